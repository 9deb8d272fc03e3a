"""How many parts of one file lie on each node, so that the next ones go to nodes that have few: a file is read as fast
as the node that has the most of it. Called by `segment` and `part`.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Collection, Iterable


class NodeUse:
    """Of one file. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: Counter[str] = Counter()

    def add(self, nodes: Iterable[str]) -> None:
        """A part goes there."""
        with self._lock:
            self._parts.update(nodes)

    def remove(self, nodes: Iterable[str]) -> None:
        """It did not get there."""
        with self._lock:
            self._parts.subtract(nodes)

    def most(self, num_parts: int, without: Collection[str]) -> list[str]:
        """The nodes with the most, the most last: fewer remain than so many parts need, so that at least one of these
        goes to a node that has none, if there is one. Those of `without` are no nodes to remain."""
        with self._lock:
            counts = [(count, random.random(), node) for node, count in self._parts.items() if node not in without]  # noqa: S311 - no secret
        return [node for _, _, node in sorted(counts)[num_parts - 1 :]]

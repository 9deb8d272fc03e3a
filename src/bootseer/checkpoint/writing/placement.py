"""Which nodes new parts are placed on: not on those that failed lately, and on those that have few parts of the file,
since a file is read as fast as the node that has the most of it.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable


class NodeLoad:
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

    def most_loaded(self, num_parts: int, without: Collection[str]) -> list[str]:
        """The nodes with the most, the most last: fewer remain than so many parts need, so that at least one of these
        goes to a node that has none, if there is one. Those of `without` are no nodes to remain."""
        with self._lock:
            counts = [(count, random.random(), node) for node, count in self._parts.items() if node not in without]  # noqa: S311 - no secret
        return [node for _, _, node in sorted(counts)[num_parts - 1 :]]


class ExcludedNodes:
    """Nodes on which a part has failed lately, each for a while. Safe to use from many threads."""

    def __init__(self, for_s: float) -> None:
        self._for_s = for_s
        self._until: dict[str, float] = {}
        self._lock = threading.Lock()

    def exclude(self, nodes: Iterable[str]) -> None:
        """A part failed there."""
        until = time.monotonic() + self._for_s
        with self._lock:
            self._until.update(dict.fromkeys(nodes, until))

    def names(self) -> frozenset[str]:
        """Nodes to avoid."""
        now = time.monotonic()
        with self._lock:
            self._until = {node: until for node, until in self._until.items() if until > now}
            return frozenset(self._until)

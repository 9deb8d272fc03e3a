"""Nodes on which a part has failed lately: new parts go elsewhere. Called by `segment` and `part`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable


class SickNodes:
    """Remembers nodes for a while. Safe to use from many threads."""

    def __init__(self, for_s: float) -> None:
        self._for_s = for_s
        self._until: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, nodes: Iterable[str]) -> None:
        """A part failed there."""
        until = time.monotonic() + self._for_s
        with self._lock:
            self._until.update(dict.fromkeys(nodes, until))

    def now(self) -> frozenset[str]:
        """Nodes to avoid."""
        now = time.monotonic()
        with self._lock:
            self._until = {node: until for node, until in self._until.items() if until > now}
            return frozenset(self._until)

"""Nodes that left readers waiting although nobody else had what they were asked for.

The place itself turns away from a node that hangs only where it has another one to turn to. With parity there always is
another way: so what was late once is not waited for again. From time to time one read tries whether the node is back.
Called by `row` and `chunk_read`; one for all files of a `Reading`.
"""

from __future__ import annotations

import threading

from bootseer.checkpoint.reading.parts import LazyPart

_FIRST_PAUSE_S = 2.0
_MAX_PAUSE_S = 60.0


class LateNodes:
    """Keeps no clock: `now` is s of a monotonic one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[str, tuple[float, float]] = {}  # when it may be tried again, and the pause after that

    def blame(self, part: LazyPart, offset: int, now: float) -> None:
        """A read of this part was late or failed. Where several nodes have it, that is for the place to sort out."""
        nodes = part.nodes(offset)
        if len(nodes) == 1:
            self.note(nodes[0], now)

    def note(self, node: str, now: float) -> None:
        """It was late, or gave an error."""
        with self._lock:
            if node and node not in self._nodes:
                self._nodes[node] = (now + _FIRST_PAUSE_S, 2 * _FIRST_PAUSE_S)

    def forget(self, node: str) -> None:
        """It served a read."""
        if self._nodes:
            with self._lock:
                self._nodes.pop(node, None)

    def are_late(self, nodes: tuple[str, ...]) -> bool:
        """Whether only late nodes have it."""
        return bool(nodes) and all(node in self._nodes for node in nodes)

    def may_try(self, nodes: tuple[str, ...], now: float) -> bool:
        """Whether it is time to ask one of them again; then nobody else does so for a while."""
        with self._lock:
            for node in nodes:
                at, pause_s = self._nodes.get(node, (now, 0.0))
                if at > now:
                    continue
                if pause_s:
                    self._nodes[node] = (now + pause_s, min(2 * pause_s, _MAX_PAUSE_S))
                return True
        return False

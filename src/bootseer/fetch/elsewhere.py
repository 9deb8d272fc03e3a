"""When to look again for blocks that other processes are about to bring.

There is no message between processes: a block appears in the shared cache, or its claim falls. So blocks are looked
at again and again, soon at first. Called by `engine`, with a lock held. Decides and touches nothing.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from bootseer.fetch.queues import Key

_FIRST_S = 0.002
_LONGEST_S = 0.05


@dataclass(slots=True)
class _Watched:
    since: float
    pause_s: float


class Elsewhere:
    """The blocks of others that this fetcher waits for. A claim that is held for `overdue_s` is not believed."""

    def __init__(self, overdue_s: float) -> None:
        self._overdue_s = overdue_s
        self._watched: dict[Key, _Watched] = {}
        self._heap: list[tuple[float, Key]] = []

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, key: Key, now: float) -> None:
        """Another process has claimed this block."""
        if key not in self._watched:
            self._watched[key] = _Watched(now, _FIRST_S)
            heapq.heappush(self._heap, (now + _FIRST_S, key))

    def forget(self, key: Key) -> None:
        """The block is here, or nobody waits for it."""
        self._watched.pop(key, None)

    def due(self, now: float) -> list[Key]:
        """The blocks to look at now; those that stay watched come again, a little later each time."""
        due: dict[Key, None] = {}
        while self._heap and self._heap[0][0] <= now:
            key = heapq.heappop(self._heap)[1]
            if key in self._watched:
                due[key] = None
        for key in due:
            watched = self._watched[key]
            watched.pause_s = min(1.5 * watched.pause_s, _LONGEST_S)
            heapq.heappush(self._heap, (now + watched.pause_s, key))
        return list(due)

    def overdue(self, key: Key, now: float) -> bool:
        """Whether its claim has been held for so long that whoever holds it must hang."""
        watched = self._watched.get(key)
        return watched is not None and now - watched.since >= self._overdue_s

    @property
    def next_look(self) -> float | None:
        """When the next one is due."""
        return self._heap[0][0] if self._watched and self._heap else None

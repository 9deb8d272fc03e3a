"""Idle connections, by the server that they lead to: kept for a moment, because a new one costs round trips."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable
from typing import Final, Generic, Protocol, TypeVar

from bootseer.io.fork import in_each_process

_MAX_IDLE: Final = 64


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


class IdleConnections(Generic[C]):
    """At most `_MAX_IDLE` connections, `max_each` to one server, none for longer than `keep_s`. Safe for many threads,
    and after `fork`."""

    def __init__(self, keep_s: float, max_each: int = _MAX_IDLE) -> None:
        self._keep_s = keep_s
        self._max_each = max_each
        self._idle: deque[tuple[float, Hashable, C]] = deque()
        """When each was given, its server, and itself."""
        in_each_process(self._begin)

    def _begin(self) -> None:
        """In the child of a fork the connections belong to the parent, and the lock may be held for ever."""
        self._lock = threading.Lock()
        self.close()

    def take(self, server: Hashable) -> C | None:
        """Take the connection that was used last, if there is one."""
        self.expire()
        with self._lock:
            found = next((entry for entry in reversed(self._idle) if entry[1] == server), None)
            if found is not None:
                self._idle.remove(found)
        return found[2] if found is not None else None

    def give(self, server: Hashable, connection: C) -> None:
        with self._lock:
            self._idle.append((time.monotonic(), server, connection))
            same = [entry for entry in self._idle if entry[1] == server]
            surplus = same[: -self._max_each] or list(self._idle)[:-_MAX_IDLE]
        self._close(surplus)

    def drop(self, server: Hashable) -> None:
        """Close the connections to one server."""
        self._close([entry for entry in list(self._idle) if entry[1] == server])

    def expire(self) -> None:
        """Close connections that their servers are about to close."""
        oldest_s = time.monotonic() - self._keep_s
        self._close([entry for entry in list(self._idle) if entry[0] < oldest_s])

    def close(self) -> None:
        self._close(list(self._idle))

    def _close(self, entries: list[tuple[float, Hashable, C]]) -> None:
        for entry in entries:
            with self._lock:
                if entry not in self._idle:
                    continue  # taken by another thread
                self._idle.remove(entry)
            entry[2].close()

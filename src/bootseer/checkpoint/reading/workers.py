"""A few threads for calls that block: opening parts of files, which is a question to a server each.

Threads are started when there is work and end when there has been none for a while.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

_IDLE_S = 5.0


class Workers:
    """Calls functions soon, on other threads. They must not raise."""

    def __init__(self, max_threads: int, name: str) -> None:
        self._max = max_threads
        self._name = name
        self._change = threading.Condition(threading.Lock())
        self._calls: deque[Callable[[], None]] = deque()
        self._num_threads = 0
        self._num_idle = 0

    def call(self, call: Callable[[], None]) -> None:
        """Call it, in the order of these calls."""
        with self._change:
            self._calls.append(call)
            if self._num_idle >= len(self._calls):
                self._change.notify()
            elif self._num_threads < self._max:
                self._num_threads += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            call()

    def _next(self) -> Callable[[], None] | None:
        with self._change:
            self._num_idle += 1
            self._change.wait_for(lambda: self._calls, timeout=_IDLE_S)
            self._num_idle -= 1
            if self._calls:
                return self._calls.popleft()
            self._num_threads -= 1
            return None

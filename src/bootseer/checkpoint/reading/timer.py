"""Calls that are to be made later: one thread for all of a `Reading`.

It looks after chunks that are late, asks whether another process has brought a chunk, and drops what nobody uses. The
thread is started by the first call and ends when there has been nothing to do for a while.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from itertools import count

_IDLE_S = 5.0


class Timer:
    """Calls functions at their time, from its own thread. They must return soon and must not raise."""

    def __init__(self) -> None:
        self._change = threading.Condition(threading.Lock())
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._running = False
        self._closed = False

    def now_s(self) -> float:
        """The time that calls are made by: seconds of a monotonic clock."""
        return time.monotonic()

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call it in so many seconds."""
        at = self.now_s() + delay_s
        with self._change:
            heapq.heappush(self._heap, (at, next(self._order), call))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="bootseer-timer", daemon=True).start()
            elif self._heap[0][2] is call:
                self._change.notify()

    def close(self) -> None:
        """End the thread as soon as nothing is to be called: reads that are under way still need their calls."""
        with self._change:
            self._closed = True
            self._change.notify()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            call()

    def _next(self) -> Callable[[], None] | None:
        with self._change:
            idle_until = time.monotonic() + _IDLE_S
            while True:
                now = time.monotonic()
                if self._heap and self._heap[0][0] <= now:
                    return heapq.heappop(self._heap)[2]
                wake_at = self._heap[0][0] if self._heap else idle_until
                if not self._heap and (self._closed or now >= idle_until):
                    self._running = False
                    return None
                self._change.wait(max(wake_at - now, 0.0))

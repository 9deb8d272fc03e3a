"""Delayed calls: deadlines, hedged requests, cleanup of unused objects.

One thread waits for the next due call. Before it makes the call another one takes its place, so that long calls delay
others only once `threads` of them run.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from itertools import count

from bootseer.errors import TransientError
from bootseer.io.executor import Executor
from bootseer.io.fork import in_each_process

_THREADS = 4


class Timer:
    """Makes calls at their time, in threads of its own without locks; several may run at once.

    Exceptions are reported as in `Executor`. Safe to use in the child of a fork, which starts without calls.
    """

    def __init__(self, name: str = "bootseer-timer", threads: int = _THREADS) -> None:
        self._pool = Executor(name, threads)
        in_each_process(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()  # taken by blocks, as in `Executor`
        self._change = threading.Condition(self._lock)
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._has_waiter = False
        """Whether a thread waits for the first call of the heap, or is about to."""

    def now_s(self) -> float:
        """The current time of the timer: seconds of a monotonic clock."""
        return time.monotonic()

    def after(self, delay_s: float, call: Callable[[], object]) -> None:
        """Make a call after so many seconds. Raises `TransientError` if there is no thread and none can be started; the
        call is then not made."""
        entry = (self.now_s() + delay_s, next(self._order), call)
        with self._lock:
            heapq.heappush(self._heap, entry)
            if not self._has_waiter:
                try:
                    self._wait_for_next()
                except TransientError:
                    self._heap.remove(entry)
                    heapq.heapify(self._heap)
                    raise
            elif self._heap[0] is entry:
                self._change.notify_all()  # of one thread; `notify` may reach a stale waiter, see `Executor.submit`

    def close(self, timeout_s: float = 0.0, *, drop: bool = False) -> None:
        """End the threads when no call is left, as running reads may need theirs, and wait. `drop`: cancel calls."""
        if drop:
            with self._lock:
                self._heap.clear()
                self._change.notify_all()
        self._pool.close(timeout_s)

    def _wait_for_next(self) -> None:
        """Let a thread wait for the first call, if there is one. Called with the lock."""
        self._has_waiter = False
        if self._heap:
            self._pool.submit(self._run)
            self._has_waiter = True

    def _run(self) -> None:
        with self._lock:
            while self._heap and (left_s := self._heap[0][0] - time.monotonic()) > 0:
                self._change.wait(left_s)
            if not self._heap:
                self._has_waiter = False
                return
            call = heapq.heappop(self._heap)[2]
            self._wait_for_next()
        call()

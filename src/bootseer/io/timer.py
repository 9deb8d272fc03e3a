"""Calls that are made later: deadlines, late requests, what is dropped when it is not used any more.

One thread waits for the next call that is due. Before it makes the call, another one waits in its place, so that a call
that takes long does not hold up the others until `threads` of them do.
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
_IDLE_S = 5.0


class Timer:
    """Makes calls at their time, in threads of its own and with no lock held; several may be under way at once.

    What a call raises is reported as in `Executor`, and the next ones are made. Safe to use in the child of a fork,
    which begins without calls.
    """

    def __init__(self, name: str = "bootseer-timer", threads: int = _THREADS) -> None:
        self._pool = Executor(name, threads, idle_s=_IDLE_S)
        in_each_process(self._begin)

    def _begin(self) -> None:
        self._change = threading.Condition(threading.Lock())
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._has_waiter = False
        """Whether a thread waits for the first call of the heap, or is about to."""

    def now_s(self) -> float:
        """The time that calls are made by: seconds of a monotonic clock."""
        return time.monotonic()

    def after(self, delay_s: float, call: Callable[[], object]) -> None:
        """Make this call in so many seconds. Raises `TransientError` when there is no thread and none can be started;
        the call is not made then."""
        entry = (self.now_s() + delay_s, next(self._order), call)
        with self._change:
            heapq.heappush(self._heap, entry)
            if not self._has_waiter:
                try:
                    self._wait_for_next()
                except TransientError:
                    self._heap.remove(entry)
                    heapq.heapify(self._heap)
                    raise
            elif self._heap[0] is entry:
                self._change.notify()

    def close(self, timeout_s: float = 0.0, *, drop: bool = False) -> None:
        """Let the threads end when no call is left, and wait for them: reads that are under way may need their calls.
        `drop`: what is to be called later is not called at all."""
        if drop:
            with self._change:
                self._heap.clear()
                self._change.notify()
        self._pool.close(timeout_s)

    def _wait_for_next(self) -> None:
        """Have a thread wait for the first call, if there is any. Under the lock."""
        self._has_waiter = False
        if self._heap:
            self._pool.submit(self._run)
            self._has_waiter = True

    def _run(self) -> None:
        with self._change:
            while self._heap and (left_s := self._heap[0][0] - time.monotonic()) > 0:
                self._change.wait(left_s)
            if not self._heap:
                self._has_waiter = False
                return
            call = heapq.heappop(self._heap)[2]
            self._wait_for_next()
        call()

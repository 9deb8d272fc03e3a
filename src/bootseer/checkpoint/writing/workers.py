"""The threads that write parts: a bounded number for all files of one `Writing`.

A part does not hold a thread while it waits for its data: work comes in small steps, and whoever has nothing to do is
not in a queue. A `Lane` per file sees to the order: as many steps at a time as a segment has parts, of the oldest
segment first. So the links never idle between two segments, and the segments do not all end at the same moment.

Called by `segment` and `pipeline`. Safe to use from many threads, and again in the child of a fork.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

_IDLE_S = 10.0
"""A thread without work ends after this; the next step starts another one."""
_TURN = 8
"""Steps of one file before another file has its turn."""


class Workers:
    """Threads that run steps in the order in which they come. Steps catch their own errors."""

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._pid = 0
        self._forget()

    def _forget(self) -> None:
        """Begin anew: in the child of a fork there are no threads, and locks may be held by nobody."""
        self._pid = os.getpid()
        self._change = threading.Condition()
        self._steps: deque[Callable[[], None]] = deque()
        self._num_threads = 0
        self._num_idle = 0
        self._idle_s = _IDLE_S

    def submit(self, step: Callable[[], None]) -> None:
        """Do it soon."""
        if self._pid != os.getpid():
            self._forget()
        with self._change:
            self._steps.append(step)
            if self._num_idle >= len(self._steps):
                self._change.notify()
            elif self._num_threads < self._max_threads:
                threading.Thread(target=self._work, name="bootseer-write", daemon=True).start()
                self._num_threads += 1

    def close(self) -> None:
        """Let the threads end that have nothing to do, now and later."""
        with self._change:
            self._idle_s = 0.0
            self._change.notify_all()

    def _work(self) -> None:
        while (step := self._next()) is not None:
            step()

    def _next(self) -> Callable[[], None] | None:
        with self._change:
            while not self._steps:
                self._num_idle += 1
                woken = self._change.wait_for(lambda: self._steps or not self._idle_s, timeout=self._idle_s)
                self._num_idle -= 1
                if not self._steps and (not woken or not self._idle_s):
                    self._num_threads -= 1
                    return None
            return self._steps.popleft()


class Stepper(Protocol):
    """What a lane runs."""

    @property
    def order(self) -> tuple[int, int]:
        """The smallest goes first."""

    def step(self) -> bool:
        """Do a little, never raise: whether there is more to do now."""


class Lane:
    """The steps of one file: `width` at a time, in their order."""

    def __init__(self, workers: Workers, width: int) -> None:
        self._workers = workers
        self._width = width
        self._change = threading.Condition()
        self._ready: list[tuple[tuple[int, int], int, Stepper]] = []
        self._count = itertools.count()
        self._num_running = 0
        self._num_apart = 0

    def ready(self, stepper: Stepper) -> None:
        """It has something to do. Once, until its `step` has returned False."""
        with self._change:
            heapq.heappush(self._ready, (stepper.order, next(self._count), stepper))
            if self._num_running >= self._width:
                return
            self._num_running += 1
        self._workers.submit(self._run)

    def apart(self, work: Callable[[], None]) -> None:
        """Do what mostly waits, beside the steps: beginning and ending files."""
        with self._change:
            self._num_apart += 1
        self._workers.submit(lambda: self._run_apart(work))

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing runs and nothing is ready: whether that was so in time."""
        until = time.monotonic() + timeout_s
        with self._change:
            while self._num_running or self._num_apart:
                if not self._change.wait(until - time.monotonic()) and time.monotonic() >= until:
                    return False
        return True

    def _run(self) -> None:
        for _ in range(_TURN):
            with self._change:
                if not self._ready:
                    self._num_running -= 1
                    self._change.notify_all()
                    return
                stepper = heapq.heappop(self._ready)[2]
            if stepper.step():
                with self._change:
                    heapq.heappush(self._ready, (stepper.order, next(self._count), stepper))
        self._workers.submit(self._run)

    def _run_apart(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._change:
                self._num_apart -= 1
                self._change.notify_all()

"""The order of the steps in which files are written: a `Lane` for each file, over the threads of one `Writing`.

A part does not hold a thread while it waits for its data: work comes in small steps, and a part without data is not
queued. A lane runs as many steps at a time as a segment has parts, of the oldest segment first. So the links never idle
between two segments, and the segments do not all end at the same moment.

Safe to use from many threads.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Protocol

from bootseer.errors import TransientError
from bootseer.io.executor import Executor

_TURN = 8
"""Steps of one file before another file has its turn."""
_STUCK_S = 600.0
"""Longer than any step takes: each has a deadline, and the pause after a failed one is short."""


class Stepper(Protocol):
    """What a lane runs."""

    @property
    def order(self) -> tuple[int, int]:
        """The smallest goes first."""

    def step(self) -> bool:
        """Do a little, never raise: whether there is more to do now."""


class Lane:
    """The steps of one file: `width` at a time, in their order."""

    def __init__(self, workers: Executor, width: int) -> None:
        self._workers = workers
        self._width = width
        self._change = threading.Condition()
        self._ready: list[tuple[tuple[int, int], int, Stepper]] = []
        self._count = itertools.count()
        self._num_running = 0
        self._num_apart = 0
        self._moved_s = time.monotonic()

    def ready(self, stepper: Stepper) -> None:
        """It has something to do. Once, until its `step` has returned False. Raises `TransientError` when no thread can
        be started for it; its step runs when there is a thread again."""
        with self._change:
            self._push(stepper)
            if self._num_running >= self._width:
                return
            self._workers.submit(self._run)
            self._num_running += 1

    def apart(self, work: Callable[[], None]) -> None:
        """Do what mostly waits, beside the steps: beginning and ending files. Raises `TransientError` when no thread
        can be started for it; then it is not done."""
        with self._change:
            self._moved_s = time.monotonic()
            self._workers.submit(lambda: self._run_apart(work))
            self._num_apart += 1

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing runs and nothing is ready: whether that was so in time."""
        with self._change:
            return self._change.wait_for(lambda: not (self._num_running or self._num_apart), timeout_s)

    def check_moves(self, what: str) -> None:
        """Raise `TransientError` when no step has begun or ended for minutes: a call to the storage hangs."""
        still_s = time.monotonic() - self._moved_s
        if still_s > _STUCK_S:
            raise TransientError(f"{what}: no request to the storage has ended for {still_s:.0f} s; try again")

    def _push(self, stepper: Stepper) -> None:
        self._moved_s = time.monotonic()
        heapq.heappush(self._ready, (stepper.order, next(self._count), stepper))

    def _run(self) -> None:
        try:
            for _ in range(_TURN):
                with self._change:
                    if not self._ready:
                        break
                    stepper = heapq.heappop(self._ready)[2]
                if stepper.step():
                    with self._change:
                        self._push(stepper)
                self._moved_s = time.monotonic()
        finally:
            with self._change:
                if self._ready:
                    self._workers.submit(self._run)
                else:
                    self._num_running -= 1
                    self._change.notify_all()

    def _run_apart(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._change:
                self._moved_s = time.monotonic()
                self._num_apart -= 1
                self._change.notify_all()

"""One large read: all its jobs, a bounded number of bytes of them under way, every lane busy.

Each lane goes on at its own pace. A sick disk then holds up what lies on it and nothing else; at the end the healthy
ones have done their part. The next job of a lane is started by the thread in which one of its jobs ended: nobody is
woken for it. Called by `file`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial

from bootseer.checkpoint.reading.source import Done, Job, Source, Want
from bootseer.errors import BootseerError


class _Lane:
    __slots__ = ("in_flight", "jobs")

    def __init__(self) -> None:
        self.jobs: deque[Job] = deque()
        self.in_flight = 0


class Transfer:
    """Reads of one source into memory that the caller owns until `then` is called."""

    def __init__(
        self,
        source: Source,
        wants: Sequence[tuple[int, memoryview]],
        *,
        max_bytes: int,
        max_lane_bytes: int,
        moved: Callable[[], None],
        then: Done,
    ) -> None:
        """`then` is called once, from any thread, when nobody writes into any of the memory any more; `moved` whenever
        a part has ended. At most `max_bytes` are under way, and `max_lane_bytes` in each lane."""
        self._moved = moved
        self._then = then
        self._lock = threading.Lock()
        self._lanes: dict[Hashable, _Lane] = {}
        self._running: set[Job] = set()
        self._in_flight = 0
        self._left = len(wants)
        self._error: BootseerError | None = None
        self._starting = False
        ends: list[partial[None]] = [partial(self._ended, number) for number in range(len(wants))]
        self._jobs = source.jobs([Want(start, into, end) for (start, into), end in zip(wants, ends, strict=True)])
        for job in self._jobs:
            self._lanes.setdefault(job.lane, _Lane()).jobs.append(job)
        self._waiting = deque(self._lanes.values())
        # Lanes that wait for each other must all be able to go on, however many they are.
        self._max_bytes = max(max_bytes, source.num_lanes * source.unit_bytes)
        self._max_in_lane = max(min(self._max_bytes // max(len(self._lanes), 1), max_lane_bytes), source.unit_bytes)

    def start(self) -> None:
        """Begin."""
        if self._left:
            self._start_more()
        else:
            self._then(None)

    def cancel(self, error: BootseerError) -> None:
        """Start nothing more, and end with this error as soon as what runs has ended."""
        with self._lock:
            if self._error is not None or not self._left:
                return
            ended = self._give_up(error)
            running = list(self._running)
        for job in running:
            job.cancel()
        if ended:
            self._then(error)

    def _start_more(self) -> None:
        with self._lock:
            if self._starting:  # that thread looks again before it goes
                return
            self._starting = True
        try:
            while (job := self._next()) is not None:
                job.start(urgent=True)
        except BaseException:  # Ctrl-C: the job has ended with an error
            with self._lock:
                self._starting = False
            raise

    def _next(self) -> Job | None:
        with self._lock:
            for _ in range(len(self._waiting)):
                lane = self._waiting.popleft()
                if not lane.jobs:
                    continue
                self._waiting.append(lane)
                size = lane.jobs[0].num_bytes
                if self._fits(self._in_flight, size, self._max_bytes) and self._fits(
                    lane.in_flight, size, self._max_in_lane
                ):
                    job = lane.jobs.popleft()
                    lane.in_flight += size
                    self._in_flight += size
                    self._running.add(job)
                    return job
            self._starting = False
            return None

    @staticmethod
    def _fits(taken: int, size: int, limit: int) -> bool:
        return not taken or taken + size <= limit

    def _ended(self, number: int, error: BootseerError | None) -> None:
        job = self._jobs[number]
        self._moved()
        with self._lock:
            if job not in self._running:
                return  # Ctrl-C ended it before
            self._running.remove(job)
            self._lanes[job.lane].in_flight -= job.num_bytes
            self._in_flight -= job.num_bytes
            self._left -= 1
            # Once: who is cancelled ends with an error too, and nothing is started after the first.
            running = list(self._running) if error is not None and self._error is None else []
            ended = self._give_up(error) if error is not None else not self._left
        for other in running:
            other.cancel()
        if ended:
            self._then(self._error)
        else:
            self._start_more()

    def _give_up(self, error: BootseerError) -> bool:
        """Whether nothing is left. Called with the lock."""
        self._error = self._error or error
        for lane in self._lanes.values():
            self._left -= len(lane.jobs)
            lane.jobs.clear()
        return not self._left

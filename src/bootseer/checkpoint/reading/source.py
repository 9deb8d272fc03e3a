"""What reads of a file are made of: the source that starts them, the calls that follow from their ends, the counters.

A reader gives a source the memory, and starts the reads in an order and number of its own choice.

*Effects* are calls that are made with no lock held, and never one inside another. A read that ends starts others, which
may end at once, which starts others: a chain without an end, in which each call would find the state of those above it
half changed. So code that changes state under a lock makes a list of calls, and hands it over after the lock
(`carry_out`). In each thread one loop makes them, in their order; what a call hands over itself comes after all others.
Threads do not wait for each other's calls: each compares what it received with its digest. What a call raises is
reported, and the next one is made.

One large read: all its jobs, a bounded number of bytes of them in flight, every lane busy; and waiting for its end.

Each lane goes on at its own pace. A slow disk then holds up what lies on it and nothing else; at the end the healthy
ones have done their part. The next job of a lane is started by the thread in which one of its jobs ended: no thread is
woken for it. A read that is made of several (`Gather`) ends when all of them have ended, with the first error if there
was one.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from bootseer.errors import BootseerError, TransientError
from bootseer.io.executor import report_exception, show_threads

Done = Callable[[BootseerError | None], None]
"""Called once, from any thread, when a read has ended: None, or what went wrong. From then on no thread writes."""


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """Bytes of a file, from `start` on, for `into`."""

    start: int
    into: memoryview
    done: Done
    hold: Callable[[], Callable[[], None]] | None = None
    """Where `into` is not changed later: keeps it as it is until the function that this returns is called."""
    here: bool = False
    """Whether the thread that starts the read may carry it out."""


class Job(Protocol):
    """One read. Nothing happens before `start`; `done` is called once after it."""

    lane: Hashable
    """Reads of one lane take turns at the same disk, those of different lanes do not."""
    num_bytes: int

    def start(self, *, urgent: bool) -> None:
        """Begin. `urgent`: a reader waits for it. Whatever goes wrong ends the read; only Ctrl-C is raised, too."""

    def hurry(self) -> None:
        """A reader waits for it now."""

    def cancel(self) -> None:
        """It is not wanted any more; it still ends."""


class Source(Protocol):
    """One version of one file. Safe to use from many threads."""

    size_bytes: int
    version: str
    unit_bytes: int
    """Read-ahead brings so much at once; units begin at multiples of it."""
    row_bytes: int
    """Reading multiples of this together costs least."""
    whole_units: bool
    """Only whole units can be read: each has a digest."""
    max_ahead_bytes: int
    """Read-ahead is worth while so far."""
    num_lanes: int
    """So many lanes wait for each other at most; 0: they do not."""

    def prepare(self) -> None:
        """Find out what this node has of the file already. Reads work without it."""

    def is_local(self, start: int) -> bool:
        """Whether the unit is on this node's disk, as far as is known."""

    def read_local(self, start: int, into: memoryview) -> bool:
        """Read bytes of one unit from this node's disk: whether they were there and right. Blocks for the disk."""

    def jobs(self, wants: Sequence[Want]) -> list[Job]:
        """Reads from the place, for bytes that are wanted together, in the order of the file."""

    def close(self) -> None:
        """Not read any more. Reads that were begun still end."""


def failure(error: BaseException, operation: str) -> BootseerError:
    """The error that a read of `what` ends with when `error` was raised on its way: a read that was begun must end.

    To be called in an `except` block. What was not foreseen is reported; Ctrl-C is for the caller to raise again.
    """
    if isinstance(error, BootseerError):
        return error
    if isinstance(error, Exception):
        report_exception()
    return TransientError(f"{operation}: {type(error).__name__}: {error}")


Effect = Callable[[], object]
_own = threading.local()


def carry_out(effects: Iterable[Effect]) -> None:
    """Make these calls; from within such a call, a little later. Ctrl-C is raised again when all of them were made."""
    queue: deque[Effect] | None = getattr(_own, "queue", None)
    if queue is not None:
        queue.extend(effects)
        return
    queue = _own.queue = deque(effects)
    interrupt: BaseException | None = None
    try:
        while queue:
            try:
                queue.popleft()()
            except Exception:
                report_exception()
            except BaseException as error:
                interrupt = error
    finally:
        _own.queue = None
    if interrupt is not None:
        raise interrupt


NAMES = (
    "place_bytes",  # came from the place: what readers asked for, parity, and reads ahead
    "cache_bytes",  # came from this node's cache
    "peer_bytes",  # came from other nodes of the job
    "donor_bytes",  # came from chunks of other files in the cache that are the same
    "chunks",  # chunks and pieces that came from the place
    "reads",  # calls of readers
    "rebuilt",  # chunks that were computed from the others of their row
    "wrong_chunks",  # chunks that came with wrong bytes, and were refused
    "retries",  # chunks that were asked for again
    "kept_chunks",  # chunks that were put into the cache
    "not_kept_chunks",  # chunks that were not, because the disk was full or slower than the place
    "claims_waited",  # chunks that another process of this node was fetching already
    "waited_for_room",  # reads that had to wait for memory
)


class Counters:
    """Counts by name, of `NAMES`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def all(self) -> dict[str, int]:
        """What was counted so far, zeros too."""
        with self._lock:
            return {name: self._counts[name] for name in NAMES}


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
        position: float = 0.0,
    ) -> None:
        """`then` is called once, from any thread, when no thread writes into any of the memory any more; `moved`
        whenever a part has ended. At most `max_bytes` are under way, and `max_lane_bytes` in each lane. It begins at
        `position`, a part of each lane, and goes on with what lies before that."""
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
        for lane in self._lanes.values():
            lane.jobs.rotate(-int(len(lane.jobs) * position))
        self._waiting = deque(self._lanes.values())
        # Lanes that wait for each other must all be able to go on, however many they are.
        self._max_bytes = max(max_bytes, source.num_lanes * source.unit_bytes)
        self._max_in_lane = max(min(self._max_bytes // max(len(self._lanes), 1), max_lane_bytes), source.unit_bytes)

    def start(self) -> None:
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
            # Once: a read that is cancelled ends with an error too, and nothing is started after the first.
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


class Gather:
    """Counts what is under way. `then` is called once, by the thread in which the last one ends."""

    def __init__(self, then: Done) -> None:
        """It begins with one that is under way: that which adds the others. So it cannot end before they are there."""
        self.moved_s = time.monotonic()
        """When something ended last."""
        self.copy: Callable[[], None] = lambda: None
        """Called before `then` when all has ended well."""
        self._then = then
        self._lock = threading.Lock()
        self._left = 1
        self._error: BootseerError | None = None
        self._transfers: list[Transfer] = []

    @property
    def has_failed(self) -> bool:
        """Whether what comes now is of no use: it is not copied into the caller's memory any more."""
        return self._error is not None

    def expect(self, count: int = 1) -> None:
        with self._lock:
            self._left += count

    def begin(self, transfer: Transfer) -> None:
        """A transfer, which calls `ended`, starts now."""
        with self._lock:
            self._left += 1
            self._transfers.append(transfer)
        transfer.start()

    def moved(self) -> None:
        self.moved_s = time.monotonic()

    def ended(self, error: BootseerError | None = None) -> None:
        with self._lock:
            self.moved_s = time.monotonic()
            self._left -= 1
            self._error = self._error or error
            if self._left:
                return
        if self._error is None:
            self.copy()
        self._then(self._error)

    def cancel(self, error: BootseerError) -> None:
        """It is not wanted any more. It ends with this error, soon, when no thread writes into the caller's memory."""
        with self._lock:
            self._error = self._error or error
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.cancel(error)


class Waiting:
    """For a thread that waits for one read."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BootseerError | None = None
        self.gather = Gather(self.ended)
        """Of a read that is made of several."""

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def ended(self, error: BootseerError | None = None) -> None:
        self._error = error
        self._over.set()

    def wait(self, operation: str, limit_s: float) -> None:
        """Wait for it, and raise its error; `what` is read, in an error's words.

        The parts of a read have deadlines of their own. When none has ended for `limit_s`, which is more, an answer was
        lost by a mistake in this program: then all threads are shown on standard error, and `TransientError` is raised.
        """
        while not self._over.wait(max(self.gather.moved_s + limit_s - time.monotonic(), 0.0)):
            if time.monotonic() >= self.gather.moved_s + limit_s:
                show_threads(f"{operation}: no answer within {limit_s:g} s")
                raise TransientError(
                    f"{operation}: no answer within {limit_s:g} s, although each part has a deadline: this is a bug of "
                    "BootSeer; try again, and report what standard error shows"
                )
        if self._error is not None:
            raise self._error

    def wait_over(self, timeout_s: float = 5.0) -> None:
        """Wait a little for its end, whatever that is."""
        self._over.wait(timeout_s)

"""The machinery of reads: `Source` (starts them), effects (what follows from their ends), `Transfer` (one large read),
`Gather` and `Waiting` (waiting for their ends), counters.

A reader passes memory to a source, and starts its jobs in an order and number of its own choice.

*Effects* are calls made with no lock held, and never nested. A read that ends starts others, which may end at once and
start others again: nested calls would recurse without bound, and each would see the state of its callers half changed.
So code that changes state under a lock collects its follow-up calls, and hands them to `run_effects` after releasing
the lock. In each thread one loop runs them in order; calls handed over by an effect are appended. Threads do not wait
for each other's effects. An exception in an effect is reported, and the next one runs.

A `Transfer` keeps a bounded number of bytes in flight and every lane (a disk or node) busy. Each lane advances at its
own pace, so a slow disk delays only what lies on it. The next job of a lane is started by the thread in which one of
its jobs has ended, without waking another thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Protocol

from msgspec import Struct, field

from bootseer.errors import BootseerError, TransientError
from bootseer.io.executor import report_exception, show_threads

Done = Callable[[BootseerError | None], None]
"""Called once, from any thread, when a read has ended, with None or its error. From then on no thread writes into its
memory."""


class RangeRequest(Struct, frozen=True, eq=False):
    """Bytes of a file, from `start` on, to be read into `into`."""

    start: int
    into: memoryview
    done: Done
    hold: Callable[[], Callable[[], None]] | None = None
    """Set where `into` will not be changed: pins it until the function that this returns is called."""
    inline: bool = False
    """Whether the thread that starts the read may carry it out."""


class Job(Protocol):
    """One read, not yet started; `done` is called once after `start`."""

    lane: Hashable
    """Reads of one lane share a disk, those of different lanes do not."""
    num_bytes: int

    def start(self, *, urgent: bool) -> None:
        """Start. `urgent`: a reader waits for it. Errors end the read; only KeyboardInterrupt is also raised."""

    def prioritize(self) -> None:
        """A reader waits for it now."""

    def cancel(self) -> None:
        """Cancel the read, which still ends."""


class Source(Protocol):
    """One version of one file. Safe to use from many threads."""

    size_bytes: int
    version: str
    unit_bytes: int
    """Unit of read-ahead; units start at multiples of it."""
    row_bytes: int
    """The most efficient multiple to read at once."""
    whole_units: bool
    """Whether only whole units can be read, because each has one digest."""
    max_ahead_bytes: int
    """The largest useful read-ahead window."""
    num_lanes: int
    """How many lanes wait for each other; 0: none."""

    def is_local(self, start: int) -> bool:
        """Whether the unit is in this node's cache, as far as known."""

    def read_local(self, start: int, into: memoryview) -> bool:
        """Read bytes of one unit from the node's cache; returns whether they were there and right. Blocks on disk."""

    def jobs(self, requests: Sequence[RangeRequest]) -> list[Job]:
        """Reads from the place, for bytes that are wanted together, in the order of the file."""

    def close(self) -> None:
        """Close the source; reads in flight still end."""


def failure(error: BaseException, operation: str) -> BootseerError:
    """The error with which a read ends after `error` was raised: every started read must end.

    Called in an `except` block. Unexpected exceptions are reported; the caller raises a KeyboardInterrupt again.
    """
    if isinstance(error, BootseerError):
        return error
    if isinstance(error, Exception):
        report_exception()
    return TransientError(f"{operation}: {type(error).__name__}: {error}")


Effect = Callable[[], object]
_own = threading.local()


def run_effects(effects: Iterable[Effect]) -> None:
    """Run these calls; within an effect, after it. A KeyboardInterrupt is raised again when all have run."""
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
    "place_bytes",  # read from the place: requested, parity, and read ahead
    "cache_bytes",  # read from this node's cache
    "peer_bytes",  # received from other nodes of the job
    "chunks",  # chunks and pieces read from the place
    "reads",  # calls of readers
    "rebuilt",  # chunks rebuilt from the others of their row
    "wrong_chunks",  # chunks that arrived with wrong bytes, and were rejected
    "kept_chunks",  # chunks that were put into the cache
    "not_kept_chunks",  # chunks that were not, because the disk was full or slower than the place
    "waited_for_room",  # reads that had to wait for memory
)


class Counters:
    """Counters by name, see `NAMES`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def all(self) -> dict[str, int]:
        with self._lock:
            return {name: self._counts[name] for name in NAMES}


class _Lane(Struct, eq=False):
    jobs: deque[tuple[int, Job]] = field(default_factory=deque)
    """With their numbers, not started yet."""
    in_flight: int = 0


class Transfer:
    """Reads of one source into memory that the caller owns again when they have ended."""

    def __init__(
        self,
        source: Source,
        requests: Sequence[tuple[int, memoryview]],
        gather: Gather,
        *,
        max_bytes: int,
        max_lane_bytes: int,
        position: float = 0.0,
    ) -> None:
        """At least one request. Ends in `gather` once, in any thread, when no thread writes into any of the memory any
        more. At most `max_bytes` are in flight, `max_lane_bytes` per lane. Each lane starts at the fraction `position`
        of its jobs and wraps around."""
        self._gather = gather
        self._lock = threading.Lock()
        self._lanes: dict[Hashable, _Lane] = {}
        self._running: dict[int, Job] = {}
        """By number. Jobs that have ended are not kept: they refer to this and to their readers' memory."""
        self._in_flight = 0
        self._left = len(requests)
        self._error: BootseerError | None = None
        self._starting = False
        ends: list[partial[None]] = [partial(self._ended, number) for number in range(len(requests))]
        jobs = source.jobs([RangeRequest(start, into, end) for (start, into), end in zip(requests, ends, strict=True)])
        for number, job in enumerate(jobs):
            self._lanes.setdefault(job.lane, _Lane()).jobs.append((number, job))
        for lane in self._lanes.values():
            lane.jobs.rotate(-int(len(lane.jobs) * position))
        self._waiting = deque(self._lanes.values())
        # Lanes that wait for each other must all be able to advance, however many they are.
        self._max_bytes = max(max_bytes, source.num_lanes * source.unit_bytes)
        self._max_in_lane = max(min(self._max_bytes // max(len(self._lanes), 1), max_lane_bytes), source.unit_bytes)

    def cancel(self, error: BootseerError) -> None:
        """Start nothing more, and end with this error when the jobs in flight have ended."""
        with self._lock:
            if self._error is not None or not self._left:
                return
            ended = self._give_up(error)
            running = list(self._running.values())
        for job in running:
            job.cancel()
        if ended:
            self._gather.ended(error)

    def start_more(self) -> None:
        """Start the next jobs, as far as the limits allow. Called once, then by the ends of jobs."""
        with self._lock:
            if self._starting:  # that thread checks again before it leaves
                return
            self._starting = True
        try:
            while (job := self._next()) is not None:
                job.start(urgent=True)
        except BaseException:  # KeyboardInterrupt: the job has ended with an error
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
                number, job = lane.jobs[0]
                size = job.num_bytes
                if self._fits(self._in_flight, size, self._max_bytes) and self._fits(
                    lane.in_flight, size, self._max_in_lane
                ):
                    lane.jobs.popleft()
                    lane.in_flight += size
                    self._in_flight += size
                    self._running[number] = job
                    return job
            self._starting = False
            return None

    @staticmethod
    def _fits(taken: int, size: int, limit: int) -> bool:
        return not taken or taken + size <= limit

    def _ended(self, number: int, error: BootseerError | None) -> None:
        self._gather.on_progress()
        with self._lock:
            job = self._running.pop(number, None)
            if job is None:
                return  # KeyboardInterrupt ended it before
            self._lanes[job.lane].in_flight -= job.num_bytes
            self._in_flight -= job.num_bytes
            self._left -= 1
            # Only for the first error: cancelled reads end with errors too.
            running = list(self._running.values()) if error is not None and self._error is None else []
            ended = self._give_up(error) if error is not None else not self._left
        for other in running:
            other.cancel()
        if ended:
            self._gather.ended(self._error)
        else:
            self.start_more()

    def _give_up(self, error: BootseerError) -> bool:
        """Returns whether nothing is left. Called with the lock held."""
        self._error = self._error or error
        for lane in self._lanes.values():
            self._left -= len(lane.jobs)
            lane.jobs.clear()
        return not self._left


class Gather:
    """Counts reads in flight. `on_end` is called once, by the thread in which the last one ends, with the first
    error."""

    def __init__(self, on_end: Done) -> None:
        """The count starts at one, for the caller that adds the reads: it cannot end before all were added."""
        self.progress_s = time.monotonic()
        """When a read has last ended."""
        self._on_end = on_end
        self._lock = threading.Lock()
        self._left = 1
        self._error: BootseerError | None = None
        self._transfers: list[Transfer] = []

    @property
    def has_failed(self) -> bool:
        """Whether a read has failed: later results are not copied into the caller's memory."""
        return self._error is not None

    def expect(self, count: int = 1) -> None:
        with self._lock:
            self._left += count

    def begin(self, transfer: Transfer) -> None:
        """Add a transfer that ends here, and start it, unless the read has failed."""
        with self._lock:
            self._left += 1
            self._transfers.append(transfer)
            error = self._error
        if error is None:
            transfer.start_more()
        else:
            transfer.cancel(error)

    def on_progress(self) -> None:
        self.progress_s = time.monotonic()

    def ended(self, error: BootseerError | None = None, *, count: int = 1) -> None:
        with self._lock:
            self.progress_s = time.monotonic()
            self._left -= count
            self._error = self._error or error
            if self._left:
                return
            self._transfers.clear()  # they refer to this, and would keep the readers' memory
        self._on_end(self._error)

    def cancel(self, error: BootseerError) -> None:
        """Cancel: it ends with this error, as soon as no thread writes into the caller's memory."""
        with self._lock:
            self._error = self._error or error
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.cancel(error)


_STOP_S = 5.0


class Waiting(Gather):
    """Lets a thread wait for one read, which may consist of several."""

    def __init__(self) -> None:
        over = self._over = threading.Event()
        super().__init__(lambda _: over.set())

    def wait(self, operation: str, limit_s: float) -> None:
        """Wait for the end, and raise the read's error. `operation` describes it in messages.

        Each part of a read has a deadline. If none has ended for `limit_s`, which is longer, a bug has lost an answer:
        all threads are dumped to standard error, and `TransientError` is raised.
        """
        while not self._over.wait(max(self.progress_s + limit_s - time.monotonic(), 0.0)):
            if time.monotonic() >= self.progress_s + limit_s:
                show_threads(f"{operation}: no answer within {limit_s:g} s")
                raise TransientError(
                    f"{operation}: no answer within {limit_s:g} s, although each part has a deadline: this is a bug of "
                    "BootSeer; try again, and report what standard error shows"
                )
        if self._error is not None:
            raise self._error

    def stop(self, error: BootseerError) -> None:
        """Cancel, if it has not ended, and wait briefly for the end: until then threads may write into the memory."""
        self.cancel(error)
        self._over.wait(_STOP_S)

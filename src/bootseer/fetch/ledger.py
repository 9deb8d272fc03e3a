"""The books of the scheduler: the origins with their pace and queues, which blocks are wanted, and what runs.

Each block of a file is here, or not wanted, or has one `Wanted` entry, which is queued at one of the file's origins, on
its way, or waits for its next attempt. `Ledger` keeps that true; when to start what is decided by its subclass
`schedule.Scheduler`. Decides and touches nothing.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from bootseer.errors import BootseerError, TransientError
from bootseer.fetch.settings import FetchSettings, Purpose

if TYPE_CHECKING:
    from bootseer.blocks.index import Place, Stripe

Key = tuple[int, int]
"""File number, block."""
_RECENT = 64
# Fewer samples say nothing about the slowest tenth.
_MIN_SAMPLES = 8
_MAX_WINDOW_S = 1.0
_NEVER = float("-inf")


class Geometry(Protocol):
    """What the scheduler must know of a block file; `blocks.Index` is one."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""

    @property
    def stripes(self) -> Sequence[Stripe]:
        """Block i lies in stripe i modulo their number."""

    def place(self, block: int, /) -> Place:
        """Where a block is stored."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read these blocks with one ranged request: their stored bytes are adjacent in their stripe."""

    number: int
    file: int
    blocks: range
    purpose: Purpose
    hedge: bool
    """Another request for these blocks runs already; the first answer counts."""
    timeout_s: float
    origin: int = 0
    """Which of the file's origins to ask."""
    step: Hashable = None
    """Which of the places of that origin."""


@dataclass(slots=True)
class Counts:
    """What the scheduler did, for the report."""

    requests: dict[Purpose, int] = field(default_factory=lambda: dict.fromkeys(Purpose, 0))
    hedges: int = 0
    failures: int = 0
    dropped: int = 0
    """Blocks whose prefetch was given up."""


class Pace:
    """How fast one origin may be asked, and whether it is well, learned from its answers. Times are seconds of a clock.

    Requests at once grow by one per round of successes and halve on a failure (additive increase, multiplicative
    decrease). What prefetch has in flight follows the measured throughput, so that a reader's request on a thin line is
    not stuck behind seconds of prefetch. Retry-After holds for all requests; after failures prefetch alone pauses,
    longer each time.
    """

    def __init__(self, settings: FetchSettings) -> None:
        self._settings = settings
        self._limit = float(settings.first_requests)
        self._cut_at = _NEVER
        self._failures = 0
        self._latencies: deque[float] = deque(maxlen=_RECENT)
        self._fastest_s = 0.0
        self._rate = 0.0
        """Measured throughput, bytes per second; 0 when unknown."""
        self._mark = _NEVER
        self._bytes = 0
        self.paused_until = _NEVER
        """The origin said when to come back: it is not asked before."""
        self.prefetch_after = _NEVER
        """Prefetch keeps away until then."""
        self._down_until = _NEVER
        self.error: BootseerError | None = None
        """Why the latest request failed, if nothing has come since."""

    @property
    def limit(self) -> int:
        """Prefetch requests at once."""
        return int(self._limit)

    def launched(self, num_running: int, now: float) -> None:
        """A request begins; `num_running` others run already. Idle time is no time of low throughput."""
        if num_running == 0:
            self._mark, self._bytes = now, 0

    def arrived(self, num_bytes: int, now: float) -> None:
        """Bytes of a running request arrived."""
        self._down_until, self.error = _NEVER, None
        self._bytes += num_bytes
        passed = now - self._mark
        if passed >= self._settings.window_s:
            rate = self._bytes / passed
            # Believes more at once and less slowly: readers that ask for little do not make a line thin.
            self._rate = rate if rate > self._rate else 0.8 * self._rate + 0.2 * rate
            self._mark, self._bytes = now, 0

    def first_block(self, latency_s: float) -> None:
        """A request's first block was here after `latency_s`."""
        self._fastest_s = min(self._fastest_s, latency_s) if self._latencies else latency_s
        self._latencies.append(latency_s)

    def succeeded(self, num_running: int) -> None:
        """A request ended well while `num_running` ran, itself included."""
        self._failures = 0
        self._down_until, self.error = _NEVER, None
        self.prefetch_after = _NEVER
        if num_running >= self.limit:
            self._limit = min(self._limit + 1 / self._limit, float(self._settings.max_requests))

    def failed(self, error: BootseerError, started: float, now: float, jitter: float) -> None:
        """A request that began at `started` ended with an error; `jitter` is a random number from 0 to 1."""
        self.error = error
        if self.is_down(now):
            self.gave_up(now)
        if isinstance(error, TransientError) and error.retry_after_s is not None:
            # Not all nodes at the same moment; never earlier than asked.
            wait = min(max(error.retry_after_s, 0.0), self._settings.max_retry_after_s)
            self.paused_until = max(self.paused_until, now + wait * (1 + 0.1 * jitter))
        if started < self._cut_at:
            return  # it belongs to the trouble that the last cut was the answer to
        self._cut_at = now
        self._limit = max(self._limit / 2, 1.0)
        self._failures += 1
        pause = min(self._settings.backoff_s * 2 ** min(self._failures, 20), self._settings.max_pause_s)
        self.prefetch_after = now + pause * (0.5 + 0.5 * jitter)

    def gave_up(self, now: float) -> None:
        """A reader reached its deadline without a block."""
        if self.error is not None:
            self._down_until = now + self._settings.deadline_s

    def is_down(self, now: float) -> bool:
        """Whether a reader reached its deadline and all requests since have failed, the last one lately."""
        return now < self._down_until

    def window_bytes(self) -> int:
        """What prefetch may have in flight."""
        max_bytes = self._settings.inflight_bytes - self._settings.reserved_bytes
        # By the fastest answer, not by the usual one: that one grows with the window, and the window would with it.
        wait_s = max(self._settings.window_s, min(2 * self._fastest_s, _MAX_WINDOW_S))
        return min(max(int(self._rate * wait_s), self._settings.min_window_bytes), max_bytes)

    def hedge_after_s(self) -> float:
        """How long a reader's block may take before it is asked for a second time."""
        return max(self._settings.hedge_s, self._settings.hedge_factor * self._quantile())

    def _quantile(self) -> float:
        """What 9 of 10 recent requests took to their first block."""
        if len(self._latencies) < _MIN_SAMPLES:
            return 0.0
        return sorted(self._latencies)[int(0.9 * (len(self._latencies) - 1))]


@dataclass(slots=True)
class Wanted:
    """A block that is wanted and missing."""

    readers: int = 0
    prefetch: Purpose | None = None
    """Why it is wanted when no reader waits for it."""
    origin: int = 0
    """Which of the file's origins it is asked from: the first that is well, then the next after each failure."""
    requests: list[int] = field(default_factory=list)
    """Running requests that will bring it: more than one after a hedge."""
    foreign: bool = False
    """Another process is about to bring it."""
    later: bool = False
    """It failed and waits for its next attempt."""
    late_at: float = 0.0
    """When a reader has waited so long that a second request is due."""
    hedges: int = 0
    tried: tuple[Hashable, ...] = ()
    """Places that were asked already, of an origin that is many."""
    attempts: int = 0
    corrupt: int = 0
    error: BootseerError | None = None
    """Why the latest attempt failed."""

    @property
    def purpose(self) -> Purpose | None:
        """The highest purpose that it has, None when it is not wanted any more."""
        return Purpose.DEMAND if self.readers else self.prefetch

    @property
    def in_flight(self) -> bool:
        """Whether a request, or another process, brings it."""
        return self.foreign or bool(self.requests)

    @property
    def queued(self) -> bool:
        """Whether it can be asked for now."""
        return not (self.requests or self.foreign or self.later)


@dataclass(slots=True, eq=False)
class Origin:
    """One place that blocks come from: its pace, what waits for its turn by purpose, and what runs.

    Entries of the prefetch queues are not removed when the block is fetched for another reason, but when they come to
    the head.
    """

    pace: Pace
    next_bytes: int
    """Size of the next prefetch request: small at first, so that the first blocks are here early."""
    demand: dict[Key, None] = field(default_factory=dict)
    """In the order of arrival."""
    uncovered: set[Key] = field(default_factory=set)
    """Blocks that readers wait for, queued or not, and that are not in the hot set."""
    yield_until: float = 0.0
    """Until then hot blocks give way to these readers, though the hot set has proven itself."""
    hot: deque[Key] = field(default_factory=deque)
    """In the order of recorded need."""
    cold: deque[tuple[int, range]] = field(default_factory=deque)
    later: list[tuple[float, Key]] = field(default_factory=list)
    """Heap of failed blocks by the time of their next attempt."""
    num_running: int = 0
    num_prefetch: int = 0
    prefetch_bytes: int = 0
    """What running prefetch requests may still bring."""

    def enqueue(self, key: Key, purpose: Purpose) -> None:
        """Queue a block: a reader's behind the other readers', a prefetch before all others: it has had its turn."""
        if purpose is Purpose.DEMAND:
            self.demand[key] = None
        elif purpose is Purpose.HOT:
            self.hot.appendleft(key)
        else:
            self.cold.appendleft((key[0], range(key[1], key[1] + 1)))

    def postpone(self, key: Key, until: float) -> None:
        """Let a block wait for its next attempt."""
        heapq.heappush(self.later, (until, key))

    def due(self, now: float) -> Iterator[Key]:
        """Take out the blocks whose next attempt is due."""
        while self.later and self.later[0][0] <= now:
            yield heapq.heappop(self.later)[1]


@dataclass(slots=True)
class File:
    """One block file."""

    geometry: Geometry
    origins: tuple[Origin, ...]
    """Where its blocks come from, in the order in which they are asked."""
    done: bytearray
    hot: bytearray


@dataclass(slots=True)
class Request:
    """A request that runs."""

    fetch: Fetch
    origin: Origin
    left: dict[int, int]
    """Stored bytes of each block that has not arrived."""
    started: float
    answered: bool = False
    cancelled: bool = False


class Ledger:
    """All files of one fetcher."""

    def __init__(self, settings: FetchSettings) -> None:
        self._settings = settings
        self.files: list[File] = []
        self.origins: dict[str, Origin] = {}
        self.wanted: dict[Key, Wanted] = {}
        self.running: dict[int, Request] = {}
        self.inflight_bytes = 0
        """What the running requests may still bring."""
        self.num_demanded = 0
        """Blocks that readers wait for."""
        self.hot_left = 0
        """Hot blocks that are neither cached nor given up."""
        self.redundant: list[int] = []
        """Running requests that can bring nothing new any more, until `tick` hands them out."""
        self.counts = Counts()

    def add(self, geometry: Geometry, *origins: str) -> int:
        """A new file and the names of its origins, the first to be asked first. Returns the file's number.

        Files of one origin share its pace and its queues.
        """
        for name in origins:
            if name not in self.origins:
                self.origins[name] = Origin(Pace(self._settings), next_bytes=self._settings.request_bytes // 16)
        size = geometry.num_blocks
        found = tuple(self.origins[name] for name in origins)
        self.files.append(File(geometry, found, bytearray(size), bytearray(size)))
        return len(self.files) - 1

    def origin_of(self, key: Key) -> Origin:
        wanted = self.wanted.get(key)
        return self.files[key[0]].origins[wanted.origin if wanted is not None else 0]

    @property
    def idle(self) -> bool:
        """Whether nothing is wanted and nothing runs."""
        return not (self.wanted or self.running or any(origin.cold for origin in self.origins.values()))

    # Which readers want which blocks

    def _demand(self, key: Key, origin: int) -> bool:
        """One more reader waits for a block. Whether it is on its way already and now a reader's."""
        file = self.files[key[0]]
        file.done[key[1]] = 0
        wanted = self.wanted.get(key)
        if wanted is None:
            wanted = self.wanted[key] = Wanted(origin=origin)
        wanted.readers += 1
        if wanted.readers > 1:
            return False
        self.num_demanded += 1
        if not file.hot[key[1]]:
            file.origins[wanted.origin].uncovered.add(key)
        if wanted.later:  # it failed as a prefetch: a reader is worth an attempt at once
            wanted.later, wanted.attempts = False, 0
        if wanted.queued:
            file.origins[wanted.origin].enqueue(key, Purpose.DEMAND)
        return wanted.in_flight

    def _leave(self, key: Key) -> None:
        """One reader less; without readers a block falls back to what it is wanted for besides."""
        wanted = self.wanted.get(key)
        if wanted is None or not wanted.readers:
            return
        wanted.readers -= 1
        if wanted.readers:
            return
        self._not_demanded(key, wanted)
        if wanted.prefetch is None:
            if not wanted.in_flight:
                self._forget(key)
        elif wanted.queued:
            self.origin_of(key).enqueue(key, wanted.prefetch)

    def _prefetch(self, key: Key, purpose: Purpose, origin: int) -> None:
        """A block is wanted in advance, behind those that are so already."""
        file, block = self.files[key[0]], key[1]
        if purpose is Purpose.HOT:
            file.hot[block] = 1
            self.origin_of(key).uncovered.discard(key)
        if file.done[block]:
            return
        wanted = self.wanted.setdefault(key, Wanted(origin=origin))
        if wanted.prefetch is not None and wanted.prefetch >= purpose:
            return
        wanted.prefetch = purpose
        self.hot_left += purpose is Purpose.HOT
        if wanted.queued and not wanted.readers:
            queues = file.origins[wanted.origin]
            if purpose is Purpose.HOT:
                queues.hot.append(key)
            else:
                queues.cold.append((key[0], range(block, block + 1)))

    def _make_cold(self, key: Key) -> None:
        """If the block is still wanted, it is so as one of the rest: its reader may leave, its request may fail."""
        wanted = self.wanted.get(key)
        if wanted is not None:
            self.hot_left -= wanted.prefetch is Purpose.HOT
            wanted.prefetch = Purpose.COLD

    def stop_prefetch(self, number: int) -> None:
        """Nothing of this file is wanted in advance any more."""
        for key in [key for key in self.wanted if key[0] == number]:
            wanted = self.wanted[key]
            if wanted.prefetch is None:
                continue
            self.counts.dropped += 1
            self.hot_left -= wanted.prefetch is Purpose.HOT
            wanted.prefetch = None
            if not wanted.readers and not wanted.in_flight:
                self._forget(key)
        for origin in self.files[number].origins:
            origin.cold = deque(item for item in origin.cold if item[0] != number)

    def _requeue(self, key: Key) -> None:
        """A block that is not on its way any more waits for its turn, if it is wanted."""
        wanted = self.wanted[key]
        if not wanted.queued:
            return
        if wanted.purpose is None:
            self._forget(key)
        else:
            self.origin_of(key).enqueue(key, wanted.purpose)

    def _try_next_origin(self, key: Key, now: float) -> bool:
        """Queue a block at its file's next origin; False if that was the last one."""
        wanted, origins = self.wanted[key], self.files[key[0]].origins
        if wanted.origin + 1 >= len(origins):
            return False
        before = origins[wanted.origin]
        wanted.origin += 1
        if key in before.uncovered:
            before.uncovered.discard(key)
            origins[wanted.origin].uncovered.add(key)
        self._requeue(key)
        return True

    def _forget(self, key: Key) -> None:
        """The block is not wanted any more, or will not come."""
        wanted = self.wanted.pop(key)
        self.hot_left -= wanted.prefetch is Purpose.HOT
        if wanted.readers:
            self._not_demanded(key, wanted)

    def have(self, file: int, block: int) -> None:
        """The block is here: from an earlier start, or a request or another process brought it."""
        self.files[file].done[block] = 1
        wanted = self.wanted.get((file, block))
        if wanted is None:
            return
        self._forget((file, block))
        for number in wanted.requests:
            request = self.running[number]
            self._release(request, block)
            if not request.left:
                request.cancelled = True
                self.redundant.append(number)

    def _not_demanded(self, key: Key, wanted: Wanted) -> None:
        self.num_demanded -= 1
        origin = self.files[key[0]].origins[wanted.origin]
        origin.uncovered.discard(key)
        origin.demand.pop(key, None)

    # What runs

    def _received(self, request: Request, block: int, now: float) -> None:
        """A running request brought the bytes of a block, good or not."""
        if not request.answered:
            request.answered = True
            request.origin.pace.first_block(now - request.started)
        request.origin.pace.arrived(self._release(request, block), now)

    def _release(self, request: Request, block: int) -> int:
        """A running request is not expected to bring a block any more. Returns the stored bytes."""
        size = request.left.pop(block, 0)
        self.inflight_bytes -= size
        if request.fetch.purpose is not Purpose.DEMAND:
            request.origin.prefetch_bytes -= size
        return size

    def _detach(self, number: int, key: Key) -> Wanted | None:
        """Request `number` will not bring a block. Returns the block if it was to and is wanted still."""
        wanted = self.wanted.get(key)
        if wanted is None or number not in wanted.requests:
            return None
        wanted.requests.remove(number)
        return wanted

    def _end(self, number: int) -> Request:
        """A request has ended. What it has `left` is still attached to it."""
        request = self.running.pop(number)
        request.origin.num_running -= 1
        request.origin.num_prefetch -= request.fetch.purpose is not Purpose.DEMAND
        return request

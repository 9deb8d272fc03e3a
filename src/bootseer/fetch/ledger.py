"""The state of the scheduler: origins with their queues, wanted blocks, and running requests.

Each block of a file is present, or not wanted, or has one `Wanted` entry, which is queued at one of the file's origins,
in flight, or postponed to its next attempt. `Ledger` maintains this invariant; its subclass `scheduler.Scheduler`
decides what to start when. Decides and touches nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, field

from bootseer.errors import BootseerError
from bootseer.fetch.fetch_settings import FetchSettings, Purpose
from bootseer.fetch.pace import Pace

if TYPE_CHECKING:
    from bootseer.blocks.index import Place

Key = tuple[int, int]
"""File number and block."""
# Limits runs of all-zero blocks, which have no bytes.
_MAX_RUN = 1024
# Limits gaps and what is read ahead: a thousand blocks of equal bytes, 256 MiB in the cache, are stored in 26 KB.
_MAX_GAP = 32
_NEVER = float("-inf")
ELSEWHERE = -1
"""The number of a request that stands for all other processes: it is running for each block that one has claimed."""


class Geometry(Protocol):
    """The layout of a block file with one stripe; implemented by `blocks.index.Index`."""

    @property
    def num_blocks(self) -> int: ...

    def place(self, block: int, /) -> Place: ...


class Fetch(Struct, frozen=True):
    """Read these blocks with one range request: their stored bytes are adjacent."""

    number: int
    file: int
    blocks: range
    purpose: Purpose
    hedge: bool
    """A second request for blocks that are in flight; the first answer counts."""
    timeout_s: float
    step: Hashable = None
    """For peers, the step of the route: which one is asked, and how. None: the store is asked."""


class Wanted(Struct):
    """A block that is wanted and missing."""

    readers: int = 0
    prefetch: Purpose | None = None
    """Why it is wanted apart from readers."""
    origin: int = 0
    """The number of the origin to ask: first the peers, if there are any, then the store."""
    requests: list[int] = field(default_factory=list)
    """Running requests for it: more than one after a hedge. `ELSEWHERE` if another process has claimed it."""
    postponed: bool = False
    """An attempt failed, and the next one is due later."""
    late_at: float = float("inf")
    """When to hedge it for its readers, if it is in flight then."""
    hedges: int = 0
    tried: tuple[Hashable, ...] = ()
    """The steps of its route that were tried."""
    attempts: int = 0
    corrupt: int = 0
    error: BootseerError | None = None
    """The error of the latest attempt."""

    @property
    def purpose(self) -> Purpose | None:
        """Its highest purpose; None if it is not wanted any more."""
        return Purpose.DEMAND if self.readers else self.prefetch

    @property
    def in_flight(self) -> bool:
        """Whether a request or another process is fetching it."""
        return bool(self.requests)

    @property
    def queued(self) -> bool:
        """Whether it waits in a queue for a request."""
        return not (self.requests or self.postponed)


class OriginQueues(Struct, eq=False):
    """The queues of one origin by purpose, its pace, and its running requests. All peers together are one origin.

    Prefetch queues are cleaned lazily: an entry that was fetched for another reason is dropped when it reaches the
    head.
    """

    pace: Pace
    next_bytes: int
    """Size of the next prefetch request: small at first, so that the first blocks arrive early."""
    demand: dict[Key, None] = field(default_factory=dict)
    """In order of arrival."""
    yield_until: float = 0.0
    """Until then even a proven hot set gives way to readers that wait for blocks outside it."""
    hot: deque[Key] = field(default_factory=deque)
    """In the order of the recorded needs."""
    cold: deque[tuple[int, range]] = field(default_factory=deque)
    postponed: list[tuple[float, Key]] = field(default_factory=list)
    """Failed blocks as a heap by the time of their next attempt."""
    asked: Counter[Hashable] = field(default_factory=Counter)
    """Running requests per route step."""
    busy_until: dict[Hashable, float] = field(default_factory=dict)
    """Route steps of peers that are overloaded until a time (Retry-After)."""
    blocked_until: float = _NEVER
    """No prefetch can be started before this time, unless a request ends or a block is queued."""
    num_running: int = 0
    num_prefetch: int = 0
    prefetch_bytes: int = 0
    """Outstanding bytes of running prefetch requests."""

    def enqueue(self, key: Key, purpose: Purpose) -> None:
        """Queue a block: a reader's at the end, a returning prefetch at the head, as it had its turn before."""
        if purpose is Purpose.DEMAND:
            self.demand[key] = None
            return
        self.blocked_until = _NEVER
        if purpose is Purpose.HOT:
            self.hot.appendleft(key)
        else:
            self.cold.appendleft((key[0], range(key[1], key[1] + 1)))


class FileState(Struct):
    """One block file."""

    geometry: Geometry
    origins: Sequence[OriginQueues]
    """The peers, if there are any, then the store."""
    done: bytearray
    prefetches: bool = True
    """Whether blocks are requested that no reader waits for."""


class Request(Struct):
    """A running request."""

    fetch: Fetch
    origin: OriginQueues
    left: dict[int, int]
    """Stored bytes of each outstanding block."""
    started: float
    latest: float | None = None
    """When its latest block arrived; None: none has arrived."""
    cancelled: bool = False
    cost: int = 0
    """The hedge credit that it cost."""


class FetchStats(Struct):
    """Statistics of one startup, for the report. Bytes are stored (compressed) bytes unless noted."""

    waited_s: float = 0.0
    """Total waiting time of reads."""
    failed_reads: int = 0
    needs: int = 0
    """Distinct blocks that readers needed."""
    covered: int = 0
    """Those in the hot set."""
    late: int = 0
    """Those of them that were in flight, not cached yet."""
    hot_blocks: int = 0
    wasted_blocks: int = 0
    """Fetched for the hot set and not needed so far."""
    bytes_by_purpose: dict[Purpose, int] = field(default_factory=lambda: dict.fromkeys(Purpose, 0))
    requests_by_purpose: dict[Purpose, int] = field(default_factory=lambda: dict.fromkeys(Purpose, 0))
    peer_bytes: int = 0
    """Part of `bytes_by_purpose` that came from other nodes of the job, uncompressed; the rest came from the store."""
    hedges: int = 0
    corrupt_blocks: int = 0
    first_corrupt: str = ""
    """The first block that was invalid or missing at every attempt, with its origin; empty if none."""
    first_failure: str = ""
    """The first error that a reader got; empty if none."""
    dropped: int = 0
    """Blocks whose prefetch was given up."""


class Plan(Struct):
    """What to do now: collected by the events, returned by the next `tick`."""

    fetches: list[Fetch] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    """Running requests that cannot bring anything new any more."""
    given_up: list[tuple[int, int, BootseerError]] = field(default_factory=list)
    """File, block and reason: blocks that readers will not get."""
    wake_at: float | None = None
    """When to call `tick` at the latest; None: not before the next event."""


class Ledger:
    """The state of one fetcher's files."""

    def __init__(self, settings: FetchSettings) -> None:
        self._settings = settings
        self.files: list[FileState] = []
        self.origins: dict[str, OriginQueues] = {}
        self.wanted: dict[Key, Wanted] = {}
        self.running: dict[int, Request] = {}
        self.inflight_bytes = 0
        """Outstanding bytes of the running requests."""
        self.demanded: set[Key] = set()
        """Blocks with waiting readers."""
        self.claims: dict[Key, float] = {}
        """Blocks that other processes are fetching, and since when that is known."""
        self.hung: set[int] = set()
        """Running requests that are taken to hang: another request has brought a block of theirs, and they have brought
        nothing since."""
        self.hot_left = 0
        """Hot blocks that are neither cached nor given up."""
        self.plan = Plan()
        self.stats = FetchStats()

    def origin_of(self, key: Key) -> OriginQueues:
        wanted = self.wanted.get(key)
        return self.files[key[0]].origins[wanted.origin if wanted is not None else 0]

    @property
    def idle(self) -> bool:
        """Whether nothing is wanted and nothing runs."""
        return not (self.wanted or self.running or any(origin.cold for origin in self.origins.values()))

    def _adjacent(
        self,
        key: Key,
        most_bytes: int,
        eligible: Callable[[Key], bool],
        gaps: range = range(0),
        gap_bytes: int = 0,
        *,
        ahead: bool = False,
    ) -> dict[int, int]:
        """The stored sizes of the block and its neighbours whose stored bytes are adjacent.

        At least the block itself, then those behind it and those before it that are `eligible` and fit into
        `most_bytes`. Gaps of up to `gap_bytes` between two of them are included, if all their blocks are in `gaps`,
        missing and not wanted. With `ahead`, such blocks behind the last one are included, too, and none before the
        first: a reader waits for it.
        """
        number, first = key
        file = self.files[number]
        sizes = {first: file.geometry.place(first).length}
        # An all-zero block is stored nowhere: what is before it need not be adjacent to what is behind it.
        for direction in (1,) if ahead or not sizes[first] else (1, -1):
            room, gap_room = most_bytes - sum(sizes.values()), gap_bytes
            gap: dict[int, int] = {}
            for block, size in _stored_beside(file.geometry, first, direction):
                belongs = eligible((number, block))
                if not belongs and (block not in gaps or file.done[block] or (number, block) in self.wanted):
                    break
                room -= size
                gap_room = gap_bytes if belongs else gap_room - size
                if room < 0 or gap_room < 0 or len(sizes) >= _MAX_RUN or len(gap) == _MAX_GAP:
                    break
                gap[block] = size
                if belongs:
                    sizes |= gap
                    gap = {}
            if ahead:
                sizes |= gap
        return sizes

    # Which blocks are wanted

    def _add_reader(self, key: Key) -> bool:
        """Add a reader to a block. Returns whether the block is in flight already and had no reader before."""
        file = self.files[key[0]]
        file.done[key[1]] = 0
        wanted = self.wanted.setdefault(key, Wanted())
        wanted.readers += 1
        if wanted.readers > 1:
            return False
        self.demanded.add(key)
        if wanted.postponed:  # a failed prefetch: for a reader it is retried at once
            wanted.postponed, wanted.attempts = False, 0
        if wanted.queued:
            file.origins[wanted.origin].enqueue(key, Purpose.DEMAND)
        return wanted.in_flight

    def _remove_reader(self, key: Key) -> None:
        """Remove a reader from a block; without readers only its prefetch purpose remains."""
        wanted = self.wanted.get(key)
        if wanted is None or not wanted.readers:
            return
        wanted.readers -= 1
        if wanted.readers:
            return
        self._remove_demand(key, wanted)
        if wanted.prefetch is None:
            if not wanted.in_flight:
                self._forget(key)
        elif wanted.queued:
            self.origin_of(key).enqueue(key, wanted.prefetch)

    def _add_hot(self, key: Key) -> None:
        """Queue a hot block for prefetch, behind earlier ones."""
        file = self.files[key[0]]
        if file.done[key[1]] or not file.prefetches:
            return
        wanted = self.wanted.setdefault(key, Wanted())
        if wanted.prefetch is Purpose.HOT:
            return
        wanted.prefetch = Purpose.HOT
        self.hot_left += 1
        if wanted.queued and not wanted.readers:
            origin = self.origin_of(key)
            origin.hot.append(key)
            origin.blocked_until = _NEVER

    def _make_cold(self, key: Key) -> None:
        """Lower the prefetch purpose of a block to cold, if it is still wanted."""
        wanted = self.wanted.get(key)
        if wanted is not None and wanted.prefetch is not Purpose.COLD:
            self.hot_left -= wanted.prefetch is Purpose.HOT
            wanted.prefetch = Purpose.COLD
            if wanted.queued and not wanted.readers:  # as hot, at another origin than the caller's
                self.origin_of(key).enqueue(key, Purpose.COLD)

    def stop_prefetch(self, number: int) -> None:
        """From now on, request only the blocks that readers wait for."""
        self.files[number].prefetches = False
        for key in [key for key in self.wanted if key[0] == number]:
            wanted = self.wanted[key]
            if wanted.prefetch is None:
                continue
            self.stats.dropped += 1
            self.hot_left -= wanted.prefetch is Purpose.HOT
            wanted.prefetch = None
            if not wanted.readers and not wanted.in_flight:
                self._forget(key)
        for origin in self.files[number].origins:
            origin.cold = deque(item for item in origin.cold if item[0] != number)

    def _requeue(self, key: Key) -> None:
        """Queue a block again if it is wanted and not in flight any more."""
        wanted = self.wanted[key]
        if not wanted.queued:
            return
        if wanted.purpose is None:
            self._forget(key)
        else:
            self.origin_of(key).enqueue(key, wanted.purpose)

    def _forget(self, key: Key) -> None:
        """Remove the entry of a block that is not wanted any more, or was given up."""
        wanted = self.wanted.pop(key)
        self.claims.pop(key, None)
        self.hot_left -= wanted.prefetch is Purpose.HOT
        if wanted.readers:
            self._remove_demand(key, wanted)

    def mark_present(self, file: int, block: int) -> None:
        """The block is cached, by an earlier start, a request, or another process."""
        self.files[file].done[block] = 1
        wanted = self.wanted.get((file, block))
        if wanted is None:
            return
        self._forget((file, block))
        if ELSEWHERE in wanted.requests:
            self.hung.discard(ELSEWHERE)
        for request in self._running_for(wanted):
            self._remove_outstanding(request, block)
            if not request.left:
                request.cancelled = True
                self.plan.cancelled.append(request.fetch.number)

    def _remove_demand(self, key: Key, wanted: Wanted) -> None:
        self.demanded.discard(key)
        self.files[key[0]].origins[wanted.origin].demand.pop(key, None)

    # Running requests

    def _running_for(self, wanted: Wanted) -> list[Request]:
        """This process's requests for a block."""
        return [self.running[number] for number in wanted.requests if number != ELSEWHERE]

    def _received(self, request: Request, block: int, now: float) -> None:
        """A running request received a block, valid or not."""
        pace, num_bytes = request.origin.pace, self._remove_outstanding(request, block)
        if request.latest is None:
            pace.first_block(now - request.started)
        elif request.fetch.purpose is Purpose.DEMAND:
            pace.next_block(num_bytes, now - request.latest)
        request.latest = now
        self.hung.discard(request.fetch.number)
        pace.arrived(num_bytes, now)

    def _remove_outstanding(self, request: Request, block: int) -> int:
        """Remove a block from a request's outstanding ones; returns its stored bytes."""
        size = request.left.pop(block, 0)
        self.inflight_bytes -= size
        if request.fetch.purpose is not Purpose.DEMAND:
            request.origin.prefetch_bytes -= size
        return size

    def _detach(self, number: int, key: Key) -> Wanted | None:
        """Remove request `number` from a block. Returns the entry if the block is wanted and had this request."""
        wanted = self.wanted.get(key)
        if wanted is None or number not in wanted.requests:
            return None
        wanted.requests.remove(number)
        return wanted

    def _end(self, number: int) -> Request:
        """Remove an ended request. Its outstanding blocks still refer to it."""
        request = self.running.pop(number)
        self.hung.discard(number)
        request.origin.num_running -= 1
        request.origin.num_prefetch -= request.fetch.purpose is not Purpose.DEMAND
        return request


def _stored_beside(geometry: Geometry, first: int, step: int) -> Iterator[tuple[int, int]]:
    """The blocks behind one, or before it if `step` is -1, with their stored sizes, as long as their stored bytes are
    adjacent."""
    edge: int | None = None
    for block in range(first, geometry.num_blocks if step > 0 else -1, step):
        place = geometry.place(block)
        if place.length:
            near, far = place.offset, place.offset + place.length
            near, far = (near, far) if step > 0 else (far, near)
            if edge not in (None, near):
                return
            edge = far
        if block != first:
            yield block, place.length

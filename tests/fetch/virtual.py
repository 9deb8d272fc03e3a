"""A simulation for the scheduler in virtual time: an origin with latency, shared bandwidth and faults, and its readers.

All requests past their latency share the link evenly. The world drives `Scheduler` and `PendingReads` like the fetcher,
and checks the invariants at each step.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from random import Random

from bootseer.blocks.codec import Buffer
from bootseer.blocks.index import Place
from bootseer.errors import BootseerError, CorruptError, TransientError
from bootseer.fetch.fetch_settings import WITHOUT_READ_AHEAD, FetchSettings, Purpose
from bootseer.fetch.ledger import Fetch
from bootseer.fetch.pending import PendingRead, PendingReads
from bootseer.fetch.routed import Routes
from bootseer.fetch.scheduler import Scheduler

BLOCK = 128 << 10
_EPSILON = 1e-9


class Layout:
    """A block file with given stored sizes, its blocks contiguous."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.num_blocks = len(sizes)
        self._ends = list(accumulate(sizes))

    def place(self, block: int) -> Place:
        return Place(0, self._ends[block] - self.sizes[block], self.sizes[block], 1)


@dataclass
class Fault:
    """The fault of one request. Bytes flow until `after_blocks` have arrived."""

    error: BootseerError | None = None
    """Ends the request with this error."""
    after_blocks: int = 0
    corrupt: frozenset[int] = frozenset()
    """Blocks that arrive with wrong bytes."""
    hang: bool = False
    """Receives nothing more; ends with its timeout."""
    claimed_elsewhere: dict[int, tuple[float, bool]] = field(default_factory=dict)
    """Blocks that another process has claimed: for how long, and whether it delivers them."""


@dataclass(eq=False)
class Transfer:
    """A running request."""

    fetch: Fetch
    flows_at: float
    ends_at: float
    blocks: list[tuple[int, float]]
    """Block and remaining bytes."""
    fault: Fault
    arrived: int = 0

    def flows(self, now: float) -> bool:
        stuck = (self.fault.hang or self.fault.error) and self.arrived >= self.fault.after_blocks
        return now + _EPSILON >= self.flows_at and bool(self.blocks) and not stuck


class Near:
    """Routes of a file that one peer may have: the peer, and after its failure the store. Also its only route."""

    run_blocks, turn = 1 << 20, 0.0
    steps, may_ask_store, may_read_ahead = ("near",), True, True

    def route(self, block: int, now: float) -> Near:
        return self


class World:
    """`fault(fetch, number of earlier requests for its first block)` decides about each request."""

    def __init__(
        self,
        layouts: Sequence[Layout],
        *,
        settings: FetchSettings | None = None,
        latency_s: float = 0.02,
        bytes_per_s: float = 100e6,
        fault: Callable[[Fetch, int], Fault | None] | None = None,
        routes: Routes | None = None,
        seed: int = 0,
    ) -> None:
        self.settings = settings or WITHOUT_READ_AHEAD
        self.now = 0.0
        self.layouts = layouts
        self._largest = max(max(layout.sizes, default=0) for layout in layouts)
        self.scheduler = Scheduler(self.settings, Random(seed).random)
        self.tickets = PendingReads()
        for layout in layouts:
            self.scheduler.add(layout, "origin", routes)
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self._fault = fault or (lambda fetch, earlier: None)
        self.transfers: dict[int, Transfer] = {}
        self.here: set[tuple[int, int]] = set()
        self.asked: Counter[tuple[int, int]] = Counter()
        self._asked_now: set[tuple[int, int]] = set()
        """Blocks requested since the last check."""
        self.excused: Counter[tuple[int, int]] = Counter()
        """Requests for a block that failed, were hedges or lost to another process."""
        self.seen: set[tuple[int, int]] = set()
        self.launched: list[tuple[float, Fetch]] = []
        self.bytes = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._next = 0
        self._wake_at: float | None = None

    # Actions

    def at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, self._next, call))
        self._next += 1

    def prefetch(self, blocks: Iterable[tuple[int, int]]) -> None:
        self.scheduler.want_hot(blocks)

    def read(
        self, file: int, blocks: Sequence[int], done: Callable[[Buffer | BootseerError], None], deadline_s: float = 30.0
    ) -> PendingRead:
        """One read of whole blocks."""
        for block in blocks:
            if (file, block) not in self.seen:
                self.seen.add((file, block))
                self.scheduler.note_need(file, block, self.now)
        missing = [block for block in blocks if (file, block) not in self.here]
        ticket = PendingRead(file, 0, 0, self.now, self.now + deadline_s, done)
        if missing:
            self.scheduler.want(file, missing, self.now)
            self.tickets.wait(ticket, missing)
        else:
            done(b"")
        return ticket

    def reader(self, steps: Iterator[tuple[float, int, Sequence[int]]], finished: Callable[[], None]) -> None:
        """A reader that thinks for a while, reads, waits for the data, and repeats."""

        def step(answer: Buffer | BootseerError = b"") -> None:
            assert not isinstance(answer, BootseerError), answer
            try:
                think_s, file, blocks = next(steps)
            except StopIteration:
                finished()
                return
            self.at(self.now + think_s, lambda: void(self.read(file, blocks, step)))

        step()

    def leave(self, ticket: PendingRead) -> None:
        self.scheduler.reader_cancelled(ticket.file, self.tickets.close(ticket))

    def _bring(self, file: int, block: int) -> None:
        self.here.add((file, block))
        for ticket in self.tickets.arrived((file, block), b""):
            ticket.done(b"")

    def _launch(self, fetch: Fetch) -> None:
        self.launched.append((self.now, fetch))
        first = (fetch.file, fetch.blocks[0])
        fault = self._fault(fetch, self.asked[first]) or Fault()
        places = [self.layouts[fetch.file].place(block) for block in fetch.blocks]
        stored = [place for place in places if place.length]
        for before, after in pairwise(stored):
            assert before.offset + before.length == after.offset
        for block in fetch.blocks:
            key = (fetch.file, block)
            assert key not in self.here or fetch.hedge
            self.asked[key] += 1
            self._asked_now.add(key)
            self.excused[key] += fetch.hedge
        blocks = []
        for block, place in zip(fetch.blocks, places, strict=True):
            if block in fault.claimed_elsewhere and not fetch.hedge:
                after_s, brings = fault.claimed_elsewhere[block]
                self.excused[fetch.file, block] += 1
                self.scheduler.claimed_elsewhere(fetch.number, block, self.now)
                self.at(self.now + after_s, lambda block=block, brings=brings: self._other(fetch.file, block, brings))
            else:
                blocks.append((block, float(place.length)))
        self.transfers[fetch.number] = Transfer(
            fetch, self.now + self.latency_s, self.now + fetch.timeout_s, blocks, fault
        )

    def _other(self, file: int, block: int, brings: bool) -> None:
        if brings:
            self.scheduler.mark_present(file, block)
            self._bring(file, block)
        elif (file, block) not in self.here:
            self.scheduler.claim_released(file, block)

    # Time

    def tick(self) -> None:
        for ticket, missing in self.tickets.take_expired(self.now):
            self.scheduler.reader_timed_out(ticket.file, missing, self.now)
            ticket.done(TransientError("no answer in time"))
        while True:
            plan = self.scheduler.tick(self.now)
            for fetch in plan.fetches:
                self._launch(fetch)
            for number in plan.cancelled:
                transfer = self.transfers.pop(number, None)
                if transfer is not None:
                    self.scheduler.request_finished(number, self.now)
            for file, block, error in plan.given_up:
                for ticket, others in self.tickets.fail_block((file, block)):
                    self.scheduler.reader_cancelled(file, others)
                    ticket.done(error)
            self.check()
            if not (plan.fetches or plan.cancelled or plan.given_up):
                break
        assert plan.wake_at is None or plan.wake_at > self.now
        self._wake_at = plan.wake_at

    def check(self) -> None:
        """Check the invariants."""
        left = sum(
            self.layouts[transfer.fetch.file].sizes[block]
            for transfer in self.transfers.values()
            for block, _ in transfer.blocks
        )
        assert self.scheduler.inflight_bytes <= max(self.settings.inflight_bytes, self._largest)
        assert self.scheduler.inflight_bytes <= left
        assert len(self.transfers) <= self.settings.max_requests + self.settings.reserved_requests
        for key in self._asked_now:  # excused requests stay excused
            assert self.asked[key] <= 1 + self.excused[key], f"{key} was fetched {self.asked[key]} times"
        self._asked_now.clear()

    def run(self, until: float = 1e6) -> None:
        """Run until no event is left, or until this time."""
        self.tick()
        while (upcoming := self._upcoming()) is not None and upcoming <= until:
            self._pass(upcoming)
            while self._events and self._events[0][0] <= self.now + _EPSILON:
                heapq.heappop(self._events)[2]()
            self._move()
            self.tick()
        if until < 1e6:
            self._pass(until)

    def _flowing(self) -> list[Transfer]:
        return [transfer for transfer in self.transfers.values() if transfer.flows(self.now)]

    def _upcoming(self) -> float | None:
        flowing = self._flowing()
        rate = self.bytes_per_s / max(len(flowing), 1)
        times = [self.now + transfer.blocks[0][1] / rate for transfer in flowing]
        for transfer in self.transfers.values():
            if transfer.flows_at > self.now:
                times.append(transfer.flows_at)
            elif not transfer.flows(self.now):
                times.append(transfer.ends_at if transfer.fault.hang and transfer.blocks else self.now)
            times.append(transfer.ends_at)
        times += [event[0] for event in self._events[:1]]
        times += [time for time in (self._wake_at, self.tickets.next_deadline) if time is not None]
        return max(min(times), self.now) if times else None

    def _pass(self, time: float) -> None:
        flowing = self._flowing()
        share = (time - self.now) * self.bytes_per_s / max(len(flowing), 1)
        for transfer in flowing:
            block, left = transfer.blocks[0]
            transfer.blocks[0] = (block, left - share)
            self.bytes += share
        self.now = time

    def _move(self) -> None:
        """Deliver complete blocks, and end finished requests."""
        for number, transfer in list(self.transfers.items()):
            fetch = transfer.fetch
            while transfer.flows(self.now) and transfer.blocks[0][1] <= 1e-3:
                block, _ = transfer.blocks.pop(0)
                transfer.arrived += 1
                if block in transfer.fault.corrupt:
                    self.excused[fetch.file, block] += 1
                    self.scheduler.block_failed(number, block, CorruptError("wrong bytes"), self.now)
                else:
                    self.scheduler.block_arrived(number, block, self.now)
                    self._bring(fetch.file, block)
            error: BootseerError | None = None
            if transfer.blocks:
                if transfer.fault.error and self.now >= transfer.flows_at and not transfer.flows(self.now):
                    error = transfer.fault.error
                elif self.now >= transfer.ends_at:
                    error = TransientError("timed out")
                else:
                    continue
            elif self.now < transfer.flows_at:
                continue
            del self.transfers[number]
            for block, _ in transfer.blocks:
                self.excused[fetch.file, block] += 1
            self.scheduler.request_finished(number, self.now, error)


def void(_: object) -> None:
    """Drop a value."""


def world(num_blocks: int = 1000, **options: object) -> World:
    return World([Layout([BLOCK] * num_blocks)], **options)  # type: ignore[arg-type]


class Answers(list[Buffer | BootseerError]):
    """Collects the readers' results."""

    def __call__(self, answer: Buffer | BootseerError) -> None:
        self.append(answer)


def fetched(w: World, purpose: Purpose) -> list[int]:
    return [block for _, fetch in w.launched if fetch.purpose is purpose for block in fetch.blocks]

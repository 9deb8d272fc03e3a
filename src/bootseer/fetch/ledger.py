"""The books of the scheduler: which blocks are wanted by whom, which requests run, and what they may still bring.

Each block of a file is here, or not wanted, or has one `Wanted` entry, which is queued at its origin, on its way, or
waits for its next attempt. This module keeps that true; when to start what is decided in `schedule`, its only caller.
Decides and touches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from bootseer.fetch.pace import Pace
from bootseer.fetch.purpose import Purpose
from bootseer.fetch.queues import Key, Origin, Wanted
from bootseer.fetch.settings import FetchSettings

if TYPE_CHECKING:
    from bootseer.blocks.index import Place, Stripe

# A run of all-zero blocks has no bytes that would end it.
_MAX_RUN = 1024


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


@dataclass(slots=True)
class File:
    """One block file."""

    geometry: Geometry
    origin: Origin
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


@dataclass(slots=True)
class Counts:
    """What the scheduler did, for the report."""

    requests: dict[Purpose, int] = field(default_factory=lambda: dict.fromkeys(Purpose, 0))
    hedges: int = 0
    failures: int = 0
    dropped: int = 0
    """Blocks whose prefetch was given up."""


class Ledger:
    """All files of one fetcher."""

    def __init__(self, settings: FetchSettings) -> None:
        self._settings = settings
        self._next_number = 0
        self.files: list[File] = []
        self.origins: dict[str, Origin] = {}
        self.wanted: dict[Key, Wanted] = {}
        self.running: dict[int, Request] = {}
        self.inflight_bytes = 0
        self.num_demanded = 0
        """Blocks that readers wait for."""
        self.hot_left = 0
        """Hot blocks that are not here and not given up."""
        self.cancelled: list[int] = []
        """Running requests that can bring nothing new any more; `schedule` hands them out."""
        self.counts = Counts()

    def add(self, geometry: Geometry, origin: str) -> int:
        """A new file. Files of one origin share its pace and its queues."""
        if origin not in self.origins:
            self.origins[origin] = Origin(Pace(self._settings), next_bytes=self._settings.request_bytes // 16)
        size = geometry.num_blocks
        self.files.append(File(geometry, self.origins[origin], bytearray(size), bytearray(size)))
        return len(self.files) - 1

    def origin_of(self, key: Key) -> Origin:
        """Where a block comes from."""
        return self.files[key[0]].origin

    # Who wants what

    def demand(self, key: Key) -> bool:
        """One more reader waits for a block. Whether it is on its way already and now a reader's."""
        file = self.files[key[0]]
        file.done[key[1]] = 0
        wanted = self.wanted.setdefault(key, Wanted())
        wanted.readers += 1
        if wanted.readers > 1:
            return False
        self.num_demanded += 1
        if not file.hot[key[1]]:
            file.origin.uncovered.add(key)
        if wanted.later:  # it failed as a prefetch: a reader is worth an attempt at once
            wanted.later, wanted.attempts = False, 0
        if wanted.queued:
            file.origin.enqueue(key, Purpose.DEMAND)
        return wanted.on_its_way

    def leave(self, key: Key) -> None:
        """One reader less; without readers a block falls back to what it is wanted for besides."""
        wanted = self.wanted.get(key)
        if wanted is None or not wanted.readers:
            return
        wanted.readers -= 1
        if wanted.readers:
            return
        self._not_demanded(key)
        if wanted.prefetch is None:
            if not wanted.on_its_way:
                self.forget(key)
        elif wanted.queued:
            self.origin_of(key).enqueue(key, wanted.prefetch)

    def prefetch(self, key: Key, purpose: Purpose) -> None:
        """A block is wanted in advance, behind those that are so already."""
        file, block = self.files[key[0]], key[1]
        if purpose is Purpose.HOT:
            file.hot[block] = 1
            file.origin.uncovered.discard(key)
        if file.done[block]:
            return
        wanted = self.wanted.setdefault(key, Wanted())
        if wanted.prefetch is not None and wanted.prefetch >= purpose:
            return
        wanted.prefetch = purpose
        self.hot_left += purpose is Purpose.HOT
        if wanted.queued and not wanted.readers:
            if purpose is Purpose.HOT:
                file.origin.hot.append(key)
            else:
                file.origin.cold.append((key[0], range(block, block + 1)))

    def make_cold(self, key: Key) -> None:
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
            if not wanted.readers and not wanted.on_its_way:
                self.forget(key)
        origin = self.files[number].origin
        origin.cold = type(origin.cold)(item for item in origin.cold if item[0] != number)

    def requeue(self, key: Key) -> None:
        """A block that is not on its way any more waits for its turn, if anybody wants it."""
        wanted = self.wanted[key]
        if not wanted.queued:
            return
        if wanted.purpose is None:
            self.forget(key)
        else:
            self.origin_of(key).enqueue(key, wanted.purpose)

    def forget(self, key: Key) -> None:
        """Nobody wants the block any more, or nobody will get it."""
        wanted = self.wanted.pop(key)
        self.hot_left -= wanted.prefetch is Purpose.HOT
        if wanted.readers:
            self._not_demanded(key)

    def done(self, key: Key) -> None:
        """The block is here."""
        self.files[key[0]].done[key[1]] = 1
        wanted = self.wanted.get(key)
        if wanted is None:
            return
        self.forget(key)
        for number in wanted.requests:
            request = self.running[number]
            self.release(request, key[1])
            if not request.left:
                request.cancelled = True
                self.cancelled.append(number)

    def _not_demanded(self, key: Key) -> None:
        self.num_demanded -= 1
        origin = self.origin_of(key)
        origin.uncovered.discard(key)
        origin.demand.pop(key, None)

    # What runs

    def run(self, key: Key, most_bytes: int, eligible: Callable[[Key], bool]) -> tuple[range, list[int]]:
        """The block and those after it whose bytes follow in the same stripe, and their stored sizes.

        At least the block itself, then as many as are `eligible` and fit into `most_bytes`.
        """
        number, first = key
        geometry = self.files[number].geometry
        step = len(geometry.stripes)
        place = geometry.place(first)
        sizes, total, end = [place.length], place.length, place.offset + place.length
        block = first + step
        while block < geometry.num_blocks and len(sizes) < _MAX_RUN and eligible((number, block)):
            place = geometry.place(block)
            if place.length:
                total += place.length
                if total > most_bytes or (place.offset != end and total > place.length):
                    break
                end = place.offset + place.length
            sizes.append(place.length)
            block += step
        return range(first, first + step * len(sizes), step), sizes

    def launch(
        self, number: int, blocks: range, sizes: list[int], purpose: Purpose, now: float, *, hedge: bool = False
    ) -> Fetch:
        """Begin a request."""
        origin = self.files[number].origin
        timeout_s = self._settings.timeout_s(purpose)
        fetch = Fetch(self._next_number, number, blocks, purpose, hedge, timeout_s)
        self._next_number += 1
        self.running[fetch.number] = Request(fetch, origin, dict(zip(blocks, sizes, strict=True)), now)
        total = sum(sizes)
        self.inflight_bytes += total
        origin.pace.launched(origin.num_running, now)
        origin.num_running += 1
        if purpose is not Purpose.DEMAND:
            origin.num_prefetch += 1
            origin.prefetch_bytes += total
            origin.next_bytes = min(2 * origin.next_bytes, self._settings.request_bytes)
        self.counts.requests[purpose] += 1
        self.counts.hedges += hedge
        for block in blocks:
            key = (number, block)
            origin.demand.pop(key, None)
            self.wanted.setdefault(key, Wanted(prefetch=purpose)).requests.append(fetch.number)
        return fetch

    def received(self, request: Request, block: int, now: float) -> None:
        """A running request brought the bytes of a block, good or not."""
        if not request.answered:
            request.answered = True
            request.origin.pace.first_block(now - request.started)
        request.origin.pace.arrived(self.release(request, block), now)

    def release(self, request: Request, block: int) -> int:
        """A running request is not expected to bring a block any more. Returns the stored bytes."""
        size = request.left.pop(block, 0)
        self.inflight_bytes -= size
        if request.fetch.purpose is not Purpose.DEMAND:
            request.origin.prefetch_bytes -= size
        return size

    def detach(self, number: int, key: Key) -> Wanted | None:
        """Request `number` will not bring a block. Returns the block if it was to and somebody wants it still."""
        wanted = self.wanted.get(key)
        if wanted is None or number not in wanted.requests:
            return None
        wanted.requests.remove(number)
        return wanted

    def end(self, number: int) -> Request:
        """A request has ended. What it has `left` is still attached to it."""
        request = self.running.pop(number)
        request.origin.num_running -= 1
        request.origin.num_prefetch -= request.fetch.purpose is not Purpose.DEMAND
        return request

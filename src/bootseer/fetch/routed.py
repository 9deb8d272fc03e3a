"""Requests to an origin that is many places, each of which has some of the blocks: the other nodes of a job.

Such an origin comes first among a file's origins. Its blocks wait in one queue, in the order in which they are needed,
and a block's place is looked up when it could be asked for: so the order holds whatever the places do, a place that
comes or goes moves what still waits without a message, and a thousand places cost no more than the blocks looked at.
(A queue for each place would do all of that once more for each, and needs to be sorted again when the route changes.)

- A place has few requests at a time, all of them together not many more: a start asks many places at once.
- A block whose route begins at the file's next origin, or none of whose places gave it and which this node may ask
  there, moves to that origin's queue, and is fetched as if there were no places.
- A second request for a block that is late is the business of the places (they tell waiting from silence), not of the
  scheduler's hedges: the request fails, and the block is asked from the second in its route.

Decides and touches nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Final, Protocol, TypeVar

from bootseer.errors import BootseerError, TransientError
from bootseer.fetch.ledger import Fetch, Geometry, Key, Origin, Pace, Wanted
from bootseer.fetch.schedule import Scheduler
from bootseer.fetch.settings import FetchSettings, Purpose

T = TypeVar("T")
_WINDOW_RUNS: Final = 8
"""Prefetch keeps the order of its list between windows of so many runs, and changes it within them."""
_WINDOWS: Final = 2
"""Of what is in flight, half may wait at owners for the origin; what a store is asked for all flows."""
_REQUESTS_PER_WINDOW: Final = 4
_LOOK: Final = 256
"""How many queued blocks are looked at for one whose place has room."""
_LOOK_RUNS: Final = 32
"""The same for the rest of files, which waits in runs."""
_MAX_BOUND: Final = 64
"""Blocks that wait at the next origin are not moved back when the route changes: no more than so many wait there."""
_MAX_BOUND_RUNS: Final = 8
_LOOK_AGAIN_S: Final = 0.1
_NEVER: Final = float("-inf")
_ROUNDS: Final = 3
"""A block that its places did not give in so many rounds is asked from the next origin by any node: the places may have
lost what this node still has, such as a way to the store."""


class Route(Protocol):
    """Where a block is, and the others of its run."""

    @property
    def steps(self) -> Sequence[Hashable]:
        """Places to ask, in order; none where the file's next origin is to be asked at once."""

    @property
    def may_ask_origin(self) -> bool:
        """Whether the next origin is asked when all places fail. Otherwise they are asked again, and other ones."""


class Routes(Protocol):
    """The routes of one file."""

    @property
    def run_blocks(self) -> int:
        """Blocks have the same route in runs of so many."""

    @property
    def turn(self) -> float:
        """Where in a window to begin, 0 to 1: different for each node, so that not all ask the same place first."""

    def route(self, block: int, now: float) -> Route:
        """Of a block, at a time of the scheduler's clock."""


@dataclass(slots=True, eq=False)
class Places(Origin):
    """An origin that is many places."""

    running: Counter[Hashable] = field(default_factory=Counter)
    """Requests to each."""
    busy_until: dict[Hashable, float] = field(default_factory=dict)
    """Places that asked to be left alone for a while."""
    look_at: float = _NEVER
    """No prefetch can be started before, unless something happens."""

    def enqueue(self, key: Key, purpose: Purpose) -> None:
        Origin.enqueue(self, key, purpose)
        self.look_at = _NEVER

    def has_room(self, step: Hashable, max_requests: int, now: float) -> bool:
        """Whether a place can be asked now."""
        return self.running[step] < max_requests and now >= self.busy_until.get(step, _NEVER)


class RoutedScheduler(Scheduler):
    """A scheduler some of whose files have routes. Without any it is `Scheduler`."""

    def __init__(self, settings: FetchSettings, jitter: Callable[[], float]) -> None:
        super().__init__(settings, jitter)
        self._places: Places | None = None
        self._routes: dict[int, Routes] = {}

    def add(self, geometry: Geometry, *origins: str, routes: Routes | None = None) -> int:
        """With `routes` the first of two origins is many places; a scheduler has one such origin."""
        if routes is not None and self._places is None:
            self._places = Places(Pace(self._settings), next_bytes=self._settings.request_bytes // 16)
            # What it passes on is started in the same `tick`: it comes first.
            self.origins = {origins[0]: self._places, **self.origins}
            # Of many nodes that start at once, each would spend it on the same slow origin: where half a second was
            # late, origins sent 1.1 to 1.5 copies.
            self._hedge_credit = 0.0
            self._hedge_earned, self._hedge_from_s = self._settings.shared_hedge_credit, self._settings.shared_hedge_s
        number = super().add(geometry, *origins)
        if routes is not None:
            self._routes[number] = routes
        return number

    def in_turn(self, blocks: list[Key]) -> list[Key]:
        """A hot set in the order in which this node fetches it."""
        routes = self._routes.get(blocks[0][0]) if blocks else None
        return blocks if routes is None else rotated(blocks, _WINDOW_RUNS * routes.run_blocks, routes.turn)

    def want(self, file: int, blocks: Iterable[int], purpose: Purpose, now: float) -> None:
        super().want(file, blocks, purpose, now)
        if self._places is not None:
            self._places.look_at = _NEVER

    def want_cold(self, file: int, blocks: range, now: float) -> None:
        routes = self._routes.get(file)
        if routes is None or self._places is None:
            super().want_cold(file, blocks, now)
            return
        size = routes.run_blocks
        edges = [blocks.start, *range((blocks.start // size + 1) * size, blocks.stop, size), blocks.stop]
        runs = [range(*edge) for edge in pairwise(edges)]
        for run in rotated(runs, _WINDOW_RUNS, routes.turn):
            super().want_cold(file, run, now)
        self._places.look_at = _NEVER

    def foreign(self, number: int, block: int) -> None:
        self._untry(number, (block,))
        super().foreign(number, block)

    def finished(self, number: int, now: float, error: BootseerError | None = None) -> None:
        request = self.running[number]
        step, places = request.fetch.step, self._places
        if step is not None and places is not None:
            places.look_at = _NEVER
            places.running[step] -= 1
            if not places.running[step]:
                del places.running[step]
            retry_after_s = error.retry_after_s if isinstance(error, TransientError) else None
            if retry_after_s is not None:
                places.busy_until[step] = now + retry_after_s
            if error is None or retry_after_s is not None:
                self._untry(number, request.left)
        super().finished(number, now, error)

    def _first_well(self, file: int, now: float) -> int:
        return super()._first_well(file, now) if file not in self._routes else 0

    def _watch(self, key: Key, now: float) -> None:
        if self.origin_of(key) is not self._places:
            super()._watch(key, now)

    def _untry(self, number: int, blocks: Iterable[int]) -> None:
        """The place of a request may be asked for these blocks once more."""
        for block in blocks:
            wanted = self.wanted.get((self.running[number].fetch.file, block))
            if wanted is not None:
                wanted.tried = ()

    def _try_next_origin(self, key: Key, now: float) -> bool:
        wanted, routes = self.wanted[key], self._routes.get(key[0])
        if wanted.origin or routes is None:
            return super()._try_next_origin(key, now)
        route = routes.route(key[1], now)
        if any(step not in wanted.tried for step in route.steps):
            self._requeue(key)
        elif not route.steps or route.may_ask_origin or wanted.attempts >= _ROUNDS:
            wanted.attempts = 0
            super()._try_next_origin(key, now)
        else:
            return False
        return True

    # Where blocks are

    def _step(self, key: Key, now: float) -> Hashable:
        """Which place to ask for a block of a file with routes; None for the next origin."""
        routes = self._routes.get(key[0])
        if routes is None or not self.files[key[0]].geometry.place(key[1]).length:  # zeros are in no place
            return None
        route = routes.route(key[1], now)
        wanted = self.wanted.get(key)
        if wanted is None or not wanted.tried or not route.steps:
            return route.steps[0] if route.steps else None
        for step in route.steps:
            if step not in wanted.tried:
                return step
        if route.may_ask_origin:
            return None
        wanted.tried = ()
        return route.steps[0]

    def _pass_on(self, key: Key) -> None:
        """Queue a block at the next origin, behind those that are there."""
        wanted, (places, store) = self.wanted[key], self.files[key[0]].origins
        wanted.origin = 1
        if wanted.readers:
            places.demand.pop(key, None)
            store.demand[key] = None
            store.yield_until = max(store.yield_until, places.yield_until)
            if key in places.uncovered:
                places.uncovered.discard(key)
                store.uncovered.add(key)
        elif wanted.prefetch is Purpose.HOT:
            store.hot.append(key)

    def _is_next(self, key: Key, purpose: Purpose, origin: Origin) -> bool:
        if origin is not self._places and key[0] in self._routes and key not in self.wanted:
            return False  # beside a block that was passed on, and in another place itself
        return super()._is_next(key, purpose, origin)

    def _ahead(self, places: Places, purpose: Purpose, now: float) -> Iterator[tuple[Key, Hashable]]:
        """The next blocks to prefetch from places, in order, each with its place; of the rest one of each run. Passes
        the others on."""
        if purpose is Purpose.HOT:
            self._next_hot(places)  # takes out what is done with
            for key in list(islice(places.hot, _LOOK)):
                if self._is_next(key, Purpose.HOT, places):
                    step = self._step(key, now)
                    if step is not None:
                        yield key, step
                    elif len(self.files[key[0]].origins[1].hot) < _MAX_BOUND:
                        self._pass_on(key)
            return
        kept: deque[tuple[int, range]] = deque()
        for _ in range(min(len(places.cold), _LOOK_RUNS)):
            file, run = places.cold.popleft()
            while run and not self._is_next((file, run[0]), Purpose.COLD, places):
                self._make_cold((file, run[0]))
                run = run[1:]
            store = self.files[file].origins[1]
            own = 0
            while own < len(run) and len(store.cold) < _MAX_BOUND_RUNS:
                key = (file, run[own])
                if not self._is_next(key, Purpose.COLD, places) or self._step(key, now) is not None:
                    break
                self.wanted.setdefault(key, Wanted(prefetch=Purpose.COLD)).origin = 1
                own += 1
            if own:
                store.cold.append((file, run[:own]))
            if run[own:]:
                kept.append((file, run[own:]))
        places.cold.extendleft(reversed(kept))
        yield from (((file, run[0]), self._step((file, run[0]), now)) for file, run in kept)

    # What to do

    def _start_demand(self, origin: Origin, now: float, fetches: list[Fetch]) -> None:
        places, settings = self._places, self._settings
        if places is None or origin is not places:
            super()._start_demand(origin, now, fetches)
            return
        for key in list(places.demand):
            if key not in places.demand:
                continue  # it went with the one before
            step = self._step(key, now)
            if step is None:
                self._pass_on(key)
                continue
            if not (self._has_demand_slot(places) and places.has_room(step, settings.place_requests + 1, now)):
                continue

            def eligible(other: Key, step: Hashable = step, places: Places = places) -> bool:
                hot = not self._hot_suspended and self._is_next(other, Purpose.HOT, places)
                return (other in places.demand or hot) and self._step(other, now) == step

            room = settings.inflight_bytes - self.inflight_bytes
            blocks, sizes = self._adjacent(key, min(settings.demand_bytes, room), eligible)
            if sum(sizes) > room and self.inflight_bytes:
                continue
            fetches.append(self._ask(places, step, key[0], blocks, sizes, Purpose.DEMAND, now))

    def _has_demand_slot(self, origin: Origin) -> bool:
        if origin is not self._places:
            return super()._has_demand_slot(origin)
        limit = self._settings.max_requests + self._settings.reserved_requests
        return origin.num_running < self._settings.place_requests_in_all and len(self.running) < limit

    def _start_prefetch(
        self, origin: Origin, purpose: Purpose, window_bytes: int, now: float, fetches: list[Fetch]
    ) -> None:
        places, settings = self._places, self._settings
        if places is None or origin is not places:
            super()._start_prefetch(origin, purpose, window_bytes, now, fetches)
            return
        if not window_bytes or now < places.look_at:
            return
        before = len(fetches)
        for key, step in self._ahead(places, purpose, now):
            limit = settings.place_requests_in_all - settings.reserved_place_requests
            if places.num_running >= limit or len(self.running) >= settings.max_requests:
                return
            if not places.has_room(step, settings.place_requests, now) or not self._is_next(key, purpose, places):
                continue

            def eligible(other: Key, step: Hashable = step, places: Places = places) -> bool:
                return self._is_next(other, purpose, places) and self._step(other, now) == step

            left = settings.inflight_bytes - settings.reserved_bytes - self.inflight_bytes
            room = min(_WINDOWS * window_bytes - places.prefetch_bytes, left)
            most_bytes = min(places.next_bytes, window_bytes // _REQUESTS_PER_WINDOW)
            if room < most_bytes and places.num_prefetch:
                return  # rather a request of that size a little later than a small one now
            blocks, sizes = self._adjacent(key, min(most_bytes, room), eligible)
            # One block may go alone, however small the window.
            if sum(sizes) > (room if places.num_prefetch else left) and self.inflight_bytes:
                return
            fetches.append(self._ask(places, step, key[0], blocks, sizes, purpose, now))
        if len(fetches) == before and (purpose is Purpose.COLD or places.hot):
            places.look_at = now + _LOOK_AGAIN_S

    def _ask(
        self, places: Places, step: Hashable, file: int, blocks: range, sizes: list[int], purpose: Purpose, now: float
    ) -> Fetch:
        fetch = self._launch(places, file, blocks, sizes, purpose, now, step=step)
        places.running[step] += 1
        for block in blocks:
            self.wanted[file, block].tried += (step,)
        return fetch

    def _wake_at(self, now: float) -> float | None:
        wake_at = super()._wake_at(now)
        places = self._places
        if places is not None:
            hot = places.hot and not self._hot_suspended
            if places.demand or hot or (places.cold and self._cold_from(now) <= now):
                return now + _LOOK_AGAIN_S if wake_at is None else min(wake_at, now + _LOOK_AGAIN_S)
        return wake_at


def rotated(items: list[T], window: int, turn: float) -> list[T]:
    """The same items; within each window of so many, those behind `turn` of it come first."""
    parts = (items[start : start + window] for start in range(0, len(items), window))
    return [item for part in parts for half in _halves(part, int(turn * len(part))) for item in half]


def _halves(part: Sequence[T], at: int) -> tuple[Sequence[T], Sequence[T]]:
    return part[at:], part[:at]

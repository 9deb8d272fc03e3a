"""Scheduling with peers: requests to other nodes of a job, each of which has some of the blocks.

Peers are the first of a file's origins. All their blocks wait in one queue in the order of need, and the peer of a
block is looked up only when the block could be requested. So the order does not depend on the peers, joining or leaving
peers move waiting blocks without a message, and a thousand peers cost no more than the blocks examined. (A queue per
peer would repeat all of that for each, and would have to be sorted again when routes change.)

- A peer gets few concurrent requests, and all peers together not many more: a start asks many of them at once.
- A block whose route starts at the file's next origin, or that no peer of its route provided and that this node may
  request there, moves to that origin's queue and is fetched as without peers.
- Late blocks are handled by the peers' own health (which distinguishes waiting from silence), not by the scheduler's
  hedges: the request to a late owner fails, and the block is requested from the second owner of its route. Hedging to
  the store instead would send the whole job there whenever it is slow, which is when owners are late.

Decides and touches nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Final, Protocol, TypeVar

from msgspec import field

from bootseer.errors import BootseerError, TransientError
from bootseer.fetch.fetch_settings import FetchSettings, Purpose
from bootseer.fetch.ledger import Geometry, Key, OriginQueues, Pace, Wanted
from bootseer.fetch.scheduler import Scheduler

T = TypeVar("T")
_WINDOW_RUNS: Final = 8
"""Prefetch keeps the order of its list between windows of this many runs, and rotates it within them."""
_WINDOWS: Final = 2
"""Half of what is in flight may wait at owners for the store, whereas requests to a store all transfer data."""
_REQUESTS_PER_WINDOW: Final = 4
_MAX_EXAMINED: Final = 256
"""How many queued blocks are examined to find one whose peer has capacity."""
_MAX_EXAMINED_RUNS: Final = 32
"""The same for cold blocks, which are queued in runs."""
_MAX_MOVED: Final = 64
"""Blocks moved to the next origin do not move back when routes change, so their number is limited."""
_MAX_MOVED_RUNS: Final = 8
_RETRY_S: Final = 0.1
_NEVER: Final = float("-inf")
_ROUNDS: Final = 3
"""After this many rounds without success, any node may request the block from the next origin: the peers may have lost
something that this node still has, such as access to the store."""


class Route(Protocol):
    """The peers of a block, the same for its whole run."""

    @property
    def steps(self) -> Sequence[Hashable]:
        """The peers to ask, in order; empty if the file's next origin is to be asked at once."""

    @property
    def may_ask_origin(self) -> bool:
        """Whether to ask the next origin after all peers failed. Otherwise they are asked again, or other ones."""


class Routes(Protocol):
    """The routes of one file."""

    @property
    def run_blocks(self) -> int:
        """The number of blocks per run; blocks of a run share a route."""

    @property
    def turn(self) -> float:
        """Where to start within a window, 0 to 1; differs between nodes, so that not all ask the same peer first."""

    def route(self, block: int, now: float) -> Route:
        """The route of a block at a time of the scheduler's clock."""


class PeerQueues(OriginQueues, eq=False):
    """The queues of the origin that consists of all peers."""

    running: Counter[Hashable] = field(default_factory=Counter)
    """Requests per route step."""
    busy_until: dict[Hashable, float] = field(default_factory=dict)
    """Peers that are overloaded until a time (Retry-After)."""
    blocked_until: float = _NEVER
    """No prefetch can be started before this time, unless a request ends or a block is queued."""

    def enqueue(self, key: Key, purpose: Purpose, *, is_new: bool = False) -> None:
        OriginQueues.enqueue(self, key, purpose, is_new=is_new)
        if purpose is not Purpose.DEMAND:
            self.blocked_until = _NEVER

    def has_room(self, step: Hashable, max_requests: int, now: float) -> bool:
        """Whether a peer can be asked now."""
        return self.running[step] < max_requests and now >= self.busy_until.get(step, _NEVER)


class RoutedScheduler(Scheduler):
    """A scheduler with routes for some of its files. Without any it equals `Scheduler`."""

    def __init__(self, settings: FetchSettings, jitter: Callable[[], float]) -> None:
        super().__init__(settings, jitter)
        self._peers: PeerQueues | None = None
        self._routes: dict[int, Routes] = {}

    def add(self, geometry: Geometry, *origins: str, routes: Routes | None = None) -> int:
        """With `routes`, the first of the two origins is the job's peers, of which a scheduler has one set."""
        if routes is not None and self._peers is None:
            self._peers = PeerQueues(Pace(self._settings), next_bytes=self._settings.request_bytes // 16)
            # First in the order: blocks that it moves to the next origin are started in the same `tick`.
            self.origins = {origins[0]: self._peers, **self.origins}
            # When many nodes start together, each would spend its hedges on the same slow origin: with a limit of half
            # a second origins sent 1.1 to 1.5 copies.
            self._hedge_credit = 0.0
            self._hedge_earned, self._hedge_from_s = self._settings.shared_hedge_credit, self._settings.shared_hedge_s
        number = super().add(geometry, *origins)
        if routes is not None:
            self._routes[number] = routes
        return number

    def rotate_hot(self, blocks: list[Key]) -> list[Key]:
        """A hot set in the order in which this node fetches it."""
        routes = self._routes.get(blocks[0][0]) if blocks else None
        return blocks if routes is None else rotated(blocks, _WINDOW_RUNS * routes.run_blocks, routes.turn)

    def want_cold(self, file: int, blocks: range, now: float) -> None:
        routes = self._routes.get(file)
        if routes is None or self._peers is None:
            super().want_cold(file, blocks, now)
            return
        size = routes.run_blocks
        edges = [blocks.start, *range((blocks.start // size + 1) * size, blocks.stop, size), blocks.stop]
        runs = [range(*edge) for edge in pairwise(edges)]
        for run in rotated(runs, _WINDOW_RUNS, routes.turn):
            super().want_cold(file, run, now)
        self._peers.blocked_until = _NEVER

    def claimed_elsewhere(self, number: int, block: int, now: float) -> None:
        self._reset_tried(number, (block,))
        super().claimed_elsewhere(number, block, now)

    def request_finished(self, number: int, now: float, error: BootseerError | None = None) -> None:
        request = self.running[number]
        step, peers = request.fetch.step, self._peers
        if peers is not None:
            peers.blocked_until = _NEVER
        if step is not None and peers is not None:
            peers.running[step] -= 1
            if not peers.running[step]:
                del peers.running[step]
            retry_after_s = error.retry_after_s if isinstance(error, TransientError) else None
            if retry_after_s is not None:
                peers.busy_until[step] = now + retry_after_s
            if error is None or retry_after_s is not None:
                self._reset_tried(number, request.left)
        super().request_finished(number, now, error)

    def _watch(self, key: Key, now: float) -> None:
        if self.origin_of(key) is not self._peers:
            super()._watch(key, now)

    def _reset_tried(self, number: int, blocks: Iterable[int]) -> None:
        """Allow these blocks to be requested again from the peer of a request."""
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
            wanted.tried = ()
            return False
        return True

    # Where blocks are

    def _step(self, key: Key, now: float) -> Hashable:
        """The route step to request a block with; None for the next origin."""
        routes = self._routes.get(key[0])
        if routes is None or not self.files[key[0]].geometry.place(key[1]).length:  # all-zero blocks need no peer
            return None
        route = routes.route(key[1], now)
        wanted = self.wanted.get(key)
        if wanted is None or not wanted.tried or not route.steps:
            return route.steps[0] if route.steps else None
        for step in route.steps:
            if step not in wanted.tried:
                return step
        return None if route.may_ask_origin else route.steps[0]

    def _move_to_next_origin(self, key: Key) -> None:
        """Queue a block at the next origin, behind those that are there."""
        wanted, (peers, store) = self.wanted[key], self.files[key[0]].origins
        wanted.origin = 1
        if wanted.readers:
            peers.demand.pop(key, None)
            store.demand[key] = None
            store.yield_until = max(store.yield_until, peers.yield_until)
        elif wanted.prefetch is Purpose.HOT:
            store.hot.append(key)

    def _is_next(self, key: Key, purpose: Purpose, origin: OriginQueues) -> bool:
        if origin is not self._peers and key[0] in self._routes and key not in self.wanted:
            return False  # not in the peers' queue: it may follow a block that was moved on
        return super()._is_next(key, purpose, origin)

    def _hot_ahead(self, peers: PeerQueues, now: float) -> Iterator[tuple[Key, Hashable]]:
        """The next hot blocks to prefetch from peers, each with its route step. Moves others to the next origin."""
        for key in islice(self._hot_candidates(peers), _MAX_EXAMINED):
            if self._is_next(key, Purpose.HOT, peers):
                step, store = self._step(key, now), self.files[key[0]].origins[1]
                if step is not None:
                    yield key, step
                elif self._only_near or len(store.hot) < _MAX_MOVED:  # few are near
                    self._move_to_next_origin(key)

    def _cold_ahead(self, peers: PeerQueues, now: float) -> Iterator[tuple[Key, Hashable]]:
        """The first block of each of the next cold runs, as `_hot_ahead`."""
        # In two passes: the caller may stop at any `yield`, and the queue must be whole by then.
        kept: deque[tuple[int, range]] = deque()
        for _ in range(min(len(peers.cold), _MAX_EXAMINED_RUNS)):
            file, run = peers.cold.popleft()
            while run and not self._is_next((file, run[0]), Purpose.COLD, peers):
                self._make_cold((file, run[0]))
                run = run[1:]
            store = self.files[file].origins[1]
            own = 0
            while own < len(run) and len(store.cold) < _MAX_MOVED_RUNS:
                key = (file, run[own])
                if not self._is_next(key, Purpose.COLD, peers) or self._step(key, now) is not None:
                    break
                self.wanted.setdefault(key, Wanted(prefetch=Purpose.COLD)).origin = 1
                own += 1
            if own:
                store.cold.append((file, run[:own]))
            if run[own:]:
                kept.append((file, run[own:]))
        peers.cold.extendleft(reversed(kept))
        for file, run in kept:
            key = (file, run[0])
            if self._is_next(key, Purpose.COLD, peers):  # an entry before may have been of the same block
                step = self._step(key, now)
                if step is not None:
                    yield key, step

    # What to start

    def _start_demand(self, origin: OriginQueues, now: float) -> None:
        peers, settings = self._peers, self._settings
        if peers is None or origin is not peers:
            super()._start_demand(origin, now)
            return
        for key in list(peers.demand):
            if key not in peers.demand:
                continue  # it was requested with an earlier one
            step = self._step(key, now)
            if step is None:
                self._move_to_next_origin(key)
                continue
            if not (self._has_demand_slot(peers) and peers.has_room(step, settings.peer_requests + 1, now)):
                continue

            def eligible(other: Key, step: Hashable = step, peers: PeerQueues = peers) -> bool:
                hot = not self._hot_suspended and self._is_next(other, Purpose.HOT, peers)
                return (other in peers.demand or hot) and self._step(other, now) == step

            room = settings.inflight_bytes - self.inflight_bytes
            blocks, sizes = self._adjacent(key, min(settings.demand_bytes, room), eligible)
            if sum(sizes) > room and self.inflight_bytes:
                continue
            self._start_request(peers, step, key[0], blocks, sizes, Purpose.DEMAND, now)

    def _has_demand_slot(self, origin: OriginQueues) -> bool:
        if origin is not self._peers:
            return super()._has_demand_slot(origin)
        limit = self._settings.max_requests + self._settings.reserved_requests
        return origin.num_running < self._settings.total_peer_requests and len(self.running) < limit

    def _start_prefetch(self, origin: OriginQueues, purpose: Purpose, window_bytes: int, now: float) -> None:
        peers, settings = self._peers, self._settings
        if peers is None or origin is not peers:
            super()._start_prefetch(origin, purpose, window_bytes, now)
            return
        if not window_bytes or now < peers.blocked_until or self._is_full(peers, window_bytes):
            return
        ahead = self._hot_ahead if purpose is Purpose.HOT else self._cold_ahead
        for key, step in ahead(peers, now):
            if self._is_full(peers, window_bytes):
                return
            if not peers.has_room(step, settings.peer_requests, now) or not self._is_next(key, purpose, peers):
                continue

            def eligible(other: Key, step: Hashable = step, peers: PeerQueues = peers) -> bool:
                return self._is_next(other, purpose, peers) and self._step(other, now) == step

            most_bytes, room, left = self._prefetch_bytes(peers, window_bytes)
            blocks, sizes = self._adjacent(key, min(most_bytes, room), eligible)
            # A single block may always go, however small the window.
            if sum(sizes) > (room if peers.num_prefetch else left) and self.inflight_bytes:
                return
            self._start_request(peers, step, key[0], blocks, sizes, purpose, now)
        # All blocks were examined: nothing changes before a request ends, a block is queued or a route changes.
        if purpose is Purpose.COLD or self._cold_from(now) > now:
            peers.blocked_until = now + _RETRY_S

    def _is_full(self, peers: PeerQueues, window_bytes: int) -> bool:
        """Whether no prefetch can be started at any peer."""
        settings = self._settings
        limit = settings.total_peer_requests - settings.reserved_peer_requests
        if peers.num_running >= limit or len(self.running) >= settings.max_requests:
            return True
        most_bytes, room, _ = self._prefetch_bytes(peers, window_bytes)
        return room < most_bytes and peers.num_prefetch > 0  # better a full-sized request a little later

    def _prefetch_bytes(self, peers: PeerQueues, window_bytes: int) -> tuple[int, int, int]:
        """The size of a full prefetch request, and what the window and the memory have room for."""
        left = self._settings.inflight_bytes - self._settings.reserved_bytes - self.inflight_bytes
        room = min(_WINDOWS * window_bytes - peers.prefetch_bytes, left)
        return min(peers.next_bytes, window_bytes // _REQUESTS_PER_WINDOW), room, left

    def _start_request(
        self,
        peers: PeerQueues,
        step: Hashable,
        file: int,
        blocks: range,
        sizes: list[int],
        purpose: Purpose,
        now: float,
    ) -> None:
        self._launch(peers, file, blocks, sizes, purpose, now, step=step)
        peers.running[step] += 1
        for block in blocks:
            self.wanted[file, block].tried += (step,)

    def _wake_at(self, now: float) -> float | None:
        wake_at = super()._wake_at(now)
        peers = self._peers
        if peers is not None:
            hot = not self._hot_suspended and self._next_hot(peers) is not None
            if peers.demand or hot or (peers.cold and self._cold_from(now) <= now):
                return now + _RETRY_S if wake_at is None else min(wake_at, now + _RETRY_S)
        return wake_at


def rotated(items: list[T], window: int, turn: float) -> list[T]:
    """The same items; each window of this size is rotated to start at its fraction `turn`."""
    found: list[T] = []
    for start in range(0, len(items), window):
        part = items[start : start + window]
        at = int(turn * len(part))
        found += part[at:] + part[:at]
    return found

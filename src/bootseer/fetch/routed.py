"""Which blocks are requested next from which origin: the store of a file, or before it other nodes of the job (peers),
each of which has some of the blocks.

All blocks for peers wait in one queue in the order of need, and the peer of a block is looked up only when the block
could be requested. So the order does not depend on the peers, joining or leaving peers move waiting blocks without a
message, and a thousand peers cost no more than the blocks examined. (A queue per peer would repeat all of that for
each, and would have to be sorted again when routes change.)

- A peer gets few concurrent requests, and all peers together not many more: a start asks many of them at once.
- A block whose route starts at the store, or that no peer of its route provided and that this node may request there,
  moves to the store's queue and is fetched as without peers.
- Late blocks are handled by the peers' own health (which distinguishes waiting from silence), not by the scheduler's
  hedges: the request to a late owner fails, and the block is requested from the second owner of its route. Hedging to
  the store instead would send the whole job there whenever it is slow, which is when owners are late.

Decides and touches nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Final, Protocol, TypeVar

from bootseer.errors import BootseerError, TransientError
from bootseer.fetch.fetch_settings import FetchSettings, Purpose
from bootseer.fetch.hotset import HotSetTrust
from bootseer.fetch.ledger import FileState, Geometry, Key, Ledger, OriginQueues, Request, Wanted
from bootseer.fetch.pace import Pace

T = TypeVar("T")
_WINDOW_RUNS: Final = 8
"""Prefetch keeps the order of its list between windows of this many runs, and rotates it within them."""
_MAX_EXAMINED: Final = 256
"""How many queued blocks are examined to find one whose peer has capacity."""
_MAX_EXAMINED_RUNS: Final = 32
"""The same for cold blocks, which are queued in runs."""
_MAX_MOVED: Final = 64
"""Blocks moved to the store do not move back when routes change, so their number is limited."""
_MAX_MOVED_RUNS: Final = 8
RETRY_S: Final = 0.1
"""After so long, waiting blocks are examined again although nothing has happened: routes may have changed."""
_NEVER: Final = float("-inf")
_ROUNDS: Final = 3
"""After this many rounds without success, any node may request the block from the store: the peers may have lost
something that this node still has, such as access to it."""


class Route(Protocol):
    """The peers of a block, the same for its whole run."""

    @property
    def steps(self) -> Sequence[Hashable]:
        """The peers to ask, in order; empty if the store is to be asked at once."""

    @property
    def may_read_ahead(self) -> bool:
        """Whether the first peer, or this node if there is none, fetches missing blocks from the store for all. Then
        readers may read ahead."""

    @property
    def may_ask_store(self) -> bool:
        """Whether to ask the store after all peers failed. Otherwise they are asked again, or other ones."""


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


class Routed(Ledger):
    """Which of the wanted blocks can be requested next, and from where."""

    def __init__(self, settings: FetchSettings) -> None:
        super().__init__(settings)
        self._peers: OriginQueues | None = None
        self._routes: dict[int, Routes] = {}
        self._fetch_all_now = False
        self._last_need: float | None = None
        """When a reader last needed a block."""
        self.trust = HotSetTrust(settings)

    def add(self, geometry: Geometry, store: str, routes: Routes | None = None, here: bytearray | None = None) -> int:
        """Add a file with the name of its store and the routes of peers that are asked before; returns its number.

        `here` has 1 for each block that is cached.

        Files of the same store share its pace and queues. All peers are one set.
        """
        first_bytes = self._settings.request_bytes // 16
        if routes is not None and self._peers is None:
            self._peers = OriginQueues(Pace(self._settings), next_bytes=first_bytes)
            # First in the order: blocks that it moves to the store are started in the same `tick`.
            self.origins = {"": self._peers, **self.origins}
        if store not in self.origins:
            self.origins[store] = OriginQueues(Pace(self._settings), next_bytes=first_bytes)
        origins = [self.origins[store]]
        if routes is not None and self._peers is not None:
            self._routes[len(self.files)] = routes
            origins.insert(0, self._peers)
        self.files.append(FileState(geometry, origins, here or bytearray(geometry.num_blocks)))
        return len(self.files) - 1

    def rotate_hot(self, blocks: list[Key]) -> list[Key]:
        """A hot set in the order in which this node fetches it."""
        routes = self._routes.get(blocks[0][0]) if blocks else None
        return blocks if routes is None else rotated(blocks, _WINDOW_RUNS * routes.run_blocks, routes.turn)

    def want_cold(self, file: int, blocks: range, now: float) -> None:
        """Queue these blocks as cold; cached ones are skipped later."""
        origin, routes = self.files[file].origins[0], self._routes.get(file)
        runs = [blocks]
        if routes is not None:
            size = routes.run_blocks
            edges = [blocks.start, *range((blocks.start // size + 1) * size, blocks.stop, size), blocks.stop]
            runs = rotated([range(*edge) for edge in pairwise(edges)], _WINDOW_RUNS, routes.turn)
        origin.cold += [(file, run) for run in runs]
        origin.blocked_until = _NEVER
        if self._last_need is None:  # a file that has not been read yet will be read soon
            self._last_need = now

    def _peer_ended(self, request: Request, now: float, error: BootseerError | None) -> None:
        """A request has ended, with `error` if it failed."""
        peers, step = self._peers, request.fetch.step
        if peers is None:
            return
        peers.blocked_until = _NEVER  # also after a request to the store: this node's own blocks may be next
        if step is None:
            return
        peers.asked[step] -= 1
        if not peers.asked[step]:
            del peers.asked[step]
        retry_after_s = error.retry_after_s if isinstance(error, TransientError) else None
        if retry_after_s is not None:
            peers.busy_until[step] = now + retry_after_s
        if error is None or retry_after_s is not None:
            for block in request.left:  # they may be requested again from this peer
                if wanted := self.wanted.get((request.fetch.file, block)):
                    wanted.tried = ()

    def _try_next(self, key: Key, now: float) -> bool:
        """A request for a block failed: queue it for the next peer of its route, or at the store; False if there is
        none."""
        wanted, routes = self.wanted[key], self._routes.get(key[0])
        if wanted.origin or routes is None:
            return False
        route = routes.route(key[1], now)
        if all(step in wanted.tried for step in route.steps):
            if route.steps and not route.may_ask_store and wanted.attempts < _ROUNDS:
                wanted.tried = ()
                return False
            wanted.attempts, wanted.origin = 0, 1
        self._requeue(key)
        return True

    # Where blocks are

    def _step(self, key: Key, now: float) -> Hashable:
        """The route step to request a block with; None for the store."""
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
        return None if route.may_ask_store else route.steps[0]

    def _may_read_ahead(self, key: Key, step: Hashable, now: float) -> range:
        """The blocks that a reader's request with this route step may read ahead: with peers those of the same run."""
        number, block = key
        file, routes = self.files[number], self._routes.get(number)
        if routes is None:
            return range(file.geometry.num_blocks if file.prefetches else 0)
        route, first = routes.route(block, now), block // routes.run_blocks * routes.run_blocks
        is_first = step == next(iter(route.steps), None)
        may_read_ahead = file.prefetches and route.may_read_ahead and is_first
        return range(first, first + routes.run_blocks) if may_read_ahead else range(0)

    def _may_ask(self, step: Hashable, purpose: Purpose, now: float) -> bool:
        """Whether the peer of this step, if any, can be asked now."""
        peers, most = self._peers, self._settings.peer_requests + (purpose is Purpose.DEMAND)
        return step is None or peers is None or (peers.asked[step] < most and now >= peers.busy_until.get(step, _NEVER))

    def _move_to_store(self, key: Key) -> None:
        """Queue a block at the store, behind those that are there."""
        wanted, (peers, store) = self.wanted[key], self.files[key[0]].origins
        wanted.origin = 1
        if wanted.readers:
            peers.demand.pop(key, None)
            store.demand[key] = None
            store.yield_until = max(store.yield_until, peers.yield_until)
        elif wanted.prefetch is Purpose.HOT:
            store.hot.append(key)

    # Which blocks are next

    @property
    def _hot_suspended(self) -> bool:
        return self.trust.suspended and not self._fetch_all_now

    @property
    def _only_near(self) -> bool:
        """Whether only hot blocks near what readers need are prefetched."""
        return self.trust.was_wrong and not self._fetch_all_now

    def _is_next(self, key: Key, purpose: Purpose, origin: OriginQueues) -> bool:
        """Whether a block can be prefetched from this origin now. Suspended hot blocks are fetched with the cold
        ones."""
        wanted = self.wanted.get(key)
        if wanted is None:
            # With routes it may follow a block that was moved to the store: it is in the peers' queue.
            is_here = origin is self._peers or key[0] not in self._routes
            return is_here and purpose is Purpose.COLD and not self.files[key[0]].done[key[1]]
        return (
            wanted.queued
            and wanted.purpose is not None
            and wanted.purpose <= Purpose.HOT
            and (purpose is Purpose.COLD or wanted.purpose is Purpose.HOT)
            and self.files[key[0]].origins[wanted.origin] is origin
        )

    def _goes_along(self, origin: OriginQueues, purpose: Purpose, step: Hashable, now: float, key: Key) -> bool:
        """Whether a block may be requested together with the one before it, whose route step is `step`."""
        if purpose is Purpose.DEMAND:
            fits = key in origin.demand or (not self._hot_suspended and self._is_next(key, Purpose.HOT, origin))
        else:
            fits = self._is_next(key, purpose, origin)
        return fits and (step is None or self._step(key, now) == step)

    def _demand_ahead(self, origin: OriginQueues, now: float) -> Iterator[tuple[Key, Hashable]]:
        """The blocks that readers wait for, each with its route step. Moves others from the peers to the store."""
        for key in list(origin.demand):
            if key in origin.demand:  # it may have been requested with an earlier one
                step = self._step(key, now) if origin is self._peers else None
                if step is None and origin is self._peers:
                    self._move_to_store(key)
                else:
                    yield key, step

    def _ahead(self, origin: OriginQueues, purpose: Purpose, now: float) -> Iterator[tuple[Key, Hashable]]:
        """The next blocks to prefetch, each with its route step. Moves others from the peers to the store."""
        if purpose is Purpose.HOT:
            return self._hot_ahead(origin, now)
        return self._cold_ahead(origin, now) if origin is self._peers else self._cold_of_store(origin)

    def _hot_candidates(self, origin: OriginQueues) -> Iterator[Key]:
        """Hot blocks to prefetch, in order. Some of them may not be prefetched from this origin (`_is_next`)."""
        # In either case: with peers, only the first entries of the queue are looked at.
        while origin.hot and not self._is_next(origin.hot[0], Purpose.HOT, origin):
            origin.hot.popleft()
        if self._only_near:
            return self.trust.near(origin.pace.window_bytes(), self.wanted.__contains__)
        return iter(origin.hot)

    def _hot_ahead(self, origin: OriginQueues, now: float) -> Iterator[tuple[Key, Hashable]]:
        has_peers = origin is self._peers
        for key in islice(self._hot_candidates(origin), _MAX_EXAMINED if has_peers else None):
            if self._is_next(key, Purpose.HOT, origin):
                step = self._step(key, now) if has_peers else None
                if step is not None or not has_peers:
                    yield key, step
                elif self._only_near or len(self.files[key[0]].origins[1].hot) < _MAX_MOVED:  # few are near
                    self._move_to_store(key)

    def _cold_of_store(self, store: OriginQueues) -> Iterator[tuple[Key, Hashable]]:
        while store.cold:
            file, blocks = store.cold[0]
            for position, block in enumerate(blocks):
                if self._is_next((file, block), Purpose.COLD, store):
                    store.cold[0] = file, blocks[position:]
                    yield (file, block), None
                else:
                    self._make_cold((file, block))
            store.cold.popleft()

    def _cold_ahead(self, peers: OriginQueues, now: float) -> Iterator[tuple[Key, Hashable]]:
        """The first block of each of the next cold runs."""
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


def rotated(items: list[T], window: int, turn: float) -> list[T]:
    """The same items; each window of this size is rotated to start at its fraction `turn`."""
    found: list[T] = []
    for start in range(0, len(items), window):
        part = items[start : start + window]
        at = int(turn * len(part))
        found += part[at:] + part[:at]
    return found

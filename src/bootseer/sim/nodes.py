"""Nodes of a job that load block files (images, environments) from a store and from each other.

The real code makes the decisions: `fetch.scheduler` with hot sets, pacing and hedged requests, `peers.choice` and
`peers.health`. Store, links, processors and sockets between nodes are models: an owner answers with its blocks, reports
that it is fetching them, or hangs. A request is delivered as a whole, and `Health` gets its progress at intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from random import Random
from typing import Final

from bootseer.blocks.codec import ZSTD, Buffer
from bootseer.blocks.index import Place
from bootseer.errors import BootseerError, TransientError
from bootseer.fetch.fetch_settings import WITHOUT_READ_AHEAD, FetchSettings
from bootseer.fetch.ledger import Fetch, Key
from bootseer.fetch.pending import PendingRead, PendingReads
from bootseer.fetch.scheduler import Scheduler
from bootseer.peers.choice import Level, Members, Peer, Route, Step
from bootseer.peers.health import Health, PeerRequest
from bootseer.peers.origins import run_bytes
from bootseer.peers.server import FILLING_EVERY_S
from bootseer.sim.engine import Engine, Flow, Link

STORE: Final = "store"
Think = tuple[float, int, Sequence[int]]
"""Seconds of computing, followed by a read of blocks of a file."""


class BlockFile:
    """A file of equal blocks with the same compression ratio. A `Geometry`."""

    def __init__(self, identity: str, num_blocks: int, block_bytes: int, ratio: float = 1.0) -> None:
        """`ratio`: stored bytes per byte of the file."""
        self.identity = identity
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.stored_block_bytes = size = max(int(block_bytes * ratio), 1)
        self._places = [Place(0, block * size, size, ZSTD) for block in range(num_blocks)]
        self.place = self._places.__getitem__


class Store:
    """A registry or an HDFS: one link, and a limit of requests per second."""

    def __init__(self, engine: Engine, bytes_per_s: float, latency_s: float, requests_per_s: float = 0.0) -> None:
        """`requests_per_s`: 0 is unlimited, less than 1 is one request in several seconds. Above the limit it answers
        429 with a Retry-After of one second.
        """
        self.link = engine.link(bytes_per_s)
        self.latency_s = latency_s
        self.refused = 0
        self._window_s = max(1 / requests_per_s, 1.0) if requests_per_s else 1.0
        self._per_window = requests_per_s * self._window_s
        self._window = -1
        self._in_window = 0

    def takes(self, now_s: float) -> bool:
        if (window := int(now_s / self._window_s)) != self._window:
            self._window, self._in_window = window, 0
        self._in_window += 1
        if self._per_window and self._in_window > self._per_window:
            self.refused += 1
            return False
        return True


@dataclass
class Rack:
    """The uplink and downlink of a rack."""

    up: Link
    down: Link


@dataclass
class Node:
    """One node: its links, its processors and its cache."""

    name: str
    up: Link
    """For what it sends to other nodes."""
    down: Link
    cpu: Link
    rack: Rack | None = None
    alive: bool = True
    """Whether it answers; a dead node does not respond, rather than closing connections."""
    here: set[Key] = field(default_factory=set)
    claims: dict[Key, Loader] = field(default_factory=dict)
    loaders: list[Loader] = field(default_factory=list)
    service: Loader | None = None
    """The loader that fetches for other nodes."""

    def way_from(self, other: Node) -> tuple[Link, ...]:
        """The links of a transfer from another node."""
        if self.rack is None or other.rack is None or self.rack is other.rack:
            return other.up, self.down, self.cpu
        return other.up, other.rack.up, self.rack.down, self.down, self.cpu

    def loaded(self, key: Key, by: Loader) -> None:
        """A block is in the cache now."""
        self.here.add(key)
        self.claims.pop(key, None)
        for loader in self.loaders:
            if loader is not by:
                loader.found(key)

    def release(self, key: Key, by: Loader) -> None:
        """A loader gives up a block that it had claimed."""
        if self.claims.get(key) is by:
            del self.claims[key]
            for loader in self.loaders:
                if loader is not by:
                    loader.freed(key)


class Job:
    """The nodes of a job, their store and their files."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        nodes: Sequence[Node],
        files: Sequence[BlockFile],
        *,
        peers: bool,
        seed: int = 0,
        latency_s: float = 0.0005,
    ) -> None:
        """`latency_s`: of a round trip between two nodes."""
        self.engine, self.store, self.nodes, self.files = engine, store, nodes, files
        self.latency_s = latency_s
        self.by_name = {node.name: node for node in nodes}
        racks = {id(node.rack): f"rack{at}" for at, node in enumerate(nodes) if node.rack is not None}
        members = [Peer(node.name, ("",), racks.get(id(node.rack), "")) for node in nodes]
        for at, node in enumerate(nodes):
            own = Members(members, node.name) if peers else None
            node.loaders = [Loader(self, node, own, Random(f"{seed}/{at}").random)]  # noqa: S311
            if own is not None:
                node.service = Loader(self, node, own, Random(f"{seed}/{at}/s").random, is_service=True)  # noqa: S311
                node.loaders.append(node.service)

    def requests(self) -> tuple[int, int]:
        """Number of requests to peers, and of those given up as late."""
        healths = [loader.health for node in self.nodes for loader in node.loaders]
        return sum(health.requests for health in healths), sum(health.num_given_up for health in healths)


class _Routes:
    """The routes of one file in one process; implements `fetch.routed.Routes`."""

    def __init__(self, loader: Loader, members: Members, file: BlockFile, asked: Level | None) -> None:
        self._loader = loader
        self._members = members
        self._identity = file.identity
        self._asked = asked
        self.run_blocks = max(run_bytes(file.num_blocks * file.block_bytes) // file.block_bytes, 1)

    @property
    def turn(self) -> float:
        return self._members.turn

    def route(self, block: int, now: float) -> Route:
        absent = self._loader.health.absent(now, self._identity)
        return self._members.route(self._identity, block // self.run_blocks, absent, asked=self._asked)


@dataclass(eq=False)
class _Request:
    fetch: Fetch
    mine: list[int]
    flow: Flow | None = None
    asked: PeerRequest | None = None
    known_left: float = 0.0
    """Remaining bytes of the flow at the last report to `Health`."""
    fills: bool = False
    over: bool = False


class Loader:
    """A process that fetches blocks: for the mounts of a start, or for other nodes."""

    def __init__(
        self,
        job: Job,
        node: Node,
        members: Members | None,
        jitter: Callable[[], float],
        *,
        is_service: bool = False,
    ) -> None:
        self.job, self.node = job, node
        self.health = Health()
        self.scheduler = Scheduler(WITHOUT_READ_AHEAD if is_service else FetchSettings(), jitter)
        self._engine = job.engine
        self._pending = PendingReads()
        self._requests: dict[int, _Request] = {}
        self._wake_s: float | None = None
        self._num_files = len(job.files)
        asked = Level.RACK if is_service else None
        for at in range(2 if is_service else 1):  # a service has each file twice: from the store, and by global owners
            for file in job.files:
                if members is None or (is_service and at == 0):
                    self.scheduler.add(file, STORE)
                else:
                    self.scheduler.add(file, STORE, _Routes(self, members, file, asked))

    # Requests of readers

    def prefetch(self, blocks: Iterable[Key]) -> None:
        self.scheduler.want_hot(key for key in self.scheduler.rotate_hot(list(blocks)) if key not in self.node.here)
        self._engine.soon(self._tick)

    def pull(self, file: int) -> None:
        """Load a whole file at full speed."""
        self.scheduler.want_cold(file, range(self.job.files[file].num_blocks), self._engine.now)
        self.scheduler.fetch_all_now()
        self._engine.soon(self._tick)

    def read(self, file: int, blocks: Sequence[int], done: Callable[[Buffer | BootseerError], None]) -> None:
        """Read blocks; `done` is called when all of them are loaded."""
        now = self._engine.now
        for block in blocks:
            self.scheduler.note_need(file, block, now)
        missing = [block for block in blocks if (file % self._num_files, block) not in self.node.here]
        if not missing:
            done(b"")
            return
        self.scheduler.want(file, missing, now)
        read = PendingRead(file, 0, 0, now, float("inf"), done)
        self._pending.wait(read, missing)
        self._engine.soon(self._tick)

    def run(self, steps: Iterator[Think], finished: Callable[[], None]) -> None:
        """Run a program that alternately computes and reads. Errors of its reads are raised from `_tick`."""

        def step(answer: Buffer | BootseerError = b"") -> None:
            if isinstance(answer, BootseerError):
                raise answer
            try:
                think_s, file, blocks = next(steps)
            except StopIteration:
                finished()
                return
            self._engine.after(think_s, lambda: self.read(file, blocks, step))

        step()

    # Events of blocks

    def found(self, key: Key) -> None:
        """A block has been loaded by another process of the node."""
        for file in range(key[0], len(self.scheduler.files), self._num_files):
            self.scheduler.mark_present(file, key[1])
            for read in self._pending.arrived((file, key[1]), None):
                read.done(b"")
        self._engine.soon(self._tick)

    def freed(self, key: Key) -> None:
        """A block that another process of the node had claimed was given up."""
        for file in range(key[0], len(self.scheduler.files), self._num_files):
            self.scheduler.claim_released(file, key[1])
        self._engine.soon(self._tick)

    def _tick(self) -> None:
        plan = self.scheduler.tick(self._engine.now)
        for fetch in plan.fetches:
            self._launch(fetch)
        for number in plan.cancelled:
            if number in self._requests:
                self._end(self._requests[number], None)
        for file, block, error in plan.given_up:
            for read, _ in self._pending.fail_block((file, block)):
                read.done(error)
        wake_s = plan.wake_at
        if wake_s is not None and (self._wake_s is None or wake_s < self._wake_s or self._wake_s <= self._engine.now):
            self._wake_s = wake_s
            self._engine.at(wake_s, lambda: self._engine.soon(self._tick) if self._wake_s == wake_s else None)
        if plan.fetches or plan.cancelled:
            self._engine.soon(self._tick)

    def _launch(self, fetch: Fetch) -> None:
        mine = []
        for block in fetch.blocks:
            key = (fetch.file % self._num_files, block)
            if key in self.node.here:
                self.scheduler.mark_present(fetch.file, block)
            elif self.node.claims.get(key, self) is not self:
                self.scheduler.claimed_elsewhere(fetch.number, block, self._engine.now)
            else:
                self.node.claims[key] = self
                mine.append(block)
        request = self._requests[fetch.number] = _Request(fetch, mine)
        if not mine:
            self._end(request, None)
        elif isinstance(fetch.step, Step):
            self._ask_peer(request, fetch.step)
        else:
            self._ask_store(request)

    def _ask_store(self, request: _Request) -> None:
        store, fetch, node = self.job.store, request.fetch, self.node
        file = self.job.files[fetch.file % self._num_files]

        def flows() -> None:
            if request.over:
                return
            if not store.takes(self._engine.now):
                self._end(request, TransientError("too many requests", retry_after_s=1.0))
                return
            num_bytes = len(request.mine) * file.stored_block_bytes
            rack = (node.rack.down,) if node.rack is not None else ()
            way = (store.link, *rack, node.down, node.cpu)
            length, begun_s = len(request.mine) * file.block_bytes, self._engine.now

            def arrived() -> None:
                self.health.store_sent(length, self._engine.now - begun_s)
                self._end(request, None)

            request.flow = self._engine.start(way, num_bytes, arrived)

        self._engine.after(store.latency_s, flows)
        self._engine.after(fetch.timeout_s, lambda: self._end(request, TransientError("timed out")))

    def _ask_peer(self, request: _Request, step: Step) -> None:
        file_number = request.fetch.file % self._num_files
        file, peer = self.job.files[file_number], self.job.by_name[step.peer.name]
        num_bytes = len(request.mine) * file.block_bytes
        if self.health.must_compare(peer.name, num_bytes):
            self._engine.soon(lambda: self._end(request, TransientError("read elsewhere, for comparison")))
            return
        request.asked = asked = self.health.begin(peer.name, self._engine.now, num_bytes)

        def connected() -> None:
            if request.over or not peer.alive or peer.service is None:
                return
            self.health.connected(asked, self._engine.now)
            missing = [block for block in request.mine if (file_number, block) not in peer.here]
            if not missing:
                send()
                return
            request.fills = True
            at = file_number + (self._num_files if step.level is Level.RACK else 0)
            peer.service.read(at, missing, send)

        def send(answer: Buffer | BootseerError = b"") -> None:
            request.fills = False
            if request.over or not peer.alive:
                return
            if isinstance(answer, BootseerError):
                self._end(request, TransientError(f"{peer.name} could not fetch it"), late=False)
                return
            self.health.received(asked, 0, self._engine.now)  # the head of a response comes with its first bytes
            request.known_left = num_bytes
            request.flow = self._engine.start(self.node.way_from(peer), num_bytes, lambda: self._end(request, None))

        self._engine.after(self.job.latency_s, connected)
        self._engine.after(FILLING_EVERY_S, lambda: self._look(request, peer))

    def _look(self, request: _Request, peer: Node) -> None:
        """Report the progress of a request to `Health`, and end it if it is late."""
        asked, now = request.asked, self._engine.now
        if request.over or asked is None:
            return
        if request.flow is not None and request.flow.left < request.known_left:
            moved, request.known_left = request.known_left - request.flow.left, request.flow.left
            self.health.received(asked, int(moved), now)
        elif request.fills and peer.alive:
            self.health.filling(asked, now)
        late_s = self.health.late_at(asked)
        if late_s > now:
            self._engine.at(max(late_s, now + FILLING_EVERY_S), lambda: self._look(request, peer))
            return
        self.health.gave_up()
        self._end(request, TransientError("late"))

    def _keep(self, request: _Request, bytes_left: float) -> None:
        """Keep the blocks of a request that have arrived completely."""
        fetch, now = request.fetch, self._engine.now
        file = self.job.files[fetch.file % self._num_files]
        size = file.stored_block_bytes
        if request.asked is not None:
            size = file.block_bytes
            self.health.received(request.asked, int(request.known_left - bytes_left), now)
        num_blocks = len(request.mine) - ceil(bytes_left / size)
        done, request.mine = request.mine[:num_blocks], request.mine[num_blocks:]
        for block in done:
            key = (fetch.file % self._num_files, block)
            if block in self.scheduler.running[fetch.number].left:
                self.scheduler.block_arrived(fetch.number, block, now)
            self.node.loaded(key, self)
            self.found(key)

    def _end(self, request: _Request, error: BootseerError | None, *, late: bool = True) -> None:
        if request.over:
            return
        request.over, now = True, self._engine.now
        del self._requests[request.fetch.number]
        if request.flow is not None:
            self._engine.stop(request.flow)
            self._keep(request, request.flow.left)
        if request.asked is not None:
            self.health.ended(request.asked, late=late and error is not None, now_s=now)
        self.scheduler.request_finished(request.fetch.number, now, error)
        for block in request.mine:
            self.node.release((request.fetch.file % self._num_files, block), self)
        self._engine.soon(self._tick)

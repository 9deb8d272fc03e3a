"""One start of a job: image, environment, imports, checkpoint and connections of all its nodes, in virtual time.

Image and environment are loaded by `nodes` and checkpoints by `checkpoint_reads`, both with the real scheduling code.
Installs, imports and connections are fixed times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from math import ceil
from random import Random
from statistics import median
from typing import Any, Final

from bootseer.artifact.loading import PULL, predict
from bootseer.blocks import block_file
from bootseer.checkpoint.layout import Policy
from bootseer.env.document import EnvironmentDocument
from bootseer.env.life.decide import Action, Decision, Lookup, after_election, after_wait, decide
from bootseer.errors import BootseerError, PermanentError
from bootseer.fetch.fetch_settings import FetchSettings
from bootseer.peers.service import Limits
from bootseer.sim.checkpoint_reads import Cluster, Reads, Shared
from bootseer.sim.engine import Engine, Link
from bootseer.sim.nodes import BlockFile, Job, Node, Rack, Store, Think
from bootseer.sim.scenario import Fault, Scenario
from bootseer.store.store import Stored
from bootseer.trace.event import BEGIN, END, INSTANT, OK, Event
from bootseer.units import plural

_GBIT: Final = 1e9 / 8
_BLOCK_BYTES: Final = FetchSettings().request_bytes
"""Size of the largest prefetch request: only requests matter for flows, not the blocks that they consist of."""
_INDEX_BYTES: Final = 45
"""Size of a block's entry in the index of its file."""
_IMPORTS: Final = 40
"""Number of reads during imports."""
_QUANTUM_S: Final = 0.01
_MAX_S: Final = 86_400.0
"""A start that takes longer, after the allocation of its nodes, has failed: retries would be simulated without end."""
_PIECES: Final = 256
"""Approximate number of pieces of a read."""
_BY_BLOCK: Final = {
    64: (1.091, 1.005), 128: (1.051, 0.965), 256: (1.0, 1.0), 512: (0.977, 1.102), 1024: (0.94, 1.243),
    2048: (0.905, 1.459), 4096: (0.888, 1.74),
}  # fmt: skip
"""By block size in KiB: stored size, and bytes that a start needs, relative to 256 KiB. Measured with the demo's image,
whose start imports PyTorch: 402 and 90 MB."""
IMAGE, ENVIRONMENT = 0, 1
Step = Callable[[Callable[[], None]], object]
"""A step of a start: begins something that calls its argument at its end."""
Steps = Iterator[Step]
_EPOCH_NS: Final = 1_700_000_000_000_000_000


@dataclass(frozen=True, slots=True)
class Techniques:
    """The parts of BootSeer that a start uses. Without any: a full pull, an install, a read in one stream."""

    image: bool = True
    environment: bool = True
    checkpoint: bool = True
    record: bool = True
    """Whether there are hot sets of earlier starts."""
    peers: bool = True
    warm: bool = False
    """Whether the nodes' caches have the blocks that an earlier start of the job read."""
    forked: bool = False
    """Whether the ranks are forked from a process that has already imported."""
    first: bool = False
    """Whether there is no snapshot of the environment yet."""


ARMS: Final = {
    "today": Techniques(image=False, environment=False, checkpoint=False, record=False, peers=False),
    "lazy": Techniques(environment=False, checkpoint=False, record=False, peers=False),
    "without peers": Techniques(peers=False),
    "without image": Techniques(image=False),
    "without environment": Techniques(environment=False),
    "without checkpoint": Techniques(checkpoint=False),
    "bootseer": Techniques(),
}
"""The variants that are compared by default, including the ablation."""
MORE_ARMS: Final = {
    "first": Techniques(first=True),
    "warm": Techniques(warm=True),
    "restart": Techniques(warm=True, forked=True),
    "only image": Techniques(environment=False, checkpoint=False, peers=False),
    "image and peers": Techniques(environment=False, checkpoint=False),
    "only environment": Techniques(image=False, checkpoint=False, peers=False),
    "environment and peers": Techniques(image=False, checkpoint=False),
    "only checkpoint": Techniques(image=False, environment=False, record=False, peers=False),
}
"""Variants that are simulated only on request."""


@dataclass
class Outcome:
    """The result of a simulated start."""

    arm: str
    nodes: int
    seed: int
    digest: str
    spans: dict[str, list[tuple[str, float, float]]] = field(default_factory=dict)
    """By node: stage, begin and end in seconds."""
    began_s: float = 0.0
    """When training began."""
    registry_bytes: float = 0.0
    peer_bytes: float = 0.0
    refused: int = 0
    """Requests that the registry answered with 429."""
    asked: int = 0
    late: int = 0

    def stages(self) -> dict[str, dict[str, float]]:
        """For each stage the duration on the median node and on the slowest one."""
        taken: dict[str, list[float]] = defaultdict(list)
        for spans in self.spans.values():
            for stage, begin_s, end_s in spans:
                taken[stage].append(end_s - begin_s)
        return {
            stage: {"median_s": round(median(values), 3), "max_s": round(max(values), 3)}
            for stage, values in taken.items()
        }

    def as_json(self) -> dict[str, Any]:
        ready = [spans[-2][2] for spans in self.spans.values()]
        return {
            "arm": self.arm, "nodes": self.nodes, "seed": self.seed, "parameters": self.digest,
            "startup_s": round(self.began_s, 3), "median_ready_s": round(median(ready), 3), "stages": self.stages(),
            "registry_gb": round(self.registry_bytes / 1e9, 3), "peer_gb": round(self.peer_bytes / 1e9, 3),
            "asked_peers": self.asked, "late": self.late, "refused": self.refused,
        }  # fmt: skip

    def events(self, job: str) -> Iterator[Event]:
        """The events that such a start would have written."""
        number = 0
        for node, spans in self.spans.items():

            def event(at_s: float, stage: str, phase: str, span: int, node: str = node, **more: Any) -> Event:
                return Event(_EPOCH_NS + int(at_s * 1e9), int(at_s * 1e9) + 10**9, job, node, stage, phase,
                             f"{span:016x}", **more)  # fmt: skip

            for stage, begin_s, end_s in spans:
                number += 1
                yield event(begin_s, stage, BEGIN, number)
                yield event(end_s, stage, END, number, outcome=OK)
            number += 1
            yield event(self.began_s, "training_began", INSTANT, number, attrs={"by": "simulated"})


def simulate(scenario: Scenario, num_nodes: int, arm: str, seed: int = 0) -> Outcome:
    """Simulate one start; deterministic. Raises `PermanentError` if the start fails."""
    try:
        return _Start(scenario, num_nodes, arm, seed).run()
    except BootseerError as error:
        raise PermanentError(f"{arm} on {plural(num_nodes, 'node')}: the start fails: {error}") from error


class _Start:
    def __init__(self, scenario: Scenario, num_nodes: int, arm: str, seed: int) -> None:
        self.scenario, self.techniques = scenario, {**ARMS, **MORE_ARMS}[arm]
        self.outcome = Outcome(arm, num_nodes, seed, scenario.digest)
        self.engine = engine = Engine(_QUANTUM_S)
        self.num_nodes = num_nodes
        self._fold = fold = _fold(scenario, num_nodes)
        self._draws = _draws(scenario, num_nodes, fold, seed)
        self.peers = self.techniques.peers and num_nodes > 1
        num_groups = len(self._draws)
        self._each = num_nodes / num_groups
        """Number of real nodes per simulated node; the rates of shared resources are divided by it."""
        asked = 1.0 if self.peers else self._each  # with peers, the registry is asked once for all, folded or not
        links, image, environment = scenario.links, scenario.image, scenario.environment
        installs = 1.0 if self.techniques.first else self._each
        self.index = engine.link(links.index_gbit * _GBIT / installs)
        self.datanodes = Cluster(engine, links.datanodes, links.datanode_gbit * _GBIT / self._each, seed,
                                  scenario.checkpoint.replicas)  # fmt: skip
        store = Store(engine, links.registry_gbit * _GBIT / asked, links.registry_latency_ms / 1e3,
                      links.registry_requests_per_s / asked)  # fmt: skip
        self._asked = asked
        self.pulls = store.link if asked == self._each else engine.link(store.link.bytes_per_s / self._each)
        """The registry's link for runtimes that pull whole images: each node pulls for itself."""
        self._from_servers: list[Link] = []
        """Per rack, the link for bytes from servers that each of its nodes requests separately."""
        self.nodes = list(self._make_nodes(num_groups))
        size, hot = _BY_BLOCK[image.block_kib]
        files = [
            _file("image", image.gb * size * 1e9, image.ratio * size),
            _file("environment", environment.gb * 1e9, image.ratio),
        ]
        shares = (min(image.hot_share * hot / size, 1.0), environment.hot_share)
        self.hot = [_hot(file.num_blocks, share) for file, share in zip(files, shares, strict=True)]
        self.job = Job(engine, store, self.nodes, files, peers=self.peers, seed=seed,
                        latency_s=links.peer_latency_ms / 1e3)  # fmt: skip
        self.is_leased = False
        """Whether a node holds the lease to build the snapshot of the environment."""
        self.has_snapshot = not self.techniques.first
        self.waiting: list[Callable[[], None]] = []
        """Callbacks of nodes that wait for the snapshot, until it is `published`."""
        self.shared = Shared(engine, self.shared_bytes, links.peer_latency_ms / 1e3)
        self.indexes = Shared(engine, self.index_bytes, links.peer_latency_ms / 1e3)
        if self.techniques.warm:
            for node in self.nodes:
                node.here |= {(file, block) for file, hot in enumerate(self.hot) for block in hot}
        self._left = num_groups
        for fault in scenario.fault:
            engine.at(fault.at_s, partial(self._fail, fault))

    @property
    def index_bytes(self) -> float:
        image = self.scenario.image
        return _INDEX_BYTES * image.gb * 1e9 / image.ratio / (image.block_kib << 10)

    @property
    def shared_bytes(self) -> float:
        return self.scenario.checkpoint.gb * 1e9 * self.scenario.checkpoint.replicated_share

    def _make_nodes(self, num_groups: int) -> Iterator[Node]:
        links, engine, load_mb_s = self.scenario.links, self.engine, self.scenario.processors.load_mb_s
        racks: list[Rack] = []
        for at in range(num_groups):
            if 0 < links.rack_nodes < self.num_nodes and at % (links.rack_nodes // self._fold) == 0:
                rate = links.rack_nodes * links.node_gbit * _GBIT / links.rack_oversubscription
                up, down = (engine.link(rate / self._asked) for _ in range(2))
                # With peers, one node of a rack fetches from another rack for all its nodes, folded or not; but each
                # node requests from servers for itself.
                servers = engine.link(rate / self._each) if self.peers and self._fold > 1 else down
                racks.append(Rack(up, down))
                self._from_servers.append(servers)
            rate = links.node_gbit * _GBIT
            sent = min(rate, Limits().before or rate)
            yield Node(_name(at), engine.link(sent), engine.link(rate), engine.link(load_mb_s * 1e6),
                       racks[-1] if racks else None)  # fmt: skip

    def run(self) -> Outcome:
        for at, (node, draw) in enumerate(zip(self.nodes, self._draws, strict=True)):
            rack = at * self._fold // max(self.scenario.links.rack_nodes, 1)
            _NodeStart(self, node, self._from_servers[rack : rack + 1], *draw)
        self.engine.run(self.scenario.rest.allocate_s + _MAX_S)
        if self._left:
            raise PermanentError(f"not all nodes were ready within {_MAX_S / 3600:g} hours")
        outcome, job = self.outcome, self.job
        spans = [outcome.spans[node.name] for node in self.nodes]
        outcome.spans = {_name(at): list(spans[at // self._fold]) for at in range(self.num_nodes)}
        outcome.registry_bytes = job.store.link.carried * self._asked
        if self.pulls is not job.store.link:
            outcome.registry_bytes += self.pulls.carried * self._each
        outcome.peer_bytes = sum(node.up.carried for node in self.nodes) * self._each
        outcome.refused = round(job.store.refused * self._asked)
        outcome.asked, outcome.late = (round(number * self._each) for number in job.requests())
        return outcome

    def _fail(self, fault: Fault) -> None:
        if fault.node is not None and fault.node < len(self.nodes):
            node = self.nodes[fault.node]
            node.up.bytes_per_s *= fault.upload_factor or 1.0
            node.alive = fault.upload_factor > 0
        name = f"datanode{fault.datanode}"
        if name in self.datanodes.links:
            self.datanodes.links[name].bytes_per_s *= fault.upload_factor or 1.0
            self.datanodes.hung |= set() if fault.upload_factor else {name}

    def published(self) -> None:
        self.has_snapshot = True
        for proceed in self.waiting:
            proceed()

    def ready(self) -> None:
        self._left -= 1
        if not self._left:
            rest, ranks = self.scenario.rest, self.num_nodes * self.scenario.gpus_per_node
            connect_s = rest.connect_s + rest.connect_s_per_1000_ranks * ranks / 1000
            for spans in self.outcome.spans.values():
                spans.append(("connection_setup", self.engine.now, self.engine.now + connect_s))
            self.outcome.began_s = self.engine.now + connect_s
            self.engine.halt()


class _NodeStart:
    """The stages of one node."""

    def __init__(self, start: _Start, node: Node, rack: Sequence[Link], factor: float, retry_s: float) -> None:
        self._start, self._node, self._rack, self._factor, self._retry_s = start, node, rack, factor, retry_s
        self._engine, self._scenario, self._techniques = start.engine, start.scenario, start.techniques
        self._begin_s = 0.0
        self._engine.at(self._scenario.rest.allocate_s, partial(_proceed, self._stages()))

    def _stages(self) -> Steps:
        if self._engine.now:
            self._ended("allocation")
        yield from self._image()
        self._ended("image_loading")
        yield from self._environment()
        self._ended("environment_setup")
        yield partial(self._node.loaders[0].run, self._imports())
        self._ended("model_initialization.imports")
        yield self._checkpoint
        self._ended("model_initialization.checkpoint")
        self._start.ready()

    def _ended(self, stage: str) -> None:
        spans = self._start.outcome.spans.setdefault(self._node.name, [])
        spans.append((stage, self._begin_s, self._engine.now))
        self._begin_s = self._engine.now

    def _image(self) -> Steps:
        techniques, image, start, loader = self._techniques, self._scenario.image, self._start, self._node.loaders[0]
        if techniques.record:
            hot = []
            if techniques.environment and not techniques.first:
                hot = [(ENVIRONMENT, block) for block in start.hot[ENVIRONMENT]]
            if techniques.image:
                hot += [(IMAGE, block) for block in start.hot[IMAGE]]
            loader.prefetch(hot)
        if not techniques.image:
            unpack = self._engine.link(self._scenario.processors.unpack_mb_s * 1e6)
            yield partial(self._engine.start, (*self._down(start.pulls), unpack), image.gb * 1e9)
        elif start.peers and not techniques.warm:
            # Each node needs the index of all blocks before it can mount, and caches it.
            read_first = partial(self._engine.start, self._down(start.job.store.link))
            yield partial(start.indexes.read, self._node.name, 0.0, 1, read_first, self._way_from)
        elif not techniques.warm:
            yield partial(self._engine.start, self._down(start.pulls), start.index_bytes)
        if techniques.image and techniques.record:  # always lazily without hot sets
            file = start.job.files[IMAGE]
            missing = [block for block in range(file.num_blocks) if (IMAGE, block) not in self._node.here]
            size = file.stored_block_bytes
            if missing and predict(len(missing) * size, len(start.hot[IMAGE]) * size).mode == PULL:
                loader.pull(IMAGE)
                yield lambda done: loader.read(IMAGE, missing, lambda answer: done())
        yield partial(self._engine.after, image.fixed_s * self._factor)

    def _environment(self) -> Steps:
        start, node, environment = self._start, self._node, self._scenario.environment
        if not self._techniques.environment:
            yield from self._install()
            return
        document = environment_document("environment", self._scenario, -1.0)
        found = Lookup("found", document) if start.has_snapshot else Lookup("none")
        decision = self._elected(decide("auto", found, now_s=self._engine.now))
        while decision.action not in (Action.RESTORE, Action.BUILD):  # another node is building it
            yield start.waiting.append
            decision = self._elected(after_wait(decision, "published", now_s=self._engine.now, document=document))
        if decision.action is Action.RESTORE:
            yield partial(self._engine.after, environment.fixed_s * self._factor)
            return
        start.is_leased = True
        yield from self._install()
        up = self._engine.link(self._scenario.links.node_gbit * _GBIT)
        self._engine.start((up,), max(environment.gb * 1e9, 1.0), start.published)
        node.here |= {(ENVIRONMENT, block) for block in range(start.job.files[ENVIRONMENT].num_blocks)}

    def _elected(self, decision: Decision) -> Decision:
        if decision.action is not Action.BUILD:
            return decision
        return after_election(decision, "held" if self._start.is_leased else "ours")

    def _install(self) -> Steps:
        environment = self._scenario.environment
        yield partial(self._engine.start, self._down(self._start.index), max(environment.gb * 1e9, 1.0))
        yield partial(self._engine.after, environment.install_s * self._factor + self._retry_s)

    def _imports(self) -> Iterator[Think]:
        files = [IMAGE] * self._techniques.image + [ENVIRONMENT] * self._techniques.environment
        rest = self._scenario.rest
        think_s = (rest.warm_import_s if self._techniques.forked else rest.import_s) * self._factor / _IMPORTS
        for at in range(_IMPORTS):
            reads = [(file, part) for file in files if (part := _part(self._start.hot[file], at))]
            yield from [(think_s / len(reads), file, part) for file, part in reads] or [(think_s, IMAGE, ())]

    def _checkpoint(self, done: Callable[[], None]) -> None:
        checkpoint, start = self._scenario.checkpoint, self._start
        shared = start.shared_bytes
        passed_on = bool(shared) and start.peers and self._techniques.checkpoint
        mine = (0.0 if passed_on else shared) + (checkpoint.gb * 1e9 - shared) / start.num_nodes
        num_bytes = int(mine / checkpoint.readers)
        stream_bytes_per_s = checkpoint.stream_mb_s * 1e6
        num_readers = checkpoint.readers if num_bytes or not passed_on else 0
        left = passed_on + num_readers

        def ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                done()

        policy = Policy(stripes=checkpoint.stripes, parity=checkpoint.parity)
        piece_bytes = min(max(int(mine or shared) // _PIECES, 1 << 20), 4 << 20 if checkpoint.parity else 8 << 20)
        reads = Reads(start.datanodes, self._down, stream_bytes_per_s, policy, piece_bytes)
        if passed_on:
            turn = start.nodes.index(self._node) / len(start.nodes)
            start.shared.read(self._node.name, turn, checkpoint.readers, reads.read, self._way_from, ended)
        for _ in range(num_readers):
            if self._techniques.checkpoint:
                reads.read(max(num_bytes, 1), ended, in_order=checkpoint.in_order)
            else:
                pace = self._engine.link(stream_bytes_per_s)
                start.datanodes.plain(max(num_bytes, 1), self._down, pace, ended)

    def _way_from(self, name: str) -> Sequence[Link]:
        """The links from another node to this one's cache, without decompression."""
        return self._node.way_from(self._start.job.by_name[name])[:-1]

    def _down(self, link: Link) -> tuple[Link, ...]:
        return (link, *self._rack, self._node.down)


def _proceed(steps: Steps) -> None:
    """Start the next step, and proceed when it has ended."""
    step = next(steps, None)
    if step is not None:
        step(partial(_proceed, steps))


def _name(at: int) -> str:
    return f"node-{at:04d}"


def _fold(scenario: Scenario, num_nodes: int) -> int:
    """Number of nodes that are simulated as one.

    The cost of a simulation grows faster than the number of nodes, because every end of a flow changes the rates of
    others. Nodes of a rack share the same links and differ only by noise, so 2, 4, 8, ... of them can be simulated as
    one without changing the load on shared resources (`_each`). Not so if nodes differ in more than noise: when single
    nodes pass data on to each other, or when one of them has a fault.
    """
    fold, rack_nodes = 1, scenario.links.rack_nodes
    if scenario.checkpoint.replicated_share:
        return 1
    if any(fault.node is not None and fault.upload_factor < 1 for fault in scenario.fault):
        return 1
    while num_nodes >= 2 * fold * scenario.fold and rack_nodes % (2 * fold) == 0:
        fold *= 2
    return fold


def _draws(scenario: Scenario, num_nodes: int, fold: int, seed: int) -> list[tuple[float, float]]:
    """The noise factor of each node, and the delay of its install.

    Nodes that are simulated as one are chosen to be about equally fast (sorted), and get the values of their slowest,
    so that the slowest node of the job is preserved: it determines when training begins.
    """
    noise, environment = scenario.noise, scenario.environment
    draws = []
    for at in range(num_nodes):
        random = Random(f"{seed}/{at}")  # noqa: S311
        factor = random.lognormvariate(0.0, noise.sigma)
        if random.random() < noise.slow_share:
            factor *= noise.slow_factor
        for fault in scenario.fault:
            factor *= fault.work_factor if fault.node == at else 1.0
        draws.append((factor, environment.retry_s if random.random() < environment.retry_share else 0.0))
    if fold > 1:
        draws.sort(key=lambda draw: environment.install_s * draw[0] + draw[1])
        draws = [draws[min(at + fold, num_nodes) - 1] for at in range(0, num_nodes, fold)]
        Random(seed).shuffle(draws)  # noqa: S311
    return draws


def _file(name: str, stored_bytes: float, ratio: float) -> BlockFile:
    blocks = max(ceil(stored_bytes / _BLOCK_BYTES), 1)
    return BlockFile(name, blocks, int(_BLOCK_BYTES / ratio), ratio)


def _hot(num_blocks: int, share: float) -> Sequence[int]:
    """The blocks that starts read, in order: spread over the whole file."""
    blocks = list(range(num_blocks))
    Random(0).shuffle(blocks)  # noqa: S311
    return blocks[: max(round(share * num_blocks), 1)]


def _part(blocks: Sequence[int], at: int) -> Sequence[int]:
    return blocks[at * len(blocks) // _IMPORTS : (at + 1) * len(blocks) // _IMPORTS]


def environment_document(
    name: str, scenario: Scenario, built_s: float, max_age_s: float | None = None
) -> EnvironmentDocument:
    """The document of a snapshot built at this time."""
    digest = sha256(name.encode()).hexdigest()
    stored = Stored(f"sha256:{digest}", 1)
    size = int(scenario.environment.gb * 1e9)
    file = block_file.BlockFile(f"sha256:{digest}", 1, digest, size, size, (Stored(f"sha256:{digest}", size),))
    return EnvironmentDocument(
        digest, {}, file, stored, f"sha256:{digest}", ("/opt/venv",), 0, 1, size, (), (), {}, "observed", (),
        "simulated", "1.0", built_s, scenario.environment.install_s, max_age_s,
    )  # fmt: skip

"""Generates the event lines of a large job's nodes, with known durations.

The generator chooses how long each node works in each stage and simulates the barriers, in floating-point seconds; the
analysis must compute the same numbers from the lines. It does not import the analysis.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bootseer.trace.event import BEGIN, END, INSTANT, NO_RANK, OK, Event, encode

NS = 1_000_000_000
EPOCH_NS = 1_790_000_000 * NS
INSTALL = "environment_setup.install"
RELEASE_S = 0.05

# Stage, seconds of work, jitter in seconds. Those with a barrier end when all nodes have arrived.
DEFAULT_WORK: tuple[tuple[str, float, float], ...] = (
    ("image_loading", 30.0, 0.3),
    (INSTALL, 60.0, 0.3),
    ("model_initialization.import_torch", 8.0, 0.3),
    ("model_initialization.process_group", 2.0, 0.1),
    ("model_initialization.checkpoint_read", 20.0, 0.3),
    ("model_initialization.first_collective", 0.5, 0.1),
    ("first_step", 6.0, 0.2),
)
BARRIERS = {
    "model_initialization.process_group": "process_group",
    "model_initialization.first_collective": "first_collective",
}
RANK_STAGES = ("model_initialization", "first_step")


@dataclass
class Fleet:
    """One startup of a job."""

    num_nodes: int
    gpus_per_node: int = 8
    ranks_per_node: int = 1
    job: str = "fleet"
    attempt: int = 0
    seed: int = 0
    begin_s: float = 0.0
    queue_s: float = 12.0
    work: tuple[tuple[str, float, float], ...] = DEFAULT_WORK
    work_of: Mapping[tuple[int, str], float] = field(default_factory=dict)
    """(node, stage) to seconds of work, instead of the default."""
    clock_off_s: Mapping[int, float] = field(default_factory=dict)
    clock_step: Mapping[int, tuple[str, float]] = field(default_factory=dict)
    """Node to (stage, seconds): its wall clock jumps when this stage begins."""
    silent: frozenset[int] = frozenset()
    """Nodes without event lines; the others still wait for them at barriers."""
    killed_in: Mapping[int, str] = field(default_factory=dict)
    """Node to the stage in which it is killed; then no node passes the next barrier."""
    names: Sequence[str] = ()
    """Names of the nodes; default: `node-0000`, ..."""
    facts_of: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    """Node to attributes of its `run`: rack, topology."""
    end_s: float = field(default=0.0, init=False)
    """When the first step has ended on all nodes; set by `events`."""
    waited_s: dict[int, float] = field(default_factory=dict, init=False)

    def name(self, node: int) -> str:
        return self.names[node] if self.names else f"node-{node:04d}"

    def lines(self) -> list[bytes]:
        """The event lines of all nodes; fills `end_s` and `waited_s`."""
        return [encode(event) for event in self.events()]

    def events(self) -> list[Event]:
        rng = random.Random(self.seed)
        writers = {node: _Writer(self, node) for node in range(self.num_nodes)}
        now = dict.fromkeys(writers, self.begin_s + self.queue_s)
        self.waited_s = dict.fromkeys(writers, 0.0)
        alive = set(writers)
        writers[0].at(self.begin_s, "queue", BEGIN)
        writers[0].at(now[0], "queue", END)
        facts: dict[str, object] = {"gpus": self.gpus_per_node, "num_nodes": self.num_nodes}
        for node, writer in writers.items():
            writer.at(now[node], "run", BEGIN, attrs={**facts, **self.facts_of.get(node, {})})
        for stage, base_s, jitter_s in self.work:
            for node in alive:
                writers[node].begin(now[node], stage)
            alive -= {node for node, where in self.killed_in.items() if where == stage}
            if stage not in BARRIERS:
                for node in sorted(alive):
                    now[node] += self.work_of.get((node, stage), base_s + rng.uniform(-jitter_s, jitter_s))
            elif len(alive) < self.num_nodes:
                return self._written(writers)  # it never opens
            else:
                self._open_barrier(now)
            for node in alive:
                writers[node].end(now[node], stage)
        self.end_s = max(now[node] for node in alive)
        for node in alive:
            writers[node].began(now[node])
            self.waited_s[node] += self.end_s - now[node]
        return self._written(writers)

    def _open_barrier(self, now: dict[int, float]) -> None:
        """Nodes arrive when their work before the barrier is done; the barrier itself takes `RELEASE_S`."""
        latest = max(now.values())
        for node, arrived in now.items():
            self.waited_s[node] += latest - arrived
            now[node] = latest + RELEASE_S

    def _written(self, writers: Mapping[int, _Writer]) -> list[Event]:
        return [event for node, writer in writers.items() if node not in self.silent for event in writer.events]


class _Writer:
    """One node's clocks and event lines."""

    def __init__(self, fleet: Fleet, node: int) -> None:
        self.fleet = fleet
        self.node = node
        self.events: list[Event] = []
        self.spans: dict[tuple[str, int], str] = {}
        self.count = 0
        self.wall_off_s = fleet.clock_off_s.get(node, 0.0)
        # The monotonic clocks of the machines differ.
        self.mono_off_s = 1000.0 + 37.0 * node

    def ranks(self, stage: str) -> Iterator[int]:
        if stage.partition(".")[0] in RANK_STAGES:
            first = self.node * self.fleet.ranks_per_node
            yield from range(first, first + self.fleet.ranks_per_node)
        else:
            yield NO_RANK

    def at(
        self, now_s: float, stage: str, phase: str, *, rank: int = NO_RANK, attrs: dict[str, object] | None = None
    ) -> None:
        if phase in (BEGIN, INSTANT):
            self.count += 1
            self.spans[stage, rank] = f"{self.fleet.attempt:04x}{self.node:06x}{self.count:06x}"
        self.events.append(
            Event(
                wall_ns=EPOCH_NS + round((now_s + self.wall_off_s) * NS),
                mono_ns=round((now_s + self.mono_off_s) * NS),
                job=self.fleet.job,
                attempt=self.fleet.attempt,
                node=self.fleet.name(self.node),
                rank=rank,
                pid=1000 + rank if rank >= 0 else 1,
                stage=stage,
                phase=phase,
                span=self.spans[stage, rank],
                outcome=OK if phase == END else "",
                attrs=attrs or {},
            )
        )

    def begin(self, now_s: float, stage: str) -> None:
        step = self.fleet.clock_step.get(self.node)
        if step is not None and step[0] == stage:
            self.wall_off_s += step[1]
        if stage == INSTALL:  # the parent span of the install, as written by `bootseer run --requirements`
            self.at(now_s, "environment_setup", BEGIN)
        attrs: dict[str, object] = {"barrier": BARRIERS[stage]} if stage in BARRIERS else {}
        for rank in self.ranks(stage):
            self.at(now_s, stage, BEGIN, rank=rank, attrs=attrs)

    def end(self, now_s: float, stage: str) -> None:
        for rank in self.ranks(stage):
            self.at(now_s, stage, END, rank=rank)
        if stage == INSTALL:
            self.at(now_s, "environment_setup", END)

    def began(self, now_s: float) -> None:
        for rank in self.ranks("first_step"):
            self.at(now_s, "training_began", INSTANT, rank=rank, attrs={"by": "optimizer_step"})


def slow_installs(num_nodes: int = 1440, slow_share: float = 0.01, *, ranks_per_node: int = 1) -> Fleet:
    """The paper's job: the slowest 1 % of the installs end after 92 s, the rest within 60 s."""
    rng = random.Random(7)
    slow = set(range(num_nodes - round(num_nodes * slow_share), num_nodes))
    work = {(n, INSTALL): 92.0 if n in slow else 60.0 - rng.uniform(0, 0.4) for n in range(num_nodes)}
    return Fleet(num_nodes, ranks_per_node=ranks_per_node, work_of=work, job="slow-installs")

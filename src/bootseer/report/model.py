"""The report as data: what the analysis says and every renderer shows.

`Report` is the one result of `analysis.report`; the terminal, HTML, Perfetto and JSON outputs are views of it, so a
number can be shown in four places and computed in one. docs/formats/report.md describes the JSON for other programs.
All times are seconds since the startup's own zero (`Startup.zero_ns`), on the clock of the reference node.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from bootseer.report.model_starts import CheckpointStart, EnvironmentStart, ImageStart, PeersStart, Restarted

SCHEMA = "bootseer.report/1"

Kind = Literal["work", "wait", "untracked"]
WORK: Kind = "work"
WAIT: Kind = "wait"
UNTRACKED: Kind = "untracked"

UNTRACKED_STAGE = "untracked"
"""The stage of time that no span covers; inside a stage it is `<stage>.untracked`."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a node's time that belongs to one stage alone; a node's segments leave no holes and do not overlap."""

    stage: str
    start_s: float
    end_s: float
    kind: Kind
    outcome: str
    """`ok`, `failed`, `truncated` (no end was seen) or empty."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node's way to the first step: that of the lane (node and rank) that got there last."""

    node: str
    rank: int
    num_ranks: int
    gpus: int | None
    start_s: float
    end_s: float
    """End of the job's startup: a node that is done waits for the others until then."""
    own_end_s: float
    """End of this node's own first step."""
    work_s: float
    wait_s: float
    untracked_s: float
    outcome: str
    """`ok`: training began; `truncated`: something was left open before; `failed`: a stage failed; `unobserved`: all
    that was seen ended well, and nothing was seen of a first step."""
    last_stage: str
    """Where its events stop."""
    clock_offset_s: float
    clock_error_s: float | None
    """Bound of the offset's error; None when nothing ties this node's clock to the others."""
    segments: list[Segment]
    background: list[Segment]
    """Work beside the startup (streaming of cold blocks): shown, never summed."""
    attrs: dict[str, Any] = field(default_factory=dict)
    """Facts by stage, as `stage.key`: bytes, hits, ..."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage over all nodes. Medians leave truncated and failed spans out; `num_*` count them."""

    stage: str
    depth: int
    num_nodes: int
    num_truncated: int
    num_failed: int
    median_s: float | None
    p90_s: float | None
    max_s: float | None
    max_over_median: float | None
    """None when the median is 0 or there are fewer than two nodes."""
    max_node: str
    work_s: float
    """Sum over nodes."""
    wait_s: float
    gpu_hours: float | None
    cost: float | None
    cdf: list[tuple[float, float]]
    """(seconds, share of nodes done by then), at most 101 points."""


@dataclass(frozen=True, slots=True)
class Link:
    """One link of the critical chain: the node that came last to a barrier, and what it did since the one before."""

    barrier: str
    """`training_began` is the last one: all nodes have to get there."""
    node: str
    rank: int
    from_s: float
    arrival_s: float
    release_s: float
    num_participants: int
    others_median_arrival_s: float | None
    stage: str
    """Where this node lost the most against the others' median."""
    stage_s: float
    excess_s: float | None
    waited_gpu_hours: float | None
    """What the others spent waiting for it here."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A node whose work set a barrier later than the others' median, beyond clock error and noise."""

    node: str
    rank: int
    barrier: str
    stage: str
    delay_s: float
    z: float | None
    """Robust z-score of its work among the others; None when the others do not vary at all."""
    savings_s: float
    """How much sooner the job would have begun without this node, by the exact barrier model."""
    savings_gpu_hours: float | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where many of a group's nodes stand."""

    kind: str
    """`rack`, `topology` (attributes of events), `name` (how the nodes' names begin)."""
    value: str
    num_slow: int
    num_nodes: int


@dataclass(frozen=True, slots=True)
class StragglerGroup:
    """The stragglers of one stage together: leaving out one of fourteen saves nothing, all of them saves the lot.

    Groups hide behind each other as well. They are listed in the order in which to mend them: each is the one that
    saves most once those before it are left out.
    """

    stage: str
    barrier: str
    nodes: list[str]
    places: list[Place]
    """What explains the group; empty when nothing does."""
    savings_s: float
    """Without this group alone."""
    savings_gpu_hours: float | None
    savings_cost: float | None
    next_s: float
    """What it saves beyond the groups before it."""
    joint_s: float
    """Without this group and all before it; of the last group: without all stragglers."""
    joint_gpu_hours: float | None
    joint_cost: float | None


@dataclass(frozen=True, slots=True)
class Overhead:
    """What the startup cost."""

    job_level_s: float | None = None
    """Submission to the end of the first step; None when the submission was not observed."""
    node_level_median_s: float | None = None
    node_level_max_s: float | None = None
    startup_s: float | None = None
    """First event of the startup to its end: what was observed, whatever it covers. None when nothing had a time."""
    work_share: float | None = None
    wait_share: float | None = None
    gpu_hours: float | None = None
    wait_gpu_hours: float | None = None
    cost: float | None = None
    wait_cost: float | None = None
    price_per_gpu_hour: float | None = None
    currency: str = "$"
    """Of the price, as the user said: a sign or a code."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """The nodes that sent events. Missing nodes may be the stragglers, so less than all is a headline."""

    nodes_heard: int = 0
    nodes_expected: int | None = None
    ranks_heard: int = 0
    ranks_expected: int | None = None
    nodes_truncated: int = 0
    events_lost: int = 0
    """Events that writers said they could not write."""


@dataclass(frozen=True, slots=True)
class Clock:
    """How far the nodes' clocks agree."""

    reference_node: str = ""
    max_offset_s: float = 0.0
    max_error_s: float | None = None
    nodes_untied: int = 0
    """Nodes without any barrier that would tie their clock to the others."""
    steps: list[str] = field(default_factory=list)
    """Nodes whose wall clock jumped during the startup; durations are not affected."""
    left_out: dict[str, float] = field(default_factory=dict)
    """Nodes whose events lie an hour and more away from all others, by so much: they are in no sum and no list."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Something that an existing log said by itself, without BootSeer."""

    source: str
    """`torchelastic`, `nccl`, `kubelet`, `containerd`, `pip`, `uv`."""
    stage: str
    text: str
    duration_s: float | None
    node: str
    where: str
    """File and line."""


@dataclass(frozen=True, slots=True)
class Overview:
    """One startup in a list of them."""

    job: str
    attempt: int
    restart: int
    kind: str
    begin_ns: int
    startup_s: float
    num_nodes: int
    num_gpus: int | None
    outcome: str
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds of each top-level stage along the critical chain; `wait` is the rest."""


@dataclass(frozen=True, slots=True)
class Share:
    """Startups of one job over the time that it ran."""

    num_startups: int
    startup_s: float
    wall_s: float
    share: float
    gpu_hours: float | None


@dataclass(frozen=True, slots=True)
class Startup:
    """Which startup this report is about."""

    job: str
    attempt: int = 0
    restart: int = 0
    kind: str = "full"
    zero_ns: int = 0
    """Unix time of second 0, ns."""
    outcome: str = "unobserved"
    """`training_began`, `truncated` (logs stop before), `failed` or `unobserved` (nothing had a time)."""
    ended_by: str = "last_event"
    """The evidence for the end: `first_step`, `training_began`, `last_event`."""
    num_nodes: int = 0
    num_ranks: int = 0
    num_gpus: int | None = None
    scale: str = ""
    """The paper's bucket of the number of GPUs: `1-10`, `10-100`, ..., `>3000`; empty when unknown."""


@dataclass(frozen=True, slots=True)
class Input:
    """What was read, and what was passed over and why."""

    files: int
    bytes: int
    lines: int
    events: int
    duplicates: int
    skipped: dict[str, int]
    """Reason to count; docs/formats/event.md lists the reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that `bootseer report` knows about one startup."""

    startup: Startup
    verdict: str
    headlines: list[str]
    """What must not be overlooked: coverage below 100 %, truncated nodes, clock steps."""
    overhead: Overhead
    stages: list[Stage] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    ranks: list[Node] = field(default_factory=list)
    """Every rank by itself, where there are at most 64 and more than nodes; else empty."""
    critical_chain: list[Link] = field(default_factory=list)
    stragglers: list[Straggler] = field(default_factory=list)
    straggler_groups: list[StragglerGroup] = field(default_factory=list)
    coverage: Coverage
    clock: Clock
    unobserved: list[str]
    images: list[ImageStart] = field(default_factory=list)
    """One for each node that `bootseer run --image` started a container on, by node."""
    environments: list[EnvironmentStart] = field(default_factory=list)
    """One for each node that `bootseer run` prepared an environment on (`--setup`, `--requirements`), by node."""
    checkpoints: list[CheckpointStart] = field(default_factory=list)
    """One for each node that `bootseer run --checkpoint` mounted a checkpoint on, by node."""
    peers: list[PeersStart] = field(default_factory=list)
    connections: list[str] = field(default_factory=list)
    """Lines: what connecting the ranks took where it took long, why, and settings that make it slow."""
    warm: list[str] = field(default_factory=list)
    """Lines: how many programs came from a warm parent, and why others did not."""
    unused_imports: list[str] = field(default_factory=list)
    """Lines: imports that took long, and of which no function ran before training began."""
    stacks: list[str] = field(default_factory=list)
    """Lines: where late processes stood that the service asked, the innermost frame first."""
    restarts: list[Restarted] = field(default_factory=list)
    """Starts of the attempt behind its first, up to this one."""
    facts: list[Fact]
    share: Share | None
    startups: list[Overview] = field(default_factory=list)
    input: Input
    scheduler: list[Segment] = field(default_factory=list)
    """Queue and allocation: what the job, not a node, went through."""

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists, ready for `json.dump`; times rounded to a microsecond."""
        return {"schema": SCHEMA, **plain(self)}

    def to_text(self) -> str:
        """What `bootseer report --json` prints, newline included."""
        return json.dumps(self.to_json(), ensure_ascii=False) + "\n"


def plain(value: Any) -> Any:
    """Dataclasses as plain dicts and lists, floats rounded to a microsecond."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, (str, int)) or value is None:
        return value
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value]

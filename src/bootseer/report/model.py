"""The report as data: the result of the analysis, shown by every renderer.

`Report` is the result of `analysis.compose`. Terminal, HTML, Perfetto and JSON outputs are views of it, so each number
is computed once. docs/formats/report.md describes the JSON for other programs. All times are seconds since the
startup's own zero (`Startup.zero_ns`), on the clock of the reference node.
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
"""The stage of time that no span covers; within a stage it is `<stage>.untracked`."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a node's time that belongs to one stage; a node's segments have no gaps and do not overlap."""

    stage: str
    start_s: float
    end_s: float
    kind: Kind
    outcome: str
    """`ok`, `failed`, `truncated` (no end seen) or empty."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node's time line to the first step: that of its slowest lane (rank)."""

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
    """`ok`: training began; `truncated`: a span has no end; `failed`: a stage failed; `unobserved`: everything seen
    ended well, but no first step was seen."""
    last_stage: str
    """The stage of its last events."""
    clock_offset_s: float
    clock_error_s: float | None
    """Bound of the offset's error; None if no barrier ties this node's clock to the others."""
    segments: list[Segment]
    background: list[Segment]
    """Background work (streaming of cold blocks): shown, never summed."""
    attrs: dict[str, Any] = field(default_factory=dict)
    """Facts by stage, as `stage.key`: bytes, hits, ..."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage over all nodes. Medians exclude truncated and failed spans; `num_*` count them."""

    stage: str
    depth: int
    num_nodes: int
    num_truncated: int
    num_failed: int
    median_s: float | None
    p90_s: float | None
    max_s: float | None
    max_over_median: float | None
    """None if the median is 0 or there are fewer than two nodes."""
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
    """One link of the critical chain: the last node to arrive at a barrier, and its work since the previous barrier."""

    barrier: str
    """The last one is `training_began`."""
    node: str
    rank: int
    from_s: float
    arrival_s: float
    release_s: float
    num_participants: int
    others_median_arrival_s: float | None
    stage: str
    """The stage with the largest excess over the others' median."""
    stage_s: float
    excess_s: float | None
    waited_gpu_hours: float | None
    """Spent by the others waiting for it here."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A node whose work set a barrier later than the others' median, beyond clock error and noise."""

    node: str
    rank: int
    barrier: str
    stage: str
    delay_s: float
    z: float | None
    """Robust z-score of its work among the others; None if the others do not vary at all."""
    savings_s: float
    """How much sooner training would have begun without this node, by the barrier model."""
    savings_gpu_hours: float | None


@dataclass(frozen=True, slots=True)
class Place:
    """A location of many of a group's nodes."""

    kind: str
    """`rack`, `topology` (attributes of events), `name` (common prefix of the nodes' names)."""
    value: str
    num_slow: int
    num_nodes: int


@dataclass(frozen=True, slots=True)
class StragglerGroup:
    """The stragglers of one stage: leaving out one of fourteen saves nothing, leaving out all of them saves everything.

    Groups hide each other as well. They are listed in the order in which to fix them: each is the one that saves most
    once those before it are left out.
    """

    stage: str
    barrier: str
    nodes: list[str]
    places: list[Place]
    """Places that explain the group; may be empty."""
    savings_s: float
    """Without only this group."""
    savings_gpu_hours: float | None
    savings_cost: float | None
    next_s: float
    """What it saves in addition to the groups before it."""
    joint_s: float
    """Without this group and all before it; for the last group: without all stragglers."""
    joint_gpu_hours: float | None
    joint_cost: float | None


@dataclass(frozen=True, slots=True)
class Overhead:
    """What the startup cost."""

    job_level_s: float | None = None
    """Submission to the end of the first step; None if the submission was not observed."""
    node_level_median_s: float | None = None
    node_level_max_s: float | None = None
    startup_s: float | None = None
    """First event of the startup to its end, as far as it was observed. None if there are no times."""
    work_share: float | None = None
    wait_share: float | None = None
    gpu_hours: float | None = None
    wait_gpu_hours: float | None = None
    cost: float | None = None
    wait_cost: float | None = None
    price_per_gpu_hour: float | None = None
    currency: str = "$"
    """Currency of the price: a sign or a code."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """The nodes that sent events. Missing nodes may be the stragglers, so there is a headline about them."""

    nodes_heard: int = 0
    nodes_expected: int | None = None
    ranks_heard: int = 0
    ranks_expected: int | None = None
    nodes_truncated: int = 0
    events_lost: int = 0
    """Events that could not be written, as reported by the writers."""


@dataclass(frozen=True, slots=True)
class Clock:
    """How well the nodes' clocks agree."""

    reference_node: str = ""
    max_offset_s: float = 0.0
    max_error_s: float | None = None
    nodes_untied: int = 0
    """Nodes without a barrier that ties their clock to the others."""
    steps: list[str] = field(default_factory=list)
    """Nodes whose wall clock jumped during the startup; durations are not affected."""
    left_out: dict[str, float] = field(default_factory=dict)
    """Nodes whose events are an hour or more from all others, with the distance in s: excluded from sums and lists."""


@dataclass(frozen=True, slots=True)
class Fact:
    """Information from a log of another program."""

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
    """One startup in the list of startups."""

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
    """Share of a job's time spent in startups."""

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
    """`training_began`, `truncated` (the logs end before), `failed` or `unobserved` (no times)."""
    ended_by: str = "last_event"
    """The evidence for the end: `first_step`, `training_began`, `command`, `restart`, `last_event`."""
    num_nodes: int = 0
    num_ranks: int = 0
    num_gpus: int | None = None
    scale: str = ""
    """The paper's bucket of the number of GPUs: `1-10`, `10-100`, ..., `>3000`; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Input:
    """What was read, and what was skipped and why."""

    files: int
    bytes: int
    lines: int
    events: int
    duplicates: int
    skipped: dict[str, int]
    """Reason to count; docs/formats/event.md lists the reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All results about one startup."""

    startup: Startup
    verdict: str
    headlines: list[str]
    """Warnings: coverage below 100 %, truncated nodes, clock steps."""
    overhead: Overhead
    stages: list[Stage] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    ranks: list[Node] = field(default_factory=list)
    """Every rank, if there are at most 64 and more than nodes; else empty."""
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
    """Lines: slow connections between ranks, their causes, and settings that make them slow."""
    warm: list[str] = field(default_factory=list)
    """Lines: how many programs were forked from a warm parent, and why others were not."""
    unused_imports: list[str] = field(default_factory=list)
    """Lines: slow imports of which no function ran before training began."""
    stacks: list[str] = field(default_factory=list)
    """Lines: stacks of late processes that the service asked for, innermost frame first."""
    restarts: list[Restarted] = field(default_factory=list)
    """The restarts of the attempt up to this one."""
    facts: list[Fact]
    share: Share | None
    startups: list[Overview] = field(default_factory=list)
    input: Input
    scheduler: list[Segment] = field(default_factory=list)
    """Queue and allocation, which belong to the job and not to a node."""

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists for `json.dump`; times are rounded to a microsecond."""
        return {"schema": SCHEMA, **plain(self)}

    def to_text(self) -> str:
        """The output of `bootseer report --json`, including the newline."""
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

"""Lanes: the time line of each rank, from the moment that its node was bound to the job to the end of its first step.

A lane combines what the node did for all its ranks (image, environment, launcher) with what the rank's own process did.
It has its barriers in order, from which `barriers` finds out which lane waited for which.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bootseer.report.analysis.spans import COMMAND, PROCESS_STAGES, STRUCTURE, TRUNCATED, NodeSpans, Offset, Span
from bootseer.report.foreign.parser import BY_LOG, FOREIGN
from bootseer.trace.event import ALIVE, FAILED, NO_RANK, OK, STACK

SCHEDULER = ("queue", "allocation")
"""Stages of the scheduler: part of the job's overhead, never of a node's."""
MODEL_INITIALIZATION = "model_initialization"
FIRST_STEP = "first_step"
TRAINING_BEGAN = "training_began"
BOUND = "bound"
ENDINGS = ("worker_failed", "launcher_signal")
"""Instants by which a launcher reports the end of its workers, maybe hours into training: no part of the startup."""
_NO_PROGRESS = (*ENDINGS, ALIVE, STACK)
"""Instants that do not show progress of the startup."""
UNOBSERVED = "unobserved"
RESTART = "restart"
_BY_STEP = ("optimizer_step", "compiled_step", BY_LOG)


@dataclass(slots=True)
class Visit:
    """One lane at one barrier; `barriers_of` completes it."""

    lane: Lane
    barrier: str
    span: Span
    """It waits there; at `training_began` an instant."""
    at_ns: int
    left_ns: int
    """When the lane was released."""
    previous: int = -1
    """Index of the lane's barrier before this one, -1 for the lane's begin."""
    from_ns: int = 0
    """When the lane left its previous barrier."""

    @property
    def work_ns(self) -> int:
        """What the lane did between the two barriers, waiting excluded."""
        return max(self.at_ns - self.from_ns, 0)


@dataclass(slots=True)
class Lane:
    """The time line of one rank, or of a node without ranks."""

    node: str
    rank: int
    begin_ns: int
    end_ns: int
    outcome: str
    """`ok`: training began; `failed`, `truncated`; `unobserved`: everything seen ended well, but without training."""
    ended_by: str
    last_stage: str
    spans: list[Span]
    background: list[Span]
    arrivals: list[Visit] = field(default_factory=list)


def align(nodes: Mapping[str, NodeSpans], offsets: Mapping[str, Offset]) -> None:
    """Move all nodes' spans to the reference clock, in place."""
    for name, node in nodes.items():
        offset = offsets[name].offset_ns
        if offset:
            node.last_ns -= offset
            for span in (*node.spans, *node.instants, *node.structure):
                # Kubernetes' scheduler has a clock of its own.
                if span.attrs.get(FOREIGN) != "kubelet" or span.stage not in ("queue", BOUND):
                    span.begin_ns -= offset
                    span.end_ns -= offset


def began_of(node: NodeSpans) -> dict[int, int]:
    """When training began, by rank."""
    marks = [(mark.rank, mark.begin_ns) for mark in node.instants if mark.stage == TRAINING_BEGAN]
    marks += [(span.rank, span.end_ns) for span in node.spans if span.stage == FIRST_STEP and span.outcome == OK]
    return dict(sorted(marks, key=lambda mark: -mark[1]))


def lanes_of(node: NodeSpans, *, began: bool) -> list[Lane]:
    """The node's lanes, one for each rank with events; at least one.

    `began`: whether training began on any node. If not, a lane lasts until the last event of the command.
    """
    spans = [span for span in node.spans if span.stage not in SCHEDULER]
    ranks = sorted({span.rank for span in (*spans, *node.instants)} - {NO_RANK})
    of_rank: dict[int, list[Span]] = defaultdict(list)
    common: list[Span] = []
    background: list[Span] = []
    ranks_ns = min((span.begin_ns for span in spans if span.rank != NO_RANK), default=0)
    for span in spans:
        if span.rank != NO_RANK:
            of_rank[span.rank].append(span)
        else:
            # What a Python program did before there were ranks, such as one that then starts them, delayed them.
            helper = bool(ranks) and span.stage in PROCESS_STAGES and span.begin_ns >= ranks_ns
            (background if helper or span.background else common).append(span)
    if not ranks:
        common, helpers = _without_helpers(common, node, NO_RANK)
        return [_lane(node, NO_RANK, [], common, background + helpers, began)]
    return [_lane(node, rank, of_rank[rank], common, background, began) for rank in ranks]


def _without_helpers(spans: list[Span], node: NodeSpans, rank: int) -> tuple[list[Span], list[Span]]:
    """The spans of the training process and of what ran before it; and those of helper processes."""
    main = _main_pid(spans, node, rank)
    begin_ns = min((span.begin_ns for span in spans if span.pid == main), default=0)
    kept: list[Span] = []
    helpers: list[Span] = []
    for span in spans:
        other = bool(main and span.pid and span.pid != main) and span.stage not in STRUCTURE
        # Without a rank, stages of a shell belong to all; only stages that a Python process reports may be a helper's.
        helper = other and span.begin_ns >= begin_ns and (rank != NO_RANK or span.stage in PROCESS_STAGES)
        (helpers if helper or span.background else kept).append(span)
    return kept, helpers


def _lane(
    node: NodeSpans, rank: int, of_rank: list[Span], common: list[Span], background: list[Span], job_began: bool
) -> Lane:
    own, helpers = _without_helpers(of_rank, node, rank)
    background = background + helpers
    lane_spans = [span for span in (*common, *own) if span.stage not in STRUCTURE]
    structure = [span for span in (*common, *own) if span.stage in STRUCTURE]
    bound = [span.begin_ns for span in node.instants if span.stage == BOUND]
    began = min((span.begin_ns for span in (*common, *own) or node.instants), default=None)
    begin_ns = min(bound) if bound else began if began is not None else node.last_ns
    end_ns, ended_by, outcome = _end(node, rank, lane_spans, begin_ns)
    if outcome != OK and structure and not job_began:
        # After a failed setup there is no command.
        over = max(structure, key=lambda span: (span.stage == COMMAND, span.end_ns))
        if over.outcome != OK:
            outcome = FAILED if FAILED in (outcome, over.outcome) else TRUNCATED
            end_ns = max(end_ns, over.end_ns)
            ended_by = COMMAND if over.outcome == FAILED else RESTART if node.restarted else ended_by
    lane_spans = [
        # Spans that begin at the last event and were cut off count, except after the end of the startup.
        span
        for span in lane_spans
        if span.begin_ns < end_ns or (span.outcome == TRUNCATED and outcome != OK)
    ]
    derived = _model_initialization(node, structure, lane_spans, end_ns, outcome)
    spans = lane_spans + derived
    lane = Lane(
        node=node.node,
        rank=rank,
        begin_ns=begin_ns,
        end_ns=end_ns,
        outcome=outcome,
        ended_by=ended_by,
        last_stage=max(spans, key=lambda s: (s.begin_ns, len(s.stage))).stage if spans else "queue" * node.is_queued,
        spans=spans,
        background=[span for span in background if span.begin_ns < end_ns],
    )
    counts: dict[str, int] = defaultdict(int)
    for span in sorted(lane_spans, key=lambda span: span.begin_ns):
        if span.barrier:
            name = f"{span.barrier}#{counts[span.barrier]}" if counts[span.barrier] else span.barrier
            counts[span.barrier] += 1
            lane.arrivals.append(Visit(lane, name, span, span.begin_ns, min(span.end_ns, end_ns)))
    return lane


def _main_pid(spans: Iterable[Span], node: NodeSpans, rank: int) -> int:
    """The training process. Data loaders and compile workers inherit RANK and import torch as well."""
    weights: dict[int, int] = defaultdict(int)
    for span in spans:
        if span.stage == FIRST_STEP or span.stage.startswith(MODEL_INITIALIZATION):
            weights[span.pid] += 1000 if span.stage == FIRST_STEP else 10 if span.barrier else 1
    for span in node.instants:
        # `bootseer run` may report the first step by a pattern, but it is not the training process.
        if span.rank == rank and span.pid in weights and span.stage != ALIVE:
            weights[span.pid] += 1000 if span.stage == TRAINING_BEGAN else 10
    weights.pop(0, None)
    return max(weights, key=lambda pid: weights[pid]) if weights else 0


def _end(node: NodeSpans, rank: int, spans: list[Span], begin_ns: int) -> tuple[int, str, str]:
    marks = [span for span in node.instants if span.stage == TRAINING_BEGAN and span.rank in (rank, NO_RANK)]
    explicit = [mark for mark in marks if mark.attrs.get("by") not in _BY_STEP]
    if marks:
        # Marks by the user (API or pattern) take precedence over those of the hook or of log lines about steps.
        mark = min(explicit or marks, key=lambda mark: mark.begin_ns)
        return max(mark.begin_ns, begin_ns), FIRST_STEP if not explicit else TRAINING_BEGAN, OK
    steps = [span for span in spans if span.stage == FIRST_STEP and span.outcome == OK]
    if steps:
        return max(min(span.end_ns for span in steps), begin_ns), FIRST_STEP, OK
    moments = [span.end_ns for span in spans] + [
        mark.begin_ns for mark in node.instants if mark.rank in (rank, NO_RANK) and mark.stage not in _NO_PROGRESS
    ]
    outcome = UNOBSERVED
    if any(span.outcome == FAILED for span in spans):
        outcome = FAILED
    elif node.is_queued or any(span.outcome == TRUNCATED for span in spans):
        outcome = TRUNCATED
    return max([begin_ns, *moments]), "last_event", outcome


def _model_initialization(
    node: NodeSpans, structure: list[Span], spans: list[Span], end_ns: int, outcome: str
) -> list[Span]:
    """The stage that covers everything from the start of the command to the first step, or else to its end."""
    stages = [span.stage for span in spans]
    if MODEL_INITIALIZATION in stages:
        return []
    commands = [span.begin_ns for span in structure if span.stage == COMMAND]
    inner = [span.begin_ns for span in spans if span.stage.startswith(MODEL_INITIALIZATION + ".")]
    cut_short = outcome in (FAILED, TRUNCATED)
    if not inner and not (commands and outcome != UNOBSERVED):
        return []
    begin_ns = max(commands) if commands else min(inner)
    steps = [span.begin_ns for span in spans if span.stage == FIRST_STEP]
    until = min(steps) if steps else end_ns
    if until <= begin_ns:
        return []
    how = outcome if cut_short and not steps else OK
    return [Span(MODEL_INITIALIZATION, node.node, NO_RANK, 0, min([begin_ns, *inner]), until, how, {})]

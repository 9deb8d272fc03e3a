"""One startup made ready to be told: clocks aligned, lanes built, barriers known. And what the reader asked for.

Called by `analysis.report` and `analysis.overview`. Decides and touches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bootseer.analysis import barriers as barrier_model
from bootseer.analysis.clock import Offset, apart, offsets
from bootseer.analysis.lanes import SCHEDULER, UNOBSERVED, Lane, align, lanes_of, training_began
from bootseer.analysis.spans import TRUNCATED, Span, StartupSpans
from bootseer.trace.event import FAILED, OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the reader of a report may say."""

    job: str | None = None
    attempt: int | None = None
    restart: int | None = None
    num_nodes: int | None = None
    """Nodes that the job has, when the logs do not tell."""
    gpus_per_node: int | None = None
    price_per_gpu_hour: float | None = None
    currency: str = "$"


@dataclass(slots=True)
class Prepared:
    """A startup on one clock, with its lanes and barriers. `clocks` holds the offsets that were taken out, `left_out`
    the nodes whose clocks are wrong by an unknown amount, and how far they are from the others."""

    lanes: list[Lane]
    barriers: list[barrier_model.Barrier]
    clocks: Mapping[str, Offset]
    left_out: Mapping[str, int]
    begin_ns: int
    submitted_ns: int | None
    end_ns: int
    scheduler: Sequence[Span] = ()
    """Queue and allocation, each as the node tells it that saw it longest."""


def prepare(startup: StartupSpans) -> Prepared:
    """Bring a startup's nodes to one clock, in place, and find out who waited for whom."""
    clocks = offsets(startup.nodes)
    align(startup.nodes, clocks)
    left_out = apart(startup.nodes)
    for name in left_out:
        del startup.nodes[name], clocks[name]
    job_began = training_began(startup.nodes.values())
    lanes = [lane for name in sorted(startup.nodes) for lane in lanes_of(startup.nodes[name], began=job_began)]
    scheduler = [s for node in startup.nodes.values() for s in node.spans if s.stage in SCHEDULER]
    submitted = [span.begin_ns for span in scheduler if span.stage == "queue"]
    began = [lane.end_ns for lane in lanes if lane.outcome == OK]
    for lane in lanes if began else []:  # what a lost lane left open may last as long as the job
        lane.end_ns = max(min(lane.end_ns, max(began)), lane.begin_ns)
    begin = min([lane.begin_ns for lane in lanes] + [span.begin_ns for span in scheduler])
    end = max(began or [lane.end_ns for lane in lanes])
    longest = {span.stage: span for span in sorted(scheduler, key=lambda span: span.end_ns - span.begin_ns)}
    told = [longest[stage] for stage in SCHEDULER if stage in longest]
    barriers = barrier_model.barriers_of(lanes)
    return Prepared(lanes, barriers, clocks, left_out, begin, min(submitted, default=None), max(end, begin), told)


def gpus_of(startup: StartupSpans, node: str, options: Options) -> int | None:
    """GPUs of a node that the job uses; None when nobody told."""
    value = startup.run_attrs.get(node, {}).get("gpus")
    if options.gpus_per_node is not None:
        return options.gpus_per_node
    return value if isinstance(value, int) and 0 <= value < 1 << 16 else None


def total(values: Iterable[int | None]) -> int | None:
    """The sum, or None when one of the values is unknown."""
    found = 0
    for value in values:
        if value is None:
            return None
        found += value
    return found


def outcome_of(lanes: Sequence[Lane]) -> str:
    """How the startup ended, over all its lanes."""
    outcomes = {lane.outcome for lane in lanes}
    if OK in outcomes:
        return "training_began"
    return next((outcome for outcome in (FAILED, TRUNCATED) if outcome in outcomes), UNOBSERVED)

"""The startups in the input: which one is meant, each in a line, and their share of the job's time.

Called by `analysis.report`. Decides and touches nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from bootseer.analysis import model
from bootseer.analysis.barriers import last_arrivals
from bootseer.analysis.foreign.parser import FOREIGN, NODES, UNKNOWN_JOB
from bootseer.analysis.foreign.rules import hosts_of
from bootseer.analysis.model import WAIT
from bootseer.analysis.prepare import Options, Prepared, gpus_of, outcome_of, total
from bootseer.analysis.spans import StartupSpans
from bootseer.analysis.timeline import Piece, cut, time_by_stage
from bootseer.errors import UsageError
from bootseer.trace.event import Event
from bootseer.units import S_PER_H, seconds

_SHORT_S = 0.01


def of_one_job(events: Sequence[Event], options: Options) -> list[Event]:
    """The events of the job that is meant, a scheduler's for each node of the job. Raises `UsageError` when there are
    several jobs and no choice."""
    # A job that no line names comes last: it is no useful choice.
    names = sorted({event.job for event in events}, key=lambda name: (name == UNKNOWN_JOB, name))
    shown = ", ".join(_printable(name) for name in names[:10]) + (", ..." if len(names) > 10 else "")
    if options.job is not None and options.job not in names:
        raise UsageError(f"no job {options.job!r} in the input", hint=f"it holds: {shown}")
    if options.job is None and len(names) > 1:
        raise UsageError(f"{len(names)} jobs in the input: {shown}", hint=f"choose one: --job {_printable(names[0])}")
    job = options.job or names[0]
    return [
        event._replace(node=node)
        for event in events
        if event.job == job
        for node in (hosts_of(event.attrs[NODES]) if FOREIGN in event.attrs and NODES in event.attrs else (event.node,))
    ]


def _printable(name: str) -> str:
    """A job's name in a message: as a shell takes it, and without what would drive a terminal."""
    plain = name.isprintable() and not set(name) & set(" '\"$`\\&|;<>()*?[]#~!{}")
    return name if plain else repr(name)


def chosen(found: list[StartupSpans], options: Options) -> StartupSpans:
    """The startup that is meant, by default the last. Raises `UsageError` when there is none."""
    fitting = [
        startup
        for startup in found
        if options.attempt in (None, startup.key.attempt) and options.restart in (None, startup.key.restart)
    ]
    if not fitting:
        there = sorted({(startup.key.attempt, startup.key.restart) for startup in found})
        told = ", ".join(f"{attempt}" + (f" restart {restart}" if restart else "") for attempt, restart in there[:10])
        more = ", ..." if len(there) > 10 else ""
        raise UsageError(f"no such attempt or restart of job {found[0].key.job!r}", hint=f"its attempts: {told}{more}")
    return fitting[-1]


def overview(startup: StartupSpans, ready: Prepared, options: Options) -> model.Overview:
    """One startup in a line."""
    return model.Overview(
        job=startup.key.job,
        attempt=startup.key.attempt,
        restart=startup.key.restart,
        kind=startup.kind,
        begin_ns=ready.begin_ns,
        startup_s=seconds(ready.end_ns - ready.begin_ns),
        num_nodes=len(startup.nodes),
        num_gpus=total(gpus_of(startup, node, options) for node in startup.nodes),
        outcome=outcome_of(ready.lanes),
        stages=_stages(ready),
    )


def _stages(ready: Prepared) -> dict[str, float]:
    """The critical chain's time by top-level stage: what each barrier's last one did since the barrier before."""
    took = {span.stage: seconds(span.end_ns - span.begin_ns) for span in ready.scheduler}
    arrivals = last_arrivals(ready.barriers)
    cursor_ns = ready.begin_ns
    pieces_of: dict[int, list[Piece]] = {}
    for barrier in ready.barriers:
        lane, at_ns = barrier.last.lane, barrier.last.at_ns
        pieces = pieces_of.get(id(lane))
        if pieces is None:
            pieces = pieces_of[id(lane)] = cut(lane.spans, lane.begin_ns, lane.end_ns, arrivals)
        for stage, length_ns in time_by_stage(pieces, cursor_ns, at_ns).items():
            name = stage.partition(".")[0]
            took[name] = took.get(name, 0.0) + seconds(length_ns)
        cursor_ns = max(cursor_ns, at_ns)
    rest = seconds(ready.end_ns - ready.begin_ns) - sum(took.values())
    return {**took, WAIT: rest} if rest > _SHORT_S else took


def share(found: Sequence[StartupSpans], overviews: Sequence[model.Overview]) -> model.Share | None:
    """Startups of the job over its wall time: only when there are several. They must be on one clock already."""
    last_ns = max(node.last_ns for startup in found for node in startup.nodes.values())
    wall_s = seconds(last_ns - min(overview.begin_ns for overview in overviews))
    startup_s = sum(overview.startup_s for overview in overviews)
    if len(overviews) < 2 or wall_s <= 0:
        return None
    gpus = [overview.num_gpus for overview in overviews]
    hours = None
    if all(count is not None for count in gpus):
        hours = sum(o.startup_s * (o.num_gpus or 0) for o in overviews) / S_PER_H
    return model.Share(len(overviews), startup_s, wall_s, min(startup_s / wall_s, 1.0), hours)

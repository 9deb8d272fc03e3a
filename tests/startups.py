"""Functions to write startups by hand: `span(begin, end, stage)` on a node, in seconds."""

from __future__ import annotations

import itertools
from typing import Any

from bootseer.report.analysis.compose import analyse
from bootseer.report.analysis.prepare import Options
from bootseer.report.model import Report, Stage
from bootseer.trace.event import BEGIN, END, INSTANT, OK, Event

NS = 1_000_000_000
EPOCH_S = 1_790_000_000
_count = itertools.count(1)


def moment(
    at_s: float,
    stage: str,
    phase: str = INSTANT,
    *,
    node: str = "n0",
    rank: int = -1,
    pid: int = 1,
    clock_s: float = 0.0,
    booted_s: float = -100_000.0,
    **more: Any,
) -> Event:
    """One event. `clock_s`: the error of the node's wall clock; `booted_s`: when its monotonic clock was 0."""
    return Event(
        wall_ns=round((EPOCH_S + at_s + clock_s) * NS),
        mono_ns=round((at_s - booted_s) * NS),
        node=node,
        stage=stage,
        phase=phase,
        rank=rank,
        pid=pid,
        outcome=more.pop("outcome", OK) if phase == END else "",
        **{"job": "j", "span": f"{next(_count):016x}", **more},
    )


def span(begin_s: float, end_s: float | None, stage: str, **more: Any) -> list[Event]:
    """The events of a span; without `end_s`, its end is missing."""
    name = more.pop("span", f"{next(_count):016x}")
    outcome, attrs = more.pop("outcome", OK), more.pop("attrs", {})
    events = [moment(begin_s, stage, BEGIN, span=name, attrs=attrs, **more)]
    if end_s is not None:
        events.append(moment(end_s, stage, END, span=name, outcome=outcome, **more))
    return events


def began(at_s: float, by: str = "optimizer_step", **more: Any) -> list[Event]:
    return [moment(at_s, "training_began", attrs={"by": by}, **more)]


def report(*parts: list[Event], **options: Any) -> Report:
    """The report; asserts that each node's parts add up to its wall time."""
    result = analyse([event for part in parts for event in part], Options(**options))
    for node in result.nodes:
        wall = node.end_s - node.start_s
        assert abs(node.work_s + node.wait_s + node.untracked_s - wall) < 1e-6
        assert abs(sum(s.end_s - s.start_s for s in node.segments) - wall) < 1e-6
    return result


def row(result: Report, stage: str) -> Stage:
    return next(row for row in result.stages if row.stage == stage)

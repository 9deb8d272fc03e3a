"""Stage times over all nodes: medians, tails, GPU-hours and the distribution.

A stage's time on a node is what its pieces add up to there, waiting apart. Spans that were cut short or failed are
counted and kept out of the medians: they would make a slow stage look fast. Decides and touches nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from bootseer.analysis.model import UNTRACKED_STAGE, WAIT, Node, Segment, Stage
from bootseer.analysis.spans import TRUNCATED
from bootseer.analysis.timeline import enclosing
from bootseer.trace.event import FAILED
from bootseer.units import S_PER_H

STAGES = ("queue", "allocation", "image_loading", "environment_setup", "model_initialization", "first_step")
"""The stages of every full startup; what of them was not seen is reported as unobserved."""
WAIT_FOR_OTHERS = "wait_for_others"
"""After its own first step, a node waits for the last one."""
_CDF_POINTS = 101


@dataclass(slots=True)
class _Times:
    """One stage's time on one node, seconds."""

    work_s: float = 0.0
    wait_s: float = 0.0
    outcomes: set[str] = field(default_factory=set)


def stage_order(nodes: Sequence[Node]) -> list[str]:
    """Stages as they come in time, each behind the stage around it."""
    first: dict[str, float] = {}
    for node in nodes:
        for segment in node.segments:
            for name in enclosing(segment.stage):
                first[name] = min(first.get(name, segment.start_s), segment.start_s)

    def key(name: str) -> list[tuple[int, float, str]]:
        return [
            (part.endswith(UNTRACKED_STAGE) or part == WAIT_FOR_OTHERS, first[part], part) for part in enclosing(name)
        ]

    return sorted(first, key=key)


def stages(nodes: Sequence[Node], price_per_gpu_hour: float | None) -> list[Stage]:
    """One row for each stage and each stage around it."""
    by_stage: dict[str, dict[str, _Times]] = defaultdict(dict)
    for node in nodes:
        for segment in node.segments:
            for name in enclosing(segment.stage):
                _add(by_stage[name].setdefault(node.node, _Times()), segment)
    gpus = {node.node: node.gpus for node in nodes}
    return [_row(name, by_stage[name], gpus, price_per_gpu_hour) for name in stage_order(nodes)]


def _add(times: _Times, segment: Segment) -> None:
    length = segment.end_s - segment.start_s
    if segment.kind == WAIT:
        times.wait_s += length
    else:
        times.work_s += length
    times.outcomes.add(segment.outcome)


def _row(name: str, times: dict[str, _Times], gpus: dict[str, int | None], price: float | None) -> Stage:
    whole = {node: t for node, t in times.items() if not t.outcomes & {TRUNCATED, FAILED}}
    # A stage of nothing but waiting is told by its waiting; any other by its work.
    only_wait = all(t.work_s == 0 for t in times.values())
    values = sorted((t.wait_s if only_wait else t.work_s, node) for node, t in whole.items())
    middle = median(value for value, _ in values) if values else None
    known = [count for node in times if (count := gpus[node]) is not None]
    hours = None
    if len(known) == len(times):
        hours = sum((t.work_s + t.wait_s) * (gpus[node] or 0) for node, t in times.items()) / S_PER_H
    return Stage(
        stage=name,
        depth=name.count("."),
        num_nodes=len(times),
        num_truncated=sum(TRUNCATED in t.outcomes for t in times.values()),
        num_failed=sum(FAILED in t.outcomes for t in times.values()),
        median_s=middle,
        p90_s=quantile([value for value, _ in values], 0.9),
        max_s=values[-1][0] if values else None,
        max_over_median=values[-1][0] / middle if middle and len(values) > 1 else None,
        max_node=values[-1][1] if values else "",
        work_s=sum(t.work_s for t in times.values()),
        wait_s=sum(t.wait_s for t in times.values()),
        gpu_hours=hours,
        cost=None if hours is None or price is None else hours * price,
        cdf=cdf([value for value, _ in values]),
    )


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed."""
    if not ordered:
        return None
    place = share * len(ordered)
    return ordered[min(max(int(place) - (place == int(place)), 0), len(ordered) - 1)]


def cdf(ordered: Sequence[float]) -> list[tuple[float, float]]:
    """The distribution as (value, share of values up to it), at most 101 points, ends included."""
    count = len(ordered)
    if count <= _CDF_POINTS:
        places = list(range(count))
    else:
        places = sorted({round(i * (count - 1) / (_CDF_POINTS - 1)) for i in range(_CDF_POINTS)})
    return [(ordered[place], (place + 1) / count) for place in places]

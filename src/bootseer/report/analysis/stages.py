"""A lane's time cut into pieces of one stage each, and stage times over all nodes.

A lane is one rank on one node, including the node's own stages before it. At each moment the innermost running span
owns the time, so the pieces add up to the lane's wall time exactly; time that no span covers is `untracked`. At a
barrier, time until the arrival of the last participant is waiting, the rest is work. Truncated and failed spans are
counted but excluded from medians: they would make a slow stage look fast.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import median

from bootseer.report.analysis.spans import TRUNCATED, Span
from bootseer.report.model import UNTRACKED, UNTRACKED_STAGE, WAIT, WORK, Kind, Node, Stage
from bootseer.trace.event import FAILED
from bootseer.units import S_PER_H

STAGES = ("queue", "allocation", "image_loading", "environment_setup", "model_initialization", "first_step")
"""The stages of every full startup; those without events are reported as unobserved."""
WAIT_FOR_OTHERS = "wait_for_others"
"""After its own first step, a node waits for the last one."""
_CDF_POINTS = 101


@dataclass(frozen=True, slots=True)
class Piece:
    """Time from `begin_ns` to `end_ns` that one stage owns."""

    stage: str
    begin_ns: int
    end_ns: int
    kind: Kind
    outcome: str


def cut(spans: Sequence[Span], begin_ns: int, end_ns: int, last_arrival_ns: dict[int, int]) -> list[Piece]:
    """The pieces of `[begin_ns, end_ns]`, in order, without overlap or gap.

    `last_arrival_ns`: by `id(span)`, when the last participant arrived at the barrier that the span waits at.
    """
    inside = [span for span in spans if span.end_ns > begin_ns and span.begin_ns < end_ns]
    # Parents first among spans that begin together: the longer one encloses the shorter one.
    inside.sort(key=lambda span: (span.begin_ns, -span.end_ns, len(span.stage)))
    parents = {outer for stage in {span.stage for span in inside} for outer in enclosing(stage)[:-1]}
    edges = {begin_ns, end_ns}
    for span in inside:
        edges.update((max(span.begin_ns, begin_ns), min(span.end_ns, end_ns)))
        arrival = last_arrival_ns.get(id(span))
        if arrival is not None and max(span.begin_ns, begin_ns) < arrival < min(span.end_ns, end_ns):
            edges.add(arrival)
    pieces: list[Piece] = []
    running: list[tuple[int, Span]] = []  # heap, the innermost first
    coming = 0
    marks = sorted(edges)
    for left, right in pairwise(marks):
        while coming < len(inside) and inside[coming].begin_ns <= left:
            heapq.heappush(running, (-coming, inside[coming]))
            coming += 1
        while running and running[0][1].end_ns <= left:
            heapq.heappop(running)
        owner = running[0][1] if running else None
        _append(pieces, _piece(owner, left, right, parents, last_arrival_ns))
    return pieces


def _piece(owner: Span | None, left: int, right: int, parents: set[str], last_arrival_ns: dict[int, int]) -> Piece:
    if owner is None:
        return Piece(UNTRACKED_STAGE, left, right, UNTRACKED, "")
    arrival = last_arrival_ns.get(id(owner))
    if arrival is not None and right <= arrival:
        return Piece(owner.stage, left, right, WAIT, owner.outcome)
    if owner.stage in parents:
        return Piece(f"{owner.stage}.{UNTRACKED_STAGE}", left, right, UNTRACKED, owner.outcome)
    return Piece(owner.stage, left, right, WORK, owner.outcome)


def _append(pieces: list[Piece], piece: Piece) -> None:
    last = pieces[-1] if pieces else None
    if last is not None and (last.stage, last.kind, last.outcome) == (piece.stage, piece.kind, piece.outcome):
        pieces[-1] = Piece(last.stage, last.begin_ns, piece.end_ns, last.kind, last.outcome)
    else:
        pieces.append(piece)


def time_by_stage(pieces: Sequence[Piece], begin_ns: int, end_ns: int) -> dict[str, int]:
    """Work and untracked time of each stage within a window, ns; waiting is left out. The pieces are those of `cut`."""
    totals: dict[str, int] = {}
    for index in range(bisect_right(pieces, begin_ns, key=lambda piece: piece.end_ns), len(pieces)):
        piece = pieces[index]
        if piece.begin_ns >= end_ns:
            break
        if piece.kind != WAIT:
            length = min(piece.end_ns, end_ns) - max(piece.begin_ns, begin_ns)
            totals[piece.stage] = totals.get(piece.stage, 0) + length
    return totals


def enclosing(stage: str) -> list[str]:
    """The stage and the stages around it, outermost first: `a.b.c` gives `a`, `a.b`, `a.b.c`."""
    return list(accumulate(stage.split("."), "{}.{}".format))


@dataclass(slots=True)
class Times:
    """One stage's time on one node, seconds."""

    work_s: float = 0.0
    wait_s: float = 0.0
    outcomes: set[str] = field(default_factory=set)

    @property
    def is_whole(self) -> bool:
        return not self.outcomes & {TRUNCATED, FAILED}


def stage_order(nodes: Sequence[Node]) -> list[str]:
    """The stages by time of their first begin, each after the stage that contains it."""
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


def times_of(nodes: Sequence[Node]) -> dict[str, dict[str, Times]]:
    """The times of each stage, including those that only contain others, by node."""
    by_stage: dict[str, dict[str, Times]] = defaultdict(dict)
    for node in nodes:
        for segment in node.segments:
            length = segment.end_s - segment.start_s
            for name in enclosing(segment.stage):
                times = by_stage[name].setdefault(node.node, Times())
                times.work_s += length if segment.kind != WAIT else 0.0
                times.wait_s += length if segment.kind == WAIT else 0.0
                times.outcomes.add(segment.outcome)
    return by_stage


def stages(nodes: Sequence[Node], price_per_gpu_hour: float | None) -> list[Stage]:
    """One row for each stage."""
    by_stage, gpus = times_of(nodes), {node.node: node.gpus for node in nodes}
    return [_row(name, by_stage[name], gpus, price_per_gpu_hour) for name in stage_order(nodes)]


def _row(name: str, times: dict[str, Times], gpus: dict[str, int | None], price: float | None) -> Stage:
    # A stage that is only waiting is represented by its waiting time, any other by its work.
    only_wait = all(t.work_s == 0 for t in times.values())
    values = sorted((t.wait_s if only_wait else t.work_s, node) for node, t in times.items() if t.is_whole)
    middle = median(value for value, _ in values) if values else None
    hours = None
    if all(gpus[node] is not None for node in times):
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

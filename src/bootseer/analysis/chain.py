"""The critical chain and the straggler rows: names, stages and prices for what the barrier model found.

Called by `analysis.report`. Decides and touches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from bootseer.analysis import model
from bootseer.analysis.barriers import Barrier, Visit
from bootseer.analysis.clock import Offset
from bootseer.analysis.lanes import Lane
from bootseer.analysis.stragglers import LATE_START, delays, groups, savings_ns, slowest_visits
from bootseer.analysis.timeline import Piece, time_by_stage
from bootseer.units import S_PER_H, seconds

_MAX_ROWS = 50
"""Stragglers that are listed one by one; groups hold all of them."""


@dataclass(slots=True)
class Told:
    """What the rows are made from."""

    barriers: list[Barrier]
    clocks: Mapping[str, Offset]
    lanes: Mapping[str, Lane]
    pieces_of: Callable[[Lane], list[Piece]]
    gpus: Mapping[str, int | None]
    price: float | None
    zero_ns: int

    def gpu_hours(self, length_ns: int, without: frozenset[str] = frozenset()) -> float | None:
        """What `length_ns` of all nodes but some costs; None when a node's GPUs are unknown."""
        counts = [count for node, count in self.gpus.items() if node not in without]
        if any(count is None for count in counts):
            return None
        return seconds(length_ns) * sum(count or 0 for count in counts) / S_PER_H


def critical_chain(told: Told) -> list[model.Link]:
    """For each barrier who came last, and in which stage it lost the most."""
    return [_link(told, barrier) for barrier in told.barriers if barrier.passed]


def _link(told: Told, barrier: Barrier) -> model.Link:
    last = barrier.last
    others = [visit.at_ns for visit in barrier.visits if visit is not last]
    stage, stage_ns, excess_ns = lost_stage(told, barrier, last)
    waited = None
    nodes = slowest_visits(barrier)
    if all(told.gpus[node] is not None for node in nodes):
        waited_ns = sum((last.at_ns - visit.at_ns) * (told.gpus[node] or 0) for node, visit in nodes.items())
        waited = seconds(waited_ns) / S_PER_H

    def at(ns: float) -> float:
        return seconds(ns - told.zero_ns)

    return model.Link(
        barrier=barrier.name,
        node=last.lane.node,
        rank=last.lane.rank,
        from_s=at(last.from_ns),
        arrival_s=at(last.at_ns),
        release_s=at(last.at_ns + barrier.release_ns),
        num_participants=barrier.num_participants,
        others_median_arrival_s=at(median(others)) if others else None,
        stage=stage,
        stage_s=seconds(stage_ns),
        excess_s=None if excess_ns is None else seconds(excess_ns),
        waited_gpu_hours=waited,
    )


def lost_stage(told: Told, barrier: Barrier, visit: Visit) -> tuple[str, int, int | None]:
    """The stage that cost a visit the most against the others' median: (stage, its ns, excess ns).

    Without others it is the longest stage, and the excess is None.
    """
    own = time_by_stage(told.pieces_of(visit.lane), visit.from_ns, visit.at_ns)
    nodes = [other for node, other in slowest_visits(barrier).items() if node != visit.lane.node]
    # On a single node its ranks are the ones to compare.
    crowd = nodes or [other for other in barrier.visits if other is not visit]
    others = [time_by_stage(told.pieces_of(other.lane), other.from_ns, other.at_ns) for other in crowd]
    if not own:
        return "", 0, None
    if not others:
        stage = max(own, key=lambda name: own[name])
        return stage, own[stage], None
    excess = {stage: length - int(median(other.get(stage, 0) for other in others)) for stage, length in own.items()}
    stage = max(excess, key=lambda name: excess[name])
    return stage, own[stage], excess[stage]


def straggler_rows(told: Told) -> list[model.Straggler]:
    """Each straggler with its stage and with what leaving it out would save, worst first."""
    rows: list[model.Straggler] = []
    for delay in delays(told.barriers, told.clocks):
        visit, node = delay.visit, delay.visit.lane.node
        stage = LATE_START if delay.late_start else lost_stage(told, delay.barrier, visit)[0]
        # Past the first fifty only the groups are of use, and each what-if costs a pass over all lanes.
        saved = savings_ns(told.barriers, frozenset({node})) if len(rows) < _MAX_ROWS else 0
        rows.append(
            model.Straggler(
                node=node,
                rank=visit.lane.rank,
                barrier=delay.barrier.name,
                stage=stage,
                delay_s=seconds(delay.delay_ns),
                z=delay.z,
                savings_s=seconds(saved),
                savings_gpu_hours=told.gpu_hours(saved, frozenset({node})),
            )
        )
    return rows


def straggler_groups(told: Told, rows: list[model.Straggler]) -> list[model.StragglerGroup]:
    """The stragglers of one stage together, most savings first."""
    found = []
    for (stage, barrier), nodes in groups([(row.stage, row.barrier, row.node) for row in rows]).items():
        saved = savings_ns(told.barriers, frozenset(nodes))
        hours = told.gpu_hours(saved, frozenset(nodes))
        cost = None if hours is None or told.price is None else hours * told.price
        found.append(model.StragglerGroup(stage, barrier, nodes, seconds(saved), hours, cost))
    return sorted(found, key=lambda group: -group.savings_s)

"""The critical chain and the straggler rows: names, stages and prices for what the barrier model found.

Called by `analysis.report`. Decides and touches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from bootseer.analysis import model
from bootseer.analysis.barriers import Barrier, Replay, Visit
from bootseer.analysis.clock import Offset
from bootseer.analysis.lanes import TRAINING_BEGAN, Lane
from bootseer.analysis.stragglers import LATE_START, delays, groups, partitions, places, slowest_visits
from bootseer.analysis.timeline import Piece, time_by_stage
from bootseer.units import S_PER_H, seconds

_MAX_COMPARED = 16
"""Groups among which the next one is looked for; a job has a handful, a hostile log may have one for each node."""


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
    replay: Replay = field(init=False)

    def __post_init__(self) -> None:
        self.replay = Replay(self.barriers)

    def gpu_hours(self, length_ns: int, without: frozenset[str] = frozenset()) -> float | None:
        """What `length_ns` of all nodes but some costs; None when a node's GPUs are unknown."""
        counts = [count for node, count in self.gpus.items() if node not in without]
        if any(count is None for count in counts):
            return None
        return seconds(length_ns) * sum(count or 0 for count in counts) / S_PER_H

    def price_of(self, length_ns: int, without: frozenset[str]) -> tuple[float | None, float | None]:
        """GPU-hours as above, and their price; None where it is unknown."""
        hours = self.gpu_hours(length_ns, without)
        return hours, None if hours is None or self.price is None else hours * self.price


def critical_chain(told: Told) -> list[model.Link]:
    """For each barrier who came last, and in which stage it lost the most."""
    links = [_link(told, barrier) for barrier in told.barriers if barrier.passed]
    return [link for link in links if link.stage or link.barrier != TRAINING_BEGAN]


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
        saved = told.replay.savings_ns(frozenset({node}))
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


def straggler_groups(
    told: Told, rows: Sequence[model.Straggler], nodes: Sequence[model.Node]
) -> list[model.StragglerGroup]:
    """The stragglers of one stage together, in the order that saves most first."""
    staged = groups([(row.stage, row.barrier, row.node) for row in rows])
    ways = partitions({node.node: node.attrs for node in nodes}) if staged else []
    found: list[model.StragglerGroup] = []
    out: frozenset[str] = frozenset()
    joint, total = 0, told.replay.savings_ns({row.node for row in rows})
    while staged:
        # They come by their worst delay, so that of groups that save equally much the latest is next: the others save
        # nothing before it is gone. Where all is saved the order is of no use.
        candidates = list(staged)[: _MAX_COMPARED if joint < total else 1]
        key = max(candidates, key=lambda key: told.replay.savings_ns(out.union(staged[key])))
        members = staged.pop(key)
        before, out = joint, out.union(members)
        alone, joint = told.replay.savings_ns(frozenset(members)), told.replay.savings_ns(out)
        prices = told.price_of(alone, frozenset(members)), told.price_of(joint, out)
        found.append(
            model.StragglerGroup(
                *key,
                members,
                places(members, ways),
                seconds(alone),
                *prices[0],
                seconds(joint - before),
                seconds(joint),
                *prices[1],
            )
        )
    return found

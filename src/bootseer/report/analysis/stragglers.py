"""The critical chain, the nodes that delayed the others, and what these nodes have in common.

A straggler is a node whose work before a barrier exceeds the median of the others by more than noise. Work is measured
with the node's own monotonic clock, so clock errors cannot create stragglers. Only late starts are compared across
clocks, and there the clock error is taken into account.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from statistics import median
from typing import Any, NamedTuple

from bootseer.report import model
from bootseer.report.analysis.barriers import Barrier, Replay
from bootseer.report.analysis.lanes import TRAINING_BEGAN, Visit
from bootseer.report.analysis.prepare import Prepared
from bootseer.report.analysis.spans import Offset
from bootseer.report.analysis.stages import time_by_stage
from bootseer.report.model import Place
from bootseer.units import S_PER_H, seconds

MIN_NODES = 4
"""With fewer nodes there is no meaningful median; the critical chain still names the last node."""
LATE_START = "late_start"
NAME = "name"
"""The kind of a place that is known only from a common prefix of the nodes' names."""
_PLACE_ATTRS = ("rack", "topology")
_PLACE_ALPHA = 0.01
_PLACE_SHARE = 0.75
_PLACE_DEPTH = 8
_SWITCHES = re.compile(r"[./]?[^./]+")
_WORDS = re.compile(r"\d+|[^\W\d_]+|[\W_]+")
_MAD_TO_SIGMA = 1.4826
_NOISE_SIGMAS = 4.0
_MIN_SHARE = 0.05
_MIN_DELAY_NS = 500_000_000
_MAX_COMPARED = 16
"""Number of candidates for the next group; a job has a handful, a hostile log may have one per node."""


@dataclass(frozen=True, slots=True)
class Delay:
    """A node that arrived late at a barrier because of its own work."""

    visit: Visit
    barrier: Barrier
    delay_ns: int
    z: float | None
    late_start: bool


def slowest_visits(barrier: Barrier) -> dict[str, Visit]:
    """Each node's slowest lane at a barrier."""
    slowest: dict[str, Visit] = {}
    for visit in barrier.visits:
        best = slowest.get(visit.lane.node)
        if best is None or visit.work_ns > best.work_ns:
            slowest[visit.lane.node] = visit
    return slowest


def delays(barriers: Sequence[Barrier], clocks: Mapping[str, Offset]) -> list[Delay]:
    """The stragglers of all barriers, worst first, each node once."""
    worst: dict[str, Delay] = {}
    for delay in chain.from_iterable(_delays_at(barrier, clocks) for barrier in barriers):
        known = worst.get(delay.visit.lane.node)
        if known is None or delay.delay_ns > known.delay_ns:
            worst[delay.visit.lane.node] = delay
    return sorted(worst.values(), key=lambda delay: -delay.delay_ns)


def _delays_at(barrier: Barrier, clocks: Mapping[str, Offset]) -> Iterator[Delay]:
    visits = list(slowest_visits(barrier).values())
    if len(visits) < MIN_NODES or not barrier.passed:
        return
    yield from _outliers(barrier, [(visit, visit.work_ns) for visit in visits], late_start=False)
    first = [visit for visit in visits if visit.previous < 0]
    if len(first) >= MIN_NODES:
        begin_ns = int(median(visit.lane.begin_ns for visit in first))
        late = [(visit, max(visit.lane.begin_ns - begin_ns, 0)) for visit in first]
        for delay in _outliers(barrier, late, late_start=True):
            error_ns = clocks[delay.visit.lane.node].error_ns
            if error_ns is not None and delay.delay_ns > error_ns:
                yield delay


def _outliers(barrier: Barrier, values_ns: Sequence[tuple[Visit, int]], *, late_start: bool) -> list[Delay]:
    middle = median(value for _, value in values_ns)
    sigma = _MAD_TO_SIGMA * median(abs(value - middle) for _, value in values_ns)
    limit = max(_NOISE_SIGMAS * sigma, _MIN_SHARE * middle, _MIN_DELAY_NS)
    return [
        Delay(visit, barrier, int(excess), excess / sigma if sigma else None, late_start)
        for visit, value in values_ns
        if (excess := value - middle) > limit
    ]


def host_list(nodes: Sequence[str]) -> str:
    """Node names in compact form: those that differ only in their last number as `node-[003-007,012]`."""
    numbers: dict[str, list[str]] = defaultdict(list)
    for node in sorted(nodes):
        begin = node.rstrip("0123456789")
        numbers[begin].append(node[len(begin) :])
    parts_of = []
    for begin, found in numbers.items():
        runs: list[list[str]] = []
        for text in found:
            last = runs[-1][-1] if runs else ""
            if last and text and len(last) == len(text) and int(text) == int(last) + 1:
                runs[-1].append(text)
            else:
                runs.append([text])
        parts = ",".join(run[0] + (f"-{run[-1]}" if len(run) > 1 else "") for run in runs)
        parts_of.append(f"{begin}[{parts}]" if len(found) > 1 else begin + parts)
    return ", ".join(parts_of)


class Partition(NamedTuple):
    """One way to divide the nodes of a job into places."""

    kind: str
    place_of: Mapping[str, str]
    """By node; empty if unknown."""
    sizes: Mapping[str, int]


def partitions(attrs: Mapping[str, Mapping[str, Any]]) -> list[Partition]:
    """Racks, places in the topology and prefixes of names, each from wide to narrow, from the facts of all nodes."""
    parts: dict[str, dict[str, list[str]]] = {kind: {} for kind in (*_PLACE_ATTRS, NAME)}
    for node, facts in attrs.items():
        for key, value in facts.items():
            if (kind := key.rpartition(".")[2]) in _PLACE_ATTRS:
                parts[kind][node] = _SWITCHES.findall(str(value))
        parts[NAME][node] = _WORDS.findall(node)[:-1]
    found = []
    for kind, of_node in parts.items():
        for depth in range(1, min(max(map(len, of_node.values()), default=0), _PLACE_DEPTH) + 1):
            place_of = {node: "".join(of_node.get(node, ())[:depth]) for node in attrs}
            found.append(Partition(kind, place_of, Counter(place_of.values())))
    return found


def places(slow: Sequence[str], ways: Sequence[Partition]) -> list[Place]:
    """What slow nodes have in common: at most three places of one partition, or nothing.

    Places are an explanation if they contain three quarters of the slow nodes and this is unlikely to be chance:
    Fisher's exact test (Fisher 1922, one-sided, p < 0.01), with Bonferroni's correction for the choice of places.
    """
    best: tuple[float, list[Place]] = (_PLACE_ALPHA, [])
    for kind, place_of, sizes in ways:
        common = Counter(at for node in slow if (at := place_of[node])).most_common(3)
        found = [Place(kind, at, count, sizes[at]) for at, count in common]
        inside = list(accumulate(place.num_slow for place in found))
        enough = next((number for number, count in enumerate(inside, 1) if count >= _PLACE_SHARE * len(slow)), 0)
        found = found[:enough]
        if not found or len(sizes) == enough or found[-1].num_slow < 2:
            continue
        chance = _fisher_p(len(place_of), sum(place.num_nodes for place in found), len(slow), inside[enough - 1])
        p = chance * math.comb(len(sizes), enough)
        # Of equal ones take the later: a longer prefix is more specific and means the same nodes.
        if p < best[0] or (p == best[0] and [place.kind for place in best[1][:1]] == [kind]):
            best = (p, found)
    return best[1]


def _fisher_p(total: int, marked: int, drawn: int, hits: int) -> float:
    """Probability of at least `hits` marked items among `drawn` of `total`: tail of the hypergeometric distribution."""
    ways = sum(math.comb(marked, i) * math.comb(total - marked, drawn - i) for i in range(hits, min(marked, drawn) + 1))
    return ways / math.comb(total, drawn)


def critical_chain(ready: Prepared) -> list[model.Link]:
    """For each barrier the node that arrived last, and the stage in which it lost the most time."""
    links = [_link(ready, barrier) for barrier in ready.barriers if barrier.passed]
    return [link for link in links if link.stage or link.barrier != TRAINING_BEGAN]


def _link(ready: Prepared, barrier: Barrier) -> model.Link:
    last = barrier.last
    others = [visit.at_ns for visit in barrier.visits if visit is not last]
    stage, stage_ns, excess_ns = lost_stage(ready, barrier, last)
    waited = None
    nodes = slowest_visits(barrier)
    if all(ready.gpus[node] is not None for node in nodes):
        waited_ns = sum((last.at_ns - visit.at_ns) * (ready.gpus[node] or 0) for node, visit in nodes.items())
        waited = seconds(waited_ns) / S_PER_H
    return model.Link(
        barrier=barrier.name,
        node=last.lane.node,
        rank=last.lane.rank,
        from_s=ready.at(last.from_ns),
        arrival_s=ready.at(last.at_ns),
        release_s=ready.at(last.at_ns + barrier.release_ns),
        num_participants=barrier.num_participants,
        others_median_arrival_s=ready.at(median(others)) if others else None,
        stage=stage,
        stage_s=seconds(stage_ns),
        excess_s=None if excess_ns is None else seconds(excess_ns),
        waited_gpu_hours=waited,
    )


def lost_stage(ready: Prepared, barrier: Barrier, visit: Visit) -> tuple[str, int, int | None]:
    """The stage with the largest excess over the others' median: (stage, its ns, excess ns).

    Without others it is the longest stage, and the excess is None.
    """
    own = time_by_stage(ready.pieces_of(visit.lane), visit.from_ns, visit.at_ns)
    nodes = [other for node, other in slowest_visits(barrier).items() if node != visit.lane.node]
    # On a single node, compare its ranks.
    compared = nodes or [other for other in barrier.visits if other is not visit]
    others = [time_by_stage(ready.pieces_of(other.lane), other.from_ns, other.at_ns) for other in compared]
    if not own:
        return "", 0, None
    if not others:
        stage = max(own, key=lambda name: own[name])
        return stage, own[stage], None
    excess = {stage: length - int(median(other.get(stage, 0) for other in others)) for stage, length in own.items()}
    stage = max(excess, key=lambda name: excess[name])
    return stage, own[stage], excess[stage]


def straggler_rows(ready: Prepared, replay: Replay) -> list[model.Straggler]:
    """Each straggler with its stage and the savings without it, worst first."""
    rows: list[model.Straggler] = []
    for delay in delays(ready.barriers, ready.clocks):
        visit, node = delay.visit, delay.visit.lane.node
        stage = LATE_START if delay.late_start else lost_stage(ready, delay.barrier, visit)[0]
        saved = replay.savings_ns(frozenset({node}))
        rows.append(
            model.Straggler(
                node=node,
                rank=visit.lane.rank,
                barrier=delay.barrier.name,
                stage=stage,
                delay_s=seconds(delay.delay_ns),
                z=delay.z,
                savings_s=seconds(saved),
                savings_gpu_hours=ready.gpu_hours(saved, frozenset({node})),
            )
        )
    return rows


def straggler_groups(
    ready: Prepared, replay: Replay, rows: Sequence[model.Straggler], nodes: Sequence[model.Node]
) -> list[model.StragglerGroup]:
    """The stragglers grouped by stage, ordered greedily by savings.

    Greedy, because groups hide each other: the savings of a group depend on which others are already left out, and the
    best order of all groups would need every subset.
    """
    staged: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        staged[row.stage, row.barrier].append(row.node)
    ways = partitions({node.node: node.attrs for node in nodes}) if staged else []
    found: list[model.StragglerGroup] = []
    out: frozenset[str] = frozenset()
    joint, total = 0, replay.savings_ns({row.node for row in rows})
    while staged:
        # Groups are in order of their worst delay, so of groups with equal savings the latest is next: the others save
        # nothing before it is left out. Once everything is saved the order does not matter.
        candidates = list(staged)[: _MAX_COMPARED if joint < total else 1]
        key = max(candidates, key=lambda key: replay.savings_ns(out.union(staged[key])))
        members = staged.pop(key)
        before, out = joint, out.union(members)
        alone, joint = replay.savings_ns(frozenset(members)), replay.savings_ns(out)
        hours, joint_hours = ready.gpu_hours(alone, frozenset(members)), ready.gpu_hours(joint, out)
        found.append(
            model.StragglerGroup(
                *key,
                members,
                places(members, ways),
                seconds(alone),
                hours,
                ready.cost(hours),
                seconds(joint - before),
                seconds(joint),
                joint_hours,
                ready.cost(joint_hours),
            )
        )
    return found

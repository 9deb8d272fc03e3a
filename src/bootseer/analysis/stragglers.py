"""Which nodes held the others back, and what would have been without them.

A straggler is a node whose work before a barrier exceeds the median of the others by more than noise. Work is measured
on the node's own monotonic clock, so that clock error cannot make one; only a late start is compared across clocks, and
there the clock error counts. Decides and touches nothing.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bootseer.analysis.barriers import Barrier, Visit, end_ns
from bootseer.analysis.clock import Offset

MIN_NODES = 4
"""With fewer nodes there is no crowd to stand out from; the critical chain still names the last one."""
LATE_START = "late_start"
_RACKS = ("run.rack", "run.topology")
"""Attributes of `run` that tell where a node stands."""
_MAX_PLACES = 4
_MAD_TO_SIGMA = 1.4826
_NOISE_SIGMAS = 4.0
_MIN_SHARE = 0.05
_MIN_DELAY_NS = 500_000_000


@dataclass(frozen=True, slots=True)
class Delay:
    """A node that came late to a barrier by its own work."""

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
    """The stragglers of each barrier, worst first, each node once."""
    found: dict[str, Delay] = {}
    for barrier in barriers:
        visits = list(slowest_visits(barrier).values())
        if len(visits) < MIN_NODES:
            continue
        first = [visit for visit in visits if visit.previous < 0]
        begins = median(visit.lane.begin_ns for visit in first) if len(first) >= MIN_NODES else None
        work = {id(visit): visit.work_ns for visit in visits}
        for delay in _outliers(visits, work, barrier, late_start=False):
            _keep_worst(found, delay)
        if begins is not None:
            late = {id(visit): max(visit.lane.begin_ns - int(begins), 0) for visit in first}
            for delay in _outliers(first, late, barrier, late_start=True):
                error_ns = clocks[delay.visit.lane.node].error_ns
                if error_ns is not None and delay.delay_ns > error_ns:
                    _keep_worst(found, delay)
    return sorted(found.values(), key=lambda delay: -delay.delay_ns)


def _keep_worst(found: dict[str, Delay], delay: Delay) -> None:
    known = found.get(delay.visit.lane.node)
    if known is None or delay.delay_ns > known.delay_ns:
        found[delay.visit.lane.node] = delay


def _outliers(
    visits: Sequence[Visit], value_ns: Mapping[int, int], barrier: Barrier, *, late_start: bool
) -> list[Delay]:
    middle = median(value_ns[id(visit)] for visit in visits)
    sigma = _MAD_TO_SIGMA * median(abs(value_ns[id(visit)] - middle) for visit in visits)
    limit = max(_NOISE_SIGMAS * sigma, _MIN_SHARE * middle, _MIN_DELAY_NS)
    return [
        Delay(visit, barrier, int(excess), excess / sigma if sigma else None, late_start)
        for visit in visits
        if (excess := value_ns[id(visit)] - middle) > limit
    ]


def savings_ns(barriers: list[Barrier], nodes: frozenset[str]) -> int:
    """How much sooner the job would have begun without these nodes, by the barrier model."""
    whole, rest = end_ns(barriers), end_ns(barriers, nodes)
    return max(whole - rest, 0) if whole is not None and rest is not None else 0


def places(nodes: Sequence[str], attrs: Mapping[str, Mapping[str, object]]) -> str:
    """Which nodes these are, in words: by rack or switch where they told it, else by the common begin of their names;
    those of a group as Slurm takes them, `node-[0003,0005]`. `attrs` are those of all nodes, by node."""
    racks: dict[str, list[str]] = defaultdict(list)
    all_racks: Counter[str] = Counter(_rack(node, facts) for node, facts in attrs.items())
    for node in nodes:
        racks[_rack(node, attrs.get(node, {}))].append(node)
    told = []
    for rack, members in sorted(racks.items(), key=lambda item: (-len(item[1]), item[0])):
        of = f"{len(members)} of {all_racks[rack]} in {rack}: " if len(all_racks) > 1 and rack else ""
        told.append(of + host_list(members))
    return "; ".join(told[:_MAX_PLACES]) + (
        f"; and {len(told) - _MAX_PLACES} more places" if told[_MAX_PLACES:] else ""
    )


def _rack(node: str, facts: Mapping[str, object]) -> str:
    said = next((str(facts[key]) for key in _RACKS if facts.get(key)), "")
    return said or re.sub(r"[-_.]?[a-z]*\d+$", "", node.partition("/")[0], flags=re.IGNORECASE)


def host_list(nodes: Sequence[str]) -> str:
    """Names that differ in their last number alone as one, `node-[003-007,012]`."""
    numbers: dict[str, list[str]] = defaultdict(list)
    for node in sorted(nodes):
        begin = node.rstrip("0123456789")
        numbers[begin].append(node[len(begin) :])
    told = []
    for begin, found in numbers.items():
        runs: list[list[str]] = []
        for text in found:
            last = runs[-1][-1] if runs else ""
            if last and text and len(last) == len(text) and int(text) == int(last) + 1:
                runs[-1].append(text)
            else:
                runs.append([text])
        parts = ",".join(run[0] + (f"-{run[-1]}" if len(run) > 1 else "") for run in runs)
        told.append(f"{begin}[{parts}]" if len(found) > 1 else begin + parts)
    return ", ".join(told)


def groups(staged: Sequence[tuple[str, str, str]]) -> dict[tuple[str, str], list[str]]:
    """Nodes by (stage, barrier), from (stage, barrier, node) in order of delay."""
    by_stage: dict[tuple[str, str], list[str]] = defaultdict(list)
    for stage, barrier, node in staged:
        by_stage[stage, barrier].append(node)
    return by_stage

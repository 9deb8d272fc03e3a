"""Which nodes held the others back, and what would have been without them.

A straggler is a node whose work before a barrier exceeds the median of the others by more than noise. Work is measured
on the node's own monotonic clock, so that clock error cannot make one; only a late start is compared across clocks, and
there the clock error counts. Decides and touches nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bootseer.analysis.barriers import Barrier, Visit, end_ns
from bootseer.analysis.clock import Offset

MIN_NODES = 4
"""With fewer nodes there is no crowd to stand out from; the critical chain still names the last one."""
LATE_START = "late_start"
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
        if len(visits) < MIN_NODES or not barrier.passed:
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


def groups(staged: Sequence[tuple[str, str, str]]) -> dict[tuple[str, str], list[str]]:
    """Nodes by (stage, barrier), from (stage, barrier, node) in order of delay."""
    by_stage: dict[tuple[str, str], list[str]] = defaultdict(list)
    for stage, barrier, node in staged:
        by_stage[stage, barrier].append(node)
    return by_stage

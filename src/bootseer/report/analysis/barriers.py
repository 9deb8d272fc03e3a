"""Which lanes waited for which: the startup as an exact max-plus model of its barriers.

A barrier opens when its last participant has arrived, plus the time that the release itself takes. A lane's arrival
is the opening of its previous barrier plus its own work:

    arrival(i, k) = open(previous barrier of i) + work(i, k)
    open(k)       = max over i of arrival(i, k) + release(k)

The last barrier is `training_began`: the job is as late as its last lane.

Why a model and not a sum of delays: the delay of a node does not say what the job would gain without it. A node that is
10 s late saves nothing if another one is 10 s late as well, or if it waits 10 s at a later barrier anyway. `work` is
what a lane did between two barriers without waiting, so it does not depend on the other lanes. With all values of
`work` and `release` measured, the equations can be evaluated again without some nodes. The result is when training
would have begun, provided that a node's work does not depend on the others (a shared network can break this).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from statistics import median

from bootseer.report.analysis.lanes import TRAINING_BEGAN, UNOBSERVED, Lane, Visit
from bootseer.report.analysis.spans import TRUNCATED, Span
from bootseer.trace.event import OK

_NOTHING: frozenset[str] = frozenset()


@dataclass(slots=True)
class Barrier:
    """A synchronisation point that all participants pass together."""

    name: str
    visits: list[Visit] = field(default_factory=list)

    @property
    def num_participants(self) -> int:
        """Number of waiting spans: a launcher waits once for all ranks of its node."""
        return len({id(visit.span) for visit in self.visits})

    @property
    def last(self) -> Visit:
        """The visit that all others waited for."""
        return max(self.visits, key=lambda visit: visit.at_ns)

    @property
    def passed(self) -> bool:
        """Whether any lane passed. If the last participant has not arrived, all spans are cut off by the end of the
        logs."""
        return any(visit.span.outcome != TRUNCATED for visit in self.visits)

    @property
    def left_ns(self) -> float:
        """When its participants left it, as a median; if none did, the last arrival."""
        left_ns = [visit.left_ns for visit in self.visits if visit.span.outcome == OK]
        return median(left_ns) if left_ns else self.last.at_ns

    @property
    def release_ns(self) -> int:
        """From the last arrival to the release."""
        return max(int(self.left_ns) - self.last.at_ns, 0)


def barriers_of(lanes: list[Lane]) -> list[Barrier]:
    """The barriers in the order of their opening; the last is `training_began`."""
    found: dict[str, Barrier] = {}
    for lane in lanes:
        for arrival in lane.arrivals:
            found.setdefault(arrival.barrier, Barrier(arrival.barrier)).visits.append(arrival)
    shared = [barrier for barrier in found.values() if barrier.num_participants > 1]
    shared.sort(key=lambda barrier: barrier.left_ns)
    left: dict[int, tuple[int, int]] = {}
    for index, barrier in enumerate(shared):
        for visit in barrier.visits:
            visit.previous, visit.from_ns = left.get(id(visit.lane), (-1, visit.lane.begin_ns))
            left[id(visit.lane)] = (index, visit.left_ns)
    end = Barrier(TRAINING_BEGAN)
    for lane in [lane for lane in lanes if lane.outcome == OK] or lanes:
        previous, from_ns = left.get(id(lane), (-1, lane.begin_ns))
        at_ns = max(lane.end_ns, from_ns)
        outcome = OK if lane.outcome in (OK, UNOBSERVED) else TRUNCATED  # none passes in a failed startup
        mark = Span(TRAINING_BEGAN, lane.node, lane.rank, 0, at_ns, at_ns, outcome, {})
        end.visits.append(Visit(lane, TRAINING_BEGAN, mark, at_ns, at_ns, previous, from_ns))
    return [*shared, end]


class Replay:
    """Evaluates the model without some nodes.

    The latest arrivals of the nodes at each barrier are kept in descending order. The maximum without some nodes is
    then the first entry that is not left out: an evaluation costs the number of nodes left out, not the number of
    lanes. That matters because many combinations of straggler groups among 1,440 nodes are evaluated.
    """

    def __init__(self, barriers: Sequence[Barrier]) -> None:
        self._barriers: list[tuple[int, dict[int, list[tuple[int, str]]]]] = []
        for barrier in barriers:
            latest: dict[int, dict[str, int]] = defaultdict(dict)
            for visit in barrier.visits:
                # The first barrier of a lane counts from the lane's begin, any other from the opening before it.
                took_ns = visit.work_ns + (visit.lane.begin_ns if visit.previous < 0 else 0)
                of_node = latest[visit.previous]
                of_node[visit.lane.node] = max(took_ns, of_node.get(visit.lane.node, took_ns))
            descending = {
                previous: sorted(((ns, node) for node, ns in of_node.items()), reverse=True)
                for previous, of_node in latest.items()
            }
            self._barriers.append((barrier.release_ns, descending))
        self._whole_ns = self.end_ns()

    def end_ns(self, without: Set[str] = _NOTHING) -> int | None:
        """When the job would have begun to train without some nodes; None if no node is left."""
        opened: list[int | None] = []
        for release_ns, descending in self._barriers:
            latest: int | None = None
            for previous, arrivals in descending.items():
                took_ns = next((ns for ns, node in arrivals if node not in without), None)
                if took_ns is not None:
                    arrival = took_ns + ((opened[previous] or 0) if previous >= 0 else 0)
                    latest = arrival if latest is None else max(latest, arrival)
            opened.append(None if latest is None else latest + release_ns)
        return opened[-1]

    def savings_ns(self, without: Set[str]) -> int:
        """How much sooner the job would have begun to train without these nodes."""
        rest_ns = self.end_ns(without)
        return 0 if self._whole_ns is None or rest_ns is None else max(self._whole_ns - rest_ns, 0)


def last_arrivals(barriers: list[Barrier]) -> dict[int, int]:
    """For each span that waits at a barrier, by `id(span)`, when the last participant arrived."""
    found = {}
    for barrier in barriers[:-1]:
        last_ns = barrier.last.at_ns
        for visit in barrier.visits:
            # A truncated span means that the barrier never opened for this lane: it waited to the end.
            found[id(visit.span)] = visit.span.end_ns if visit.span.outcome == TRUNCATED else last_ns
    return found

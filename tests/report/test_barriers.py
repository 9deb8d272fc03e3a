"""The barrier model against brute force: random jobs simulated in plain Python, with and without each node."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.report.analysis.barriers import Replay, barriers_of, last_arrivals
from bootseer.report.analysis.lanes import Lane, Visit
from bootseer.report.analysis.spans import TRUNCATED, Span
from bootseer.trace.event import OK

RELEASE = 3


@dataclass
class Job:
    """Nodes that start at some time, work, and meet at barriers; each barrier has its own group of nodes."""

    starts: list[int]
    work: list[list[int]]
    groups: list[list[int]]
    lanes: list[Lane] = field(default_factory=list)

    def play(self, left_out: frozenset[int] = frozenset()) -> int:
        """When the last node is done."""
        now = {node: start for node, start in enumerate(self.starts) if node not in left_out}
        spans: dict[int, list[Visit]] = {node: [] for node in now}
        lanes = {n: Lane(f"n{n}", n, self.starts[n], 0, OK, "first_step", "s", [], [], spans[n]) for n in now}
        for index, group in enumerate(self.groups):
            here = [node for node in group if node in now]
            for node in here:
                now[node] += self.work[node][index]
            opened = max((now[node] for node in here), default=0) + RELEASE
            for node in here:
                span = Span("s", f"n{node}", node, 1, now[node], opened, OK, {"barrier": f"b{index}"})
                spans[node].append(Visit(lanes[node], f"b{index}", span, now[node], opened))
                now[node] = opened
        self.lanes = []
        for node in list(now):
            now[node] = lanes[node].end_ns = now[node] + self.work[node][-1]
            self.lanes.append(lanes[node])
        return max(now.values())


@st.composite
def jobs(draw):
    num_nodes, num_barriers = draw(st.integers(2, 6)), draw(st.integers(0, 4))
    length = st.integers(0, 100)
    groups = [
        sorted(draw(st.sets(st.integers(0, num_nodes - 1), min_size=2, max_size=num_nodes)))
        for _ in range(num_barriers)
    ]
    starts = draw(st.lists(length, min_size=num_nodes, max_size=num_nodes))
    work = [draw(st.lists(length, min_size=num_barriers + 1, max_size=num_barriers + 1)) for _ in starts]
    return Job(starts, work, groups)


def whole_groups(job: Job) -> Job:
    """The same job with barriers of all nodes, for which the savings without a node are exact."""
    return Job(job.starts, job.work, [list(range(len(job.starts))) for _ in job.groups])


@given(jobs())
@settings(max_examples=400)
def test_the_model_gives_the_observed_end(job):
    """With barriers of all nodes and of overlapping groups, the replay with all nodes gives the observed end."""
    end = job.play()
    assert Replay(barriers_of(job.lanes)).end_ns() == end


@given(jobs(), st.data())
@settings(max_examples=400)
def test_leaving_nodes_out_is_what_the_job_without_them_takes(job, data):
    job = whole_groups(job)
    whole = job.play()
    found = barriers_of(job.lanes)
    most = len(job.starts) - 1
    out = frozenset(data.draw(st.sets(st.integers(0, most), min_size=1, max_size=most)))
    names = frozenset(f"n{node}" for node in out)
    rest = Job(job.starts, job.work, job.groups).play(out)
    assert Replay(found).end_ns(names) == rest
    assert Replay(found).savings_ns(names) == whole - rest


@given(jobs())
def test_the_last_to_arrive_does_not_wait(job):
    job.play()
    found = barriers_of(job.lanes)
    assert [barrier.name for barrier in found][-1] == "training_began"
    latest = last_arrivals(found)
    for lane in job.lanes:
        for arrival in lane.arrivals:
            index = int(arrival.barrier[1:])
            group = [a.at_ns for other in job.lanes for a in other.arrivals if a.barrier == f"b{index}"]
            assert latest[id(arrival.span)] == max(group)


def test_leaving_out_everybody_leaves_no_end():
    job = Job([0, 5], [[1, 1], [2, 2]], [[0, 1]])
    job.play()
    found = barriers_of(job.lanes)
    assert Replay(found).end_ns(frozenset({"n0", "n1"})) is None
    assert Replay(found).savings_ns(frozenset({"n0", "n1"})) == 0


def test_different_stragglers_mask_each_other():
    """n0 is late by 30 at the first barrier, n1 by 20 at the second: without one of them, only its delay is saved."""
    job = Job([0, 0, 0, 0], [[40, 5, 5], [10, 25, 5], [10, 5, 5], [10, 5, 5]], [[0, 1, 2, 3], [0, 1, 2, 3]])
    job.play()
    found = barriers_of(job.lanes)
    assert [barrier.last.lane.node for barrier in found[:2]] == ["n0", "n1"]
    saved = [Replay(found).savings_ns(frozenset(names)) for names in ({"n0"}, {"n1"}, {"n0", "n1"}, {"n2"})]
    assert saved == [30, 20, 50, 0]


def test_a_node_that_never_leaves_a_barrier_waits_to_its_end():
    span = Span("s", "n0", 0, 1, 10, 90, TRUNCATED, {"barrier": "b"})
    other = Span("s", "n1", 1, 1, 20, 90, TRUNCATED, {"barrier": "b"})
    lanes = [Lane(s.node, s.rank, 0, 90, "truncated", "last_event", "s", [s], []) for s in (span, other)]
    for lane in lanes:
        lane.arrivals.append(Visit(lane, "b", lane.spans[0], lane.spans[0].begin_ns, 90))
    assert last_arrivals(barriers_of(lanes)) == {id(span): 90, id(other): 90}


def test_a_launcher_that_waits_for_all_ranks_of_one_node_is_no_barrier():
    span = Span("s", "n0", -1, 1, 10, 20, OK, {"barrier": "rendezvous"})
    lanes = [Lane("n0", rank, 0, 50 + rank, OK, "first_step", "s", [span], []) for rank in range(8)]
    for lane in lanes:
        lane.arrivals.append(Visit(lane, "rendezvous", span, 10, 20))
    (only,) = barriers_of(lanes)
    assert (only.name, only.last.lane.rank) == ("training_began", 7)

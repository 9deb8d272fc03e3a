"""The analysis of generated fleets, compared with the generator's truth. The generator shares no code with it."""

from __future__ import annotations

import random
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.report.analysis.compose import analyse
from bootseer.report.analysis.prepare import Options
from bootseer.report.inputs import Source
from bootseer.report.log_scan import scan
from bootseer.report.model import Report
from bootseer.trace.event import decode
from bootseer.units import format_hours
from fleet import BARRIERS, DEFAULT_WORK, EPOCH_NS, INSTALL, NS, RELEASE_S, Fleet, slow_installs

pytestmark = pytest.mark.slow


def report_of(*fleets: Fleet, **options: object) -> Report:
    events = [decode(line) for fleet in fleets for line in fleet.lines()]
    return analyse(events, Options(**options))  # type: ignore[arg-type]


def stage(report: Report, name: str):
    return next(row for row in report.stages if row.stage == name)


def test_the_papers_1440_nodes(tmp_path):
    """99 % of the installs end by 60 s, the last 1 % at 92 s: Max/Median and GPU-hours lost, from a file."""
    fleet = slow_installs()
    path = tmp_path / "fleet.log"
    path.write_bytes(b"".join(fleet.lines()))
    found = scan([Source(str(path), path)])
    report = analyse(found.events, Options(price_per_gpu_hour=2.0), read=found.input())
    install = stage(report, INSTALL)
    assert install.max_s == pytest.approx(92.0, abs=1e-3)
    assert install.max_over_median >= 1.53
    (group,) = report.straggler_groups
    assert (group.stage, len(group.nodes)) == (INSTALL, 14)
    assert {int(name[5:]) for name in group.nodes} == set(range(1426, 1440))
    # Without the fourteen, all others begin 32 s earlier: 1,426 nodes x 8 GPUs x 32 s.
    assert group.savings_s == pytest.approx(32.0, abs=1.0)
    assert group.savings_gpu_hours == pytest.approx(101.4, rel=0.03)
    assert group.savings_cost == pytest.approx(2 * group.savings_gpu_hours)
    assert report.critical_chain[0].stage == INSTALL
    assert "14 nodes" in report.verdict
    assert report.overhead.startup_s == pytest.approx(fleet.end_s, abs=0.01)
    assert report.startup.scale == ">3000"


def test_waiting_is_distinguished_from_work():
    fleet = Fleet(20, work_of={(3, INSTALL): 100.0})
    report = report_of(fleet)
    for node in report.nodes:
        # The trailing wait at the end of the first step and the waits at the barriers, as the generator simulated them.
        assert node.wait_s == pytest.approx(fleet.waited_s[int(node.node[5:])], abs=0.005)


def test_totals_equal_wall_time():
    fleet = Fleet(12, ranks_per_node=2, seed=5)
    for node in report_of(fleet).nodes:
        wall = node.end_s - node.start_s
        assert node.work_s + node.wait_s + node.untracked_s == pytest.approx(wall, rel=1e-6)
        assert wall == pytest.approx(fleet.end_s - fleet.queue_s, rel=0.01)
        edges = [(segment.start_s, segment.end_s) for segment in node.segments]
        assert all(a[1] == pytest.approx(b[0], abs=1e-9) for a, b in pairwise(edges))


def test_26_startups_in_21_hours():
    """About 17 % of the wall time of a job of nearly 5,000 GPUs, at 501 s each."""
    wall_s = 21 * 3600
    work = (("image_loading", 100.0, 0.5), (INSTALL, 251.0, 0.5), ("first_step", 150.0, 0.5))
    fleets = [Fleet(25, 200, attempt=n, begin_s=n * wall_s / 26, queue_s=0.0, work=work, seed=n) for n in range(26)]
    events = [event for fleet in fleets for event in fleet.events()]
    # The last run of the job ends when the 21 hours are over.
    last = events[-1]
    end_ns = fleets[0].events()[0].wall_ns + wall_s * 10**9
    events.append(last._replace(stage="run", phase="end", wall_ns=end_ns, mono_ns=end_ns - last.wall_ns + last.mono_ns))
    report = analyse(events, Options())
    assert report.share is not None
    assert report.share.num_startups == 26
    assert report.share.startup_s / 26 == pytest.approx(501, abs=1.5)
    assert report.share.share == pytest.approx(0.17, abs=0.01)
    assert report.share.gpu_hours == pytest.approx(26 * 501 * 5000 / 3600, rel=0.01)
    assert [overview.attempt for overview in report.startups] == list(range(26))


def test_clocks_off_by_seconds_change_nothing():
    off = {n: (-1) ** n * (1.5 + n) for n in range(0, 16, 3)}
    straight, skewed = Fleet(16, work_of={(7, INSTALL): 75.0}), Fleet(16, work_of={(7, INSTALL): 75.0}, clock_off_s=off)
    a, b = report_of(straight), report_of(skewed)
    assert [row.node for row in b.stragglers] == [row.node for row in a.stragglers] == ["node-0007"]
    assert b.overhead.startup_s == pytest.approx(a.overhead.startup_s, abs=0.2)
    for node in b.nodes:
        index = int(node.node[5:])
        assert node.clock_offset_s == pytest.approx(off.get(index, 0.0), abs=RELEASE_S)
    assert any("clocks differ" in line and "from their median" in line for line in b.headlines)


LONE = tuple(row for row in DEFAULT_WORK if row[0] not in BARRIERS)
"""Stages of a fleet without barriers, so that nothing relates the nodes' clocks."""


@pytest.mark.parametrize(
    ("off_s", "words"), [(-EPOCH_NS / NS, "56.7 years"), (5 * 3600, "5 h 00 min"), (-9e5, "10 days")]
)
def test_a_clock_that_nothing_ties_is_left_out_of_the_sums(off_s, words):
    right, wrong = report_of(Fleet(8, work=LONE)), report_of(Fleet(8, work=LONE, clock_off_s={5: off_s}))
    assert wrong.startup.zero_ns == right.startup.zero_ns
    assert [node.node for node in wrong.nodes] == [node.node for node in right.nodes if node.node != "node-0005"]
    assert wrong.overhead.startup_s == pytest.approx(right.overhead.startup_s, abs=1)
    assert wrong.overhead.gpu_hours == pytest.approx(right.overhead.gpu_hours * 7 / 8, rel=0.01)
    assert (wrong.coverage.nodes_heard, list(wrong.clock.left_out)) == (8, ["node-0005"])
    assert any(f"node-0005 by {words}" in line for line in wrong.headlines), wrong.headlines


def test_a_clock_that_a_barrier_ties_may_be_off_by_years():
    fleet = Fleet(8, clock_off_s={5: -EPOCH_NS / NS})
    report = report_of(fleet)
    assert (len(report.nodes), report.clock.left_out) == (8, {})
    assert report.overhead.startup_s == pytest.approx(fleet.end_s, abs=0.1)
    assert any("differ by up to 56.7 years" in line for line in report.headlines)


def test_the_startups_of_a_job_stay_in_order_with_a_clock_of_1970():
    first = Fleet(4, work=LONE)
    second = Fleet(4, work=LONE, attempt=1, begin_s=1000, clock_off_s={2: -EPOCH_NS / NS})
    report = report_of(first, second)
    assert report.startup.attempt == 1
    assert report.share.wall_s == pytest.approx(1000 + second.end_s - 1000, abs=1)


def test_clocks_that_were_never_set_are_reported():
    report = report_of(Fleet(4, clock_off_s=dict.fromkeys(range(4), -EPOCH_NS / NS)))
    assert len(report.nodes) == 4
    assert any("clocks were never set" in line for line in report.headlines)


def test_a_clock_that_jumps_back_changes_no_duration():
    fleet = Fleet(8, clock_step={2: (INSTALL, -90.0)})
    report = report_of(fleet)
    assert report.clock.steps == ["node-0002"]
    assert stage(report, INSTALL).max_s < 61
    assert all(segment.end_s >= segment.start_s for node in report.nodes for segment in node.segments)


def test_silent_nodes_are_a_headline():
    report = report_of(Fleet(50, silent=frozenset({4, 9})))
    assert (report.coverage.nodes_heard, report.coverage.nodes_expected) == (48, 50)
    assert "48 of 50 nodes" in report.headlines[0]


@pytest.mark.parametrize("killed", ["image_loading", INSTALL, "model_initialization.checkpoint_read"])
def test_sigkill_is_truncated_and_kept_out_of_medians(killed):
    fleet = Fleet(10, killed_in={6: killed})
    report = report_of(fleet)
    row = stage(report, killed)
    assert row.num_truncated == 1
    usual = {name: seconds for name, seconds, _ in fleet.work}[killed]
    assert row.median_s == pytest.approx(usual, abs=0.5)
    node = next(node for node in report.nodes if node.node == "node-0006")
    assert (node.outcome, node.last_stage) == ("truncated", killed)
    assert any("node-0006" in line for line in report.headlines)
    assert report.startup.outcome == "truncated"


def test_sigkill_in_the_first_step_leaves_the_others_whole():
    report = report_of(Fleet(10, killed_in={6: "first_step"}))
    assert report.startup.outcome == "training_began"
    assert stage(report, "first_step").num_truncated == 1
    assert next(node for node in report.nodes if node.node == "node-0006").outcome == "truncated"


def test_attempts_and_kinds_are_kept_apart():
    first, second = Fleet(5, attempt=0), Fleet(5, attempt=1, begin_s=1000, work_of={(0, INSTALL): 10.0})
    report = report_of(first, second)
    assert report.startup.attempt == 1
    assert report.overhead.startup_s == pytest.approx(second.end_s - 1000, abs=0.01)
    assert report_of(first, second, attempt=0).overhead.startup_s == pytest.approx(first.end_s, abs=0.01)


def test_leave_one_out_is_exact():
    """The model's time for a job without its slowest node is the time of the simulated job without it."""
    slow = {(2, INSTALL): 90.0, (5, "model_initialization.checkpoint_read"): 50.0, (2, "first_step"): 9.0}
    fleet = Fleet(9, work_of=slow, seed=3)
    report = report_of(fleet)
    saved = {row.node: row.savings_s for row in report.stragglers}
    work = {stage: {} for stage, _, _ in fleet.work}
    for node in report.nodes:
        for segment in node.segments:
            if segment.kind == "work" and segment.stage in work:
                lengths = work[segment.stage]
                lengths[int(node.node[5:])] = lengths.get(int(node.node[5:]), 0.0) + segment.end_s - segment.start_s
    for name, left_out in (("node-0002", 2), ("node-0005", 5)):
        rest = {
            (new, stage): work[stage][old]
            for stage in work
            if not stage.endswith(("process_group", "collective"))
            for new, old in enumerate(n for n in range(9) if n != left_out)
        }
        without = Fleet(8, work_of=rest)
        without.lines()
        assert saved[name] == pytest.approx(fleet.end_s - without.end_s, abs=0.02)


def test_no_straggler_is_called_on_noise():
    for seed in range(5):
        report = report_of(Fleet(64, seed=seed))
        assert report.stragglers == []


def test_few_nodes_are_no_crowd():
    report = report_of(Fleet(2, work_of={(1, INSTALL): 80.0}))
    assert report.stragglers == []
    assert report.critical_chain[0].node == "node-0001"
    assert report.critical_chain[0].stage == INSTALL


def test_unknown_gpus_are_unobserved_and_not_zero():
    events = [decode(line) for line in Fleet(4).lines()]
    events = [event._replace(attrs={}) if event.stage == "run" else event for event in events]
    assert analyse(events, Options()).overhead.gpu_hours is None
    report = analyse(events, Options(gpus_per_node=4, price_per_gpu_hour=3.0))
    assert report.overhead.gpu_hours == pytest.approx(4 * 4 * median(n.end_s - n.start_s for n in report.nodes) / 3600)
    assert report.overhead.cost == pytest.approx(3 * report.overhead.gpu_hours)


def test_duplicates_are_dropped_and_order_is_free():
    events = [decode(line) for line in Fleet(6, seed=2).lines()]
    shuffled = events * 2
    random.Random(1).shuffle(shuffled)
    a, b = analyse(events, Options()).to_json(), analyse(shuffled, Options()).to_json()
    assert b["input"]["duplicates"] == len(events)
    a.pop("input"), b.pop("input")
    assert a == b


READ = "model_initialization.checkpoint_read"


def test_groups_that_mask_each_other_are_shown_together():
    """Seven nodes lose 53 s in one stage, fourteen 38 s in another: without one group, 15 s or nothing is saved."""
    work = {(n, "image_loading"): 83.0 for n in range(100, 107)} | {(n, INSTALL): 98.0 for n in range(200, 214)}
    report = report_of(Fleet(288, work_of=work), price_per_gpu_hour=2.0)
    first, second = report.straggler_groups
    assert (first.stage, len(first.nodes), second.stage, len(second.nodes)) == ("image_loading", 7, INSTALL, 14)
    assert (first.savings_s, second.savings_s) == (pytest.approx(15, abs=1), pytest.approx(0, abs=1e-6))
    assert (first.next_s, second.next_s) == (pytest.approx(15, abs=1), pytest.approx(38, abs=1))
    assert second.joint_s == pytest.approx(first.next_s + second.next_s) == pytest.approx(53, abs=1)
    assert second.joint_gpu_hours == pytest.approx(second.joint_s * 8 * (288 - 21) / 3600)
    assert second.joint_cost == pytest.approx(2 * second.joint_gpu_hours)
    told = f"21 nodes delayed the others by {second.joint_s:.1f} s in total, mainly 14 nodes in {INSTALL}"
    assert told in report.verdict
    assert f"= {format_hours(second.joint_gpu_hours)} GPU-hours = $" in report.verdict


slow_stages = st.sampled_from(["image_loading", INSTALL, READ, "first_step"])


@given(
    slow=st.lists(st.tuples(slow_stages, st.integers(1, 3), st.integers(15, 60)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_savings_of_groups_are_those_of_a_job_without_them(slow, seed):
    """Alone, in their order and together, compared with the generator's simulation of the fleet without these nodes."""
    rng = random.Random(seed)
    work = {
        (node, name): base_s + rng.uniform(-jitter_s, jitter_s)
        for node in range(16)
        for name, base_s, jitter_s in DEFAULT_WORK
        if name not in BARRIERS
    }
    late = iter(rng.sample(range(16), 16))
    for name, count, late_s in slow:
        for _ in range(count):
            work[next(late), name] += late_s

    def end_s(without: set[str]) -> float:
        number = {old: new for new, old in enumerate(n for n in range(16) if f"node-{n:04d}" not in without)}
        rest = Fleet(len(number), work_of={(number[n], s): length for (n, s), length in work.items() if n in number})
        rest.lines()
        return rest.end_s

    groups = report_of(Fleet(16, work_of=work)).straggler_groups
    whole, out, before = end_s(set()), set(), 0.0
    for index, group in enumerate(groups):
        assert group.savings_s == pytest.approx(whole - end_s(set(group.nodes)), abs=1e-5)
        others = [whole - end_s(out | set(other.nodes)) for other in groups[index:]]
        out |= set(group.nodes)
        assert group.joint_s == pytest.approx(whole - end_s(out), abs=1e-5) == pytest.approx(max(others), abs=1e-5)
        assert group.next_s == pytest.approx(group.joint_s - before, abs=1e-6)
        before = group.joint_s


RACKED = [f"r{node // 8:02d}-n{node % 8}" for node in range(64)]


@pytest.mark.parametrize(
    ("slow", "fleet", "told"),
    [
        (range(16, 23), {"names": RACKED}, [("name", "r02-n", 7, 8)]),
        ([*range(16, 22), *range(40, 47)], {"names": RACKED}, [("name", "r05-n", 7, 8), ("name", "r02-n", 6, 8)]),
        ([*range(16, 22), 60], {"facts_of": {n: {"rack": n // 8} for n in range(64)}}, [("rack", "2", 6, 8)]),
        (
            range(16, 32),
            {"facts_of": {n: {"topology": f"s0.s{n // 16}.s{n // 8}"} for n in range(64)}},
            [("topology", "s0.s1", 16, 16)],
        ),
        ([3, 13, 23, 33, 43, 53], {"names": RACKED}, []),
        ([3, 4], {"names": RACKED}, []),
        (range(16, 23), {}, []),
    ],
)
def test_what_slow_nodes_have_in_common(slow, fleet, told):
    """A rack or a name prefix if it explains them, and nothing if it is chance."""
    report = report_of(Fleet(64, work_of={(node, INSTALL): 90.0 for node in slow}, **fleet))
    (group,) = report.straggler_groups
    assert [(p.kind, p.value, p.num_slow, p.num_nodes) for p in group.places] == told
    where = "" if not told else f"({'' if told[0][0] == 'name' else told[0][0] + ' '}{told[0][1]}"
    assert where in report.verdict

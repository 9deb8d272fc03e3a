"""Pairing of events: forged, doubled, missing and restarted ones; each gives what can be known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.report.analysis.compose import analyse
from bootseer.report.analysis.prepare import Options
from bootseer.trace.event import INSTANT, KINDS, PHASES, Event
from startups import EPOCH_S, NS, began, moment, report, row, span

TORCH = "model_initialization.import_torch"
INSTALL = "environment_setup.install"
INT64 = st.sampled_from([-(2**63), -1, 0, 1, 10**18, 2**63 - 1])


@st.composite
def forged(draw):
    return Event(
        wall_ns=draw(INT64),
        mono_ns=draw(INT64),
        job="j",
        node=draw(st.sampled_from(["n0", "n1", "\x1b[2J<b>\n"])),
        stage=draw(st.sampled_from(["run", "command", "queue", "first_step", "a.b", "a", "training_began", INSTALL])),
        phase=draw(st.sampled_from(sorted(PHASES))),
        span=draw(st.sampled_from(["1", "2", "3"])),
        attempt=draw(st.sampled_from([0, 1, 2**62])),
        restart=draw(st.sampled_from([0, 1])),
        kind=draw(st.sampled_from([*KINDS, "odd"])),
        rank=draw(st.sampled_from([-1, -7, 0, 10**9])),
        parent=draw(st.sampled_from(["", "1", "2", "3"])),
        outcome=draw(st.sampled_from(["", "ok", "failed"])),
        pid=draw(st.sampled_from([0, 1, 2, -1])),
        attrs=draw(
            st.dictionaries(
                st.sampled_from(["barrier", "gpus", "num_nodes", "world_size", "bytes", "background", "by"]),
                st.sampled_from([None, True, "x", "", -1, 8, 10**30, 1.5, "b#1"]),
                max_size=4,
            )
        ),
    )


@given(st.lists(forged(), min_size=1, max_size=25))
@settings(max_examples=300)
@pytest.mark.slow
def test_forged_events_give_a_report_that_adds_up(events):
    result = analyse(events, Options())
    result.to_json()
    for node in result.nodes:
        wall = node.end_s - node.start_s
        assert wall >= 0
        assert node.work_s + node.wait_s + node.untracked_s == pytest.approx(wall, rel=1e-6, abs=1e-3)
    assert result.verdict


def test_a_rotated_log_may_hold_ends_alone():
    result = report([span(0, 5, INSTALL)[1]])
    assert (result.startup.num_nodes, result.overhead.node_level_median_s) == (1, None)
    assert "only instants" in result.verdict


def test_begin_and_end_twice_and_the_end_before_the_begin():
    begin, end = span(10, 14, INSTALL)
    late = end._replace(mono_ns=end.mono_ns + 10**9, wall_ns=end.wall_ns + 10**9)
    again = begin._replace(mono_ns=begin.mono_ns + 10**9, wall_ns=begin.wall_ns + 10**9)
    assert row(report([late, end, again, begin]), INSTALL).work_s == pytest.approx(4)
    turned = [begin._replace(phase="end", outcome="ok"), end._replace(phase="begin", outcome="")]
    rows = report(turned, span(0, 1, "a"), span(20, 21, "a")).stages
    assert [(row.work_s, row.num_truncated) for row in rows if row.stage == INSTALL] in ([], [(0, 0)])


def test_one_span_id_on_two_nodes_is_two_spans():
    result = report(span(0, 4, INSTALL, span="7", node="a"), span(1, 9, INSTALL, span="7", node="b"))
    assert row(result, INSTALL).work_s == pytest.approx(4 + 8)


def test_what_a_restart_left_open_ends_before_the_next_one():
    """The `run` around both continues for ten hours, unlike the dead process."""
    first = span(0, 36_000, "run") + span(0, 10, "environment_setup") + span(10, 36_000, "command")
    dead = span(10, None, TORCH, rank=0, pid=5)
    again = {"rank": 0, "pid": 6, "restart": 1, "kind": "restart"}
    second = span(30, 35, TORCH, **again) + span(35, 40, "first_step", **again) + began(40, **again)
    told = report(first, dead, second)
    assert (told.startup.restart, told.overhead.startup_s) == (1, pytest.approx(10))
    assert told.share.startup_s == pytest.approx(30 + 10)
    failed = report(first, dead, second, restart=0)
    assert failed.overhead.startup_s == pytest.approx(30)
    assert row(failed, TORCH).num_truncated == 1


def test_what_is_cut_short_after_training_began_is_none_of_the_startup():
    result = report(
        span(0, None, "run", attrs={"gpus": 8}),
        span(0, 10, INSTALL),
        span(10, 13, "first_step", rank=0, pid=5),
        began(13, rank=0, pid=5),
        span(36_000, None, "model_initialization.checkpoint_read", rank=0, pid=5),
    )
    assert [row.stage for row in result.stages] == ["environment_setup", INSTALL, "first_step"]
    assert result.overhead.gpu_hours == pytest.approx(13 * 8 / 3600)
    assert not result.headlines


def test_a_lost_rank_does_not_make_the_startup_as_long_as_the_job():
    """Rank 1 left a span open; the log continues for ten hours after the first step."""
    result = report(
        span(0, 36_000, "run", attrs={"gpus": 2}),
        span(5, 8, "first_step", rank=0, pid=5),
        began(8, rank=0, pid=5),
        span(5, None, TORCH, rank=1, pid=6),
    )
    (node,) = result.nodes
    assert (node.outcome, node.end_s) == ("truncated", pytest.approx(8))
    assert result.overhead.gpu_hours == pytest.approx(2 * 8 / 3600)


def _start(node, rank, from_s, *, restart=0):
    place = {"node": node, "rank": rank, "pid": from_s + 1, "restart": restart}
    return [*span(from_s, from_s + 30, TORCH, **place), *began(from_s + 30, **place)]


def _run(node, from_s):
    return span(from_s, 9000, "run", node=node, attrs={"gpus": 8, "num_nodes": 2})


@pytest.mark.parametrize(("new", "left"), [("c", "ab"), ("b", "a")])
def test_a_replaced_node_belongs_to_the_restart_that_waited_for_it(new, left):
    """A torchrun agent counts only its own restarts: on a new or rebooted node it begins at 0."""
    first = _run("a", 0) + _start("a", 0, 10) + _run("b", 0) + _start("b", 1, 10)
    second = _start("a", 0, 3700, restart=1) + _run(new, 3680) + _start(new, 1, 3700)
    third = _start("a", 0, 7200, restart=2) + _start(new, 1, 7200, restart=1)
    for restart, startup_s, nodes in ((0, 40, left), (1, 50, "a" + new), (2, 30, "a" + new)):
        told = report(first, second, third, restart=restart)
        assert told.overhead.startup_s == pytest.approx(startup_s)
        assert "".join(node.node for node in told.nodes) == nodes
        assert any("started 2 times" in line for line in told.headlines) == (new == "b" and restart == 1)
    assert told.share.startup_s == pytest.approx(40 + 50 + 30)
    assert told.overhead.gpu_hours == pytest.approx(2 * 8 * 30 / 3600)


def test_two_replaced_nodes_belong_to_one_restart_whatever_follows():
    """Their own counts are lower by one in each later restart; neither must become a separate start of one node."""
    first = [_run(node, 0) + _start(node, rank, 10) for rank, node in enumerate("abc")]
    second = [_start("a", 0, 3700, restart=1), _run("d", 3680), _start("d", 1, 3700), _run("e", 3690)]
    second += [_start("e", 2, 3705), _start("a", 0, 7000, restart=2), _start("e", 2, 7000, restart=1)]
    third = [_run("f", 6990), _start("f", 1, 7000)]  # replaces d, which was a replacement itself
    for restart, nodes in ((0, "abc"), (1, "ade"), (2, "aef")):
        told = report(*first, *second, *third, restart=restart)
        assert "".join(node.node for node in told.nodes) == nodes
    assert len(told.startups) == 3


def test_nodes_that_start_while_others_train_are_another_start():
    """When the launcher counted no restart, or the scheduler's second try has the same attempt number."""
    first = _run("a", 0) + _start("a", 0, 10) + _run("b", 0) + _start("b", 1, 10)
    second = _run("c", 3680) + _start("c", 0, 3700) + _run("d", 3690) + _start("d", 1, 3700)
    for restart, startup_s, nodes in ((0, 40, "ab"), (1, 50, "cd")):
        told = report(first, second, restart=restart)
        assert (told.overhead.startup_s, told.headlines) == (pytest.approx(startup_s), [])
        assert "".join(node.node for node in told.nodes) == nodes


def test_new_starts_are_numbered_by_their_time():
    """Tries of one attempt on new pods, the last of which restarts in place; files are read in order of node names."""
    tries = [_run("m", 0) + _start("m", 0, 10), _run("z", 5000) + _start("z", 0, 5010)]
    tries += [_run("a", 6000) + _start("a", 0, 6010) + _start("a", 0, 7000, restart=1)]
    told = report(*reversed(tries))
    assert [one.restart for one in told.startups] == [0, 1, 2, 3]
    assert [one.begin_ns // NS - EPOCH_S for one in told.startups] == [0, 5000, 6000, 7000]
    assert (told.startup.restart, [node.node for node in told.nodes]) == (3, ["a"])


def test_a_second_run_in_an_allocation_did_not_wait_for_it():
    """A loop of `srun` in a job's script: the scheduler's times belong to the first run, and the first run's training
    is not part of the second run's start."""

    def run(from_s, name):
        times = span(-600, 0, "queue", parent=name) + span(0, from_s, "allocation", parent=name)
        return span(from_s, from_s + 9000, "run", span=name, attrs={"gpus": 8}) + times + began(from_s + 30)

    first, second = run(5, "a" * 16), run(18_000, "b" * 16)
    assert report(first).overhead.job_level_s == pytest.approx(635)
    told = report(first, second)
    assert (told.overhead.startup_s, told.scheduler) == (pytest.approx(30), [])
    assert told.overhead.job_level_s is None


def test_a_reused_attempt_tells_the_last_run():
    old = span(0, 50, "run") + span(0, 40, INSTALL)
    new = span(100, 200, "run") + span(100, 103, INSTALL) + span(103, 105, "first_step") + began(105)
    result = report(old, new)
    assert result.overhead.startup_s == pytest.approx(5)
    assert any("started 2 times" in line for line in result.headlines)


def test_a_reused_attempt_is_not_ended_by_restarts_of_the_run_before():
    """Jobs with a fixed attempt number, as in the examples for Kubernetes, are started again under the same number."""
    again = {"restart": 1, "kind": "restart"}
    old = span(0, 90, "run") + span(0, 90, "command") + span(40, 41, "restart", **again) + began(60, **again)
    new = span(100, 191, "run", outcome="failed") + span(102, 190, "command", outcome="failed")
    result = report(old, new)
    assert (result.startup.outcome, result.overhead.startup_s) == ("failed", pytest.approx(90))
    assert len(result.startups) == 1


def test_srun_starts_one_run_for_each_rank():
    """Eight runs at once are not reuse of an attempt, and each rank's setup counts as its work."""
    parts = []
    for rank in range(8):
        own = {"rank": rank, "pid": 10 + rank}
        parts += [
            span(rank / 100, 500, "run", attrs={"gpus": 8}, **own),
            span(1, 21, INSTALL, **own),
            span(21, 500, "command", **own),
            span(22, 25, TORCH, rank=rank, pid=100 + rank),
            span(25, 30, "first_step", rank=rank, pid=100 + rank),
            began(30, rank=rank, pid=100 + rank),
        ]
    result = report(*parts)
    assert not result.headlines
    assert row(result, INSTALL).work_s == pytest.approx(20)
    assert {row.stage for row in result.stages}.isdisjoint({"run", "command"})
    assert result.overhead.gpu_hours == pytest.approx(30 * 8 / 3600)


@pytest.mark.parametrize(
    ("devices", "gpus"),
    [(["0", "1", "2", "3"], 4), (["0,1", "2,3"], 4), (["0,1", "0,1"], 2), ([None, "1"], 1), (["3"], 1)],
)
def test_ranks_with_runs_of_their_own_use_the_gpus_of_all(devices, gpus):
    parts = []
    for rank, some in enumerate(devices):
        own = {"rank": rank, "pid": 10 + rank}
        attrs = {"gpus": len(some.split(",")) if some else 1} | ({"devices": some} if some else {})
        parts += [span(rank / 100, 500, "run", attrs=attrs, **own), began(30, rank=rank, pid=100 + rank)]
    assert report(*parts).startup.num_gpus == gpus


def test_two_boots_have_two_monotonic_clocks():
    first = span(0, 10, "image_loading", booted_s=-500_000)
    second = span(400, 410, "first_step", booted_s=350) + began(410, booted_s=350)
    assert report(first, second).overhead.startup_s == pytest.approx(410)


@pytest.mark.parametrize("step_s", [-86_400, -7200, -90, 90, 7200, -EPOCH_S])
def test_a_step_of_the_wall_clock_within_a_span_is_no_work(step_s):
    before = {"booted_s": -1e6}
    after = {**before, "clock_s": step_s}
    begin, end = span(0, 10, INSTALL, span="5", **before)[0], span(0, 10, INSTALL, span="5", **after)[1]
    result = report([begin, end], span(10, 12, "first_step", **after), began(12, **after))
    assert row(result, INSTALL).work_s == pytest.approx(10)
    assert result.overhead.startup_s == pytest.approx(12)
    assert result.clock.steps == ["n0"]


def test_a_clock_that_is_set_during_the_startup_is_no_other_boot():
    """A machine without a clock battery begins in 1970; NTP sets its clock a minute later."""
    early, late = {"booted_s": -60, "clock_s": -EPOCH_S}, {"booted_s": -60}
    begin, end = span(0, 70, INSTALL, span="5", **early)[0], span(0, 70, INSTALL, span="5", **late)[1]
    result = report([begin, end], span(70, 72, "first_step", **late), began(72, **late))
    assert result.overhead.startup_s == pytest.approx(72)
    assert result.startup.zero_ns == EPOCH_S * 10**9
    assert result.clock.steps == ["n0"]


@pytest.mark.parametrize("step_s", [-2e6, -7200, 7200, 4e8])
@pytest.mark.parametrize("ends", [True, False], ids=["ended", "alive"])
def test_a_step_that_exceeds_the_uptime_is_no_other_boot(step_s, ends):
    """A machine that has just booted had its clock in local time. No process survives a reboot."""
    early, late = {"booted_s": -60}, {"booted_s": -60, "clock_s": step_s}
    run = span(0, 20, "run", span="7", **early)[0]
    last = span(0, 20, "run", span="7", **late)[1] if ends else moment(20, "alive", parent="7", **late)
    stages = [span(0, 5, "image_loading", **early), span(5, 10, INSTALL, **late), span(10, 12, "first_step", **late)]
    result = report([run, last], *stages, began(12, **late))
    assert row(result, "image_loading").work_s == pytest.approx(5)
    assert result.overhead.startup_s == pytest.approx(12)
    assert result.clock.steps == ["n0"]


@pytest.mark.slow
def test_ten_thousand_ranks_on_one_node_take_linear_time():
    parts = [span(0, 5, "first_step", rank=rank, pid=rank + 2) for rank in range(10_000)]
    result = report(span(0, 1, "environment_setup"), *parts)
    assert (result.startup.num_nodes, result.startup.num_ranks) == (1, 10_000)


def test_instants_alone_are_no_time():
    result = report([moment(0, "bound", INSTANT)])
    assert result.overhead.node_level_median_s is None


def test_steps_of_one_allocation_do_not_make_more_nodes_than_expected() -> None:
    """Each states its own number of nodes. In the service, the excess would hide the missing nodes of other starts."""
    steps = [span(0, 5, "run", node=node, attrs={"num_nodes": 1}) for node in "ab"]
    coverage = report(*steps).coverage
    assert (coverage.nodes_heard, coverage.nodes_expected) == (2, 2)

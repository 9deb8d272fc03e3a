"""Unusual startups with known results."""

from __future__ import annotations

import itertools

import pytest

from startups import began, moment, report, row, span

INSTALL = "environment_setup.install"
TORCH = "model_initialization.import_torch"
READ = "model_initialization.checkpoint_read"


def node_names(count: int) -> list[str]:
    return [f"n{index}" for index in range(count)]


def test_install_spans_alone_tell_max_over_median_and_lost_gpu_hours():
    """No barrier, no hook: 18 nodes install for 60 s, two for 92 s."""
    parts = []
    for index, node in enumerate(node_names(20)):
        seconds = 92 if index in (3, 7) else 60
        parts += [span(0, seconds + 1, "run", node=node, attrs={"gpus": 8}), span(0, seconds, INSTALL, node=node)]
    result = report(*parts, price_per_gpu_hour=3.0)
    install = row(result, INSTALL)
    assert (install.median_s, install.max_s) == (pytest.approx(60), pytest.approx(92))
    assert install.max_over_median == pytest.approx(92 / 60)
    assert result.overhead.wait_gpu_hours == pytest.approx(18 * 32 * 8 / 3600)
    assert result.overhead.wait_cost == pytest.approx(3 * 18 * 32 * 8 / 3600)
    assert result.overhead.gpu_hours == pytest.approx(20 * 92 * 8 / 3600)
    assert {row.node for row in result.stragglers} == {"n3", "n7"}
    ledger = sum(row.gpu_hours for row in result.stages if row.depth == 0)
    assert ledger == pytest.approx(result.overhead.gpu_hours)


def test_ranks_in_two_overlapping_groups():
    """Six nodes in pairs, then in other pairs; only n0's partners wait for its slow read."""
    now = dict.fromkeys(node_names(6), 10.0)
    parts = [span(0, None, "run", node=node, attrs={"gpus": 8}) for node in now] + [
        span(0, 10, INSTALL, node=node) for node in now
    ]
    waited = dict.fromkeys(now, 0.0)
    for turn, pairs in enumerate((((0, 1), (2, 3), (4, 5)), ((1, 2), (3, 4), (5, 0)))):
        for group, pair in enumerate(pairs):
            names = [f"n{index}" for index in pair]
            for name in names:
                work = 40.0 if (name, turn) == ("n0", 0) else 5.0
                parts.append(span(now[name], now[name] + work, READ, node=name, rank=int(name[1]), pid=9))
                now[name] += work
            latest = max(now[name] for name in names)
            for name in names:
                attrs = {"barrier": f"pair:{turn}.{group}"}
                place = {"node": name, "rank": int(name[1]), "pid": 9}
                parts.append(span(now[name], latest + 0.1, "model_initialization.pairs", attrs=attrs, **place))
                waited[name] += latest - now[name]
                now[name] = latest + 0.1
    for name in now:
        parts += [
            span(now[name], now[name] + 2, "first_step", node=name, rank=int(name[1]), pid=9),
            began(now[name] + 2, node=name, rank=int(name[1]), pid=9),
        ]
        now[name] += 2
    result = report(*parts)
    end = max(now.values())
    for node in result.nodes:
        assert node.wait_s == pytest.approx(waited[node.node] + end - now[node.node], abs=1e-3)
    assert [link.node for link in result.critical_chain if link.barrier == "pair:0.0"] == ["n0"]
    assert result.overhead.startup_s == pytest.approx(end)


def test_the_slow_rank_of_a_node_is_blamed():
    parts = []
    for node, rank in itertools.product(range(5), range(8)):
        place = {"node": f"n{node}", "rank": 8 * node + rank, "pid": 100 + rank}
        work = 50.0 if (node, rank) == (3, 5) else 10.0
        parts += [
            span(0, work, READ, **place),
            span(work, 50.1, "model_initialization.first_collective", attrs={"barrier": "first_collective"}, **place),
            span(50.1, 52, "first_step", **place),
            began(52, **place),
        ]
    result = report(*parts, gpus_per_node=8)
    (straggler,) = result.stragglers
    assert (straggler.node, straggler.rank, straggler.stage) == ("n3", 29, READ)
    assert straggler.savings_s == pytest.approx(40)
    link = result.critical_chain[0]
    assert (link.node, link.rank, link.excess_s) == ("n3", 29, pytest.approx(40))
    assert link.waited_gpu_hours == pytest.approx(4 * 40 * 8 / 3600)


def test_a_late_bound_node_is_found_although_clocks_are_more_wrong():
    """Two barriers relate the clocks; n5 was bound 30 s late, and its clock is 100 s ahead."""
    parts = []
    for index, node in enumerate(node_names(8)):
        place = {"node": node, "clock_s": 100.0 if index == 5 else -3.0 * index, "booted_s": -1e5 - 77 * index}
        begin = 30.0 if index == 5 else 0.0
        parts += [
            span(begin, None, "run", **place),
            span(begin, begin + 10, INSTALL, **place),
            span(begin + 10, 40.01, "model_initialization.process_group", attrs={"barrier": "a"}, **place),
            span(41, 45 if index == 2 else 41.5, READ, **place),
            span(45.0 if index == 2 else 41.5, 45.02, "model_initialization.c", attrs={"barrier": "b"}, **place),
            span(45.02, 47, "first_step", **place),
            began(47, **place),
        ]
    result = report(*parts)
    assert [(row.node, row.stage) for row in result.stragglers] == [("n5", "late_start"), ("n2", READ)]
    assert [row.savings_s for row in result.stragglers] == [pytest.approx(30, abs=0.1), pytest.approx(3.5, abs=0.1)]
    assert result.overhead.startup_s == pytest.approx(47, abs=0.1)
    assert "by starting late" in result.verdict


def test_a_node_that_is_lost_before_a_barrier_is_named_and_not_the_ones_that_wait():
    parts = []
    for index, node in enumerate(node_names(6)):
        lost = index == 4
        parts += [span(0, None, "run", node=node), span(0, None if lost else 10 + index, INSTALL, node=node)]
        if not lost:
            parts += [span(10 + index, None, "model_initialization.process_group", attrs={"barrier": "a"}, node=node)]
            parts += [[moment(100, "heartbeat", node=node)]]
    result = report(*parts)
    assert result.startup.outcome == "truncated"
    lost, waiting = result.headlines
    assert "n4 in environment_setup.install" in lost
    assert "5 nodes still waiting at a" in waiting


def test_hot_update_expects_no_image_stage():
    place = {"kind": "hot_update"}
    result = report(span(0, 5, INSTALL, **place), span(5, 8, "first_step", **place), began(8, **place))
    assert (result.startup.kind, result.unobserved) == ("hot_update", ["model_initialization"])


def test_background_work_is_shown_and_never_summed():
    result = report(
        span(0, None, "image_loading.stream", attrs={"background": True}),
        span(0, 10, INSTALL),
        span(12, 15, "first_step"),
        began(15),
        [moment(500, "heartbeat")],
    )
    (node,) = result.nodes
    assert (node.work_s, node.untracked_s) == (pytest.approx(13), pytest.approx(2))
    assert [segment.stage for segment in node.background] == ["image_loading.stream"]
    assert node.background[0].end_s == pytest.approx(15)
    assert "image_loading" not in [row.stage for row in result.stages]


def test_helpers_next_to_the_training_process_are_not_its_work():
    """A data loader imports torch for 8 s while the model is read: that does not make the lane longer."""
    result = report(
        span(0, 4, TORCH, rank=0, pid=5),
        span(4, 14, READ, rank=0, pid=5),
        span(5, 13, TORCH, rank=0, pid=77),
        span(14, 16, "first_step", rank=0, pid=5),
        began(16, rank=0, pid=5),
    )
    assert row(result, TORCH).work_s == pytest.approx(4)
    assert row(result, READ).work_s == pytest.approx(10)


def test_signs_of_life_do_not_make_a_program_the_training_process():
    """`bootseer stage` around a long download writes `alive` events; another process trains."""
    result = report(
        span(0, 60, "model_initialization.download", rank=0, pid=9),
        [moment(at, "alive", rank=0, pid=9) for at in range(60)],
        span(60, 70, TORCH, rank=0, pid=5),
        span(70, None, READ, rank=0, pid=5),
        [moment(90, "alive")],
    )
    assert row(result, TORCH).work_s == pytest.approx(10)
    assert row(result, READ).work_s == pytest.approx(20)


@pytest.mark.parametrize("rank", [-1, 0])
def test_a_python_that_ran_before_the_training_is_work(rank):
    """`python prepare.py && python train.py`: the first one is not a helper of the second."""
    result = report(
        span(0, 6, TORCH, rank=rank, pid=5),
        span(6, 10, TORCH, rank=rank, pid=6),
        span(10, 12, "first_step", rank=rank, pid=6),
        began(12, rank=rank, pid=6),
    )
    assert row(result, TORCH).work_s == pytest.approx(10)


def test_the_import_of_a_program_that_then_starts_the_ranks_is_work():
    """`torch.multiprocessing.spawn`: each rank imports torch again. A helper without a rank is not work."""
    ranks = [
        [
            *span(7, 10, TORCH, rank=rank, pid=6 + rank),
            *span(10, 12, "first_step", rank=rank, pid=6 + rank),
            *began(12, rank=rank, pid=6 + rank),
        ]
        for rank in (0, 1)
    ]
    result = report(span(0, 6, TORCH, pid=5), *ranks, span(8, 9, TORCH, pid=20))
    assert row(result, TORCH).work_s == pytest.approx(9)
    assert result.nodes[0].untracked_s == pytest.approx(1)


def test_the_mark_of_a_pattern_does_not_make_run_the_training_process():
    """`bootseer run --began-pattern` marks the first step: Python's imports stay in the lane."""
    result = report(
        span(0, 50, "run", pid=1),
        span(0, 10, "environment_setup", pid=1),
        span(0, 8, INSTALL, pid=1),
        span(10, 50, "command", pid=1),
        span(11, 30, TORCH, pid=9),
        began(40, by="pattern", pid=1),
    )
    assert row(result, TORCH).work_s == pytest.approx(19)
    assert result.nodes[0].background == []


@pytest.mark.parametrize(
    ("marks", "end_s"),
    [
        ({"optimizer_step": 20}, 20),
        ({"optimizer_step": 20, "api": 25}, 25),
        ({"optimizer_step": 20, "pattern": 18}, 18),
        ({"api": 25, "pattern": 23}, 23),
    ],
)
def test_marks_of_the_user_take_precedence_over_the_hook(marks, end_s):
    parts = [began(at, by=by) for by, at in marks.items()]
    result = report(span(0, 30_000, "run"), span(0, 15, INSTALL), span(15, 20, "first_step"), *parts)
    assert result.overhead.startup_s == pytest.approx(end_s)


def test_a_command_that_fails_after_other_stages_is_where_the_node_stopped():
    """Not in the loading of the image, which ended; the text has the singular for one GPU and one node."""
    parts = [span(0, 10, "image_loading"), span(10, 40, "command", outcome="failed")]
    result = report(span(0, 40, "run", outcome="failed", attrs={"gpus": 1}), *parts)
    assert result.nodes[0].last_stage == "model_initialization"
    assert "on 1 node, 1 GPU, and training" in result.verdict


def test_a_command_whose_first_step_was_reported_is_initialization_until_then():
    """Like the time of a failed command, and not uncovered time: the program has no hook."""
    parts = [span(0, 10, INSTALL), span(10, 3600, "command")]
    result = report(span(0, 3600, "run"), *parts, began(40, by="pattern"))
    assert row(result, "model_initialization").max_s == pytest.approx(30)


def test_only_one_rank_marks_the_first_step():
    """`if rank == 0: bootseer.training_began()`: the other ranks are not lost, and their GPUs cost as much."""
    parts = [span(0, 100, "run", node=node, attrs={"gpus": 8}) for node in node_names(5)]
    parts += [span(0, 10, INSTALL, node=node) for node in node_names(5)]
    result = report(*parts, began(40, by="api", node="n0"))
    assert [node.outcome for node in result.nodes] == ["ok", *["unobserved"] * 4]
    assert result.coverage.nodes_truncated == 0
    assert result.overhead.gpu_hours == pytest.approx(5 * 8 * 40 / 3600)
    assert result.overhead.wait_gpu_hours == 0
    (line,) = result.headlines
    assert "4 nodes showed no first step" in line


def test_queue_and_allocation_are_the_jobs_and_not_the_nodes():
    """As in the design: job-level time from the submission, node-level time from the binding."""
    result = report(
        span(0, 100, "queue"),
        span(100, 130, "allocation"),
        *(span(130 + wait, 150, "image_loading", node=node) for wait, node in ((0, "n0"), (4, "n1"))),
        *(span(150, 160, "first_step", node=node) for node in ("n0", "n1")),
        *(began(160, node=node) for node in ("n0", "n1")),
        gpus_per_node=4,
    )
    over = result.overhead
    assert over.job_level_s == pytest.approx(160)
    assert (over.node_level_median_s, over.node_level_max_s) == (pytest.approx(28), pytest.approx(30))
    assert over.gpu_hours == pytest.approx((30 + 26) * 4 / 3600)
    assert row(result, "queue").median_s == pytest.approx(100)
    assert row(result, "queue").gpu_hours == 0


def test_a_queue_without_an_end_lasts_until_the_first_stage_of_any_rank():
    result = report(
        span(0, None, "queue"),
        *(span(begin_s, 200, TORCH, rank=rank, pid=rank + 1) for rank, begin_s in ((0, 100), (1, 130))),
        *(began(210, rank=rank, pid=rank + 1) for rank in (0, 1)),
    )
    assert [(one.stage, one.end_s - one.start_s) for one in result.scheduler] == [("queue", pytest.approx(100))]


def test_the_queue_of_a_job_is_no_gpu_time_in_the_sum_of_its_startups():
    parts = []
    for attempt in range(2):
        place = {"attempt": attempt}
        parts += [
            span(attempt * 10_000, attempt * 10_000 + 3600, "queue", **place),
            span(attempt * 10_000 + 3600, attempt * 10_000 + 9000, "run", attrs={"gpus": 8}, **place),
            span(attempt * 10_000 + 3600, attempt * 10_000 + 3700, "first_step", **place),
        ]
    result = report(*parts)
    assert result.overhead.gpu_hours == pytest.approx(100 * 8 / 3600)
    assert result.share.gpu_hours == pytest.approx(2 * result.overhead.gpu_hours)
    assert result.share.startup_s == pytest.approx(2 * 3700)


def test_one_process_on_one_gpu():
    result = report(span(0, 9, TORCH), span(9, 12, "first_step"), began(12), gpus_per_node=1, price_per_gpu_hour=2)
    assert result.overhead.cost == pytest.approx(2 * 12 / 3600)
    assert (result.overhead.wait_share, result.stragglers) == (0, [])


def test_nested_and_overlapping_spans_are_counted_once():
    result = report(
        span(0, 10, "environment_setup"),
        span(2, 6, INSTALL),
        span(5, 9, "environment_setup.verify"),
        span(10, 11, "first_step"),
        began(11),
    )
    assert row(result, "environment_setup").work_s == pytest.approx(10)
    parts = {name: row(result, f"environment_setup.{name}").work_s for name in ("install", "verify", "untracked")}
    assert parts == {"install": pytest.approx(3), "verify": pytest.approx(4), "untracked": pytest.approx(3)}


def test_time_around_a_part_of_a_part_is_untracked() -> None:
    imported = span(3, 5, "model_initialization.import.pandas")
    result = report(span(0, 9, "run"), span(1, None, "command"), imported, began(9))
    assert row(result, "model_initialization.untracked").work_s == pytest.approx(6)


GPUS = {"attrs": {"gpus": 8, "program": "python3"}}


def test_a_command_that_failed_before_training_is_a_failed_startup():
    """Without torch as with it: all of its time was paid, and none was training."""
    result = report(span(0, 3600, "run", outcome="failed", **GPUS), [*span(10, 3600, "command", outcome="failed")])
    assert (result.startup.outcome, result.startup.ended_by) == ("failed", "command")
    assert result.overhead.gpu_hours == pytest.approx(8)
    assert row(result, "model_initialization").num_failed == 1
    assert "Failed startup: 60 min 00 s" in result.verdict
    assert any("command failed on n0 at 3600.0 s" in line for line in result.headlines)
    assert any("Nothing marks the beginning of training, so all" in line for line in result.headlines)


def test_a_run_that_was_killed_is_billed_to_its_last_sign_of_life():
    alive = [moment(at, "alive") for at in (20, 1800)]
    result = report(span(0, None, "run", **GPUS), span(10, None, "command"), span(12, None, TORCH, pid=5), alive)
    assert (result.startup.outcome, result.startup.ended_by) == ("truncated", "last_event")
    assert result.overhead.gpu_hours == pytest.approx(8 * 1800 / 3600)
    assert row(result, TORCH).work_s == pytest.approx(1788)
    assert "until the last sign of life, or it still runs" in result.verdict


def test_a_command_that_ended_well_without_a_mark_is_not_called_a_startup():
    """It is unknown how much of ten hours was training: only the installation certainly was not."""
    parts = [span(0, 36_000, "run", **GPUS), span(10, 36_000, "command"), [moment(30_000, "alive")]]
    result = report(*parts)
    assert (result.startup.outcome, result.overhead.gpu_hours) == ("unobserved", None)
    assert "The beginning of training was not observed" in result.verdict
    installed = report(*parts, span(0, 10, INSTALL))
    assert installed.overhead.gpu_hours == pytest.approx(8 * 10 / 3600)
    assert any("only the observed stages count" in line for line in installed.headlines)


def test_one_node_that_fails_is_billed_on_all_that_wait_for_it():
    """n0 fails after 5 s; the others wait for it until the scheduler ends them after 600 s."""
    parts = [
        part
        for node, until in zip(node_names(4), (5, 600, 600, 600), strict=True)
        for part in (
            span(0, until, "run", node=node, outcome="failed", **GPUS),
            span(1, until, "command", node=node, outcome="failed"),
        )
    ]
    hung = [
        span(4, None, "model_initialization.process_group", node=node, attrs={"barrier": "process_group"}, pid=7)
        for node in node_names(4)[1:]
    ]
    result = report(*parts, *hung)
    assert result.startup.outcome == "failed"
    assert result.overhead.gpu_hours == pytest.approx(8 * (5 + 3 * 600) / 3600)
    assert result.overhead.wait_gpu_hours == pytest.approx(8 * 3 * 596 / 3600)
    assert any("3 nodes still waiting at process_group" in line for line in result.headlines)
    assert result.critical_chain == [], "the last node has not arrived at a barrier that has not opened"
    assert any("1 node stopped before training: n0 in model_initialization" in line for line in result.headlines)


def test_a_node_that_outlives_the_failure_of_the_others_delays_none():
    ends = (*range(10, 17), 600)
    parts = [span(0, end, "command", node=f"n{end}", outcome="failed", **GPUS) for end in ends]
    result = report(*parts, gpus_per_node=8)
    assert result.overhead.gpu_hours == pytest.approx(8 * sum(ends) / 3600)
    assert (result.stragglers, result.straggler_groups) == ([], [])


def test_the_last_restart_ends_with_the_command():
    """torchrun's first workers fail at 30 s; the second ones hang until the command fails at 500 s."""
    first = [span(0, 500, "run", outcome="failed", **GPUS), span(0, 500, "command", outcome="failed")]
    workers = [span(5, None, TORCH, rank=0, pid=5), span(30, 33, TORCH, rank=0, pid=6, restart=1)]
    told = report(*first, *workers)
    assert (told.startup.restart, told.startup.outcome) == (1, "failed")
    assert told.overhead.gpu_hours == pytest.approx(8 * (500 - 30) / 3600)
    assert told.share.startup_s == pytest.approx(500)
    before = report(*first, *workers, restart=0)
    assert before.verdict.startswith("Abandoned startup: 30.0 s on 1 node, 8 GPUs until its processes were restarted")


def test_a_command_that_fails_after_training_began_is_no_failed_startup():
    parts = [span(0, 36_000, "command", node=node, outcome="failed") for node in ("n0", "n1")]
    result = report(*parts, span(0, 10, INSTALL, node="n1"), began(40, by="api", node="n0"), gpus_per_node=1)
    assert [node.outcome for node in result.nodes] == ["ok", "unobserved"]
    assert result.overhead.gpu_hours == pytest.approx(2 * 40 / 3600)

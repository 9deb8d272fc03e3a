"""Differences between startups: the statistics compared with brute force, the verdicts with known truth."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.report.analysis.diff import (
    FASTER,
    SAME,
    SLOWER,
    UNPROVEN,
    Limits,
    compare,
    holm,
    student_p,
)
from bootseer.trace.event import decode
from fleet import BARRIERS, DEFAULT_WORK, INSTALL, Fleet
from startups import began, report, span


def of(fleet: Fleet):
    return report([decode(line) for line in fleet.lines()])


def pair(a, b, limits=None):
    return compare([a], [b], limits)


def varied(attempt: int, sigma: float, num_nodes: int = 16, slow: float = 1.0):
    """A run with all stages of all nodes scaled by one log-normal factor."""
    rng = random.Random(attempt)
    factor = rng.lognormvariate(0, sigma)
    work = {
        (node, stage): base_s * factor * rng.uniform(0.97, 1.03) * (slow if stage == INSTALL else 1.0)
        for node in range(num_nodes)
        for stage, base_s, _ in DEFAULT_WORK
        if stage not in BARRIERS
    }
    return of(Fleet(num_nodes, work_of=work, attempt=attempt, begin_s=attempt * 1000))


def work(install_s: float, num_nodes: int = 16, seed: int = 1) -> dict[tuple[int, str], float]:
    rng = random.Random(seed)
    return {(node, INSTALL): install_s + rng.uniform(-0.5, 0.5) for node in range(num_nodes)}


def moved(difference, stage):
    return next(row for row in difference.stages if row.stage == stage)


@given(st.dictionaries(st.integers(0, 99), st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_the_textbooks(raw):
    names = {str(key): value for key, value in raw.items()}
    corrected = holm(names)
    ordered = sorted(names.values())
    for name, p in names.items():
        by_hand = max(min((len(ordered) - i) * q, 1) for i, q in enumerate(ordered) if q <= p)
        assert corrected[name] == pytest.approx(by_hand)


def test_a_slower_install_is_found_and_nothing_else():
    a, b = of(Fleet(16, work_of=work(60))), of(Fleet(16, work_of=work(150), seed=9))
    difference = pair(a, b)
    assert difference.tested
    assert moved(difference, INSTALL).verdict == SLOWER
    assert moved(difference, INSTALL).delta_s == pytest.approx(90, abs=0.5)
    assert {row.stage for row in difference.stages if row.verdict != SAME} == {"environment_setup", INSTALL}
    assert difference.slower
    assert not pair(b, a).slower
    assert moved(pair(b, a), INSTALL).verdict == FASTER


def test_eight_nodes_are_enough_for_a_pair():
    """Eight nodes just reach significance in a rank test corrected for all stages, and this change is obvious."""
    difference = pair(of(Fleet(8, work_of=work(60, 8))), of(Fleet(8, work_of=work(240, 8), seed=9)))
    assert moved(difference, INSTALL).verdict == SLOWER


def test_one_pair_proves_nothing_that_runs_do_to_each_other():
    """A third more on all sixteen nodes: significant if runs never varied, but not if they vary by 15 %."""
    a, b = of(Fleet(16, work_of=work(60))), of(Fleet(16, work_of=work(80), seed=9))
    difference = pair(a, b)
    assert not difference.slower
    assert moved(difference, INSTALL).verdict == UNPROVEN
    assert "environment_setup +20" in difference.verdict
    assert "One pair does not prove" in difference.verdict
    assert "vary by 15%; a factor below 2.09 may be chance" in difference.verdict
    assert moved(pair(a, b, Limits(run_variation=0)), INSTALL).verdict == SLOWER


def test_equal_pairs_of_runs_that_vary_are_no_regression():
    """Runs vary by 15 % and the nodes of a run by 3 %: that all nodes of a run changed alike proves nothing."""
    differences = [pair(varied(seed, 0.15), varied(seed + 100, 0.15)) for seed in range(12)]
    assert sum(UNPROVEN in {row.verdict for row in difference.stages} for difference in differences) >= 6
    assert [row for difference in differences for row in difference.stages if row.verdict in (SLOWER, FASTER)] == []
    assert {difference.overall.verdict for difference in differences} <= {SAME, UNPROVEN}


def test_several_runs_show_how_much_runs_vary():
    """Ten runs that vary by 4 % prove an increase of 40 % in one stage; ten that vary by 15 % do not."""
    baseline = [varied(seed, 0.04) for seed in range(10)]
    difference = compare(baseline, [varied(20, 0.04, slow=1.4)])
    assert {row.stage for row in difference.stages if row.verdict == SLOWER} == {"environment_setup", INSTALL}
    assert (difference.a_runs, difference.b_runs, difference.a) == (10, 1, "fleet attempts 0 to 9")
    assert 0.01 < difference.run_variation < 0.08
    assert "10 runs against 1" in difference.verdict
    row = moved(difference, INSTALL)
    assert row.a_range_s[0] < row.a_s < row.a_range_s[1] < row.b_s
    assert not compare(baseline, [varied(20, 0.04)]).slower
    assert "a factor below 100" in compare(baseline[:2], [varied(20, 0.04)]).verdict
    assert not compare([varied(seed, 0.15) for seed in range(10)], [varied(20, 0.15, slow=1.4)]).slower
    assert compare(baseline[:5], [varied(seed, 0.04, slow=1.4) for seed in range(20, 23)]).slower


def test_runs_that_prove_nothing_are_left_out():
    """Runs that ended before training, duplicates, and B itself; and facts that only one run of the baseline has."""
    baseline = [varied(seed, 0.04) for seed in range(4)]
    failed = of(Fleet(16, killed_in={4: INSTALL}, attempt=9, begin_s=9000))
    difference = compare([*baseline, baseline[0], failed, varied(20, 0.04)], [varied(20, 0.04)])
    assert difference.a_runs == 4
    assert difference.headlines[0].startswith("3 of A's 7 runs are ignored")
    assert compare([*baseline, varied(5, 0.04, num_nodes=12)], [varied(20, 0.04)]).changed == []
    assert [c.fact for c in compare(baseline, [varied(20, 0.04, num_nodes=12)]).changed] == ["num_gpus", "num_nodes"][
        ::-1
    ]


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 63.657), (2, 9.925), (3, 5.841), (4, 4.604), (9, 3.250), (14, 2.977), (30, 2.750), (120, 2.617)],
)
def test_students_p_is_that_of_the_tables(freedom, t):
    assert student_p(t, freedom) == pytest.approx(0.01, rel=0.002)
    assert student_p(-t, freedom) == student_p(t, freedom)
    assert (student_p(0.0, freedom), student_p(1e9, freedom)) == (1.0, pytest.approx(0.0, abs=1e-8))


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_difference(seed):
    difference = pair(of(Fleet(16, seed=seed)), of(Fleet(16, seed=seed + 50)))
    assert [row.verdict for row in (*difference.stages, difference.overall)] == [SAME] * (len(difference.stages) + 1)
    assert "No difference" in difference.verdict


def test_few_nodes_need_a_large_change():
    a = of(Fleet(2, work_of=work(60, 2)))
    assert not pair(a, of(Fleet(2, work_of=work(120, 2)))).slower
    assert pair(a, of(Fleet(2, work_of=work(200, 2)))).slower


@pytest.mark.parametrize(("read_s", "verdict"), [(20, SAME), (75, SAME), (110, UNPROVEN), (220, SLOWER)])
def test_the_whole_startup_is_judged_by_its_size(read_s, verdict):
    """One node of sixteen is slow: no median changes, and the startup of 137 s takes 55 s, 90 s or 200 s longer."""
    slow = {(3, "model_initialization.checkpoint_read"): float(read_s)}
    difference = pair(of(Fleet(16)), of(Fleet(16, work_of=slow)))
    assert difference.overall.verdict == verdict
    assert all(row.verdict == SAME for row in difference.stages)


def test_a_longer_queue_is_no_slower_startup():
    queued = of(Fleet(16, work_of=work(60.0), attempt=1, queue_s=3600.0))
    difference = pair(of(Fleet(16, work_of=work(60.0))), queued)
    assert not difference.slower
    assert difference.b_s == pytest.approx(difference.a_s, abs=3.0)


def test_a_startup_that_failed_early_is_not_faster():
    whole = of(Fleet(16))
    failed = of(Fleet(16, killed_in={4: INSTALL}))
    difference = pair(whole, failed)
    assert difference.overall.verdict == SAME
    assert difference.verdict.startswith("The whole startup cannot be compared, because B did not reach training")
    assert any(line.startswith("B is an abandoned or still running startup") for line in difference.headlines)
    assert FASTER not in {row.verdict for row in difference.stages}


def test_limits_of_the_user_count():
    a, b = of(Fleet(16, work_of=work(60))), of(Fleet(16, work_of=work(150)))
    assert pair(a, b).slower
    assert not pair(a, b, Limits(min_s=95)).slower
    assert not pair(a, b, Limits(min_share=1.6)).slower
    assert not pair(a, b, Limits(run_variation=0.5)).slower


def test_a_stage_of_one_side_is_no_change_from_zero():
    a = report(span(0, 5, "image_loading"), span(5, 8, "first_step"), began(8))
    b = report(span(0, 3, "first_step"), began(3))
    row = moved(pair(a, b), "image_loading")
    assert (row.a_s, row.b_s, row.delta_s, row.verdict) == (5, None, None, SAME)


def test_a_part_of_a_stage_follows_it_when_only_one_side_has_it():
    a = report(span(0, 5, "image_loading"), span(5, 8, "first_step"), began(8))
    b = report(span(0, 3, "image_loading.mount"), span(3, 6, "first_step"), began(6))
    assert [row.stage for row in pair(a, b).stages] == ["image_loading", "image_loading.mount", "first_step"]


def test_changed_facts_are_reported():
    a = report(span(0, 5, INSTALL, attrs={"packages": 7}), began(6))
    b = report(span(0, 5, INSTALL, attrs={"packages": 9}), began(6), gpus_per_node=4)
    told = {change.fact: (change.a, change.b) for change in pair(a, b).changed}
    assert told == {f"{INSTALL}.packages": ("7", "9"), "num_gpus": ("unobserved", "4")}


def test_a_stage_named_like_the_whole_is_a_stage():
    a = report(span(0, 5, "startup"), span(5, 8, "first_step"), began(8))
    difference = pair(a, report(span(0, 6, "startup"), span(6, 9, "first_step"), began(9)))
    assert [(row.stage, row.a_s, row.b_s) for row in difference.stages] == [("startup", 5, 6), ("first_step", 3, 3)]
    assert (difference.overall.stage, difference.overall.a_s, difference.overall.b_s) == ("startup", 8, 9)

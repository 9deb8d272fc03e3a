"""What counts as a difference between two startups: the statistics against brute force, the verdicts against truth."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.analysis.diff import FASTER, SAME, SLOWER, Limits, compare, holm, mann_whitney_p
from bootseer.trace.event import decode
from fleet import INSTALL, Fleet
from startups import began, report, span


def of(fleet: Fleet):
    return report([decode(line)[0] for line in fleet.lines()])


def work(install_s: float, num_nodes: int = 16, seed: int = 1) -> dict[tuple[int, str], float]:
    rng = random.Random(seed)
    return {(node, INSTALL): install_s + rng.uniform(-0.5, 0.5) for node in range(num_nodes)}


def moved(difference, stage):
    return next(row for row in difference.stages if row.stage == stage)


def exact_p(a: list[int], b: list[int]) -> float:
    """Two-sided p of the rank sum over all ways to deal the values to the two sides."""
    values = sorted([*a, *b])
    rank = {v: (values.index(v) + 1 + len(values) - values[::-1].index(v)) / 2 for v in values}
    ranks = [rank[v] for v in (*a, *b)]
    middle = sum(ranks) * len(a) / len(ranks)
    far = abs(sum(ranks[: len(a)]) - middle)
    sums = [abs(sum(pick) - middle) for pick in itertools.combinations(ranks, len(a))]
    return sum(s >= far - 1e-9 for s in sums) / len(sums)


@pytest.mark.parametrize("seed", range(12))
def test_the_rank_test_agrees_with_all_permutations(seed):
    rng = random.Random(seed)
    a = [rng.randrange(40) for _ in range(8)]
    b = [rng.randrange(40) + seed * 2 for _ in range(8)]
    assert mann_whitney_p(a, b) == pytest.approx(exact_p(a, b), abs=0.02)


@given(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9), min_size=1))
def test_the_rank_test_is_symmetric_and_a_probability(a, b):
    p = mann_whitney_p(a, b)
    assert 0 <= p <= 1
    assert p == pytest.approx(mann_whitney_p(b, a))
    assert mann_whitney_p(a, a) == 1


def test_equal_values_are_no_difference():
    assert mann_whitney_p([5.0] * 20, [5.0] * 20) == 1
    assert mann_whitney_p([], [1.0]) == 1


@given(st.dictionaries(st.integers(0, 99), st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_the_textbooks(raw):
    names = {str(key): value for key, value in raw.items()}
    corrected = holm(names)
    ordered = sorted(names.values())
    for name, p in names.items():
        by_hand = max(min((len(ordered) - i) * q, 1) for i, q in enumerate(ordered) if q <= p)
        assert corrected[name] == pytest.approx(by_hand)


def test_a_slower_install_is_found_and_nothing_else():
    difference = compare(of(Fleet(16, work_of=work(60))), of(Fleet(16, work_of=work(80), seed=9)))
    assert difference.tested
    assert moved(difference, INSTALL).verdict == SLOWER
    assert moved(difference, INSTALL).delta_s == pytest.approx(20, abs=0.5)
    assert {row.stage for row in difference.stages if row.verdict != SAME} == {"environment_setup", INSTALL}
    assert difference.slower
    assert not compare(of(Fleet(16, work_of=work(80))), of(Fleet(16, work_of=work(60), seed=9))).slower


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_difference(seed):
    difference = compare(of(Fleet(16, seed=seed)), of(Fleet(16, seed=seed + 50)))
    assert [row.verdict for row in (*difference.stages, difference.overall)] == [SAME] * (len(difference.stages) + 1)
    assert "No difference" in difference.verdict


def test_few_nodes_need_a_large_change():
    a = of(Fleet(2, work_of=work(60, 2)))
    assert not compare(a, of(Fleet(2, work_of=work(80, 2)))).slower
    assert compare(a, of(Fleet(2, work_of=work(100, 2)))).slower


@pytest.mark.parametrize(("read_s", "verdict"), [(20, SAME), (45, SAME), (75, SLOWER)])
def test_the_whole_startup_is_judged_by_its_size(read_s, verdict):
    """One node of sixteen is slow: no median moves, and the job is later by 25 s or 55 s of 137 s."""
    slow = {(3, "model_initialization.checkpoint_read"): float(read_s)}
    difference = compare(of(Fleet(16)), of(Fleet(16, work_of=slow)))
    assert difference.overall.verdict == verdict
    assert all(row.verdict == SAME for row in difference.stages)


def test_a_startup_that_failed_early_is_not_faster():
    whole = of(Fleet(16))
    failed = of(Fleet(16, killed_in={4: INSTALL}))
    difference = compare(whole, failed)
    assert difference.overall.verdict == SAME
    assert difference.verdict.startswith("The whole cannot be compared, B did not reach training")
    assert any(line.startswith("B is an abandoned startup") for line in difference.headlines)
    assert FASTER not in {row.verdict for row in difference.stages}


def test_limits_of_the_user_count():
    a, b = of(Fleet(16, work_of=work(60))), of(Fleet(16, work_of=work(80)))
    assert not compare(a, b, Limits(min_s=25)).slower
    assert not compare(a, b, Limits(min_share=0.5)).slower


def test_a_stage_of_one_side_is_no_change_from_zero():
    a = report(span(0, 5, "image_loading"), span(5, 8, "first_step"), began(8))
    b = report(span(0, 3, "first_step"), began(3))
    row = moved(compare(a, b), "image_loading")
    assert (row.a_s, row.b_s, row.delta_s, row.verdict) == (5, None, None, SAME)


def test_a_part_of_a_stage_stands_behind_it_when_one_side_alone_has_it():
    a = report(span(0, 5, "image_loading"), span(5, 8, "first_step"), began(8))
    b = report(span(0, 3, "image_loading.mount"), span(3, 6, "first_step"), began(6))
    assert [row.stage for row in compare(a, b).stages] == ["image_loading", "image_loading.mount", "first_step"]


def test_changed_facts_are_told():
    a = report(span(0, 5, INSTALL, attrs={"packages": 7}), began(6))
    b = report(span(0, 5, INSTALL, attrs={"packages": 9}), began(6), gpus_per_node=4)
    told = {change.fact: (change.a, change.b) for change in compare(a, b).changed}
    assert told == {f"{INSTALL}.packages": ("7", "9"), "num_gpus": ("unobserved", "4")}

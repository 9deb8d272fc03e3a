from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bootseer.fetch.hotset import MAX_RUNS, HotSet, Record

FILE = "ab" * 32
EMPTY = HotSet("image", "workload")


def run(number: int, blocks, *, duration_ms: int = 60_000) -> Record:
    """A startup that needs these blocks, one each 10 ms."""
    needs = {(FILE, block): 10 * at for at, block in enumerate(dict.fromkeys(blocks))}
    return Record(float(number), duration_ms, needs)


def merged(*runs: Record) -> HotSet:
    hot_set = EMPTY
    for each in runs:
        hot_set = hot_set.merge(each)
    return hot_set


def planned(hot_set: HotSet) -> list[int]:
    return [block for _, block in hot_set.plan()]


def test_after_one_run_the_plan_is_what_it_needed_in_its_order():
    assert planned(merged(run(1, [5, 3, 9]))) == [5, 3, 9]


def test_a_block_that_one_of_three_runs_needed_is_not_hot():
    hot_set = merged(run(1, [1, 2, 3]), run(2, [1, 2, 4]), run(3, [1, 2, 5]))
    assert planned(hot_set) == [1, 2]
    assert hot_set.statistics()[FILE, 3] == (20, 1 / 3)


def test_with_two_runs_all_that_any_of_them_needed_is_hot():
    assert sorted(planned(merged(run(1, [1, 2, 3]), run(2, [1, 2, 4])))) == [1, 2, 3, 4]


def test_the_order_is_by_the_early_quantile_and_one_run_in_a_hurry_does_not_decide():
    usual = list(range(20))
    hot_set = merged(*(run(number, usual) for number in range(5)), run(5, [19, *range(19)]))
    assert planned(hot_set) == usual


def test_a_stale_block_disappears_after_runs_without_it():
    runs = [run(number, [1, 2, 3, 99]) for number in range(3)]
    gone = [run(number, [1, 2, 3]) for number in range(3, 7)]
    assert 99 in planned(merged(*runs, *gone[:3]))
    assert 99 not in planned(merged(*runs, *gone))


def test_a_run_that_ended_early_does_not_count_for_later_blocks():
    whole = [run(number, range(10)) for number in range(2)]
    crashed = [run(number, [0, 1], duration_ms=15) for number in range(2, 6)]
    assert planned(merged(*whole, *crashed)) == list(range(10))


def test_a_run_that_ended_just_when_others_needed_a_block_counts():
    hot_set = merged(run(1, [1, 2, 3]), run(2, [1, 2], duration_ms=20))
    assert hot_set.statistics()[FILE, 3] == (20, 1 / 2)
    assert merged(run(1, [1, 2, 3]), run(2, [1, 2], duration_ms=19)).statistics()[FILE, 3] == (20, 1)


def test_what_the_newer_run_imported_is_kept_and_else_what_any_did():
    old = replace(merged(run(1, [1])), imports="old")
    new = replace(merged(run(2, [1])), imports="new")
    assert [old.union(new).imports, new.union(old).imports] == ["new", "new"]
    assert old.union(replace(new, imports="")).imports == "old"
    assert old.merge(run(3, [1])).imports == "old"


def test_only_the_newest_runs_are_kept_in_the_order_of_their_time():
    hot_set = merged(*(run(number, [1]) for number in (3, 1, 2, *range(4, 20))))
    assert [record.started_s for record in hot_set.records] == [float(number) for number in range(12, 20)]


def test_two_runs_of_another_workload_drop_the_old_ones_and_one_does_not():
    old = [run(number, range(100)) for number in range(4)]
    new = [run(number, range(1000, 1100)) for number in range(4, 6)]
    assert len(merged(*old, new[0]).records) == 5
    assert set(planned(merged(*old, *new))) == set(range(1000, 1100))


def test_runs_of_the_image_in_other_blocks_are_no_part_of_a_plan_and_one_new_run_makes_it():
    other = "cd" * 32
    old = [run(number, range(30)) for number in range(6)]
    assert not merged(*old).of_files([other]).records
    new = replace(run(6, range(8)), needs={(other, block): block for block in range(8)})
    assert merged(*old, new).of_files([other]).plan() == [(other, block) for block in range(8)]
    assert planned(merged(*old, new).of_files([FILE])) == list(range(30))


def test_one_odd_run_among_good_ones_changes_nothing_and_is_dropped():
    good = [run(number, range(100)) for number in (0, 1, 2, 4, 5)]
    hot_set = merged(*good[:3], run(3, range(1000, 1100)), *good[3:])
    assert planned(hot_set) == list(range(100))
    assert 3.0 not in {record.started_s for record in hot_set.records}


def test_a_workload_that_changed_by_half_has_its_new_blocks_hot_when_half_of_the_kept_runs_need_them():
    old = [run(number, range(60)) for number in range(MAX_RUNS)]
    new = [run(100 + number, range(30, 90)) for number in range(MAX_RUNS // 2 + 1)]
    assert set(planned(merged(*old, *new[:-2]))) == set(range(60))
    assert set(planned(merged(*old, *new[:-1]))) == set(range(90))
    assert set(planned(merged(*old, *new))) == set(range(30, 90))


def test_a_run_that_shares_three_blocks_of_ten_with_the_newest_is_kept():
    for shared, kept in ((3, True), (2, False)):
        hot_set = merged(run(0, range(10)), *(run(number, range(10 - shared, 20 - shared)) for number in (1, 2)))
        assert (0.0 in {record.started_s for record in hot_set.records}) is kept


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 100), min_size=3, max_size=3), min_size=1, max_size=8))
def test_blocks_are_planned_by_the_time_that_a_quarter_of_the_runs_needed_them_by(times):
    records = tuple(
        Record(float(number), 1000, {(FILE, block): at for block, at in enumerate(each)})
        for number, each in enumerate(times)
    )
    early = [sorted(column)[(len(times) - 1) // 4] for column in zip(*times, strict=True)]
    assert planned(HotSet("image", "workload", records)) == sorted(range(3), key=lambda block: (early[block], block))


runs = st.lists(st.lists(st.integers(0, 30), max_size=40), max_size=12)


@settings(max_examples=100)
@given(runs)
def test_the_plan_holds_each_hot_block_once_by_its_confidence_and_is_stable(lists):
    hot_set = merged(*(run(number, blocks) for number, blocks in enumerate(lists)))
    plan = hot_set.plan()
    assert len(set(plan)) == len(plan)
    assert HotSet("image", "workload", hot_set.records).plan() == plan
    known = hot_set.statistics()
    for block, (_, share) in known.items():
        assert share == sum(block in record.needs for record in hot_set.records) / len(hot_set.records)
        assert (block in plan) == (share >= 0.5)
    assert set(plan) <= set(known)


@settings(max_examples=100)
@given(runs, st.lists(st.integers(0, 30), unique=True, min_size=1, max_size=40))
def test_after_as_many_equal_runs_as_are_kept_the_plan_is_exactly_theirs(lists, blocks):
    earlier = [run(number, blocks) for number, blocks in enumerate(lists)]
    later = [run(100 + number, blocks) for number in range(MAX_RUNS)]
    assert planned(merged(*earlier, *later)) == blocks

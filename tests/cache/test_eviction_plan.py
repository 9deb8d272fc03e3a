from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.codec import RAW, ZERO
from bootseer.cache.eviction_plan import Candidate, Step, cold_blocks, goal_bytes, plan


def entry(identity, last_use, disk, cold=0, *, in_use=False):
    return Candidate(identity, last_use, in_use, disk, cold)


def test_nothing_is_evicted_below_the_high_mark():
    assert goal_bytes(90, 100) is None
    assert goal_bytes(91, 100) == 80


def test_cold_blocks_of_all_go_before_anything_that_was_used():
    entries = [entry("old", 1, 100, 30), entry("new", 2, 100, 50)]
    assert plan(entries, 200, 130) == [Step("old", False, 30), Step("new", False, 40)]


def test_the_least_recently_used_entry_goes_first():
    entries = [entry("new", 9, 100), entry("old", 1, 100), entry("middle", 5, 100)]
    assert plan(entries, 300, 150) == [Step("old", True, 100), Step("middle", True, 100)]


def test_an_entry_that_goes_as_a_whole_is_not_thinned_out_before():
    entries = [entry("old", 1, 100, 30), entry("new", 2, 100, 50)]
    assert plan(entries, 200, 100) == [Step("new", False, 50), Step("old", True, 100)]


def test_entries_in_use_stay():
    entries = [entry("used", 1, 100, 100, in_use=True), entry("free", 2, 10)]
    assert plan(entries, 110, 0) == [Step("free", True, 10)]


def test_nothing_happens_when_there_is_room():
    assert plan([entry("one", 1, 100, 100)], 100, 100) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 100), st.integers(0, 100), st.booleans()).map(
            lambda row: (row[0], row[1], min(row[2], row[1]), row[3])
        )
    ),
    st.integers(0, 1000),
)
def test_a_plan_frees_enough_or_all_that_is_free_and_names_each_entry_once(rows, goal):
    entries = [Candidate(str(i), last, in_use, disk, cold) for i, (last, disk, cold, in_use) in enumerate(rows)]
    used = sum(one.disk_bytes for one in entries)
    steps = plan(entries, used, goal)
    freed = sum(step.num_bytes for step in steps)
    assert used - freed <= goal or freed == sum(one.disk_bytes for one in entries if not one.in_use)
    names = [step.identity for step in steps]
    assert len(names) == len(set(names))
    busy = {one.identity for one in entries if one.in_use}
    assert not busy & set(names)
    if any(step.whole for step in steps):
        kept_cold = [one for one in entries if not one.in_use and one.cold_bytes and one.identity not in names]
        assert not kept_cold


def test_blocks_are_cold_when_nobody_wants_them_and_they_take_room():
    assert cold_blocks(bytes([2, 2, 0, 1, 2]), bytes([0, 1, 0, 0, 0]), bytes([RAW, RAW, RAW, RAW, ZERO])) == [0, 3]

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootseer.cache.eviction_plan import Candidate, goal_bytes, plan


def entry(identity, last_use, disk, *, in_use=False):
    return Candidate(identity, last_use, in_use, disk)


def names(entries):
    return [one.identity for one in entries]


def test_nothing_is_evicted_below_the_high_mark():
    assert goal_bytes(90, 100) is None
    assert goal_bytes(91, 100) == 80


def test_the_least_recently_used_entry_goes_first():
    entries = [entry("new", 9, 100), entry("old", 1, 100), entry("middle", 5, 100)]
    assert names(plan(entries, 300, 150)) == ["old", "middle"]


def test_entries_in_use_stay():
    entries = [entry("used", 1, 100, in_use=True), entry("free", 2, 10)]
    assert names(plan(entries, 110, 0)) == ["free"]


def test_nothing_happens_when_there_is_room():
    assert plan([entry("one", 1, 100)], 100, 100) == []


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100), st.booleans())), st.integers(0, 1000))
def test_a_plan_frees_enough_or_all_that_is_free_and_no_more_than_needed(rows, goal):
    entries = [entry(str(number), last, disk, in_use=in_use) for number, (last, disk, in_use) in enumerate(rows)]
    used = sum(one.disk_bytes for one in entries)
    evicted = plan(entries, used, goal)
    freed = sum(one.disk_bytes for one in evicted)
    assert used - freed <= goal or freed == sum(one.disk_bytes for one in entries if not one.in_use)
    assert len(names(evicted)) == len(set(names(evicted)))
    assert not any(one.in_use for one in evicted)
    assert not evicted or used - freed + evicted[-1].disk_bytes > goal
    kept = [one.last_use_ns for one in entries if one not in evicted and not one.in_use]
    assert not evicted or all(last >= evicted[-1].last_use_ns for last in kept)

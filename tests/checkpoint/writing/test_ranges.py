from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from bootseer.checkpoint.ranges import Ranges

OFFSETS = st.integers(0, 40)
STEPS = st.lists(st.tuples(st.booleans(), OFFSETS, st.integers(0, 12)), max_size=40)


@given(STEPS, OFFSETS, OFFSETS)
def test_ranges_are_a_set_of_offsets(steps: list[tuple[bool, int, int]], start: int, at: int) -> None:
    ranges, model = Ranges(), set[int]()
    for adds, begin, length in steps:
        offsets = set(range(begin, begin + length))
        if adds:
            ranges.add(begin, begin + length)
            model |= offsets
        else:
            assert ranges.remove(begin, begin + length) == len(offsets & model)
            model -= offsets
    assert {offset for begin, end in ranges.within(0, 100) for offset in range(begin, end)} == model
    assert ranges.total() == len(model)
    within = {offset for begin, end in ranges.within(start, start + 10) for offset in range(begin, end)}
    assert within == model & set(range(start, start + 10))
    assert ranges.missing(start, start + 10) == len(set(range(start, start + 10)) - model)
    end = at
    while end in model:
        end += 1
    assert ranges.end_from(at) == end


@given(STEPS)
def test_ranges_never_touch(steps: list[tuple[bool, int, int]]) -> None:
    ranges = Ranges()
    for adds, begin, length in steps:
        (ranges.add if adds else ranges.remove)(begin, begin + length)
    found = list(ranges.within(0, 100))
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))
    assert all(begin < end for begin, end in found)

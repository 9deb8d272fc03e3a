"""Which bytes hold a slice of a tensor."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")  # the package has it

from bootseer.checkpoint.safetensors.box import Box, Index, box_of, is_box, runs_of, strides_of

sizes = st.lists(st.integers(1, 5), max_size=4)


@st.composite
def indexed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Index, ...]]:
    shape = tuple(draw(sizes))
    index: list[Index] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        if draw(st.booleans()):
            index.append(draw(st.integers(-size, size - 1)))
        else:
            bound = st.none() | st.integers(-6, 6)
            index.append(slice(draw(bound), draw(bound), draw(st.none() | st.integers(1, 3))))
    return shape, tuple(index)


@given(indexed(), st.integers(0, 40))
def test_the_runs_hold_exactly_the_box_and_what_lies_between(
    case: tuple[tuple[int, ...], tuple[Index, ...]], gap_bytes: int
) -> None:
    shape, index = case
    box = box_of(shape, index)
    if 0 in box.counts:
        return
    runs = runs_of(shape, box, 4, gap_bytes)
    strides = strides_of(shape)
    wanted = {
        sum((start + one) * stride for start, one, stride in zip(box.starts, at, strides, strict=True))
        for at in _indexes(box.counts)
    }
    read = [range(start // 4, (start + runs.length) // 4) for start in runs.starts]
    assert wanted <= {one for run in read for one in run}
    assert all(run[0] in wanted and run[-1] in wanted for run in read)
    for one, following in itertools.pairwise(read):
        assert (following.start - one.stop) * 4 > gap_bytes
    assert len(runs.starts) == math.prod(box.counts[: runs.num_outer])


def _indexes(counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for count in counts:
        found = [(*one, number) for one in found for number in range(count)]
    return found


def test_rows_are_one_run_and_far_columns_are_many() -> None:
    shape = (8, 1000)
    assert runs_of(shape, box_of(shape, slice(2, 5)), 4, 0).starts == [8000]
    columns = runs_of(shape, box_of(shape, (slice(None), slice(0, 10))), 4, 100)
    assert (len(columns.starts), columns.length) == (8, 40)
    assert len(runs_of(shape, box_of(shape, (slice(None), slice(0, 10))), 4, 4000).starts) == 1


def test_an_index_is_understood_as_python_means_it() -> None:
    assert box_of((4, 5, 6), (-1, ..., slice(1, None, 2))) == Box(
        (3, 0, 1), (1, 5, 5), (0, slice(None, None, 1), slice(None, None, 2))
    )
    assert box_of((), ...) == Box((), (), ())


@pytest.mark.parametrize("index", [4, -5, (0, 0, 0), slice(None, None, -1)], ids=str)
def test_an_impossible_index_is_refused(index: Index) -> None:
    with pytest.raises((IndexError, ValueError)):
        box_of((4, 5), index)


@pytest.mark.parametrize("index", [True, "a", None, [1], (0, None), (..., ...), 1.5], ids=str)
def test_an_index_of_another_kind_has_no_box(index: object) -> None:
    assert not is_box(index)


@pytest.mark.parametrize("index", [3, (), (0, ...), (slice(1, 2), -1)], ids=str)
def test_numbers_and_slices_have_one(index: object) -> None:
    assert is_box(index)

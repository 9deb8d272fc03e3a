"""The byte ranges of a slice of a tensor."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")  # imported by the package

import torch

from bootseer.checkpoint.safetensors.model import Runs, runs_of

Index = int | slice


@st.composite
def indexed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Index, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    index: list[Index] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        if draw(st.booleans()):
            index.append(draw(st.integers(-size, size - 1)))
        else:
            bound = st.none() | st.integers(-6, 6)
            index.append(slice(draw(bound), draw(bound), draw(st.none() | st.integers(1, 3))))
    return shape, tuple(index)


@given(indexed(), st.integers(0, 40))
def test_the_runs_contain_the_slice_and_no_gap_that_is_worth_a_request(
    case: tuple[tuple[int, ...], tuple[Index, ...]], gap_bytes: int
) -> None:
    shape, index = case
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    wanted = set(numbers[index].flatten().tolist())
    if not wanted:
        return
    runs = runs_of(numbers[index], 4, gap_bytes)
    read = [range(start // 4, (start + runs.length) // 4) for start in runs.starts]
    assert wanted <= {one for run in read for one in run}
    assert all(run[0] in wanted and run[-1] in wanted for run in read)
    for one, following in itertools.pairwise(read):
        assert (following.start - one.stop) * 4 > gap_bytes


def runs(index: object, gap_bytes: int) -> Runs:
    return runs_of(torch.empty((8, 1000), device="meta")[index], 4, gap_bytes)


def test_rows_are_one_run_and_distant_columns_are_many() -> None:
    assert runs(slice(2, 5), 0).starts == [8000]
    columns = runs((slice(None), slice(0, 10)), 100)
    assert (len(columns.starts), columns.length) == (8, 40)
    assert len(runs((slice(None), slice(0, 10)), 4000).starts) == 1


def test_rows_that_a_step_skips_are_not_read() -> None:
    assert runs(slice(None, None, 4), 100).starts == [0, 16000]

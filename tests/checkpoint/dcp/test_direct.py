"""Which part of a stored tensor can be read directly into a target."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: E402
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem  # noqa: E402

from bootseer.checkpoint.dcp.items import Stored, part_for  # noqa: E402

pytestmark = pytest.mark.torch


def request(offsets: tuple[int, ...], lengths: tuple[int, ...]) -> ReadItem:
    index = MetadataIndex("w", offsets)
    return ReadItem(
        LoadItemType.TENSOR, index, torch.Size([0] * len(lengths)), index, torch.Size(offsets), torch.Size(lengths)
    )


def stored(sizes: tuple[int, ...]) -> Stored:
    index = MetadataIndex("w", [0] * len(sizes))
    return Stored("f", 0, 10**9, True, (), index, sizes, torch.int32, ())


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    sizes = draw(st.lists(st.integers(1, 4), max_size=4))
    starts = [draw(st.integers(0, size - 1)) for size in sizes]
    lengths = [draw(st.integers(0, size - start)) for size, start in zip(sizes, starts, strict=True)]
    return tuple(sizes), tuple(starts), tuple(lengths)


@given(boxes())
def test_a_part_is_exactly_the_wanted_elements(
    box: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
) -> None:
    sizes, offsets, lengths = box
    whole = torch.arange(math.prod(sizes), dtype=torch.int32).reshape(sizes)
    wanted = whole[tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))]
    part = part_for(stored(sizes), request(offsets, lengths), torch.zeros(lengths, dtype=torch.int32))
    elements = wanted.flatten().tolist()
    in_a_row = elements == list(range(elements[0], elements[0] + len(elements))) if elements else True
    if part is None:
        assert not in_a_row or 0 in lengths
    else:
        first = part.start // 4
        assert whole.flatten()[first : first + part.length // 4].tolist() == elements
        assert part.total == whole.nbytes


@pytest.mark.parametrize(
    "target",
    [torch.zeros(4, 6).t(), torch.zeros(6, 8)[:, ::2], torch.zeros(6, 4, device="meta"), torch.zeros(5, 4)],
    ids=["transposed", "stepped", "elsewhere", "other shape"],
)
def test_a_target_that_is_not_contiguous_gets_a_copy(target: object) -> None:
    assert part_for(stored((6, 4)), request((0, 0), (6, 4)), target) is None

"""Stripe arithmetic: every byte of a segment has exactly one position, and no two have the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.codec import RAW
from bootseer.checkpoint.layout import CHUNK_BYTES, chunk_place, index_of, num_chunks, part_size, row_of

segments = st.integers(1, 40 * CHUNK_BYTES).flatmap(
    lambda size: st.tuples(st.just(size), st.integers(1, min(9, num_chunks(size))))
)


@given(segments)
def test_chunks_fill_the_parts_without_gaps_and_in_order(segment: tuple[int, int]) -> None:
    size_bytes, stripes = segment
    ends = [0] * stripes
    for chunk in range(num_chunks(size_bytes)):
        part, offset = chunk_place(chunk, stripes)
        assert offset == ends[part]
        ends[part] += min(CHUNK_BYTES, size_bytes - chunk * CHUNK_BYTES)
    assert ends == [part_size(size_bytes, stripes, part) for part in range(stripes)]
    assert sum(ends) == size_bytes
    assert ends[0] == max(ends)


@given(segments)
def test_the_index_agrees_with_the_stripe_arithmetic(segment: tuple[int, int]) -> None:
    size_bytes, stripes = segment
    chunks = num_chunks(size_bytes)
    index = index_of(size_bytes, tuple(f"{number:064x}" for number in range(stripes)), bytes(32 * chunks))
    assert (index.size_bytes, index.num_blocks, index.block_size) == (size_bytes, chunks, CHUNK_BYTES)
    for chunk in range(chunks):
        place = index.place(chunk)
        assert (place.stripe, place.offset) == chunk_place(chunk, stripes)
        assert (place.length, place.codec) == (index.length(chunk), RAW)
    assert [stripe.size_bytes for stripe in index.stripes] == [
        part_size(size_bytes, stripes, n) for n in range(stripes)
    ]


@given(segments)
def test_rows_hold_each_chunk_once_and_one_of_each_part(segment: tuple[int, int]) -> None:
    size_bytes, stripes = segment
    chunks = num_chunks(size_bytes)
    seen: list[int] = []
    for first in range(0, chunks, stripes):
        row = row_of(first, chunks, stripes)
        assert all(row_of(chunk, chunks, stripes) == row for chunk in row)
        assert len({chunk_place(chunk, stripes)[0] for chunk in row}) == len(row)
        assert len({chunk_place(chunk, stripes)[1] for chunk in row}) == 1
        seen += row
    assert seen == list(range(chunks))


def test_more_parts_than_chunks_or_a_wrong_number_of_digests_are_refused() -> None:
    with pytest.raises(ValueError, match="2 parts"):
        index_of(CHUNK_BYTES, ("0" * 64, "1" * 64), bytes(32))
    with pytest.raises(ValueError, match="digests"):
        index_of(CHUNK_BYTES, ("0" * 64,), bytes(64))

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.codec import decode
from bootseer.errors import TransientError
from bootseer.fetch.block_request import StoreOrigin, _cut
from fetch.files import BLOCK
from store_doubles import Fault, FaultyStore


@given(st.lists(st.binary(min_size=1, max_size=20)), st.data())
def test_pieces_of_any_size_are_cut_into_the_parts_asked_for(pieces, data):
    whole = b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=10)))
    lengths = [end - start for start, end in zip([0, *cuts], cuts, strict=False)]
    parts = [bytes(part) for part in _cut(iter(pieces), lengths)]
    assert parts == [whole[end - length : end] for length, end in zip(lengths, cuts, strict=True)]


def test_an_answer_that_is_too_short_yields_the_blocks_that_are_whole(origin, index):
    store = FaultyStore(origin, [Fault(short_after=BLOCK + 10)])
    blocks = StoreOrigin(store).read(index, range(4), 5.0)
    with pytest.raises(TransientError, match="ended too early"):
        for block, stored in blocks:
            last = block, stored
    assert last[0] == 1  # block 1 holds zeros and needs no bytes


def test_blocks_of_zeros_alone_need_no_request(origin, index):
    store = FaultyStore(origin)
    [(block, stored)] = StoreOrigin(store).read(index, range(1, 2), 5.0)
    assert decode(index.place(block).codec, stored, BLOCK, index.digest(block)) == bytes(BLOCK)
    assert not store.requests


def test_closing_early_ends_the_request(origin, index):
    closed = []

    class Watched(FaultyStore):
        def read(self, *args, **options):
            try:
                yield from super().read(*args, **options)
            finally:
                closed.append(True)

    blocks = StoreOrigin(Watched(origin, lambda request: Fault(piece_bytes=100))).read(index, range(8), 5.0)
    next(blocks)
    blocks.close()
    assert closed == [True]


def test_an_answer_that_is_too_long_is_an_error(origin, index):
    class Generous(FaultyStore):
        def read(self, *args, **options):
            yield from super().read(*args, **options)
            yield b"more"

    with pytest.raises(TransientError, match="longer"):
        list(StoreOrigin(Generous(origin)).read(index, range(4), 5.0))

from __future__ import annotations

import struct

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.codec import RAW, ZERO, ZSTD
from bootseer.blocks.index import MAX_INDEX_BYTES, Index, Place, encode_index
from bootseer.errors import CorruptError, PermanentError
from bootseer.store.store import Stored

NAMES = ["sha256:" + digit * 64 for digit in "abcdef"]


def build(**changes) -> bytes:
    """An index of three blocks (4096, 4096 and 100 bytes) in two stripes."""
    fields = {
        "block_size": 4096,
        "size_bytes": 2 * 4096 + 100,
        "stripes": [Stored(NAMES[0], 4196), Stored(NAMES[1], 50)],
        "offsets": [100, 20, 0],
        "lengths": [4096, 30, 100],
        "codecs": bytes([RAW, ZSTD, RAW]),
        "digests": bytes(range(96)),
    }
    return encode_index(**{**fields, **changes})


def sealed(body: bytes) -> bytes:
    """Append a valid trailer, like an attacker."""
    return body + blake3(body).digest()


def test_an_index_has_the_place_of_each_block():
    index = Index.parse(build())
    assert (index.num_blocks, index.block_size, index.size_bytes) == (3, 4096, 8292)
    assert [index.place(i) for i in range(3)] == [
        Place(0, 100, 4096, RAW),
        Place(1, 20, 30, ZSTD),
        Place(0, 0, 100, RAW),
    ]
    assert [index.length(i) for i in range(3)] == [4096, 4096, 100]
    assert index.digest(1) == bytes(range(32, 64))


def test_parsing_and_encoding_give_the_same_bytes_and_identity():
    data = build()
    index = Index.parse(data)
    assert index.encode() == data
    assert index.identity == blake3(data[:-32]).hexdigest()
    assert Index.parse(bytearray(data)) == index


def test_blocks_outside_the_file_have_no_place():
    index = Index.parse(build())
    for block in (-1, 3):
        for method in (index.place, index.digest, index.length):
            with pytest.raises(IndexError):
                method(block)


@pytest.mark.parametrize(
    ("offset", "length", "blocks"),
    [(0, 1, [0]), (4095, 2, [0, 1]), (4096, 4096, [1]), (0, 10**9, [0, 1, 2]), (8292, 5, []), (5, 0, []), (-1, 9, [])],
)
def test_a_range_of_the_file_has_these_blocks(offset, length, blocks):
    assert list(Index.parse(build()).blocks_of(offset, length)) == blocks


def test_an_empty_file_has_no_blocks():
    index = Index.parse(
        build(size_bytes=0, stripes=[Stored(NAMES[0], 0)], offsets=[], lengths=[], codecs=b"", digests=b"")
    )
    assert index.num_blocks == 0
    assert list(index.blocks_of(0, 10)) == []


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"offsets": [101, 20, 0]}, id="a block behind its stripe's end"),
        pytest.param({"offsets": [100, 2**64 - 1, 0]}, id="an offset that would overflow"),
        pytest.param({"lengths": [4095, 30, 100]}, id="a raw block that is too short"),
        pytest.param({"lengths": [4096, 30, 99]}, id="a last block that is too short"),
        pytest.param({"codecs": bytes([RAW, ZSTD, ZERO])}, id="a zero block with bytes"),
        pytest.param({"codecs": bytes([ZSTD, ZSTD, RAW])}, id="a frame that saves nothing"),
        pytest.param({"codecs": bytes([RAW, 3, RAW])}, id="an unknown codec"),
        pytest.param({"block_size": 4095}, id="an odd block size"),
        pytest.param({"block_size": 2048}, id="a small block size"),
        pytest.param({"block_size": 1 << 30}, id="a huge block size"),
        pytest.param({"block_size": 0}, id="no block size"),
        pytest.param({"size_bytes": 3 * 4096 + 1}, id="more blocks than columns"),
        pytest.param({"size_bytes": 4096}, id="fewer blocks than columns"),
        pytest.param({"size_bytes": 2**63}, id="a huge file"),
        pytest.param({"stripes": []}, id="no stripes"),
    ],
)
def test_impossible_values_are_refused(changes):
    with pytest.raises(CorruptError):
        Index.parse(build(**changes))


def test_a_later_stripe_is_checked_in_every_piece():
    num_blocks = 3 * 65536 + 5  # pieces of 65536 blocks do not begin with stripe 0
    lengths = [10] * num_blocks
    fields = {
        "block_size": 4096,
        "size_bytes": num_blocks * 4096,
        "stripes": [Stored(name, 1000 + number) for number, name in enumerate(NAMES[:5])],
        "codecs": bytes([ZSTD]) * num_blocks,
        "digests": bytes(32) * num_blocks,
    }
    offsets = [990 + block % 5 for block in range(num_blocks)]
    Index.parse(encode_index(offsets=offsets, lengths=lengths, **fields))
    for block in (0, 65535, 65536, 131072, num_blocks - 1):
        offsets[block] += 1
        with pytest.raises(CorruptError):
            Index.parse(encode_index(offsets=offsets, lengths=lengths, **fields))
        offsets[block] -= 1


def test_a_newer_version_is_named():
    body = bytearray(build()[:-32])
    body[8:12] = struct.pack("<I", 7)
    with pytest.raises(PermanentError, match="version 7"):
        Index.parse(sealed(bytes(body)))


def test_each_flipped_bit_is_noticed():
    data = build()
    for position in range(len(data) * 8):
        broken = bytearray(data)
        broken[position // 8] ^= 1 << position % 8
        with pytest.raises(PermanentError):
            Index.parse(broken)


def test_every_cut_is_noticed():
    data = build()
    for end in range(len(data)):
        with pytest.raises(CorruptError):
            Index.parse(data[:end])


@given(st.binary(max_size=400), st.sampled_from([b"", b"BSBLKIDX", b"BSBLKIDX\1\0\0\0", build()[:32]]), st.booleans())
def test_random_bytes_end_in_an_error_of_ours(data, begin, seal):
    data = begin + data
    with pytest.raises(PermanentError):
        Index.parse(sealed(data) if seal else data)


@given(st.lists(st.tuples(st.integers(0, len(build()) - 33), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_changed_index_with_a_valid_trailer_is_refused_or_consistent(changes):
    body = bytearray(build()[:-32])
    for position, value in changes:
        body[position] = value
    try:
        index = Index.parse(sealed(bytes(body)))
    except PermanentError:
        return
    for block in range(index.num_blocks):
        place = index.place(block)
        assert place.offset + place.length <= index.stripes[place.stripe].size_bytes
        assert place.length <= index.length(block) <= index.block_size


def test_sizes_are_checked_before_anything_is_allocated():
    header = struct.pack("<8sIIQII", b"BSBLKIDX", 1, 4096, 2**26 * 4096, 1024, 0)
    with pytest.raises(CorruptError, match=str(MAX_INDEX_BYTES)):
        Index.parse(sealed(header))

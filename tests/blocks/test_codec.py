from __future__ import annotations

import os

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks import codec
from bootseer.errors import CorruptError

TEXT = b"import torch\n" * 5000
COMPRESSOR = codec.compressor_of()
NOISE = os.urandom(10_000)


@pytest.mark.parametrize(
    ("data", "expected"), [(TEXT, codec.ZSTD), (NOISE, codec.RAW), (bytes(4096), codec.ZERO), (b"\0\1", codec.RAW)]
)
def test_a_block_comes_back_as_it_was(data, expected):
    ((kind, stored, digest),) = codec.encode([data], COMPRESSOR)
    assert kind == expected
    assert codec.decode(kind, stored, len(data), digest) == data
    assert codec.decode(kind, memoryview(stored), len(data), digest) == data


def test_zeros_are_stored_in_no_bytes():
    assert codec.encode([bytes(262144)], COMPRESSOR)[0][1] == b""


def test_a_frame_that_saves_less_than_a_tenth_is_not_kept():
    data = NOISE[:9_200] + bytes(800)
    assert codec.encode([data], COMPRESSOR)[0][:2] == (codec.RAW, data)


@given(st.binary(min_size=1, max_size=20_000))
def test_any_block_comes_back_as_it_was(data):
    ((kind, stored, digest),) = codec.encode([data], COMPRESSOR)
    assert len(stored) <= len(data)
    assert codec.decode(kind, stored, len(data), digest) == data


def test_builds_of_zstandard_without_its_call_for_many_blocks_store_the_same(monkeypatch):
    blocks = [TEXT, NOISE, bytes(4096), TEXT[1:]]
    in_one_call = codec.encode(blocks, COMPRESSOR)
    monkeypatch.setattr(codec.zstandard, "backend_features", {"buffer_types"})
    assert codec.encode(blocks, COMPRESSOR) == in_one_call


@pytest.mark.parametrize("data", [TEXT, NOISE])
def test_each_flipped_bit_is_noticed(data):
    ((kind, stored, digest),) = codec.encode([data], COMPRESSOR)
    for position in range(0, len(stored) * 8, max(1, len(stored) // 50)):
        broken = bytearray(stored)
        broken[position // 8] ^= 1 << position % 8
        try:
            got = codec.decode(kind, broken, len(data), digest)
        except CorruptError:
            continue
        assert got == data  # an irrelevant bit of zstd's header


def test_a_block_with_anothers_digest_is_refused():
    ((kind, stored, _),) = codec.encode([TEXT], COMPRESSOR)
    with pytest.raises(CorruptError, match="digest"):
        codec.decode(kind, stored, len(TEXT), codec.digest_of(b"other"))


def test_a_zero_block_must_be_announced_as_zeros():
    with pytest.raises(CorruptError):
        codec.decode(codec.ZERO, b"", 4096, codec.digest_of(b"other"))
    with pytest.raises(CorruptError):
        codec.decode(codec.ZERO, b"x", 4096, codec.digest_of(bytes(4096)))


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(zstandard.ZstdCompressor().compress(bytes(1 << 26)), id="a bomb"),
        pytest.param(zstandard.ZstdCompressor(write_content_size=False).compress(TEXT), id="no size"),
        pytest.param(zstandard.ZstdCompressor().compress(TEXT) + b"x", id="more behind the frame"),
        pytest.param(zstandard.ZstdCompressor().compress(TEXT)[:-1], id="cut short"),
        pytest.param(zstandard.ZstdCompressor().compress(TEXT[:-1]), id="another size"),
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x50\x2a\x4d\x18\x00\x00\x00\x00", id="a skippable frame"),
    ],
)
def test_a_frame_that_is_not_one_of_this_length_is_refused(stored):
    with pytest.raises(CorruptError):
        codec.decode(codec.ZSTD, stored, len(TEXT), codec.digest_of(TEXT))


@given(st.integers(0, 255), st.binary(max_size=200), st.integers(1, 1000))
def test_random_stored_bytes_end_in_corrupt_error(kind, stored, length):
    with pytest.raises(CorruptError):
        codec.decode(kind, stored, length, codec.digest_of(b"something else"))

from __future__ import annotations

import random
import struct
import subprocess
import sys
import zlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

google_crc32c = pytest.importorskip("google_crc32c", reason="extra hdfs")
pytest.importorskip("numpy", reason="extra hdfs")

from bootseer.hdfs import checksums  # noqa: E402
from bootseer.hdfs.checksums import CRC32, CRC32C, NONE, first_wrong  # noqa: E402

DATA = random.Random(3).randbytes(200_000)


def sums(kind: int, chunk_bytes: int, data: bytes) -> bytearray:
    crc = zlib.crc32 if kind == CRC32 else google_crc32c.value
    starts = range(0, len(data), chunk_bytes)
    data = bytes(data)
    return bytearray(b"".join(struct.pack(">I", crc(data[start : start + chunk_bytes])) for start in starts))


def cut(data: bytearray, cuts: list[int]) -> list[memoryview]:
    view = memoryview(data)
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in cuts)})
    return [view[begin:end] for begin, end in pairwise(edges)]


@pytest.mark.parametrize("kind", [CRC32, CRC32C])
@pytest.mark.parametrize("chunk_bytes", [1, 512, 4096, 16384])
@pytest.mark.parametrize("length", [1, 511, 512, 65536, 65537, 200_000])
def test_correct_bytes_are_accepted(kind: int, chunk_bytes: int, length: int) -> None:
    length = min(length, 2000) if chunk_bytes == 1 else length
    data = bytearray(DATA[:length])
    assert first_wrong(kind, chunk_bytes, [memoryview(data)], memoryview(sums(kind, chunk_bytes, data))) is None


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([CRC32, CRC32C]),
    st.integers(1, 150_000),
    st.lists(st.integers(0, 200_000), max_size=5),
    st.integers(0, 1 << 30),
    st.integers(0, 7),
)
def test_a_flipped_bit_of_the_data_is_found_however_the_data_is_split(
    kind: int, length: int, cuts: list[int], place: int, bit: int
) -> None:
    data = bytearray(DATA[:length])
    told = memoryview(sums(kind, 512, data))
    pieces = cut(data, cuts)
    assert first_wrong(kind, 512, pieces, told) is None
    data[place % length] ^= 1 << bit
    assert first_wrong(kind, 512, pieces, told) == place % length // 512 * 512


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([CRC32, CRC32C]), st.integers(1, 150_000), st.integers(0, 1 << 30), st.integers(0, 7))
def test_a_flipped_bit_of_a_checksum_is_found(kind: int, length: int, place: int, bit: int) -> None:
    data = bytearray(DATA[:length])
    told = sums(kind, 512, data)
    place %= len(told)
    told[place] ^= 1 << bit
    assert first_wrong(kind, 512, [memoryview(data)], memoryview(told)) == place // 4 * 512


def test_two_swapped_chunks_are_found() -> None:
    data = bytearray(DATA[:65536])
    told = memoryview(sums(CRC32C, 512, data))
    data[:512], data[512:1024] = data[512:1024], data[:512]
    assert first_wrong(CRC32C, 512, [memoryview(data)], told) == 0


_WITHOUT_NUMPY = """
import sys
from bootseer.hdfs.checksums import CRC32, first_wrong
from zlib import crc32
piece = bytearray(65536)
sums = memoryview(crc32(bytes(512)).to_bytes(4, "big") * 128)
def check():
    piece[1024] = 1
    assert first_wrong(CRC32, 512, [memoryview(piece)], sums) == 1024
    piece[1024] = 0
    assert first_wrong(CRC32, 512, [memoryview(piece)], sums) is None
check()
assert "numpy" not in sys.modules
for _ in range(200):
    check()
assert "numpy" in sys.modules
"""


def test_numpy_is_imported_after_much_data_in_small_pieces() -> None:
    subprocess.run([sys.executable, "-c", _WITHOUT_NUMPY], check=True)


def test_data_without_checksums_is_not_checked() -> None:
    assert first_wrong(NONE, 512, [memoryview(bytearray(5))], memoryview(b"")) is None


@pytest.mark.parametrize("kind", [CRC32, CRC32C])
def test_the_tables_combine_the_checksums_of_chunks(kind: int) -> None:
    import numpy as np

    data = DATA[: 2 * 65536]
    joined = checksums._joined(kind, 512, np.frombuffer(sums(kind, 512, data), np.uint8))
    crc = zlib.crc32 if kind == CRC32 else google_crc32c.value
    assert joined == [crc(data[:65536]), crc(data[65536:])]

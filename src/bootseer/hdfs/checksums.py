"""Verification of HDFS's checksums. Needs the extra `hdfs`.

HDFS keeps a CRC of every 512 bytes, two thousand per MiB: computing them one by one would cost more than receiving the
data. CRCs are linear: the CRC of a group of chunks can be combined from the chunks' CRCs by table lookups, which numpy
does for the whole group at once. What remains is one CRC over the group, which the processor does by an instruction.

numpy is imported after the first 16 MiB: that takes 0.1 s of processor time, which a mount whose data is in the node's
cache need not spend, as it reads only small files from HDFS. Until then chunks are checked one by one, 2 ms per MiB.
"""

from __future__ import annotations

import functools
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import google_crc32c

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_num_groups = 0
"""Groups that were checked without numpy."""
NONE, CRC32, CRC32C = 0, 1, 2
"""The kinds, as numbered in the protocol."""
KINDS: Final = (NONE, CRC32, CRC32C)
SUM_BYTES: Final = 4
_GROUP: Final = 128
"""Chunks whose CRCs are combined: 64 KiB, a packet, with the usual chunks of 512 bytes."""
_GROUPS_WITHOUT_NUMPY: Final = 256
_MAX_TABLE_CHUNK: Final = 8192
"""Longer chunks are fast enough one by one."""


def first_wrong(kind: int, chunk_bytes: int, data: Sequence[memoryview], sums: memoryview) -> int | None:
    """The offset in `data` of the first wrong chunk; None if all match.

    `data` are pieces of one range that starts at a chunk; only its last chunk may be short. `sums`: one CRC per chunk.
    """
    if kind == NONE:
        return None
    at = num_checked = 0
    begun = b""  # of a chunk that spans several pieces
    for piece in data:
        start = min((chunk_bytes - len(begun)) % chunk_bytes, len(piece)) if begun else 0
        if start:
            begun += bytes(piece[:start])
            if len(begun) == chunk_bytes:
                if not _is_right(kind, begun, sums, num_checked):
                    return at + start - chunk_bytes
                num_checked += 1
                begun = b""
        num_chunks = (len(piece) - start) // chunk_bytes
        end = start + num_chunks * chunk_bytes
        if num_chunks:
            wrong = _first_wrong_chunk(
                kind,
                chunk_bytes,
                piece[start:end],
                sums[num_checked * SUM_BYTES : (num_checked + num_chunks) * SUM_BYTES],
            )
            if wrong is not None:
                return at + start + wrong * chunk_bytes
            num_checked += num_chunks
        begun += bytes(piece[end:])
        at += len(piece)
    if begun and not _is_right(kind, begun, sums, num_checked):
        return at - len(begun)
    return None


def _is_right(kind: int, chunk: bytes, sums: memoryview, number: int) -> bool:
    stored: int = struct.unpack_from(">I", sums, number * SUM_BYTES)[0]
    return (zlib.crc32(chunk) if kind == CRC32 else google_crc32c.value(chunk)) == stored


def _first_wrong_chunk(kind: int, chunk_bytes: int, data: memoryview, sums: memoryview) -> int | None:
    """The index of the first wrong one of whole chunks."""
    global _num_groups  # noqa: PLW0603 - of the whole process
    num_chunks = len(data) // chunk_bytes
    num_groups = num_chunks // _GROUP if chunk_bytes <= _MAX_TABLE_CHUNK else 0
    if _num_groups < _GROUPS_WITHOUT_NUMPY and "numpy" not in sys.modules:
        _num_groups += num_groups
        num_groups = 0
    if num_groups:
        import numpy as np

        # google_crc32c refuses writable memory, unless it is numpy's.
        array = np.frombuffer(data, np.uint8)
        crc: Callable[[Any], int] = zlib.crc32 if kind == CRC32 else google_crc32c.value
        group_bytes = _GROUP * chunk_bytes
        expected = _joined(kind, chunk_bytes, np.frombuffer(sums, np.uint8, num_groups * _GROUP * SUM_BYTES))
        for group in range(num_groups):
            if crc(array[group * group_bytes : (group + 1) * group_bytes]) != expected[group]:
                wrong = _one_by_one(kind, chunk_bytes, data, sums, range(group * _GROUP, (group + 1) * _GROUP))
                # If each chunk by itself is right, the tables must be wrong: nothing is trusted then.
                return group * _GROUP if wrong is None else wrong
    return _one_by_one(kind, chunk_bytes, data, sums, range(num_groups * _GROUP, num_chunks))


def _one_by_one(kind: int, chunk_bytes: int, data: memoryview, sums: memoryview, numbers: range) -> int | None:
    for number in numbers:
        if not _is_right(kind, bytes(data[number * chunk_bytes : (number + 1) * chunk_bytes]), sums, number):
            return number
    return None


def _joined(kind: int, chunk_bytes: int, sums: npt.NDArray[np.uint8]) -> list[int]:
    import numpy as np

    table, places = _tables(kind, chunk_bytes)
    found = table[sums.reshape(-1, _GROUP * SUM_BYTES) + places]
    joined: list[int] = np.bitwise_xor.reduce(found, axis=1).tolist()
    return joined


@functools.cache
def _tables(kind: int, chunk_bytes: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.intp]]:
    """The contribution of each byte of each stored CRC to the group's CRC, and the offsets of the bytes' tables."""
    import numpy as np

    zeros = bytes(chunk_bytes)

    def extended(crc: int) -> int:
        return zlib.crc32(zeros, crc) if kind == CRC32 else google_crc32c.extend(crc, zeros)

    # Appending a chunk changes a CRC linearly: knowing the effect on each bit is enough.
    none = extended(0)
    of_bit = [extended(1 << bit) ^ none for bit in range(32)]
    step = np.zeros((SUM_BYTES, 256), np.uint32)
    values = np.arange(256, dtype=np.uint32)
    for bit in range(32):
        step[bit // 8] ^= np.where(values >> (bit % 8) & 1, np.uint32(of_bit[bit]), np.uint32(0))
    tables = np.zeros((_GROUP, SUM_BYTES, 256), np.uint32)
    # Stored CRCs are big-endian.
    tables[-1] = np.stack([values << np.uint32(8 * byte) for byte in (3, 2, 1, 0)])
    for number in range(_GROUP - 2, -1, -1):
        last = tables[number + 1]
        tables[number] = (
            step[0][last & 0xFF] ^ step[1][last >> 8 & 0xFF] ^ step[2][last >> 16 & 0xFF] ^ step[3][last >> 24]
        )
    return tables.reshape(-1), np.arange(_GROUP * SUM_BYTES, dtype=np.intp) * 256

"""Stripe arithmetic: which bytes of a file lie in which part, and where.

A file is cut into segments, a segment into chunks of 1 MiB. Chunk i of a segment of S stripes lies in part i % S at
offset (i // S) chunks; the S chunks of one such turn are a row. The last chunk of a file may be short. A parity part
holds the byte-wise XOR of each row, short chunks filled up with zeros: it is as long as the first part.

Decides and touches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from types import ModuleType

from bootseer.blocks.codec import DIGEST_BYTES, RAW
from bootseer.blocks.index import Index, Stripe, encode_index

CHUNK_BYTES = 1 << 20


def num_chunks(size_bytes: int) -> int:
    """Chunks that so many bytes of a segment need."""
    return -(-size_bytes // CHUNK_BYTES)


def part_size(segment_bytes: int, stripes: int, part: int) -> int:
    """Bytes of a part of a segment; the parity part is as long as part 0."""
    chunks = num_chunks(segment_bytes)
    mine = len(range(part, chunks, stripes))
    short = num_chunks(segment_bytes) * CHUNK_BYTES - segment_bytes
    has_last = mine > 0 and (chunks - 1) % stripes == part
    return mine * CHUNK_BYTES - (short if has_last else 0)


def chunk_place(chunk: int, stripes: int) -> tuple[int, int]:
    """Part of a chunk, and its offset there."""
    return chunk % stripes, chunk // stripes * CHUNK_BYTES


def row_of(chunk: int, chunks: int, stripes: int) -> range:
    """The chunks of the same row, of a segment that has so many: they and the parity give each other."""
    first = chunk // stripes * stripes
    return range(first, min(first + stripes, chunks))


def index_of(segment_bytes: int, sha256_of_parts: tuple[str, ...], digests: bytes | bytearray) -> Index:
    """The index of a segment as a block file: nodes keep and check its chunks as they do all blocks.

    `sha256_of_parts`: 64 hexadecimal digits each, in the order of the stripes. `digests`: BLAKE3 of each chunk.
    """
    stripes = len(sha256_of_parts)
    chunks = num_chunks(segment_bytes)
    if not 1 <= stripes <= chunks or len(digests) != chunks * DIGEST_BYTES:
        raise ValueError(f"{stripes} parts and {len(digests)} bytes of digests for {chunks} chunks")
    offsets, lengths = _columns(segment_bytes, stripes)
    return Index.parse(
        encode_index(
            block_size=CHUNK_BYTES,
            size_bytes=segment_bytes,
            stripes=[
                Stripe(f"sha256:{sha256}", part_size(segment_bytes, stripes, part))
                for part, sha256 in enumerate(sha256_of_parts)
            ],
            offsets=offsets,
            lengths=lengths,
            codecs=bytes([RAW]) * chunks,
            digests=digests,
        )
    )


@lru_cache(maxsize=4)
def _columns(segment_bytes: int, stripes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and length of each chunk. All segments of a file but the last have the same."""
    chunks = num_chunks(segment_bytes)
    offsets = tuple(chunk_place(chunk, stripes)[1] for chunk in range(chunks))
    return offsets, (CHUNK_BYTES,) * (chunks - 1) + (segment_bytes - (chunks - 1) * CHUNK_BYTES,)


Buffer = bytes | bytearray | memoryview


@cache
def _numpy() -> ModuleType | None:
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def make_ready() -> None:
    """Import numpy now: at the first rebuild it would hold up a thread that receives from DataNodes."""
    _numpy()


def xor_into(target: bytearray | memoryview, *others: Buffer) -> None:
    """Change `target` to its XOR with the others, none of which may be longer than it. All are bytes."""
    numpy = _numpy()
    view = memoryview(target)
    for other in others:
        length = len(other)
        if length > len(view):
            raise ValueError(f"{length} bytes do not fit into {len(view)}")
        if numpy is not None:
            part = numpy.frombuffer(view, numpy.uint8, length)
            numpy.bitwise_xor(part, numpy.frombuffer(other, numpy.uint8), out=part)
        else:
            mixed = int.from_bytes(view[:length], "little") ^ int.from_bytes(other, "little")
            view[:length] = mixed.to_bytes(length, "little")


def parity_chunk(chunks: Iterable[Buffer], chunk_bytes: int) -> bytearray:
    """What the parity part holds for a row of chunks: `chunk_bytes` bytes, whatever the chunks' lengths."""
    parity = bytearray(chunk_bytes)
    xor_into(parity, *chunks)
    return parity

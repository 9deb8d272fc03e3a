"""Stripe arithmetic: which bytes of a file lie in which part, at which offset; and the stripe policy of a folder.

A file is cut into segments, a segment into chunks of 1 MiB. Chunk i of a segment of S stripes lies in part i % S at
offset (i // S) chunks; S consecutive chunks from a multiple of S on are a row. The last chunk of a file may be short. A
parity part contains the byte-wise XOR of each row, short chunks padded with zeros: it is as long as the first part.

A policy says how new files of a folder and below are striped; existing files stay as they are. It is stored as JSON in
the folder's `.stripes/policy.json`; `files` finds the one that applies. Decides and touches nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from types import ModuleType

import msgspec
from msgspec import Struct

from bootseer.blocks.codec import DIGEST_BYTES, RAW, Buffer
from bootseer.blocks.index import Index, encode_index
from bootseer.errors import CorruptError, PermanentError, UsageError
from bootseer.store.store import Stored

CHUNK_BYTES = 1 << 20


def num_chunks(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)


def part_size(segment_bytes: int, stripes: int, part: int) -> int:
    """Bytes of a part of a segment; the parity part is as long as part 0."""
    chunks = num_chunks(segment_bytes)
    mine = len(range(part, chunks, stripes))
    short = num_chunks(segment_bytes) * CHUNK_BYTES - segment_bytes
    has_last = mine > 0 and (chunks - 1) % stripes == part
    return mine * CHUNK_BYTES - (short if has_last else 0)


def chunk_place(chunk: int, stripes: int) -> tuple[int, int]:
    """The part with a chunk, and its offset in the part."""
    return chunk % stripes, chunk // stripes * CHUNK_BYTES


def row_of(chunk: int, chunks: int, stripes: int) -> range:
    """The chunks of a chunk's row, in a segment of `chunks`: with the parity, any one follows from the others."""
    first = chunk // stripes * stripes
    return range(first, min(first + stripes, chunks))


def index_of(segment_bytes: int, sha256_of_parts: tuple[str, ...], digests: bytes | bytearray) -> Index:
    """The index of a segment as a block file, so that the node's cache stores and verifies its chunks.

    `sha256_of_parts`: 64 hexadecimal digits each, in the order of the stripes. `digests`: concatenated BLAKE3 of the
    chunks.
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
                Stored(f"sha256:{sha256}", part_size(segment_bytes, stripes, part))
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


_numpy: ModuleType | None = None


@cache
def make_ready() -> None:
    """Import numpy for `xor_into`, which takes 0.2 s: not in a thread that receives from DataNodes. Until then, and
    without numpy, a row of four chunks takes 4 ms instead of 0.2."""
    global _numpy  # noqa: PLW0603 - of the whole process
    with suppress(ImportError):
        import numpy

        _numpy = numpy


def xor_into(target: bytearray | memoryview, *others: Buffer) -> None:
    """XOR the others into `target`; none may be longer than it. All are bytes."""
    numpy = _numpy
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
    """The parity of a row of chunks, `chunk_bytes` long whatever the chunks' lengths."""
    parity = bytearray(chunk_bytes)
    xor_into(parity, *chunks)
    return parity


SCHEMA = "bootseer.stripes/1"
MAX_POLICY_BYTES = 1 << 16
MAX_STRIPES = 64
MAX_PART_BYTES = 1 << 40
MAX_REPLICATION = 32


@dataclass(frozen=True, slots=True)
class Policy:
    """A stripe policy. Raises `UsageError` for invalid values."""

    stripes: int = 4
    """Maximum parts per segment: the nodes from which one file is read in parallel. 1: no striping."""
    parity: bool = False
    """One more part per segment, so that any one part may be missing or slow."""
    replication: int | None = None
    """Replicas of each part; None for the place's default."""
    part_bytes: int = 64 << 20
    """Maximum bytes of a part: a segment has up to `stripes` times as many. A multiple of a chunk."""
    min_bytes_per_stripe: int = 4 << 20
    """A smaller file has fewer stripes: opening one more part must pay off."""

    def __post_init__(self) -> None:
        if not 1 <= self.stripes <= MAX_STRIPES:
            raise UsageError(f"{self.stripes} stripes", hint=f"1 to {MAX_STRIPES} are possible")
        if not CHUNK_BYTES <= self.part_bytes <= MAX_PART_BYTES or self.part_bytes % CHUNK_BYTES:
            raise UsageError(f"parts of {self.part_bytes} bytes", hint="parts have a whole number of MiB")
        if self.replication is not None and not 1 <= self.replication <= MAX_REPLICATION:
            raise UsageError(f"replication {self.replication}", hint=f"1 to {MAX_REPLICATION} are possible")
        if self.min_bytes_per_stripe < CHUNK_BYTES:
            raise UsageError(f"{self.min_bytes_per_stripe} bytes per stripe", hint="at least one chunk of 1 MiB")

    @property
    def segment_bytes(self) -> int:
        """Maximum bytes of a segment."""
        return self.stripes * self.part_bytes

    def stripes_for(self, size_bytes: int) -> int:
        """Number of stripes of a segment of this size."""
        needed = -(-size_bytes // self.part_bytes)
        return min(self.stripes, max(1, needed, size_bytes // self.min_bytes_per_stripe))

    def is_striped(self, size_bytes: int) -> bool:
        """Whether a file of this size is striped: with one chunk, or one part without parity, there is no gain."""
        stripes = self.stripes_for(min(size_bytes, self.segment_bytes))
        return size_bytes > CHUNK_BYTES and (stripes > 1 or self.parity)


def encode_policy(policy: Policy) -> bytes:
    return json.dumps({"schema": SCHEMA, **asdict(policy)}, indent=1).encode() + b"\n"


class _Schema(Struct):
    schema: str


def parse_policy(data: bytes) -> Policy:
    """Decode a policy. Raises `CorruptError`, or `PermanentError` for an unknown schema."""
    try:
        schema = msgspec.json.decode(data, type=_Schema).schema
        if schema == SCHEMA:
            return msgspec.json.decode(data, type=Policy)
    except UsageError as error:
        raise CorruptError(f"the stripe policy: {error}; {error.hint}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"malformed stripe policy: {error}") from None
    if not schema.startswith("bootseer.stripes/"):
        raise CorruptError("malformed stripe policy")
    raise PermanentError(f"a stripe policy of {schema[:40]!r}; this BootSeer supports {SCHEMA}")

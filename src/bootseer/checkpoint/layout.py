"""Stripe arithmetic: which bytes of a file lie in which part, and where.

A file is cut into segments, a segment into chunks of 1 MiB. Chunk i of a segment of S stripes lies in part i % S at
offset (i // S) chunks; the S chunks of one such turn are a row. The last chunk of a file may be short. A parity part
holds the byte-wise XOR of each row, short chunks filled up with zeros: it is as long as the first part.

Decides and touches nothing.

How the files of a folder are striped: set for a folder by `bootseer ckpt policy`, and for all folders below it.

It decides about files that are written from then on; those that are there stay as they are. Kept as JSON in the
folder's `.stripes/policy.json`; `files` finds the one that holds. Decides and touches nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

from bootseer.blocks.codec import DIGEST_BYTES, RAW
from bootseer.blocks.index import Index, Stripe, encode_index
from bootseer.errors import CorruptError, PermanentError, UsageError

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


SCHEMA = "bootseer.stripes/1"
MAX_POLICY_BYTES = 1 << 16
MAX_STRIPES = 64
MAX_PART_BYTES = 1 << 40
MAX_REPLICATION = 32


@dataclass(frozen=True, slots=True)
class Policy:
    """Raises `UsageError` for values that cannot be."""

    stripes: int = 4
    """Most parts per segment: the nodes that one file is read from at once. 1 stripes nothing."""
    parity: bool = False
    """One more part per segment, so that any part may be missing or slow."""
    replication: int | None = None
    """Copies that the place keeps of each part; None for as many as it always keeps."""
    part_bytes: int = 64 << 20
    """Most bytes of a part: a segment has up to `stripes` times as many. A multiple of a chunk."""
    min_bytes_per_stripe: int = 4 << 20
    """A smaller file has fewer stripes: opening one more part must pay."""

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
        """Most bytes of a segment."""
        return self.stripes * self.part_bytes

    def stripes_for(self, size_bytes: int) -> int:
        """Parts of a segment of so many bytes."""
        needed = -(-size_bytes // self.part_bytes)
        return min(self.stripes, max(1, needed, size_bytes // self.min_bytes_per_stripe))

    def segments_of(self, size_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Start, bytes and stripes of each segment of a file whose size is known before it is written."""
        for start in range(0, size_bytes, self.segment_bytes):
            length = min(self.segment_bytes, size_bytes - start)
            yield start, length, self.stripes_for(length)

    def is_striped(self, size_bytes: int) -> bool:
        """Whether a file of this size becomes parts: one chunk, or one part without parity, would gain nothing."""
        stripes = self.stripes_for(min(size_bytes, self.segment_bytes))
        return size_bytes > CHUNK_BYTES and (stripes > 1 or self.parity)


def encode_policy(policy: Policy) -> bytes:
    """A policy as a file."""
    return json.dumps({"schema": SCHEMA, **asdict(policy)}, indent=1).encode() + b"\n"


def parse_policy(data: bytes) -> Policy:
    """Read a policy. Raises `CorruptError`, or `PermanentError` for a schema that this program does not know."""
    try:
        values: Any = json.loads(data)
    except (ValueError, RecursionError):
        raise CorruptError("the stripe policy is not JSON") from None
    if not isinstance(values, dict) or not str(values.get("schema")).startswith("bootseer.stripes/"):
        raise CorruptError("malformed stripe policy")
    if values["schema"] != SCHEMA:
        raise PermanentError(f"a stripe policy of {str(values['schema'])[:40]!r}; this BootSeer knows {SCHEMA}")
    found = {field.name: values[field.name] for field in fields(Policy) if field.name in values}
    for name, value in found.items():
        wanted = (bool,) if name == "parity" else (int,)
        if type(value) not in wanted and not (name == "replication" and value is None):
            raise CorruptError(f"the stripe policy says {str(value)[:40]!r} for {name}")
    try:
        return Policy(**found)
    except UsageError as error:
        raise CorruptError(f"the stripe policy: {error}; {error.hint}") from error

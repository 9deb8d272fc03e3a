"""The index of a block file: each block's location, codec and digest.

An immutable view of the encoded bytes: columns of numbers, read in place, so that an index of millions of blocks needs
no object per block. `Index.parse` accepts only what `encode_index` can write: it checks every size before it allocates
by it, and every location against its stripe. The format is docs/formats/block-file.md. No I/O.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple

from blake3 import blake3

from bootseer.blocks.codec import DIGEST_BYTES, NUM_CODECS, RAW, ZERO, ZSTD
from bootseer.errors import CorruptError, PermanentError
from bootseer.store.store import Stored

MAGIC = b"BSBLKIDX"
VERSION = 1
MIN_BLOCK_SIZE = 4096  # the page size: cached files are mapped
MAX_BLOCK_SIZE = 16 << 20
MAX_BLOCKS = 1 << 26
MAX_STRIPES = 1024

_HEADER = struct.Struct("<8sIIQII")  # magic, version, block size, file size, stripes, zero
_STRIPE = struct.Struct("<32sQ")  # SHA-256, size
_OFFSET = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")
_BYTES_PER_BLOCK = _OFFSET.size + _LENGTH.size + 1 + DIGEST_BYTES
MAX_INDEX_BYTES = _HEADER.size + MAX_STRIPES * _STRIPE.size + MAX_BLOCKS * _BYTES_PER_BLOCK + DIGEST_BYTES
_IDENTITY = re.compile(r"[0-9a-f]{64}")
# Columns are checked in pieces, so that checking needs little memory beside the index itself.
_PIECE = 1 << 16


class Place(NamedTuple):
    """The location of a block's stored bytes: `length` bytes at `offset` of stripe number `stripe`."""

    stripe: int
    offset: int
    length: int
    codec: int


@dataclass(frozen=True, slots=True)
class Index:
    """A validated index. Indexes of the same `identity` are equal, and so are their files."""

    identity: str
    """BLAKE3 over the encoded index without its trailer, in hexadecimal digits."""
    block_size: int
    size_bytes: int
    stripes: tuple[Stored, ...]
    """Objects that hold every S-th block each, of S stripes. An empty one is not stored: no block points into it."""
    num_blocks: int
    _encoded: bytes = field(repr=False, compare=False)
    _offsets: int = field(repr=False, compare=False)
    _lengths: int = field(repr=False, compare=False)
    _codecs: int = field(repr=False, compare=False)
    _digests: int = field(repr=False, compare=False)

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> Index:
        """Parse an index. Raises `CorruptError`, or `PermanentError` for an unknown version."""
        data = bytes(data)
        if len(data) < _HEADER.size + DIGEST_BYTES or not data.startswith(MAGIC):
            raise CorruptError("this is not the index of a block file")
        _, version, block_size, size_bytes, num_stripes, zero = _HEADER.unpack_from(data)
        if version != VERSION:
            raise PermanentError(f"block file index of version {version}; this BootSeer supports version {VERSION}")
        if not is_block_size(block_size):
            raise CorruptError(f"block file index with blocks of {block_size} bytes")
        num_blocks = -(-size_bytes // block_size)
        if not 1 <= num_stripes <= MAX_STRIPES or num_blocks > MAX_BLOCKS or zero:
            raise CorruptError(f"block file index with {num_blocks} blocks in {num_stripes} stripes: out of bounds")
        columns = _HEADER.size + num_stripes * _STRIPE.size
        lengths = columns + num_blocks * _OFFSET.size
        codecs = lengths + num_blocks * _LENGTH.size
        digests = codecs + num_blocks
        end = digests + num_blocks * DIGEST_BYTES
        if len(data) != end + DIGEST_BYTES:
            raise CorruptError(f"block file index of {len(data)} bytes; it announces {end + DIGEST_BYTES}")
        identity = blake3(memoryview(data)[:end])
        if identity.digest() != data[end:]:
            raise CorruptError("block file index does not have its own digest")
        stripes = tuple(
            Stored("sha256:" + sha256.hex(), size)
            for sha256, size in _STRIPE.iter_unpack(memoryview(data)[_HEADER.size : columns])
        )
        index = cls(
            identity=identity.hexdigest(),
            block_size=block_size,
            size_bytes=size_bytes,
            stripes=stripes,
            num_blocks=num_blocks,
            _encoded=data,
            _offsets=columns,
            _lengths=lengths,
            _codecs=codecs,
            _digests=digests,
        )
        for start in range(0, num_blocks, _PIECE):
            index._check_places(start, min(start + _PIECE, num_blocks))
        return index

    def encode(self) -> bytes:
        return self._encoded

    @property
    def stored_bytes(self) -> int:
        """Compressed size of the file: the total of the stripes."""
        return sum(stripe.size_bytes for stripe in self.stripes)

    def place(self, block: int) -> Place:
        """The location of a block. Raises `IndexError`."""
        self._check(block)
        return Place(
            block % len(self.stripes),
            _OFFSET.unpack_from(self._encoded, self._offsets + block * 8)[0],
            _LENGTH.unpack_from(self._encoded, self._lengths + block * 4)[0],
            self._encoded[self._codecs + block],
        )

    def codecs(self) -> bytes:
        """Codec of each block, one byte each."""
        return self._encoded[self._codecs : self._codecs + self.num_blocks]

    def digest(self, block: int) -> bytes:
        """BLAKE3 of a block's uncompressed bytes. Raises `IndexError`."""
        self._check(block)
        start = self._digests + block * DIGEST_BYTES
        return self._encoded[start : start + DIGEST_BYTES]

    def length(self, block: int) -> int:
        """Uncompressed size of a block: the block size, except for the last one. Raises `IndexError`."""
        self._check(block)
        return min(self.block_size, self.size_bytes - block * self.block_size)

    def blocks_of(self, offset: int, length: int) -> range:
        """The blocks that hold a range of the file, cut off at its end."""
        end = min(offset + length, self.size_bytes)
        if offset < 0 or end <= offset:
            return range(0)
        return range(offset // self.block_size, -(-end // self.block_size))

    def _check(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise IndexError(f"block {block} of {self.num_blocks}")

    def _check_places(self, start: int, stop: int) -> None:
        """Raise `CorruptError` unless the locations of blocks `start` to `stop` are valid."""
        data = self._encoded
        offsets = struct.unpack_from(f"<{stop - start}Q", data, self._offsets + start * 8)
        lengths = struct.unpack_from(f"<{stop - start}I", data, self._lengths + start * 4)
        codecs = data[self._codecs + start : self._codecs + stop]
        if codecs.translate(None, bytes(range(NUM_CODECS))):
            raise CorruptError("block file index with an unknown codec")
        num_stripes = len(self.stripes)
        for phase in range(min(num_stripes, stop - start)):
            size = self.stripes[(start + phase) % num_stripes].size_bytes
            if max(map(add, offsets[phase::num_stripes], lengths[phase::num_stripes])) > size:
                raise CorruptError("block file index with a block outside its stripe")
        # Distinct pairs are few: raw and zero blocks have one length each.
        for codec, length in set(zip(codecs[:-1], lengths[:-1], strict=True)):
            _check_stored_length(codec, length, self.block_size)
        _check_stored_length(codecs[-1], lengths[-1], self.length(stop - 1))


def encode_index(
    *,
    block_size: int,
    size_bytes: int,
    stripes: Sequence[Stored],
    offsets: Sequence[int],
    lengths: Sequence[int],
    codecs: bytes | bytearray,
    digests: bytes | bytearray,
) -> bytes:
    """The bytes of an index, for `Index.parse`. The columns are in the order of the blocks."""
    body = b"".join(
        (
            _HEADER.pack(MAGIC, VERSION, block_size, size_bytes, len(stripes), 0),
            *(
                _STRIPE.pack(bytes.fromhex(stripe.name.removeprefix("sha256:")), stripe.size_bytes)
                for stripe in stripes
            ),
            struct.pack(f"<{len(offsets)}Q", *offsets),
            struct.pack(f"<{len(lengths)}I", *lengths),
            codecs,
            digests,
        )
    )
    return body + blake3(body).digest()


def is_identity(text: str) -> bool:
    """Whether this may be the identity of an index."""
    return _IDENTITY.fullmatch(text) is not None


def is_block_size(block_size: int) -> bool:
    """Whether block files may have blocks of this size: powers of two from 4 KiB to 16 MiB."""
    return MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE and block_size & (block_size - 1) == 0


def _check_stored_length(codec: int, stored: int, length: int) -> None:
    possible = {RAW: stored == length, ZSTD: 0 < stored < length, ZERO: stored == 0}
    if not possible[codec]:
        raise CorruptError(f"block file index with {stored} stored bytes for a block of {length}, codec {codec}")

"""Write an EROFS image as a stream: data first, as it arrives; then the metadata; the superblock last.

The image is never whole in memory or on disk. Block 0 is the superblock, which is known only at the end: `finish`
returns it, and the sink is one that takes the first block last (`blocks.BlockWriter`) or a file opened behind it.

What is written depends on what was given and in which order, not on time, machine or hash seed. One thread owns a
writer. Who calls: `image.conversion.layer`, `image.folder`, and whoever else makes images.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import NamedTuple, Protocol

from bootseer.erofs.format import BLOCK, MAX_BLOCKS, align
from bootseer.erofs.layout import Layout
from bootseer.erofs.tree import Tree
from bootseer.errors import PermanentError

_PIECE = 1 << 20
_ZEROS = bytes(_PIECE)


class Sink(Protocol):
    """What takes the image from block 1 on."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Append."""


class Extent(NamedTuple):
    """Where a file's data lies: first block and size in bytes. An empty file has block 0."""

    block: int
    size: int


class ErofsWriter:
    """An image on its way into `sink`. Put the tree into `tree`; the data of a file goes before its inode."""

    def __init__(self, sink: Sink) -> None:
        self.tree = Tree()
        self._sink = sink
        self._position = BLOCK
        self._begin = BLOCK

    @property
    def position(self) -> int:
        """Bytes of the image so far."""
        return self._position

    def write(self, data: bytes | memoryview) -> None:
        """Append to the data of the file that is being written."""
        self._position += len(data)
        self._check_size()
        self._sink.write(data)

    def write_zeros(self, count: int) -> None:
        """Append zeros; `count` may be huge, memory is not used for them."""
        self._position += count
        self._check_size()
        while count > 0:
            piece = min(count, _PIECE)
            self._sink.write(memoryview(_ZEROS)[:piece])
            count -= piece

    def end_file(self) -> Extent:
        """End the data of a file. What is written next belongs to another."""
        extent = Extent(self._begin // BLOCK, self._position - self._begin)
        self.write_zeros(align(self._position, BLOCK) - self._position)
        self._begin = self._position
        return extent if extent.size else Extent(0, 0)

    def finish(self) -> bytes:
        """Write the metadata and return block 0. The writer is not used afterwards."""
        if self._position != self._begin:
            raise PermanentError("an image was finished in the middle of a file")
        layout = Layout(self.tree, self._position // BLOCK)
        digest = hashlib.sha256()
        pending = bytearray()
        for piece in layout.encode():
            pending += piece
            if len(pending) >= _PIECE:
                self._flush(pending, digest)
                pending.clear()
        self._flush(pending, digest)
        return dataclasses.replace(layout.superblock, uuid=_uuid(digest.digest())).encode()

    def _flush(self, pending: bytearray, digest: hashlib._Hash) -> None:
        data = bytes(pending)
        digest.update(data)
        self._position += len(data)
        self._sink.write(data)

    def _check_size(self) -> None:
        if self._position > MAX_BLOCKS * BLOCK:
            raise PermanentError(f"an image of more than {MAX_BLOCKS} blocks: EROFS ends there")


def _uuid(digest: bytes) -> bytes:
    """A UUID of version 8 (made by an own rule) from the digest of the metadata."""
    uuid = bytearray(digest[:16])
    uuid[6] = uuid[6] & 0x0F | 0x80
    uuid[8] = uuid[8] & 0x3F | 0x80
    return bytes(uuid)

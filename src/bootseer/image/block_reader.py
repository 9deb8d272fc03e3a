"""Read a block file directly from its store, with a small cache in memory: for metadata, or for one pass over a file.

Mounted images use `fetch` and `cache` instead. Thread-safe.
"""

from __future__ import annotations

from contextlib import closing
from functools import lru_cache, partial

from bootseer.artifact.objects import read_index
from bootseer.blocks.block_file import BlockFile
from bootseer.blocks.codec import decode
from bootseer.blocks.index import Index
from bootseer.erofs.reader import ErofsReader
from bootseer.errors import CorruptError
from bootseer.io.retry import retrying
from bootseer.store.store import Store

_KEPT_BYTES = 16 << 20
_BLOCK_TIMEOUT_S = 60.0


class BlockReader:
    """Reads ranges of the file that `index` describes. Every block is verified."""

    def __init__(self, store: Store, index: Index) -> None:
        self._store = store
        self._index = index
        # Not of a method: `self` would be in a cycle, and its blocks in memory until a garbage collection. Two threads
        # that miss one block both fetch it.
        self._block = lru_cache(max(2, _KEPT_BYTES // index.block_size))(partial(_read_block, store, index))

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes. Raises `CorruptError` (damaged, or outside the file) and the store's errors."""
        if offset < 0 or length < 0 or offset + length > self._index.size_bytes:
            raise CorruptError(f"{self._store.uri}: bytes {offset} to {offset + length} lie outside their file")
        size = self._index.block_size
        parts = []
        for number in self._index.blocks_of(offset, length):
            begin = number * size
            parts.append(self._block(number)[max(0, offset - begin) : offset + length - begin])
        return b"".join(parts)


def _read_block(store: Store, index: Index, number: int) -> bytes:
    return retrying(lambda left_s: _fetch(store, index, number, left_s), deadline_s=2 * _BLOCK_TIMEOUT_S)


def _fetch(store: Store, index: Index, number: int, left_s: float) -> bytes:
    place = index.place(number)
    name = index.stripes[place.stripe].name
    stored = b""
    if place.length:
        with closing(store.read(name, place.offset, place.length, timeout_s=min(left_s, _BLOCK_TIMEOUT_S))) as pieces:
            stored = b"".join(pieces)
    try:
        return bytes(decode(place.codec, stored, index.length(number), index.digest(number)))
    except CorruptError as error:
        raise CorruptError(f"{store.uri}: block {number} of {name}: {error}") from error


def open_layer(store: Store, file: BlockFile) -> ErofsReader:
    """The EROFS image in a block file; blocks are read from the store on demand. Raises the store's errors."""
    return ErofsReader(BlockReader(store, read_index(store, file)).read)

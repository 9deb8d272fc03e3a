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
from bootseer.erofs.reader import ErofsReader, Read
from bootseer.errors import CorruptError
from bootseer.io.retry import retrying
from bootseer.store.store import Store

_KEPT_BYTES = 16 << 20
_BLOCK_TIMEOUT_S = 60.0


def block_reader(store: Store, index: Index) -> Read:
    """A function that reads ranges of the file that `index` describes: exactly as many bytes as asked for. It verifies
    every block, and raises `CorruptError` (damaged, or outside the file) and the store's errors."""
    # Two threads that miss one block both fetch it.
    block = lru_cache(max(2, _KEPT_BYTES // index.block_size))(partial(_read_block, store, index))

    def read(offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > index.size_bytes:
            raise CorruptError(f"{store.uri}: bytes {offset} to {offset + length} lie outside their file")
        numbers = index.blocks_of(offset, length)
        begin = offset - numbers.start * index.block_size
        return b"".join(map(block, numbers))[begin : begin + length]

    return read


def _read_block(store: Store, index: Index, number: int) -> bytes:
    place = index.place(number)
    name = index.stripes[place.stripe].name

    def fetch(left_s: float) -> bytes:
        with closing(store.read(name, place.offset, place.length, timeout_s=min(left_s, _BLOCK_TIMEOUT_S))) as pieces:
            return b"".join(pieces)

    stored = retrying(fetch, deadline_s=2 * _BLOCK_TIMEOUT_S) if place.length else b""
    try:
        return bytes(decode(place.codec, stored, index.length(number), index.digest(number)))
    except CorruptError as error:
        raise CorruptError(f"{store.uri}: block {number} of {name}: {error}") from error


def open_layer(store: Store, file: BlockFile) -> ErofsReader:
    """The EROFS image in a block file; blocks are read from the store on demand. Raises the store's errors."""
    return ErofsReader(block_reader(store, read_index(store, file)))

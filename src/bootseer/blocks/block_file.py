"""What a document says of a block file: enough to fetch its index and to know that it is the right one.

Images, snapshots and checkpoints keep a `BlockFile` as JSON; `read_index` turns it into the index.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

from bootseer.blocks.index import MAX_BLOCK_SIZE, MAX_BLOCKS, MAX_INDEX_BYTES, MAX_STRIPES, Index, Stripe
from bootseer.errors import CorruptError
from bootseer.store.store import Store, Stored, is_content_name

# 6 million blocks: 1.5 TiB in blocks of 256 KiB. An index is read before anything can start, into memory.
MAX_READ_BYTES = 256 << 20
_IDENTITY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A block file in some store: its index, and the stripes that hold its blocks."""

    index_name: str
    """Content name of the index."""
    index_bytes: int
    identity: str
    """`Index.identity`: the file's name everywhere but in a store."""
    size_bytes: int
    """Size of the file itself."""
    stored_bytes: int
    """What the stripes hold: the compressed size."""
    stripes: tuple[Stripe, ...]

    @property
    def objects(self) -> tuple[Stored, ...]:
        """All objects of the store that this file needs. Stripes of no bytes are not stored."""
        return (
            Stored(self.index_name, self.index_bytes),
            *(Stored(stripe.name, stripe.size_bytes) for stripe in self.stripes if stripe.size_bytes),
        )

    def as_json(self) -> dict[str, object]:
        """A JSON object for `from_json`."""
        return {
            "index": self.index_name,
            "index_bytes": self.index_bytes,
            "identity": self.identity,
            "size_bytes": self.size_bytes,
            "stored_bytes": self.stored_bytes,
            "stripes": [[stripe.name, stripe.size_bytes] for stripe in self.stripes],
        }

    @classmethod
    def from_json(cls, value: object) -> BlockFile:
        """Read what `as_json` made. Raises `CorruptError`; unknown fields are ignored."""
        if not isinstance(value, Mapping):
            raise CorruptError("a block file's description is not an object")
        rows = value.get("stripes")
        if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_STRIPES:
            raise CorruptError("a block file's description has no list of stripes")
        identity = value.get("identity")
        if not isinstance(identity, str) or not _IDENTITY.fullmatch(identity):
            raise CorruptError("a block file's description has no identity")
        block_file = cls(
            index_name=_content_name(value.get("index")),
            index_bytes=_size(value.get("index_bytes"), MAX_INDEX_BYTES),
            identity=identity,
            size_bytes=_size(value.get("size_bytes"), MAX_BLOCKS * MAX_BLOCK_SIZE),
            stored_bytes=_size(value.get("stored_bytes"), MAX_BLOCKS * MAX_BLOCK_SIZE),
            stripes=tuple(_stripe(row) for row in rows),
        )
        if sum(stripe.size_bytes for stripe in block_file.stripes) != block_file.stored_bytes:
            raise CorruptError("a block file's description has stripes that do not add up")
        return block_file


def read_index(store: Store, block_file: BlockFile, *, timeout_s: float = 60.0) -> Index:
    """Fetch the index of a block file and check that it is the one described. One attempt: wrap it in `retrying`.

    Raises what `Store.read` raises, and `CorruptError` when the bytes are others than described.
    """
    if block_file.index_bytes > MAX_READ_BYTES:
        raise CorruptError(f"{block_file.index_name}: an index of {block_file.index_bytes} bytes is too large")
    data = bytearray()
    # All of it, whatever its size is: damage may have changed that, too.
    with closing(store.read(block_file.index_name, timeout_s=timeout_s)) as pieces:
        for piece in pieces:
            data += piece
            if len(data) > block_file.index_bytes:
                break
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != block_file.index_name:
        raise CorruptError(f"{store.uri}: the bytes of {block_file.index_name} are not those of its name")
    index = Index.parse(data)
    described = (block_file.identity, block_file.size_bytes, block_file.stripes)
    if (index.identity, index.size_bytes, index.stripes) != described:
        raise CorruptError(f"{block_file.index_name} in {store.uri}: not the index of the file that is described")
    return index


def _content_name(value: object) -> str:
    if not isinstance(value, str) or not is_content_name(value):
        raise CorruptError("a block file's description names an object that is not named by its content")
    return value


def _size(value: object, limit: int) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise CorruptError("a block file's description has an impossible size")
    return value


def _stripe(row: object) -> Stripe:
    if not isinstance(row, list) or len(row) != 2:
        raise CorruptError("a block file's description has a stripe without name and size")
    return Stripe(_content_name(row[0]), _size(row[1], MAX_BLOCKS * MAX_BLOCK_SIZE))

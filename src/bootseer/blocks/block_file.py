"""Reference to a block file, in documents: enough to fetch its index and verify it.

Images and snapshots keep a `BlockFile` as JSON; `artifact.objects` reads the index that it names.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

from msgspec import Meta, Struct

from bootseer.blocks.index import MAX_BLOCK_SIZE, MAX_BLOCKS, MAX_INDEX_BYTES, Index
from bootseer.errors import CorruptError
from bootseer.store.store import Stored, is_content_name

# 6 million blocks: 1.5 TiB in blocks of 256 KiB. An index is read into memory before anything can start.
MAX_READ_BYTES = 256 << 20


class BlockFile(Struct, frozen=True, rename={"index_name": "index"}):
    """A block file in some store: its index, and the object with its blocks."""

    index_name: Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]
    """Content name of the index."""
    index_bytes: Annotated[int, Meta(ge=0, le=MAX_INDEX_BYTES)]
    identity: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    """`Index.identity`: the file's name everywhere except in a store."""
    size_bytes: Annotated[int, Meta(ge=0, le=MAX_BLOCKS * MAX_BLOCK_SIZE)]
    """Size of the file itself."""
    stored_bytes: Annotated[int, Meta(ge=0, le=MAX_BLOCKS * MAX_BLOCK_SIZE)]
    """Compressed size: that of the stripe."""
    stripes: tuple[Stored]
    """One stripe, which may be empty: only the segments of striped checkpoints have several."""

    def __post_init__(self) -> None:
        if not is_content_name(self.stripes[0].name) or self.stripes[0].size_bytes != self.stored_bytes:
            raise ValueError("the stripe is not named by its content, or has another size")

    @property
    def objects(self) -> tuple[Stored, ...]:
        """All objects of the store that this file needs. An empty stripe is not stored."""
        return Stored(self.index_name, self.index_bytes), *(stripe for stripe in self.stripes if stripe.size_bytes)


def parse_index(data: bytes, block_file: BlockFile, where: str) -> Index:
    """Parse and verify the bytes of an index from `where`. Raises `CorruptError` when it is not the referenced one."""
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != block_file.index_name:
        raise CorruptError(f"{where}: the bytes of {block_file.index_name} are not those of its name")
    index = Index.parse(data)
    described = (block_file.identity, block_file.size_bytes, block_file.stripes)
    if (index.identity, index.size_bytes, index.stripes) != described:
        raise CorruptError(f"{block_file.index_name} in {where}: not the index of the file that is described")
    return index

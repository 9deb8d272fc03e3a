"""A block file as the engine sees it: where its blocks come from, where they are kept, and what can be done with one.

Nothing here takes a lock; the cache and the store may be used from any thread.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from bootseer.blocks.codec import Buffer, decode
from bootseer.blocks.index import Index
from bootseer.cache.file import CachedFile
from bootseer.errors import BootseerError, CorruptError
from bootseer.logs import logger
from bootseer.store.store import Store

_LOG = logger(__name__)


@dataclass(slots=True)
class Claim:
    """What has become of the blocks of one request, before it is made."""

    mine: list[int] = field(default_factory=list)
    """For us to fetch."""
    held: set[int] = field(default_factory=set)
    """Those of them that other processes leave to us until we release them."""
    here: list[int] = field(default_factory=list)
    """In the cache by now."""
    elsewhere: list[int] = field(default_factory=list)
    """Another process fetches them."""


@dataclass(frozen=True, slots=True, eq=False)
class File:
    """One block file."""

    index: Index
    origin: Store
    cached: CachedFile
    needed: bytearray
    """1 for each block that a reader has needed. Written under the engine's lock, read without: it only ever grows."""
    brought_hot: bytearray
    """1 for each block that was fetched because it is hot."""

    def claim(self, blocks: Iterable[int], *, hedge: bool, distrusted: Container[int]) -> Claim:
        """Divide blocks by who is to fetch them. Hedges do not wait for others, and `distrusted` blocks are ours."""
        claim = Claim()
        for block in blocks:
            if block in distrusted:
                claim.mine.append(block)
                continue
            try:
                if self.cached.claim(block):
                    claim.held.add(block)
                    claim.mine.append(block)
                elif self.cached.ready(block):
                    claim.here.append(block)
                else:
                    (claim.mine if hedge else claim.elsewhere).append(block)
            except BootseerError as error:  # without claims a block may be fetched twice: better than not at all
                _LOG.debug("block %d cannot be claimed: %s", block, error)
                claim.mine.append(block)
        return claim

    def is_free(self, block: int) -> bool:
        """Whether nobody fetches the block, and it is not here."""
        try:
            if self.cached.claim(block):
                self.cached.release(block)  # whoever fetches it claims it for himself
                return True
        except BootseerError:
            return True
        return False

    def release(self, blocks: Iterable[int]) -> None:
        """Leave these blocks to other processes."""
        for block in blocks:
            try:
                self.cached.release(block)
            except BootseerError:
                continue  # the kernel releases it with the process

    def decoded(self, block: int, stored: Buffer) -> bytes | CorruptError:
        """A block's bytes, verified; or the error that says which block of what is damaged."""
        place = self.index.place(block)
        try:
            return decode(place.codec, stored, self.index.length(block), self.index.digest(block))
        except CorruptError as error:
            stripe = self.index.stripes[place.stripe].name
            return CorruptError(
                f"{self.origin.uri}: {stripe}: block {block} of file {self.index.identity[:16]}: {error}"
            )

    def assembled(self, offset: int, length: int, held: Mapping[int, bytes]) -> Buffer:
        """A range of the file, from blocks at hand and from the cache. Raises `MissingBlocks`."""
        size = self.index.block_size
        end = min(offset + length, self.index.size_bytes)
        pieces: list[Buffer] = []
        for block in self.index.blocks_of(offset, length):
            start = block * size
            low, high = max(offset, start), min(end, start + size)
            data = held.get(block)
            if data is None:
                pieces.append(self.cached.read(low, high - low))
            else:
                pieces.append(memoryview(data)[low - start : high - start])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def missing(self) -> list[range]:
        """The blocks that are not in the cache."""
        return list(ranges(self.cached.missing(0, self.index.size_bytes)))


def ranges(blocks: list[int], step: int = 1) -> Iterator[range]:
    """The same ascending numbers as ranges, each as long as possible."""
    start = 0
    for position in range(1, len(blocks) + 1):
        if position == len(blocks) or blocks[position] != blocks[position - 1] + step:
            yield range(blocks[start], blocks[position - 1] + step, step)
            start = position

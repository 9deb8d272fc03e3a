"""Reads that wait for blocks, with their deadlines.

Used with the fetcher's lock held. Decides and touches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError
from bootseer.fetch.ledger import Key

if TYPE_CHECKING:
    from bootseer.blocks.codec import Buffer

Done = Callable[["Buffer | BootseerError"], None]


@dataclass(slots=True, eq=False)
class PendingRead:
    """A read of one range that waits for missing blocks. It keeps the blocks that arrive meanwhile, so that it can be
    served even if the cache has no space for them."""

    file: int
    offset: int
    length: int
    since: float
    deadline: float
    done: Done = field(repr=False)
    missing: set[int] = field(default_factory=set)
    """Blocks that it waits for."""
    held: dict[int, Buffer] = field(default_factory=dict, repr=False)
    """Blocks that arrived while it waited."""


class PendingReads:
    """All waiting reads. A read that is closed is no longer among them: a thread is responsible for calling `done`."""

    def __init__(self) -> None:
        self._reads: dict[PendingRead, None] = {}
        self._by_block: dict[Key, list[PendingRead]] = {}

    def wait(self, read: PendingRead, blocks: Iterable[int]) -> None:
        """Add a read, or add it again for blocks that were cached and are not any more."""
        self._reads[read] = None
        read.missing = set(blocks)
        for block in read.missing:
            self._by_block.setdefault((read.file, block), []).append(read)

    def arrived(self, key: Key, data: Buffer | None) -> list[PendingRead]:
        """A block arrived: with its bytes, or in the cache if None. Closes and returns the complete reads."""
        complete = []
        for read in self._by_block.pop(key, ()):
            if data is not None:
                read.held[key[1]] = data
            read.missing.discard(key[1])
            if not read.missing:
                del self._reads[read]
                complete.append(read)
        return complete

    def fail_block(self, key: Key) -> list[tuple[PendingRead, set[int]]]:
        """A block was given up. Closes and returns the reads of it, each with the other blocks that it waited for."""
        return [(read, self.close(read) - {key[1]}) for read in list(self._by_block.get(key, ()))]

    def take_expired(self, now: float) -> list[tuple[PendingRead, set[int]]]:
        """Close and return the reads past their deadline, each with the blocks that it waited for."""
        return [(read, self.close(read)) for read in list(self._reads) if read.deadline <= now]

    def close(self, read: PendingRead) -> set[int]:
        """Remove a read. Returns the blocks that it waited for; empty if it was closed before."""
        if read not in self._reads:
            return set()
        del self._reads[read]
        for block in read.missing:
            reads = self._by_block[read.file, block]
            reads.remove(read)
            if not reads:
                del self._by_block[read.file, block]
        missing, read.missing = read.missing, set()
        read.held = {}  # its caller may keep the object
        return missing

    @property
    def next_deadline(self) -> float | None:
        return min((read.deadline for read in self._reads), default=None)

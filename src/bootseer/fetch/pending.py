"""Reads that wait for blocks, with their deadlines.

Used with the fetcher's lock held. Decides and touches nothing.
"""

from __future__ import annotations

import heapq
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
    on_cancel: Callable[[PendingRead], None] = field(repr=False)
    missing: set[int] = field(default_factory=set)
    """Blocks that it waits for."""
    held: dict[int, Buffer] = field(default_factory=dict, repr=False)
    """Blocks that arrived while it waited."""
    open: bool = True
    """False once a thread is responsible for calling `done`."""

    def cancel(self) -> None:
        """Cancel the read: `done` is not called, unless that is in progress."""
        self.on_cancel(self)


class PendingReads:
    """All waiting reads."""

    def __init__(self) -> None:
        self._by_block: dict[Key, list[PendingRead]] = {}
        self._deadlines: list[tuple[float, int, PendingRead]] = []
        self._next_number = 0

    def __len__(self) -> int:
        return len({id(read) for reads in self._by_block.values() for read in reads})

    def wait(self, read: PendingRead, blocks: Iterable[int]) -> None:
        """Add a read, or add it again for blocks that were cached and are not any more."""
        read.open = True
        read.missing = set(blocks)
        for block in read.missing:
            self._by_block.setdefault((read.file, block), []).append(read)
        heapq.heappush(self._deadlines, (read.deadline, self._next_number, read))
        self._next_number += 1

    def arrived(self, key: Key, data: Buffer | None) -> list[PendingRead]:
        """A block arrived: with its bytes, or in the cache if None. Closes and returns the complete reads."""
        complete = []
        for read in self._by_block.pop(key, ()):
            if data is not None:
                read.held[key[1]] = data
            read.missing.discard(key[1])
            if not read.missing:
                read.open = False
                complete.append(read)
        return complete

    def fail_block(self, key: Key) -> list[tuple[PendingRead, set[int]]]:
        """A block was given up. Closes and returns the reads of it, each with the other blocks that it waited for."""
        return [(read, self.close(read) - {key[1]}) for read in list(self._by_block.get(key, ()))]

    def take_expired(self, now: float) -> list[tuple[PendingRead, set[int]]]:
        """Close and return the reads past their deadline, each with the blocks that it waited for."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            read = heapq.heappop(self._deadlines)[2]
            if read.open:
                expired.append((read, self.close(read)))
        return expired

    def close(self, read: PendingRead) -> set[int]:
        """Remove a read. Returns the blocks that it waited for; empty if it was closed before."""
        if not read.open:
            return set()
        read.open = False
        for block in read.missing:
            reads = self._by_block[read.file, block]
            reads.remove(read)
            if not reads:
                del self._by_block[read.file, block]
        missing, read.missing = read.missing, set()
        read.held = {}  # the read object stays in the heap of deadlines for a while
        return missing

    def close_all(self) -> list[PendingRead]:
        reads = list({id(read): read for waiting in self._by_block.values() for read in waiting}.values())
        for read in reads:
            self.close(read)
        return reads

    @property
    def next_deadline(self) -> float | None:
        while self._deadlines and not self._deadlines[0][2].open:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

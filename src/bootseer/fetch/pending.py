"""What waits: reads for their blocks, and until when; blocks that other processes bring.

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
_LOOK_S = 0.005
_LOOK_EACH_S = 50e-6
_LONGEST_LOOK_S = 0.05


@dataclass(slots=True, eq=False)
class PendingRead:
    """A read of one range that waits for the blocks that were not here. It keeps those that come meanwhile, so that it
    can be served even if the cache has no room for them."""

    file: int
    offset: int
    length: int
    since: float
    deadline: float
    done: Done = field(repr=False)
    leave: Callable[[PendingRead], None] = field(repr=False)
    missing: set[int] = field(default_factory=set)
    """Blocks that it still waits for."""
    held: dict[int, bytes] = field(default_factory=dict, repr=False)
    """Blocks that came while it waited."""
    open: bool = True
    """No thread has taken it to call `done`."""

    def cancel(self) -> None:
        """The reader does not wait any more: `done` is not called, unless that is happening just now."""
        self.leave(self)


class PendingReads:
    """All reads that wait."""

    def __init__(self) -> None:
        self._by_block: dict[Key, list[PendingRead]] = {}
        self._deadlines: list[tuple[float, int, PendingRead]] = []
        self._next_number = 0

    def __len__(self) -> int:
        return len({id(read) for reads in self._by_block.values() for read in reads})

    def wait(self, read: PendingRead, blocks: Iterable[int]) -> None:
        """A read begins to wait, or must wait once more for blocks that were here and are not any more."""
        read.open = True
        read.missing = set(blocks)
        for block in read.missing:
            self._by_block.setdefault((read.file, block), []).append(read)
        heapq.heappush(self._deadlines, (read.deadline, self._next_number, read))
        self._next_number += 1

    def arrived(self, key: Key, data: bytes | None) -> list[PendingRead]:
        """A block is here, with these bytes or in the cache. Returns the reads that have all they need; all closed."""
        complete = []
        for read in self._by_block.pop(key, ()):
            if data is not None:
                read.held[key[1]] = data
            read.missing.discard(key[1])
            if not read.missing:
                read.open = False
                complete.append(read)
        return complete

    def given_up(self, key: Key) -> list[tuple[PendingRead, set[int]]]:
        """A block will not come. Returns the reads that fail, closed, and what else each waited for."""
        return [(read, self.close(read) - {key[1]}) for read in list(self._by_block.get(key, ()))]

    def expired(self, now: float) -> list[tuple[PendingRead, set[int]]]:
        """The reads whose deadline has passed, closed, and what each waited for."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            read = heapq.heappop(self._deadlines)[2]
            if read.open:
                expired.append((read, self.close(read)))
        return expired

    def close(self, read: PendingRead) -> set[int]:
        """Take a read out. Returns the blocks that it waited for; none if it was closed before."""
        if not read.open:
            return set()
        read.open = False
        for block in read.missing:
            reads = self._by_block[read.file, block]
            reads.remove(read)
            if not reads:
                del self._by_block[read.file, block]
        missing, read.missing = read.missing, set()
        read.held = {}  # the read itself lies among the deadlines for a while
        return missing

    def close_all(self) -> list[PendingRead]:
        reads = list({id(read): read for waiting in self._by_block.values() for read in waiting}.values())
        for read in reads:
            self.close(read)
        return reads

    @property
    def next_deadline(self) -> float | None:
        """When the first read runs out of time."""
        while self._deadlines and not self._deadlines[0][2].open:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None


class ForeignClaims:
    """The blocks that other processes are about to bring, and when to look for them again.

    There is no message between processes: a block appears in the shared cache, or its claim falls. So all of them are
    looked at again and again, less often the more they are. A claim that is held for `overdue_s` is not believed.
    """

    def __init__(self, overdue_s: float) -> None:
        self._overdue_s = overdue_s
        self._since: dict[Key, float] = {}
        self._next_look = 0.0

    def watch(self, key: Key, now: float) -> None:
        """Another process has claimed this block."""
        if not self._since:
            self._next_look = now + _LOOK_S
        self._since.setdefault(key, now)

    def forget(self, key: Key) -> None:
        """The block is here, or not waited for."""
        self._since.pop(key, None)

    def due(self, now: float) -> list[Key]:
        """The blocks to look at now."""
        if not self._since or now < self._next_look:
            return []
        self._next_look = now + min(_LOOK_S + len(self._since) * _LOOK_EACH_S, _LONGEST_LOOK_S)
        return list(self._since)

    def overdue(self, key: Key, now: float) -> bool:
        """Whether its claim has been held for so long that its holder must hang."""
        return now - self._since.get(key, now) >= self._overdue_s

    @property
    def next_look(self) -> float | None:
        """When the next one is due."""
        return self._next_look if self._since else None

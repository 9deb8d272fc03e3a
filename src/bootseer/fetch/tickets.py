"""Who waits for which blocks, and until when.

A ticket is one read of one range; it waits for the blocks that were not here and keeps those that come meanwhile, so
that it can be served even if the cache has no room for them. The keeper says which tickets are complete, have failed
or have run out of time; `engine` answers their readers and tells the scheduler who left. Called by `engine`, with a
lock held. Decides and touches nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError
from bootseer.fetch.queues import Key

if TYPE_CHECKING:
    from bootseer.blocks.codec import Buffer

Done = Callable[["Buffer | BootseerError"], None]


@dataclass(slots=True, eq=False)
class Ticket:
    """A read that waits."""

    file: int
    offset: int
    length: int
    since: float
    deadline: float
    done: Done = field(repr=False)
    leave: Callable[[Ticket], None] = field(repr=False)
    missing: set[int] = field(default_factory=set)
    """Blocks that it still waits for."""
    held: dict[int, bytes] = field(default_factory=dict, repr=False)
    """Blocks that came while it waited."""
    open: bool = True
    """Nobody has taken it upon himself to call `done`."""

    def cancel(self) -> None:
        """The reader does not wait any more: `done` is not called, unless that is happening just now."""
        self.leave(self)


class Tickets:
    """All reads that wait."""

    def __init__(self) -> None:
        self._by_block: dict[Key, list[Ticket]] = {}
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._next_number = 0

    def __len__(self) -> int:
        return len({id(ticket) for tickets in self._by_block.values() for ticket in tickets})

    def wait(self, ticket: Ticket, blocks: Iterable[int]) -> None:
        """A read begins to wait, or must wait once more for blocks that were here and are not any more."""
        ticket.open = True
        ticket.missing = set(blocks)
        for block in ticket.missing:
            self._by_block.setdefault((ticket.file, block), []).append(ticket)
        heapq.heappush(self._deadlines, (ticket.deadline, self._next_number, ticket))
        self._next_number += 1

    def arrived(self, key: Key, data: bytes | None) -> list[Ticket]:
        """A block is here, with these bytes or in the cache. Returns the reads that have all they need; all closed."""
        complete = []
        for ticket in self._by_block.pop(key, ()):
            if data is not None:
                ticket.held[key[1]] = data
            ticket.missing.discard(key[1])
            if not ticket.missing:
                ticket.open = False
                complete.append(ticket)
        return complete

    def given_up(self, key: Key) -> list[tuple[Ticket, set[int]]]:
        """A block will not come. Returns the reads that fail, closed, and what else each waited for."""
        return [(ticket, self.close(ticket) - {key[1]}) for ticket in list(self._by_block.get(key, ()))]

    def expired(self, now: float) -> list[tuple[Ticket, set[int]]]:
        """The reads whose deadline has passed, closed, and what each waited for."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            ticket = heapq.heappop(self._deadlines)[2]
            if ticket.open:
                expired.append((ticket, self.close(ticket)))
        return expired

    def close(self, ticket: Ticket) -> set[int]:
        """Take a read out. Returns the blocks that it waited for; none if it was closed before."""
        if not ticket.open:
            return set()
        ticket.open = False
        for block in ticket.missing:
            tickets = self._by_block[ticket.file, block]
            tickets.remove(ticket)
            if not tickets:
                del self._by_block[ticket.file, block]
        missing, ticket.missing = ticket.missing, set()
        ticket.held = {}  # the ticket itself lies among the deadlines for a while
        return missing

    def close_all(self) -> list[Ticket]:
        """Take all reads out."""
        tickets = list({id(ticket): ticket for waiting in self._by_block.values() for ticket in waiting}.values())
        for ticket in tickets:
            self.close(ticket)
        return tickets

    @property
    def next_deadline(self) -> float | None:
        """When the first read runs out of time."""
        while self._deadlines and not self._deadlines[0][2].open:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

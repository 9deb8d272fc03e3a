"""Which reads have taken too long. Used by `schedule`, under its lock."""

from __future__ import annotations

import heapq
import itertools
from typing import Final

from bootseer.hdfs.pieces import Ticket

_MANY: Final = 256
"""Tickets that have ended are remembered until there are so many of them that forgetting them pays."""


class Deadlines:
    """All tickets that have not ended, the next to be over first."""

    def __init__(self) -> None:
        self._until: list[tuple[float, int, Ticket]] = []
        self._numbers = itertools.count()
        self._num_open = 0

    def add(self, ticket: Ticket, now_s: float) -> None:
        """A ticket begins."""
        self._num_open += 1
        heapq.heappush(self._until, (now_s + ticket.deadline_s, next(self._numbers), ticket))
        if len(self._until) > 2 * self._num_open + _MANY:
            self._until = [entry for entry in self._until if entry[2].num_left]
            heapq.heapify(self._until)

    def ended(self) -> None:
        """One of them has ended: its `num_left` is 0."""
        self._num_open -= 1

    def over(self, now_s: float) -> list[Ticket]:
        """Those whose time is over, each once."""
        found = []
        while self._until and (self._until[0][0] <= now_s or not self._until[0][2].num_left):
            ticket = heapq.heappop(self._until)[2]
            if ticket.num_left:
                found.append(ticket)
        return found

    def all(self) -> list[Ticket]:
        """Those that have not ended, and are not over."""
        return [ticket for _, _, ticket in self._until if ticket.num_left]

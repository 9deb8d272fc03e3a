"""What is wanted from one origin and waits for its turn, by purpose.

Entries of the prefetch queues are not removed when the block is fetched for another reason, but when they come to the
head: `ledger` knows whether they still mean something. Decides and touches nothing.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from bootseer.errors import BootseerError
from bootseer.fetch.pace import Pace
from bootseer.fetch.purpose import Purpose

Key = tuple[int, int]
"""File number, block."""


@dataclass(slots=True)
class Wanted:
    """A block that somebody wants and that is not here."""

    readers: int = 0
    prefetch: Purpose | None = None
    """Why it is wanted when no reader waits for it."""
    requests: list[int] = field(default_factory=list)
    """Running requests that will bring it: more than one after a hedge."""
    elsewhere: bool = False
    """Another process is about to bring it."""
    later: bool = False
    """It failed and waits for its next attempt."""
    late_at: float = 0.0
    """When a reader has waited so long that a second request is due."""
    hedges: int = 0
    attempts: int = 0
    corrupt: int = 0
    error: BootseerError | None = None
    """Why the latest attempt failed."""

    @property
    def purpose(self) -> Purpose | None:
        """The highest purpose that it has, None when nobody wants it any more."""
        return Purpose.DEMAND if self.readers else self.prefetch

    @property
    def on_its_way(self) -> bool:
        """Whether somebody is bringing it."""
        return self.elsewhere or bool(self.requests)

    @property
    def queued(self) -> bool:
        """Whether it can be asked for now."""
        return not (self.requests or self.elsewhere or self.later)


@dataclass(slots=True)
class Origin:
    """One place that blocks come from: its pace, its queues and what runs."""

    pace: Pace
    next_bytes: int
    """Size of the next prefetch request: small at first, so that the first blocks are here early."""
    demand: dict[Key, None] = field(default_factory=dict)
    """In the order of arrival."""
    uncovered: set[Key] = field(default_factory=set)
    """Blocks that readers wait for, queued or not, and that are not in the hot set."""
    yield_until: float = 0.0
    """Until then hot blocks give way to these readers, though the hot set has proven itself."""
    hot: deque[Key] = field(default_factory=deque)
    """In the order of recorded need."""
    cold: deque[tuple[int, range]] = field(default_factory=deque)
    later: list[tuple[float, Key]] = field(default_factory=list)
    """Heap of failed blocks by the time of their next attempt."""
    num_running: int = 0
    num_prefetch: int = 0
    prefetch_bytes: int = 0
    """What running prefetch requests may still bring."""

    def enqueue(self, key: Key, purpose: Purpose) -> None:
        """Queue a block: a reader's behind the other readers', a prefetch before all others, whose turn it has had."""
        if purpose is Purpose.DEMAND:
            self.demand[key] = None
        elif purpose is Purpose.HOT:
            self.hot.appendleft(key)
        else:
            self.cold.appendleft((key[0], range(key[1], key[1] + 1)))

    def postpone(self, key: Key, until: float) -> None:
        """Let a block wait for its next attempt."""
        heapq.heappush(self.later, (until, key))

    def due(self, now: float) -> Iterator[Key]:
        """Take out the blocks whose next attempt is due."""
        while self.later and self.later[0][0] <= now:
            yield heapq.heappop(self.later)[1]

"""One need: the first time that a reader of one startup read a block.

Seen by `fetcher`, written down by `record`, merged by `hotset`. Decides and touches nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

MAX_NEEDS = 1 << 17
"""Of one run: 32 GiB in blocks of 256 KiB. Who reads more than that should not start lazily."""
MAX_BLOCK = 1 << 26
MAX_MS = 1 << 40


class Found(IntEnum):
    """Where a reader found the block that it needed."""

    READY = 0
    """In the cache."""
    IN_FLIGHT = 1
    """On its way: a prefetch that was late, or another reader's."""
    MISSING = 2


@dataclass(frozen=True, slots=True)
class Need:
    """A reader needed a block for the first time."""

    file: str
    """Identity of the block file."""
    block: int
    t_ms: int
    """Milliseconds since the record began."""
    found: Found

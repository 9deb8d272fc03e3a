"""Plan evictions: the least recently used first, and cold blocks of all entries before anything that was used.

Blocks that were never read and are in no hot set cost nothing when evicted. Entries in use are never touched; an entry
that cannot be examined counts as in use. Decides and touches nothing; `evict` executes the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from bootseer.blocks.codec import ZERO

_HIGH, _LOW = 0.90, 0.80
"""Shares of the limit at which eviction starts and stops. The gap keeps a full cache from evicting at every start."""


class Candidate(Struct, frozen=True):
    """An entry, as relevant for eviction."""

    identity: str
    last_use_ns: int
    """Time of the last use, since 1970; 0: never."""
    in_use: bool
    """Leased or pinned, or not examinable: it is not evicted."""
    disk_bytes: int
    """Disk usage."""
    cold_bytes: int = 0
    """Disk usage of its `cold_blocks`, at most `disk_bytes`."""


class Step(Struct, frozen=True):
    """Evict `num_bytes` of an entry's cold blocks, or the whole entry."""

    identity: str
    whole: bool
    num_bytes: int


def goal_bytes(used_bytes: int, limit_bytes: int) -> int | None:
    """The size to shrink the cache to; None if it is not full enough for eviction."""
    return int(limit_bytes * _LOW) if used_bytes > limit_bytes * _HIGH else None


def plan(candidates: Iterable[Candidate], used_bytes: int, goal: int) -> list[Step]:
    """Steps that reduce `used_bytes` to `goal`, or as close as entries in use allow."""
    excess = used_bytes - goal
    free = sorted((one for one in candidates if not one.in_use), key=lambda one: (one.last_use_ns, one.identity))
    steps: dict[str, Step] = {}
    for one in free:
        if excess <= 0:
            break
        if one.cold_bytes:
            steps[one.identity] = Step(one.identity, False, min(one.cold_bytes, excess))
            excess -= steps[one.identity].num_bytes
    for one in free:
        if excess <= 0:
            break
        cold = steps.pop(one.identity, None)
        excess -= one.disk_bytes - (cold.num_bytes if cold else 0)
        steps[one.identity] = Step(one.identity, True, one.disk_bytes)
    return list(steps.values())


def cold_blocks(states: bytes, flags: bytes, codecs: bytes) -> Sequence[int]:
    """Present blocks not known to be needed; all-zero blocks are skipped, as they take no space."""
    return [
        block
        for block, (state, flag, codec) in enumerate(zip(states, flags, codecs, strict=True))
        if state and not flag and codec != ZERO
    ]

"""Which parts of a cache to evict: least recently used first, and cold blocks of all before anything that was used.

What was never read and no hot set names costs nothing when it goes. Entries in use are never touched, and an entry that
cannot be examined counts as in use. Decides and touches nothing; `evict` carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bootseer.blocks.codec import ZERO


@dataclass(frozen=True, slots=True)
class Watermarks:
    """When to evict, and how far. A gap between the two keeps a full cache from evicting at every start."""

    high: float = 0.90
    """Share of the limit above which eviction begins."""
    low: float = 0.80
    """Share of the limit at which it ends."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry as far as eviction cares."""

    identity: str
    last_use: int
    """Greater is later. A counter, not a time: clocks jump."""
    in_use: bool
    disk_bytes: int
    cold_bytes: int
    """What its `cold_blocks` take, at most `disk_bytes`."""


@dataclass(frozen=True, slots=True)
class Step:
    """Evict `num_bytes` of an entry's cold blocks, or all of it."""

    identity: str
    whole: bool
    num_bytes: int


def goal_bytes(used_bytes: int, limit_bytes: int, marks: Watermarks) -> int | None:
    """What the cache should shrink to; None when it is not full enough to evict anything."""
    return int(limit_bytes * marks.low) if used_bytes > limit_bytes * marks.high else None


def plan(candidates: Iterable[Candidate], used_bytes: int, goal: int) -> list[Step]:
    """Steps that bring `used_bytes` down to `goal`, or as near as entries in use allow."""
    excess = used_bytes - goal
    free = sorted((one for one in candidates if not one.in_use), key=lambda one: (one.last_use, one.identity))
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
    """Blocks that are here and that are not known to be wanted; blocks of zeros take no room and are left alone."""
    return [
        block
        for block, (state, flag, codec) in enumerate(zip(states, flags, codecs, strict=True))
        if state and not flag and codec != ZERO
    ]

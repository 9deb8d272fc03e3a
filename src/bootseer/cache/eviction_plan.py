"""Plan evictions: the least recently used entries first, each as a whole.

Blocks are never taken out of an entry that stays (ADR 7). Entries in use are never touched; an entry that cannot be
examined counts as in use. Decides and touches nothing; `Cache.prune` executes the plan.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

_HIGH, _LOW = 0.90, 0.80
"""Shares of the limit at which eviction starts and stops. The gap keeps a full cache from evicting at every start."""


class Candidate(Struct, frozen=True):
    """An entry, as relevant for eviction."""

    identity: str
    last_use_ns: int
    """Time of the last use, since 1970; 0: never."""
    in_use: bool
    """Open or mounted, or not examinable: it is not evicted."""
    disk_bytes: int
    """Disk usage."""


def goal_bytes(used_bytes: int, limit_bytes: int) -> int | None:
    """The size to shrink the cache to; None if it is not full enough for eviction."""
    return int(limit_bytes * _LOW) if used_bytes > limit_bytes * _HIGH else None


def plan(candidates: Iterable[Candidate], used_bytes: int, goal: int) -> list[Candidate]:
    """The entries to evict, to reduce `used_bytes` to `goal`, or as close as entries in use allow."""
    evicted = []
    for one in sorted(candidates, key=lambda one: (one.last_use_ns, one.identity)):
        if used_bytes > goal and not one.in_use:
            evicted.append(one)
            used_bytes -= one.disk_bytes
    return evicted

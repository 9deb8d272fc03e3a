"""Room for block files in the node's cache: a full disk makes a start slower, and does not keep it from starting.

What was not used for long is evicted; what is mounted stays. Layers that stay mounted, trees that were written out and
mounts of processes that have ended are released when no start uses them any more.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bootseer.artifact.unpacked import name_of, release_unpacked
from bootseer.blocks.index import Index
from bootseer.cache.cache import Cache
from bootseer.cache.disk import CacheFull
from bootseer.cache.file import CachedFile
from bootseer.errors import BootseerError
from bootseer.mounts import kept
from bootseer.mounts.state import Runtime

_FREE_SHARE = 0.1
"""A disk with less room than this is cleaned up before more is fetched."""
_IDLE_S = 7 * 86_400.0
"""A layer that no start used for a week is unmounted: until then the next start finds its files in memory."""


@dataclass(frozen=True, slots=True)
class Room:
    """The room of one cache; `say` gets a line when none could be made."""

    cache: Cache
    say: Callable[[str], None]

    def is_short(self, num_bytes: int = 0) -> bool:
        """Whether the disk is nearly full, or would be with so many bytes more."""
        try:
            usage = shutil.disk_usage(self.cache.root)
        except OSError:
            return False
        return usage.free - num_bytes < _FREE_SHARE * usage.total

    def open(self, index: Index) -> CachedFile:
        """A lease on the file of this index, as `Cache.open`; evicts for it when the disk is full."""
        try:
            return self.cache.open(index)
        except CacheFull:
            self.clean_up()
            return self.cache.open(index)

    def clean_up(self) -> None:
        """Evict by the cache's watermarks."""
        try:
            self.cache.prune()
        except (BootseerError, OSError) as error:
            self.say(f"no room was made in the cache: {error}")

    def make(self, num_bytes: int) -> bool:
        """Evict until so many bytes fit. Nothing is evicted, and False returned, when they would not fit even then."""
        try:
            used = sum(entry.disk_bytes for entry in self.cache.entries())
            usage = shutil.disk_usage(self.cache.root)
            goal = used - (num_bytes + int(_FREE_SHARE * usage.total) - usage.free)
            if goal < 0 or self.cache.prune(goal, dry_run=True).freed_bytes < used - goal:
                return False
            self.cache.prune(goal)
        except (BootseerError, OSError) as error:
            self.say(f"no room was made in the cache: {error}")
            return False
        return True


def release_unused(runtime: Runtime, room: Room, cache_root: Path, needed: Sequence[str]) -> None:
    """Release what is idle; all that is unused when the disk is nearly full. What is mounted cannot be evicted.

    `needed`: the layers of the start that asks, the lowest first. Mounted anew, they would not be in memory any more.
    A start does not fail for what this could not do.
    """
    with contextlib.suppress(BootseerError, OSError):
        idle_s = 0.0 if room.is_short() else _IDLE_S
        release(runtime, room.cache, idle_s=idle_s, needed=needed)
        release_unpacked(cache_root, runtime, idle_s=idle_s, needed=name_of(needed))


def release(runtime: Runtime, cache: Cache, *, idle_s: float, needed: Sequence[str] = ()) -> list[str]:
    """Unmount layers unused for so long, and forget mounts that killed processes left; returns the layers."""
    runtime.clean()
    return kept.release_idle(
        runtime, idle_s=idle_s, unpin=lambda identity: cache.unpin(identity, kept.PIN), needed=needed
    )

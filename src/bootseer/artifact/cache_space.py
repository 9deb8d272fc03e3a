"""Space for block files in the node's cache: a full disk slows a start down but does not prevent it.

The least recently used files are evicted; mounted ones stay. Shared layers, unpacked trees and mounts of ended
processes are released when no start uses them any more.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from bootseer.artifact.unpacked import delete_idle_trees, tree_name
from bootseer.blocks.index import Index
from bootseer.cache.cache import Cache
from bootseer.cache.cached_file import CachedFile
from bootseer.cache.disk import CacheFull
from bootseer.errors import BootseerError
from bootseer.mounts import shared_layers
from bootseer.mounts.state import Runtime

_FREE_SHARE = 0.1
"""A disk with less free space than this is cleaned up before more is fetched."""
_IDLE_S = 7 * 86_400.0
"""A shared layer is unmounted when no start used it for a week: until then the next start finds its files in memory."""


class CacheSpace(Struct, frozen=True):
    """The disk space of one cache. `say` gets a line when eviction fails."""

    cache: Cache
    say: Callable[[str], None]

    def is_short(self, num_bytes: int = 0) -> bool:
        """Whether the disk is nearly full, or would be with `num_bytes` more."""
        try:
            usage = shutil.disk_usage(self.cache.root)
        except OSError:
            return False
        return usage.free - num_bytes < _FREE_SHARE * usage.total

    @property
    def idle_s(self) -> float:
        """How long what no start uses stays on the disk, or keeps a file there."""
        return 0.0 if self.is_short() else _IDLE_S

    def has_room(self, num_bytes: int) -> bool:
        """Whether the disk has room for bytes that are not needed yet: other programs write to it, too."""
        return not self.is_short(num_bytes) or 2 * num_bytes <= shutil.disk_usage(self.cache.root).free

    def open(self, index: Index) -> CachedFile:
        """Open a cached file, as `Cache.open`; evicts if the disk is full."""
        try:
            return self.cache.open(index)
        except CacheFull:
            self.evict()
            return self.cache.open(index)

    def evict(self) -> None:
        """Evict down to the cache's watermarks."""
        try:
            self.cache.prune()
        except (BootseerError, OSError) as error:
            self.say(f"the cache could not be evicted from: {error}")

    def make_free(self, num_bytes: int) -> bool:
        """Evict until `num_bytes` fit. Evicts nothing, and returns False, if they would not fit even then."""
        try:
            used = sum(entry.disk_bytes for entry in self.cache.entries())
            usage = shutil.disk_usage(self.cache.root)
            goal = used - (num_bytes + int(_FREE_SHARE * usage.total) - usage.free)
            if goal < 0 or self.cache.prune(goal, dry_run=True).freed_bytes < used - goal:
                return False
            self.cache.prune(goal)
        except (BootseerError, OSError) as error:
            self.say(f"the cache could not be evicted from: {error}")
            return False
        return True


def release_unused(runtime: Runtime, space: CacheSpace, cache_root: Path, needed: Sequence[str]) -> None:
    """Unmount idle layers and delete idle trees; all unused ones if the disk is nearly full. Raises nothing.

    `needed`: the layers of the current start, the lowest first; they stay, because their files may be in memory.
    """
    with contextlib.suppress(BootseerError, OSError):
        idle_s = space.idle_s
        shared_layers.unmount_idle(runtime, idle_s=idle_s, needed=needed)
        delete_idle_trees(cache_root, runtime, idle_s=idle_s, needed=tree_name(needed))

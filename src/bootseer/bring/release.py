"""Take away what no start uses any more: layers that stay mounted, trees that were written out, mounts of the dead.

Called by whoever mounts, before he does, and by `cli.cache`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from bootseer.bring.room import Room
from bootseer.bring.unpacked import release_unpacked
from bootseer.cache.cache import Cache
from bootseer.errors import BootseerError
from bootseer.mounts import kept
from bootseer.mounts.state import Runtime

_IDLE_S = 7 * 86_400.0
"""A layer that no start used for a week is unmounted: until then the next start finds its files in memory."""


def release_unused(runtime: Runtime, room: Room, cache_root: Path) -> None:
    """Release what is idle; all that nobody uses when the disk is nearly full. What is mounted cannot be evicted.

    A start does not fail for what this could not do.
    """
    with contextlib.suppress(BootseerError, OSError):
        idle_s = 0.0 if room.is_short() else _IDLE_S
        release(runtime, room.cache, idle_s=idle_s)
        release_unpacked(cache_root, runtime, idle_s=idle_s)


def release(runtime: Runtime, cache: Cache, *, idle_s: float) -> list[str]:
    """Unmount layers unused for so long, and forget mounts that killed processes left; returns the layers."""
    runtime.clean()
    return kept.release_idle(runtime, idle_s=idle_s, unpin=lambda identity: cache.unpin(identity, kept.PIN))

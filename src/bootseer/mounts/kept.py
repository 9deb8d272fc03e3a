"""Layers that stay mounted: each complete layer once per node, shared by all images that have it.

An EROFS mount has a page cache of its own, so that containers which share the mount share memory, and a second start
finds its files in it (docs/adr/0010-mounts-and-the-daemon.md has the figures). The mounts need no process, and what a
killed process leaves behind is used by the next one. An overlay keeps its layers by itself: taking one away here while
an image uses it makes the next image mount it again, and breaks nothing.

    <runtime>/layers/<identity>         the mount point
    <runtime>/layers/<identity>.lock    locked while a process mounts or unmounts; its time is that of the last use,
                                        its text tells which state of which file is mounted

The data is pinned in the cache as long as the mount is there.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from bootseer.errors import BootseerError, UsageError
from bootseer.io import locks
from bootseer.logs import logger
from bootseer.mounts import kernel
from bootseer.mounts.layers import mount_erofs
from bootseer.mounts.state import Runtime

_LOG = logger(__name__)

PIN = "mounted"
"""Name of the pin in the cache."""
_LOCK_S = 20.0
_IDENTITY = re.compile(r"[0-9a-f]{16,128}")


def keep(runtime: Runtime, identity: str, data: Path, pin: Callable[[], None], *, loop: bool | None = None) -> Path:
    """Where the layer of this identity is mounted; mounts it from `data` if that is not what is mounted already.

    A mount of a file that was replaced or written to since is taken away: it, or the pages that it keeps, may hold
    other bytes than the verified file. `data` must be complete and trusted. `pin` is called before it is mounted, with
    no other process mounting it.
    `loop`: see `mount_erofs`.
    """
    target = _target(runtime, identity)
    with _locked(runtime, identity) as lock:
        status = data.stat()
        shown = f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}\n".encode()
        mounted = kernel.is_mount(target)
        if mounted and os.pread(lock, 2 * len(shown), 0) != shown:
            kernel.unmount(target, lazy=True)
            mounted = False
        if not mounted:
            target.mkdir(mode=0o755, exist_ok=True)
            pin()
            mount_erofs(data, target, loop=loop)
            _LOG.info("layer %s is mounted from %s", identity, data)
            os.ftruncate(lock, 0)
            os.pwrite(lock, shown, 0)
    return target


def kept(runtime: Runtime) -> list[str]:
    """Identities of the layers that are mounted now."""
    prefix = f"{runtime.layers}/"
    return sorted({point.removeprefix(prefix) for point in kernel.mount_points() if point.startswith(prefix)})


def release_idle(
    runtime: Runtime, *, idle_s: float, unpin: Callable[[str], None], needed: Collection[str] = ()
) -> list[str]:
    """Unmount the layers that no mounted image has and that were not used for `idle_s` seconds; returns them.

    `unpin` is called with each identity afterwards. Those `needed` stay mounted.
    """
    runtime.clean()
    used = {*needed, *(layer for state in runtime.all() for layer in state.layers)}
    released = []
    for identity in kept(runtime):
        # The lock's time is read before the lock is taken, which sets it.
        if identity in used or _unused_s(runtime, identity) < idle_s:
            continue
        with contextlib.suppress(BootseerError):  # busy: a process has a file of it open
            with _locked(runtime, identity):
                # A process that asked for it before we had the lock may not have put its image on it yet.
                if runtime.is_mounting():
                    continue
                kernel.unmount(_target(runtime, identity))
                unpin(identity)
                _target(runtime, identity).rmdir()
            _LOG.info("layer %s was idle and is unmounted", identity)
            released.append(identity)
    return released


def _target(runtime: Runtime, identity: str) -> Path:
    if not _IDENTITY.fullmatch(identity):
        raise UsageError(f"{identity!r} is not the identity of a block file")
    return runtime.layers / identity


def _lock_path(runtime: Runtime, identity: str) -> Path:
    return runtime.layers / f"{identity}.lock"


def _unused_s(runtime: Runtime, identity: str) -> float:
    """For how long a layer was not asked for; for ever, where the file that tells was deleted."""
    try:
        return time.time() - _lock_path(runtime, identity).stat().st_mtime
    except FileNotFoundError:
        return math.inf


@contextlib.contextmanager
def _locked(runtime: Runtime, identity: str) -> Iterator[int]:
    """One process at a time. Notes the use. Yields the lock's file."""
    with locks.flocked(_lock_path(runtime, identity), deadline_s=_LOCK_S) as lock:
        os.utime(lock)
        yield lock

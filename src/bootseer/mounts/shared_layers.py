"""The mounts of layers. Complete ones stay mounted, each once per node, shared by all images that contain it.

Containers that share an EROFS mount share its page cache, and the next start finds its files in memory
(docs/adr/0010-mounts-and-the-daemon.md has the figures). No process serves these mounts, so they survive a killed one
and are reused. An overlay holds its own references to its layers: unmounting one here while an image uses it is
harmless, the next image mounts it again.

    <runtime>/layers/<identity>         the mount point
    <runtime>/layers/<identity>.lock    flock during mount and unmount; mtime: last use; content: device, inode, size
                                        and times of the mounted file

The cache keeps a file that is mounted (`cache.entries`). A layer that is not complete is mounted in the folder of its
own mount, from a file that the mount's daemon serves.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from bootseer.cache.cached_file import CachedFile
from bootseer.errors import BootseerError
from bootseer.io import locks
from bootseer.logs import logger
from bootseer.mounts import kernel
from bootseer.mounts.control import FILES
from bootseer.mounts.layers import mount_erofs
from bootseer.mounts.state import Runtime

_LOG = logger(__name__)

OWN = "layers"
"""The folder of the layers that are not shared, in the folder of a mount."""
_LOCK_S = 20.0


def mount_layer(runtime: Runtime, folder: Path, file: CachedFile, *, loop: bool | None = None) -> Path:
    """Mount one layer; returns the mount point. A complete layer is shared, any other one is mounted in `folder`, the
    mount's own, where a daemon serves its file. `loop`: see `mount_erofs`."""
    if file.trusted:
        return mount_shared(runtime, file, loop=loop)
    point = folder / OWN / file.index.identity
    point.mkdir(parents=True, exist_ok=True)
    mount_erofs(folder / FILES / file.index.identity, point, loop=loop)
    return point


def unmount_own(folder: Path) -> None:
    """Unmount the layers that are mounted in this mount's own folder, each with its last user."""
    for point in kernel.mounts_below(folder / OWN):
        try:
            kernel.unmount(Path(point), lazy=True)
        except BootseerError as error:  # the others go on; the daemon of this one does not end
            _LOG.warning("a layer stays mounted: %s", error)


def mount_shared(runtime: Runtime, file: CachedFile, *, loop: bool | None = None) -> Path:
    """Mount a complete and trusted layer, unless exactly that is mounted already; returns the mount point.

    A mount of a file that was replaced or modified since is unmounted first: the file, or cached pages of it, may
    differ from the verified content. `file` is open, which keeps it in the cache until the mount does. `loop`: see
    `mount_erofs`.
    """
    identity = file.index.identity
    target = runtime.layers / identity
    with _locked(runtime, identity) as lock:
        status = file.path.stat()
        shown = f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}\n".encode()
        mounted = kernel.is_mount(target)
        if mounted and os.pread(lock, 2 * len(shown), 0) != shown:
            kernel.unmount(target, lazy=True)
            mounted = False
        if not mounted:
            target.mkdir(mode=0o755, exist_ok=True)
            mount_erofs(file.path, target, loop=loop)
            _LOG.info("layer %s is mounted from %s", identity, file.path)
            os.ftruncate(lock, 0)
            os.pwrite(lock, shown, 0)
    return target


def mounted_layers(runtime: Runtime) -> list[str]:
    """Identities of the layers that are mounted."""
    return sorted({point.removeprefix(f"{runtime.layers}/") for point in kernel.mounts_below(runtime.layers)})


def unmount_idle(runtime: Runtime, *, idle_s: float, needed: Collection[str] = ()) -> list[str]:
    """Unmount layers that no mounted image uses and that were not used for `idle_s` seconds, and remove records of dead
    mounts; returns the unmounted layers. Those in `needed` stay mounted.
    """
    runtime.remove_stale()
    used = {*needed, *(layer for state in runtime.all() for layer in state.layers)}
    unmounted = []
    for identity in mounted_layers(runtime):
        # Read the mtime before taking the lock, which updates it.
        if identity in used or _idle_s(runtime, identity) < idle_s:
            continue
        with contextlib.suppress(BootseerError):  # busy: a process has a file open
            with _locked(runtime, identity):
                # A process that got the layer before we had the lock may not have recorded its image yet.
                if runtime.is_mounting():
                    continue
                kernel.unmount(runtime.layers / identity)
                (runtime.layers / identity).rmdir()
            _LOG.info("layer %s was idle and is unmounted", identity)
            unmounted.append(identity)
    return unmounted


def _lock_path(runtime: Runtime, identity: str) -> Path:
    return runtime.layers / f"{identity}.lock"


def _idle_s(runtime: Runtime, identity: str) -> float:
    """Seconds since a layer was last used; infinite when its lock file was deleted."""
    try:
        return time.time() - _lock_path(runtime, identity).stat().st_mtime
    except FileNotFoundError:
        return math.inf


@contextlib.contextmanager
def _locked(runtime: Runtime, identity: str) -> Iterator[int]:
    """Serialize mounts and unmounts of a layer, and note the use. Yields the descriptor of the lock file."""
    with locks.flocked(_lock_path(runtime, identity), deadline_s=_LOCK_S) as lock:
        os.utime(lock)
        yield lock

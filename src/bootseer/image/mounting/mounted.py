"""Status and unmounting of a mounted image.

Works from the mount's record, so that any process can do it, not only the one that mounted the image.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bootseer.artifact.mounting import LazyMount, MountHandle
from bootseer.artifact.places import CACHE, RUNTIME, containers_folder, own_folder
from bootseer.errors import BootseerError, TransientError, UsageError
from bootseer.io.files import discard
from bootseer.mounts import kernel
from bootseer.mounts.daemon import Daemon
from bootseer.mounts.shared_layers import unmount_own
from bootseer.mounts.state import MountState, Runtime
from bootseer.mounts.user_namespace import may_mount

CHANGES = "changes"
"""Key in a mount's details: the folder with the changes to its tree, which is deleted with the mount."""


class MountedImage(MountHandle):
    """One mounted image, for the process that mounted it."""

    def __init__(
        self, mount: LazyMount, state: MountState, facts: Mapping[str, object], config: Mapping[str, object]
    ) -> None:
        super().__init__("the image", mount, state, facts)
        self.root = Path(state.target)
        self.config = config
        self._cache = mount.options.cache
        self._lifeline = mount.lifeline  # the mount serves one command and ends with it

    def undo_command(self) -> list[str]:
        """A command line that unmounts the image if this process can no longer do it."""
        # The folders are explicit, because the defaults depend on the user, and in a user namespace all are root.
        where = [f"{RUNTIME}={self._runtime.root}", f"{CACHE}={self._cache}"]
        return ["env", *where, sys.executable, "-P", "-m", "bootseer", "image", "umount", str(self.root)]

    def close(self, *, keep_changes: bool = False) -> None:
        """Unmount the image and delete its changes. Without a lifeline, raises `BootseerError` if it is in use."""
        unmount(self._runtime, self._state, force=self._lifeline)
        if not keep_changes:
            _delete_changes(self._state)


def unmount_recorded(runtime: Runtime, state: MountState, cache: Path, *, force: bool = False) -> None:
    """Unmount, then delete the changes, but only in this cache: the record could name any folder.

    Raises `UsageError` if it was unmounted before, after the removal of what is left of it. The record of a mount stays
    until its daemon ends, which serves copies of the mount in other mount namespaces.
    """
    is_gone = runtime.health(state) == "gone"
    unmount(runtime, state, force=force)
    containers = own_folder(containers_folder(cache), make=False)
    if containers in Path(os.path.normpath(state.details.get(CHANGES, ""))).parents:
        _delete_changes(state)
    if is_gone:
        raise _not_mounted(Path(state.target))


def unmount(runtime: Runtime, state: MountState, *, force: bool = False) -> None:
    """Unmount a recorded mount: the tree, its own layers, its daemon. Shared layers stay mounted.

    If other mount namespaces have copies of the mount, its daemon ends with the last one; with `force` it ends at once,
    and their reads fail. Raises `TransientError` while a process uses a file of the mount, unless `force`.
    """
    devices = {mount.device for mount in kernel.mounts_at(Path(state.target))}
    if len(devices) > 1 and not force:
        raise TransientError(f"{state.target}: another file system is mounted over it; unmount that before")
    if devices:
        dead = state.daemon is not None and not state.daemon.alive
        if may_mount():
            try:
                kernel.unmount(Path(state.target), lazy=dead or force)
            except TransientError as error:
                raise TransientError(f"{error}; fuser -vm {state.target} shows the processes") from error
        else:  # mounted by the set-uid helper
            from bootseer.fuse.attach import detach

            detach(Path(state.target), force=dead or force)
    folder = runtime.folder(state)
    if state.daemon is not None and state.daemon.alive:
        # Mounted layers use the daemon's files, and it ends only after nothing uses them.
        unmount_own(folder)
        Daemon(folder, state.daemon).detach(force=force)
    if state.daemon is None or not state.daemon.alive:  # else a later mount removes the record
        runtime.remove(state)


def _delete_changes(state: MountState) -> None:
    changes = state.details.get(CHANGES)
    if changes and not kernel.mounts_below(os.path.realpath(changes)):
        discard(Path(changes))


def check_unused(runtime: Runtime, changes: Path) -> None:
    """Raise `OSError` if a mount writes its changes to this folder."""
    if any(state.details.get(CHANGES) == str(changes) and runtime.health(state) != "gone" for state in runtime.all()):
        raise FileExistsError(changes)


def find_mount(runtime: Runtime, target: Path) -> MountState:
    """The record of the mount at `target`. Raises `UsageError` if there is none."""
    state = runtime.find(target)
    if state is None:
        raise _not_mounted(target)
    return state


def _not_mounted(target: Path) -> UsageError:
    return UsageError(f"{target}: no image is mounted there", hint="bootseer image list shows mounted images")


def status_of(runtime: Runtime, state: MountState) -> dict[str, Any]:
    """The status of a mount's daemon; empty if it has none or the daemon does not answer."""
    if state.daemon is None or not state.daemon.alive:
        return {}
    try:
        return Daemon(runtime.folder(state), state.daemon).status()
    except BootseerError:
        return {}


def local_share(status: Mapping[str, Any]) -> float | None:
    """The share of a daemon's blocks that are on this node, 0 to 1; None if the status does not contain it."""
    files = status.get("files")
    if not isinstance(files, list):
        return None
    total = sum(file["blocks"] for file in files)
    return sum(file["ready_blocks"] for file in files) / total if total else 1.0

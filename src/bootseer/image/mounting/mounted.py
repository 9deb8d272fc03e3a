"""An image that is mounted: what is known of it, and how it is taken away again.

Works from what was written down of the mount, so that another process than the one that mounted it can do both.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bootseer.artifact.mounting import MountHandle
from bootseer.artifact.places import CACHE, RUNTIME, containers_folder, own_folder
from bootseer.errors import BootseerError, TransientError, UsageError
from bootseer.mounts import kernel
from bootseer.mounts.daemon import Daemon
from bootseer.mounts.state import MountState, Runtime
from bootseer.mounts.user_namespace import may_mount

CHANGES = "changes"
"""Key of a mount's details: the folder with what was changed in it, which goes with the mount."""


class MountedImage(MountHandle):
    """One mounted image, seen by the process that mounted it."""

    def __init__(
        self,
        root: Path,
        config: Mapping[str, object],
        facts: Mapping[str, object],
        runtime: Runtime,
        state: MountState,
        daemon: Daemon | None,
        say: Callable[[str], None],
        cache: Path,
        *,
        lifeline: bool = False,
    ) -> None:
        super().__init__("the image", facts, runtime, state, daemon, say, lifeline=lifeline)
        self.root = root
        self.config = config
        self._cache = cache

    def undo_command(self) -> list[str]:
        """A command line that takes the mount away, for when this process cannot."""
        # In a user namespace another folder would be the usual one: there every process is root.
        where = [f"{RUNTIME}={self._runtime.root}", f"{CACHE}={self._cache}"]
        return ["env", *where, sys.executable, "-P", "-m", "bootseer", "image", "umount", str(self.root)]

    def close(self) -> None:
        """Take the mount away, and what was changed in it. Raises `BootseerError` when it is in use; one for a command
        never is."""
        unmount(self._runtime, self._state, force=self._lifeline)
        _delete_changes(self._state)


def unmount_written(runtime: Runtime, state: MountState, cache: Path) -> None:
    """`unmount`, and delete what was changed in it, which a record may name below this cache and nowhere else."""
    unmount(runtime, state)
    containers = own_folder(containers_folder(cache), make=False)
    if containers in Path(os.path.normpath(state.details.get(CHANGES, ""))).parents:
        _delete_changes(state)


def unmount(runtime: Runtime, state: MountState, *, force: bool = False) -> None:
    """Take away a mount that was written down: the tree, its layers, its daemon. Layers that others may use stay.

    Where other mount namespaces have copies of it, its daemon ends with these; with `force` at once, so that their
    readers get errors. Raises `TransientError` while a process has a file of it open, unless `force`.
    """
    if kernel.is_mount(Path(state.target)):
        dead = state.daemon is not None and not state.daemon.alive
        if may_mount():
            try:
                kernel.unmount(Path(state.target), lazy=dead or force)
            except TransientError as error:
                raise TransientError(f"{error}; fuser -vm {state.target} shows who uses it") from error
        else:  # then it was mounted by a program that has the right
            from bootseer.fuse.attach import detach

            detach(Path(state.target), force=dead or force)
    folder = runtime.folder(state)
    if state.daemon is not None and state.daemon.alive:
        # The layers above the daemon's files first: it ends only when nothing uses them.
        prefix = f"{folder}/layers/"
        for point in [point for point in kernel.mount_points() if point.startswith(prefix)]:
            kernel.unmount(Path(point), lazy=True)
        Daemon(folder, state.daemon).detach(force=force)
    if state.daemon is None or not state.daemon.alive:  # else a later mount deletes what is left
        runtime.remove(state)


def _delete_changes(state: MountState) -> None:
    changes = state.details.get(CHANGES)
    if changes and not any(point.startswith(f"{os.path.realpath(changes)}/") for point in kernel.mount_points()):
        shutil.rmtree(changes, ignore_errors=True)


def find_mount(runtime: Runtime, target: Path) -> MountState:
    """What was written down of the mount at `target`. Raises `UsageError` when nothing was."""
    state = runtime.find(target)
    if state is None:
        raise UsageError(f"{target}: no image is mounted there", hint="bootseer image list shows what is")
    return state


def status_of(runtime: Runtime, state: MountState) -> dict[str, Any]:
    """What the daemon of a mount says of itself; empty when it has none or does not answer."""
    if state.daemon is None or not state.daemon.alive:
        return {}
    try:
        return Daemon(runtime.folder(state), state.daemon).status()
    except BootseerError:
        return {}


def share_here(status: Mapping[str, Any]) -> float | None:
    """Which part of the blocks that a daemon serves is on this node; None when it did not say."""
    files = status.get("files")
    if not isinstance(files, list):
        return None
    total = sum(file["blocks"] for file in files)
    return sum(file["ready_blocks"] for file in files) / total if total else 1.0

"""Mount a snapshot on the host: its roots as overlays over the machine's folders, in a mount namespace of the job.

In each root the snapshot's files appear over the machine's; the rest of the machine is unchanged. The job's changes in
a root go into a private layer of this run (`private_layer`), so that snapshot and machine stay clean. After a capture
the lower layer is what the setup has just written, and the rest is the same.

A root costs a few system calls, whatever its size.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from bootseer.artifact.progress import Say
from bootseer.env.restoring.private_layer import MountPoints, PrivateFolder
from bootseer.env.restoring.safe_tree import is_opaque
from bootseer.errors import BootseerError, PermanentError
from bootseer.fuse.syscalls import number_of
from bootseer.mounts import kernel
from bootseer.mounts.kernel import is_below, mount_table, visible
from bootseer.mounts.layers import copy_attributes
from bootseer.mounts.namespace import Built, Namespace, overlay_in_place
from bootseer.mounts.user_namespace import is_host

SourceOf = Callable[[str], Path]
_MEMORY = "memory"
_MACHINE_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/hostname")
"""Files that belong to the machine, whose own versions are shown in a root."""
_RESTRICTIONS = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC
"""Mount flags of a folder that its overlay must have, too; statvfs and mounts use the same numbers."""


class HostView:
    """A mounted snapshot, for processes that `enter` it."""

    def __init__(self, namespace: Namespace, folder: PrivateFolder, points: MountPoints, say: Say) -> None:
        self._namespace = namespace
        self._private = folder
        self._points = points
        self._say = say
        self._closed = False

    def enter(self) -> None:
        """For a child between fork and exec, see `Namespace.enter`."""
        self._namespace.enter()

    def close(self) -> None:
        """Unmount when the job has ended; reports its changes and where they are kept."""
        if self._closed:
            return
        self._closed = True
        try:
            in_memory = self._namespace.facts.get(_MEMORY)
            self._private.close(self._say, self._namespace.folder(_MEMORY) if in_memory else None)
        finally:
            self._namespace.close()
            self._points.remove_unused()


def show_on_host(
    source_of: SourceOf, roots: Sequence[str], *, changes: Path, user: bool = False, say: Say = lambda line: None
) -> HostView:
    """Mount the roots of a snapshot; `source_of` returns where its version of a path can be read.

    `changes` is the folder for changes of all jobs of this user; if its disk cannot hold an upper layer, changes are
    kept in memory. `user`: without root, in a user namespace.
    Forks: call it while this process has one thread. Raises `BootseerError`, with nothing left behind.
    """
    folder = PrivateFolder(changes, say)
    points = MountPoints(changes)
    try:
        points.remove_unused()  # of killed runs: such a folder may have become the user's own
        for root in roots:
            folder.add(root)
        with points.locked():
            placeholders = {root: points.ensure(root, source_of) for root in roots}
            build = _MountBuilder(source_of, placeholders, folder, userxattr=user or not is_host())
            namespace = Namespace.create(build, user=user)
    except BaseException as error:
        folder.close(lambda line: None)
        points.remove_unused()
        if isinstance(error, OSError):
            raise PermanentError(f"{error.filename or changes}: {error.strerror}") from error
        raise
    for note in namespace.facts["notes"]:
        say(note)
    return HostView(namespace, folder, points, say)


class _MountBuilder(Struct, frozen=True):
    """Makes the mounts; called in the namespace."""

    source_of: SourceOf
    placeholders: Mapping[str, bool]
    """By root: whether its folder was created only as a mount point."""
    folder: PrivateFolder
    userxattr: bool

    def __call__(self) -> Built:
        notes: list[str] = []
        memory: int | None = None
        for root, is_placeholder in self.placeholders.items():
            try:
                notes += self._show(root, is_placeholder=is_placeholder)
            except BootseerError as error:
                # EINVAL: the disk of the changes cannot hold an upper layer, such as an overlay or NFS.
                if memory is not None or number_of(error) not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                kernel.attach(kernel.create_mount("tmpfs", [("source", "bootseer"), ("mode", "700")]), self.folder.path)
                memory = os.open(self.folder.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                notes.append(f"the job's changes in the environment are kept in memory: {error}")
                notes += self._show(root, is_placeholder=is_placeholder)
        folders = {} if memory is None else {_MEMORY: memory}
        return Built({"notes": notes, _MEMORY: memory is not None}, folders)

    def _show(self, root: str, *, is_placeholder: bool) -> list[str]:
        """Mount one root, and the snapshot's parts of other mounts that lie below it."""
        # Cloned before the overlay covers them: afterwards these names lead to the snapshot's files.
        files = (Path(path) for path in _MACHINE_FILES if path.startswith(f"{root}/"))
        machine = [(path, kernel.clone_mount(path)) for path in files if path.is_file() and not path.is_symlink()]
        try:
            notes = [*self._overlay(root, is_placeholder=is_placeholder)]
            for path, mount in machine:
                with contextlib.suppress(BootseerError):  # the setup has deleted it
                    kernel.attach(os.dup(mount), path)
        finally:
            for _, mount in machine:
                os.close(mount)
        for row in visible(mount_table()):
            if is_below(row.path, root) and _is_folder(Path(row.path)) and _is_folder(self.source_of(row.path)):
                notes += self._overlay(row.path, is_placeholder=False)
        return notes

    def _overlay(self, place: str, *, is_placeholder: bool) -> tuple[str, ...]:
        layer, real = self.source_of(place), Path(place)
        if not _is_folder(layer):
            raise PermanentError(f"{place}: the snapshot has no such folder")
        upper, work = self.folder.folders(place)
        copy_attributes(layer, upper)
        lowers = [layer] if is_placeholder or is_opaque(str(layer)) else [real, layer]
        restrictions = os.statvfs(real).f_flag & _RESTRICTIONS
        notes = overlay_in_place(real, lowers, upper=upper, work=work, userxattr=self.userxattr)
        if restrictions:
            kernel.restrict(real, restrictions)
        return notes


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path) and not path.is_symlink()  # noqa: PTH112 - no error without permission

"""Show a snapshot on the host: its roots as overlays over the real folders, for the job alone.

The job gets mounts of its own in which each root shows the snapshot's files over what the machine has there; all else
is the machine as it is. What the job changes in a root goes into a layer of this run (`private`), so that the snapshot
and the next job stay clean. After a capture the layer is what the setup has just written, and everything is the same.

Each root takes a few system calls, whatever lies in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bootseer.artifact.progress import Say
from bootseer.env.restoring import private
from bootseer.env.restoring.points import Points
from bootseer.env.restoring.private import PrivateFolder
from bootseer.errors import BootseerError, PermanentError
from bootseer.fuse.syscalls import number_of
from bootseer.mounts import kernel
from bootseer.mounts.kernel import is_below, mount_table, visible
from bootseer.mounts.layers import copy_attributes
from bootseer.mounts.namespace import Built, Namespace, overlay_in_place
from bootseer.mounts.user_namespace import is_host

Where = Callable[[str], Path]
_MEMORY = "memory"
_OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")
_OF_THE_MACHINE = ("/etc/resolv.conf", "/etc/hosts", "/etc/hostname")
"""What a machine knows of itself: no snapshot has it, and a setup's own version would not do elsewhere."""
_FORBIDDEN = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC
"""What holds for a folder's files holds for those that are shown over them; the numbers are those of mounts."""


class HostView:
    """A snapshot on the host, for processes that `enter` it."""

    def __init__(self, namespace: Namespace, folder: PrivateFolder, points: Points, say: Say) -> None:
        self._namespace = namespace
        self._private = folder
        self._points = points
        self._say = say
        self._closed = False

    def enter(self) -> None:
        """For a child between fork and exec, see `Namespace.enter`."""
        self._namespace.enter()

    @property
    def root(self) -> Path:
        """The view's `/`, for others to look into."""
        return self._namespace.root

    def close(self) -> None:
        """Take it away, when the job has ended; tell of what it wrote and where that is kept."""
        if self._closed:
            return
        self._closed = True
        try:
            in_memory = self._namespace.facts.get(_MEMORY)
            self._private.close(self._say, self._namespace.folder(_MEMORY) if in_memory else None)
        finally:
            self._namespace.close()
            self._points.take_away()


def show_on_host(
    where: Where, roots: Sequence[str], *, changes: Path, user: bool = False, say: Say = lambda line: None
) -> HostView:
    """Show the roots of the tree in which `where` finds the snapshot's version of a path.

    `changes` is the folder for what jobs change, of all runs of this user; where its disk takes no overlay the changes
    stay in memory. `user`: without root, in a user namespace.
    Call it while this process has one thread. Raises `BootseerError` where the roots cannot be shown: nothing of it is
    left then.
    """
    private.clean(changes, say)
    folder = PrivateFolder(changes, roots)
    points = Points(folder.path.parent)
    try:
        with points.locked():
            ours = {root: points.make(root, where) for root in roots}
            build = _Building(where, ours, folder, userxattr=user or not is_host())
            namespace = Namespace.create(build, user=user)
    except BaseException as error:
        folder.close(lambda line: None)
        points.take_away()
        if isinstance(error, OSError):
            raise PermanentError(f"{error.filename or changes}: {error.strerror}") from error
        raise
    folder.also(namespace.facts["roots"])
    for note in namespace.facts["notes"]:
        say(note)
    return HostView(namespace, folder, points, say)


@dataclass(frozen=True, slots=True)
class _Building:
    """Makes the mounts, in the namespace."""

    where: Where
    ours: Mapping[str, bool]
    """The roots; whether the folder there is a place for the mount and nothing else."""
    folder: PrivateFolder
    userxattr: bool

    def __call__(self) -> Built:
        notes: list[str] = []
        memory: int | None = None
        for root, ours in self.ours.items():
            try:
                notes += self._show(root, memory, alone=ours)
            except BootseerError as error:
                # EINVAL: the disk of the changes cannot be an upper layer, as that of a container itself or NFS.
                if memory is not None or number_of(error) not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                kernel.attach(kernel.create_mount("tmpfs", [("source", "bootseer"), ("mode", "700")]), self.folder.path)
                memory = os.open(self.folder.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                notes.append(f"what the job changes in the environment is held in memory: {error}")
                notes += self._show(root, memory, alone=ours)
        folders = {} if memory is None else {_MEMORY: memory}
        return Built({"notes": notes, "roots": self.folder.roots, _MEMORY: memory is not None}, folders)

    def _show(self, root: str, memory: int | None, *, alone: bool) -> list[str]:
        """One root, and what the snapshot has below mounts that lie in it."""
        machine = [(path, kernel.clone_mount(Path(path))) for path in _OF_THE_MACHINE if _is_file_in(path, root)]
        try:
            notes = [*self._overlay(root, alone=alone)]
            for path, mount in machine:
                with contextlib.suppress(BootseerError):  # the setup deleted it; then it stays deleted
                    kernel.attach(os.dup(mount), Path(path))
        finally:
            for _, mount in machine:
                os.close(mount)
        for row in visible(mount_table()):
            if is_below(row.path, root) and _is_folder(Path(row.path)) and _is_folder(self.where(row.path)):
                notes += self._overlay(row.path, alone=False)
        return notes

    def _overlay(self, place: str, *, alone: bool) -> tuple[str, ...]:
        layer, real = self.where(place), Path(place)
        if not _is_folder(layer):
            raise PermanentError(f"{place}: the snapshot has no such folder")
        upper, work = self.folder.folders(place)
        copy_attributes(layer, upper)
        lowers = [layer] if alone or _is_opaque(layer) else [real, layer]
        forbidden = os.statvfs(real).f_flag & _FORBIDDEN
        notes = overlay_in_place(real, lowers, upper=upper, work=work, userxattr=self.userxattr)
        if forbidden:
            kernel.restrict(real, forbidden)
        return notes


def _is_file_in(path: str, root: str) -> bool:
    return path.startswith(f"{root}/") and os.path.lexists(path) and stat.S_ISREG(os.lstat(path).st_mode)


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path) and not path.is_symlink()  # noqa: PTH112 - no error for what is closed to us


def _is_opaque(layer: Path) -> bool:
    """Whether the setup put a new folder in the place of the old one."""
    for name in _OPAQUE:
        with contextlib.suppress(OSError):
            if os.getxattr(layer, name) == b"y":
                return True
    return False

"""What is at a path, in a form that can be compared: with what is below an overlay, or with what another node has.

Who calls: `walk` and `scan`; `launch.environment_capture` for what a setup wrote again unchanged.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from bootseer.env.capturing.exclude import Kind

_PIECE = 1 << 20
_KINDS: Mapping[int, Kind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFSOCK: "socket",
    stat.S_IFIFO: "fifo",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}
_MARKS = ("trusted.overlay.", "user.overlay.")


@dataclass(frozen=True, slots=True)
class Found:
    """Something at a path. A symbolic link is itself, not what it leads to."""

    path: str
    status: os.stat_result

    @property
    def kind(self) -> Kind:
        """What kind of file."""
        return _KINDS[stat.S_IFMT(self.status.st_mode)]

    @property
    def size(self) -> int:
        """In bytes."""
        return self.status.st_size

    def marks(self) -> dict[str, bytes]:
        """What overlayfs noted in its attributes."""
        return self._attributes(marks=True)

    def xattrs(self) -> dict[str, bytes]:
        """All other extended attributes: capabilities, access lists, what users set."""
        return self._attributes(marks=False)

    def _attributes(self, *, marks: bool) -> dict[str, bytes]:
        try:
            names = os.listxattr(self.path, follow_symlinks=False)
        except OSError:  # the file system has none
            return {}
        return {
            name: os.getxattr(self.path, name, follow_symlinks=False)
            for name in names
            if name.startswith(_MARKS) is marks
        }


def found_at(folder: str, name: str) -> Found | None:
    """What a folder has by that name; for no name the folder itself. None: nothing."""
    path = os.path.join(folder, name) if name else folder  # noqa: PTH118
    try:
        # A folder may be named by a link in /proc that leads to it.
        return Found(path, os.lstat(path) if name else os.stat(path))  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return None


def difference(one: Found, other: Found) -> bool:
    """Whether anything but content and times differs: kind, permissions, owner, extended attributes."""
    ours, theirs = one.status, other.status
    return (ours.st_mode, ours.st_uid, ours.st_gid) != (theirs.st_mode, theirs.st_uid, theirs.st_gid) or (
        one.xattrs() != other.xattrs()
    )


def same_content(one: Found, other: Found) -> bool:
    """Whether two paths of one kind hold the same bytes, or lead to the same place."""
    if one.kind == "symlink":
        return os.readlink(one.path) == os.readlink(other.path)  # noqa: PTH115
    if one.kind != "file":
        return True
    if one.size != other.size:
        return False
    with _opened(one.path) as ours, _opened(other.path) as theirs:
        while True:
            left, right = ours.read(_PIECE), theirs.read(_PIECE)
            if left != right:
                return False
            if not left:
                return True


def state_of(found: Found) -> str:
    """In the form of `Change.before`."""
    if found.kind == "file":
        digest = hashlib.sha256()
        with _opened(found.path) as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
        return f"file:sha256:{digest.hexdigest()}"
    if found.kind == "symlink":
        return f"symlink:{os.readlink(found.path)}"  # noqa: PTH115
    return "directory" if found.kind == "directory" else "other"


def _opened(path: str) -> BinaryIO:
    """For reading; never through a link that took the file's place."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")

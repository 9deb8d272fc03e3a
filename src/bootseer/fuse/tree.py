"""What a file tree must answer so that `session` can show it as a mounted, read-only file system.

Implemented by `mounts.lazy` (one folder of block files), `mounts.files_tree` and by the tests. A tree is immutable:
the kernel keeps names, attributes and data for as long as it likes and does not ask again.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Data = bytes | bytearray | memoryview

Reply = Callable[[Data | int], None]
"""Answers one read: with exactly the bytes asked for, or with an error number. From any thread; only the first call
counts."""

Cancel = Callable[[], None]
"""Tells a tree that nobody waits for a read any more."""


@dataclass(frozen=True, slots=True)
class Attributes:
    """What stat(2) says of an inode. `size` in bytes; `inode` is never 0 and 1 is the root folder."""

    inode: int
    mode: int
    size: int = 0
    nlink: int = 1
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    mtime_ns: int = 0

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)


class Entry(NamedTuple):
    """One name in a folder. Of `mode` only the file type counts."""

    name: bytes
    inode: int
    mode: int


class Tree(Protocol):
    """A read-only file tree.

    All methods run on the one thread that reads requests, so that none of them may wait: not for a network, nor for
    a lock that is held during one. An `OSError` is answered with its number, any other exception with EIO.
    """

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        """The child of a folder, or None."""

    def attributes(self, inode: int) -> Attributes:
        """What is known of an inode."""

    def entries(self, inode: int) -> Sequence[Entry]:
        """The content of a folder, always in the same order; "." and ".." are not needed."""

    def readlink(self, inode: int) -> bytes:
        """Where a symbolic link points."""

    def xattrs(self, inode: int) -> Mapping[bytes, bytes]:
        """The extended attributes of an inode."""

    def read(self, inode: int, offset: int, length: int, reply: Reply) -> Cancel | None:
        """Begin to read a range that lies inside a file; `reply` may be called before this returns.

        Returns what to call when the reader gave up, or None when there is nothing to stop.
        """

    def total(self) -> tuple[int, int]:
        """Bytes and number of files, for statfs(2)."""

"""What a file system must answer so that it can be shown as a mounted one: `Tree`, read-only (`session`), and
`FileSystem`, which can be changed (`writable_session`).

A tree is immutable: the kernel keeps names, attributes and data for as long as it likes and does not ask again. In a
file system that can be changed, names of files lead to *nodes*: numbers under which the kernel keeps attributes and
pages. A node that the kernel got from `lookup`, `create`, `make_folder` or a listing is held by it until as many
`forget`s have come.
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
"""Tells a tree that a read is not waited for any more."""


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


class Caller(NamedTuple):
    """The process that a request comes from."""

    uid: int
    gid: int
    thread: int
    """Number of the thread, as processes of the mounter's process namespace see it; 0 for one they cannot see."""


class FoundNode(NamedTuple):
    """A node that a name leads to. `attributes.inode` is what programs see, and may outlive the node."""

    node: int
    attributes: Attributes


class Opened(NamedTuple):
    """An open file."""

    handle: int
    keep_pages: bool
    """Whether pages that the kernel has of this node are still right."""


class Listed(NamedTuple):
    """One name in a folder. Of `mode` only the file type counts. `found` None: attributes cost more than they are
    worth, the kernel may ask for them; with it the kernel holds the node as after a `lookup`."""

    name: bytes
    inode: int
    mode: int
    found: FoundNode | None = None


class Space(NamedTuple):
    """What statfs(2) says, in bytes."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Changes:
    """Attributes of a node that are to be changed; None is left as it is. Times in nanoseconds since 1970."""

    size: int | None = None
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None


class FileSystem(Protocol):
    """A file system that can be changed.

    Methods run on many threads at once and may wait, `read` only for moments. An `OSError` is answered with its
    number, any other exception with EIO.
    """

    def lookup(self, parent: int, name: bytes) -> FoundNode | None:
        """The child of a folder, or None."""

    def forget(self, node: int, count: int) -> None:
        """The kernel lets go of a node `count` times."""

    def attributes(self, node: int) -> Attributes:
        """What is known of a node. `ESTALE` makes the kernel look the name up again."""

    def change(self, node: int, changes: Changes) -> Attributes:
        """Change attributes, or the size of a file; what is known afterwards."""

    def create(self, parent: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[FoundNode, Opened]:
        """Make a file and open it. `flags` are those of open(2)."""

    def open(self, node: int, flags: int, caller: Caller) -> Opened:
        """Open a file. O_TRUNC is among the flags when it is to be emptied."""

    def read(self, node: int, handle: int, offset: int, length: int, reply: Reply, room: memoryview) -> Cancel | None:
        """Begin to read. `reply` gets at most `length` bytes, fewer only at the file's end, or an error number; from
        any thread, perhaps before this returns. `room` has `length` bytes in which an answer may lie that is given
        before this returns. Returns what to call when the reader does not wait any more."""

    def write(self, node: int, handle: int, offset: int, data: memoryview, caller: Caller) -> None:
        """Write all of `data`, which is valid until this returns. `callers` tells when the caller of a long wait is
        being killed, here and in `flush` and `sync`."""

    def flush(self, node: int, handle: int, caller: Caller) -> None:
        """A descriptor that can write was closed; others of the same handle may still be open."""

    def sync(self, node: int, handle: int, caller: Caller) -> None:
        """fsync(2)."""

    def release(self, node: int, handle: int) -> None:
        """The last descriptor of a handle is gone. An error is reported to no program."""

    def unlink(self, parent: int, name: bytes) -> None:
        """Remove a file."""

    def make_folder(self, parent: int, name: bytes, mode: int, caller: Caller) -> FoundNode:
        """Make a folder."""

    def remove_folder(self, parent: int, name: bytes) -> None:
        """Remove an empty folder."""

    def rename(self, parent: int, name: bytes, to_parent: int, to_name: bytes, *, replace: bool) -> None:
        """Give a file or folder another name; with `replace` in the place of what has that name."""

    def open_folder(self, node: int) -> int:
        """Begin to list a folder; returns a handle."""

    def entries(self, handle: int, start: int, most: int, *, attributes: bool) -> Sequence[Listed]:
        """At most `most` entries from number `start` on, "." and ".." among them or not; no more are an empty list.

        With `attributes`, entries whose attributes are at hand come with them. The kernel holds their nodes, so that
        `forget` is called for those that it has no room for.
        """

    def release_folder(self, handle: int) -> None:
        """The listing is over."""

    def space(self) -> Space:
        """How much room there is."""

"""Interfaces of mounted file systems: `Tree`, read-only, and `FileSystem`, writable (both in `session`).

A tree is immutable: the kernel caches names, attributes and data indefinitely. In a writable file system names lead to
*nodes*: numbers under which the kernel caches attributes and pages. The kernel references each node that it got from
`lookup`, `create`, `make_folder` or a listing until the same number of `forget`s has come.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from bootseer.errors import BootseerError

Data = bytes | bytearray | memoryview

Reply = Callable[[Data | int | BootseerError], None]
"""Answers one read: the requested bytes, an error number, or an error, which is logged and answered with EIO. Callable
from any thread; only the first call counts."""

Cancel = Callable[[], None]
"""Cancels a read whose result is not needed any more."""


class Attributes(Struct, frozen=True):
    """Attributes as in stat(2). `size` in bytes; `inode` is never 0, and 1 is the root."""

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


class FoundNode(NamedTuple):
    """The node of a name. `attributes.inode` is the number that programs see; it may outlive the node."""

    node: int
    attributes: Attributes


class Listed(NamedTuple):
    """One name in a folder. Only the file type bits of `mode` count. With `found`, the kernel references the node as
    after a `lookup`; None: in trees, and where attributes are too expensive: the kernel asks for them if needed."""

    name: bytes
    inode: int
    mode: int
    found: FoundNode | None = None


class Tree(Protocol):
    """A read-only file tree.

    All methods run on the single thread that reads requests, so none may block: neither on a network, nor on a lock
    held during network access. An `OSError` is answered with its number, any other exception with EIO.
    """

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        """The child of a folder, or None."""

    def attributes(self, inode: int) -> Attributes:
        """The attributes of an inode."""

    def entries(self, inode: int) -> Sequence[Listed]:
        """The content of a folder, in a stable order; "." and ".." are not needed."""

    def readlink(self, inode: int) -> bytes:
        """The target of a symbolic link."""

    def xattrs(self, inode: int) -> Mapping[bytes, bytes]:
        """The extended attributes of an inode."""

    def read(self, inode: int, offset: int, length: int, reply: Reply) -> Cancel | None:
        """Begin to read a range inside a file; `reply` may be called before this returns.

        Returns a function that cancels the read, or None when there is nothing to cancel.
        """

    def total(self) -> tuple[int, int]:
        """Bytes and number of files, for statfs(2)."""


class Caller(NamedTuple):
    """The process that made a request."""

    uid: int
    gid: int
    thread: int
    """Its thread id in the mounter's pid namespace; 0 if not visible there."""


class Opened(NamedTuple):
    """An open file."""

    handle: int
    keep_pages: bool
    """Whether the kernel's cached pages of this node are still valid."""


class Space(NamedTuple):
    """The result of statfs(2), in bytes."""

    total: int
    free: int


class Changes(Struct, frozen=True):
    """Attributes to set on a node; None leaves one unchanged. Times in nanoseconds since 1970."""

    size: int | None = None
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None


class FileSystem(Protocol):
    """A writable file system.

    Methods run concurrently on many threads and may block, `read` only briefly. An `OSError` is answered with its
    number, any other exception with EIO.
    """

    def lookup(self, parent: int, name: bytes) -> FoundNode | None:
        """The child of a folder, or None."""

    def forget(self, node: int, count: int) -> None:
        """The kernel drops `count` references to a node."""

    def attributes(self, node: int) -> Attributes:
        """The attributes of a node. `ESTALE` makes the kernel look the name up again."""

    def change(self, node: int, changes: Changes) -> Attributes:
        """Change attributes, including the size of a file; returns the new attributes."""

    def create(self, parent: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[FoundNode, Opened]:
        """Create a file and open it. `flags` as in open(2)."""

    def open(self, node: int, flags: int, caller: Caller) -> Opened:
        """Open a file. The flags include O_TRUNC when it is to be truncated."""

    def read(self, node: int, handle: int, offset: int, length: int, reply: Reply, room: memoryview) -> Cancel | None:
        """Begin a read. `reply` gets at most `length` bytes, fewer only at the end of the file, or an error number; it
        may be called from any thread, also before this returns. `room` has `length` bytes for an answer given before
        this returns. Returns a function that cancels the read."""

    def write(self, node: int, handle: int, offset: int, data: memoryview, caller: Caller) -> None:
        """Write all of `data`, which is valid until this returns. During long waits here, in `flush` and in `sync`,
        `io.proc` shows whether the caller is being killed."""

    def flush(self, node: int, handle: int, caller: Caller) -> None:
        """A writable descriptor was closed; others of the same handle may still be open."""

    def sync(self, node: int, handle: int, caller: Caller) -> None:
        """fsync(2)."""

    def release(self, node: int, handle: int) -> None:
        """The last descriptor of a handle was closed. Errors reach no program."""

    def unlink(self, parent: int, name: bytes) -> None:
        """Remove a file."""

    def make_folder(self, parent: int, name: bytes, mode: int, caller: Caller) -> FoundNode:
        """Make a folder."""

    def remove_folder(self, parent: int, name: bytes) -> None:
        """Remove an empty folder."""

    def rename(self, parent: int, name: bytes, to_parent: int, to_name: bytes, *, replace: bool) -> None:
        """Rename a file or folder; with `replace`, an existing target is replaced."""

    def open_folder(self, node: int) -> int:
        """Begin to list a folder; returns a handle."""

    def entries(self, handle: int, start: int, most: int, *, attributes: bool) -> Sequence[Listed]:
        """At most `most` entries from number `start` on; empty at the end. "." and ".." are optional.

        With `attributes`, entries include attributes that are available without cost. The kernel references their
        nodes, and `forget` is called for entries that do not fit into its buffer.
        """

    def release_folder(self, handle: int) -> None:
        """The listing has ended."""

    def space(self) -> Space:
        """Total and free space."""

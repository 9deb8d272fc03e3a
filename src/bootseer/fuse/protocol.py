"""The kernel's FUSE protocol: the structures of <linux/fuse.h> that a read-only tree needs.

Version 7.31 is spoken, which kernels since 5.4 know; the kernel adapts to the lower version of both sides. Everything
here is bytes in and bytes out. `messages` adds what a tree that can be changed needs.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from bootseer.fuse.filesystem import Attributes, Entry, Listed

MAJOR, MINOR = 7, 31
ROOT = 1

LOOKUP, FORGET, GETATTR, READLINK, OPEN, READ, STATFS = 1, 2, 3, 5, 14, 15, 17
GETXATTR, LISTXATTR, INIT, OPENDIR, READDIR = 22, 23, 26, 27, 28
INTERRUPT, DESTROY, BATCH_FORGET = 36, 38, 42

ASYNC_READ = 1 << 0
NO_OPEN_SUPPORT = 1 << 17
PARALLEL_DIROPS = 1 << 18
MAX_PAGES = 1 << 22
CACHE_SYMLINKS = 1 << 23
NO_OPENDIR_SUPPORT = 1 << 24
WANTED = ASYNC_READ | NO_OPEN_SUPPORT | PARALLEL_DIROPS | MAX_PAGES | CACHE_SYMLINKS | NO_OPENDIR_SUPPORT
"""Not ASYNC_DIO: with it a process that waits for a direct read cannot be killed."""

PAGE = 4096
MAX_READ = 1024 * 1024
"""Bytes of the largest read request; the kernel's own limit (fs.fuse.max_pages_limit) is 256 pages unless raised."""
MAX_WRITE = 4096  # the kernel takes no less
REQUEST_BYTES = 8192
"""Room for the largest request of a read-only tree; the kernel refuses to read into less."""
MAX_BACKGROUND = 1024
"""Read-ahead requests that the kernel sends before the first is answered. Its default of 12 would let a dozen reads
that wait for the network hold up all others."""
FOREVER_S = 1 << 31
"""Validity of names and attributes: what is mounted never changes."""

IN_HEADER = Struct("=IIQQIIIHH")  # len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding
READ_IN = Struct("=QQI")  # fh, offset, size; flags follow that a read-only tree has no use for
INTERRUPT_IN = Struct("=Q")
XATTR_IN = Struct("=II")  # size, padding
INIT_IN = Struct("=IIII")  # major, minor, max_readahead, flags
OUT_HEADER = Struct("=IiQ")  # len, negative error, unique
_INIT_OUT = Struct("=IIIIHHIIHHI28x")
ATTR = Struct("=QQQQQQIIIIIIIIII")
ENTRY_OUT = Struct("=QQQQII")
_ATTR_OUT = Struct("=QII")
DIRENT = Struct("=QQII")
STATFS_OUT = Struct("=QQQQQIIII24x")
_XATTR_OUT = Struct("=II")


class RequestHeader(NamedTuple):
    """What the header of a request says. `body` is the place of the rest in the same buffer."""

    opcode: int
    unique: int
    inode: int
    end: int


@dataclass(frozen=True, slots=True)
class Hello:
    """The kernel's first words."""

    major: int
    minor: int
    max_readahead: int
    flags: int


def parse_request(buffer: bytearray, received: int) -> RequestHeader | None:
    """The header of a request of `received` bytes, or None for a malformed one."""
    if received < IN_HEADER.size:
        return None
    length, opcode, unique, inode, *_ = IN_HEADER.unpack_from(buffer)
    return RequestHeader(opcode, unique, inode, length) if length == received else None


def parse_name(body: memoryview) -> bytes:
    """The name that ends at the first NUL of a request's body."""
    return bytes(body).partition(b"\0")[0]


def header(unique: int, length: int, errno: int = 0) -> bytes:
    """The header of an answer whose body has `length` bytes."""
    return OUT_HEADER.pack(OUT_HEADER.size + length, -errno, unique)


def init_out(
    hello: Hello, *, wanted: int = WANTED, max_background: int = MAX_BACKGROUND, max_write: int = MAX_WRITE
) -> bytes:
    """Agree on a version, on what both sides can do, and on large requests."""
    if hello.major > MAJOR:  # it will ask again in our version
        return _INIT_OUT.pack(MAJOR, MINOR, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    exact_ns = 1  # times are exact to the nanosecond
    congested = max_background * 3 // 4
    return _INIT_OUT.pack(
        MAJOR, MINOR, hello.max_readahead, hello.flags & wanted, max_background, congested, max_write, exact_ns,
        MAX_READ // PAGE, 0, 0,
    )  # fmt: skip


def attributes(of: Attributes, preferred_bytes: int = PAGE) -> bytes:
    """struct fuse_attr. `preferred_bytes` is what st_blksize says: how much to read or write at a time."""
    seconds, nanoseconds = divmod(of.mtime_ns, 1_000_000_000)
    # Times before 1970 go over the wire as the two's complement, which is how the kernel reads them.
    seconds &= (1 << 64) - 1
    return ATTR.pack(
        of.inode,
        of.size,
        -(-of.size // 512),
        seconds,
        seconds,
        seconds,
        nanoseconds,
        nanoseconds,
        nanoseconds,
        of.mode,
        of.nlink,
        of.uid,
        of.gid,
        of.rdev,
        preferred_bytes,
        0,
    )


def attr_out(of: Attributes, valid_s: int = FOREVER_S, preferred_bytes: int = PAGE) -> bytes:
    """struct fuse_attr_out: attributes that hold for `valid_s` seconds."""
    return _ATTR_OUT.pack(valid_s, 0, 0) + attributes(of, preferred_bytes)


def entry_out(of: Attributes | None) -> bytes:
    """Answer to a lookup; None is a name that is not there, which the kernel remembers too."""
    if of is None:
        return ENTRY_OUT.pack(0, 0, FOREVER_S, 0, 0, 0) + bytes(ATTR.size)
    return ENTRY_OUT.pack(of.inode, 0, FOREVER_S, FOREVER_S, 0, 0) + attributes(of)


def directory(entries: Sequence[Entry], start: int, room: int) -> bytes:
    """As many entries from number `start` on as fit into `room` bytes. The offset of an entry is its successor."""
    out = bytearray()
    for number in range(start, len(entries)):
        packed = dirent(entries[number], number)
        if len(out) + len(packed) > room:
            break
        out += packed
    return bytes(out)


def dirent(entry: Entry | Listed, number: int) -> bytes:
    """struct fuse_dirent of entry `number`, padded; its offset is its successor's number."""
    packed = DIRENT.pack(entry.inode, number + 1, len(entry.name), stat.S_IFMT(entry.mode) >> 12) + entry.name
    return packed + bytes(-len(packed) % 8)


def statfs_out(size_bytes: int, num_files: int) -> bytes:
    """A full file system of `size_bytes`."""
    return STATFS_OUT.pack(-(-size_bytes // PAGE), 0, 0, num_files, 0, PAGE, 255, PAGE, 0)


def xattr_size_out(size: int) -> bytes:
    return _XATTR_OUT.pack(size, 0)

"""The kernel's FUSE protocol: the structures of <linux/fuse.h> that are needed here.

Version 7.31 (kernels since 5.4); both sides use the lower version. Only conversion from and to bytes. The first part
serves read-only trees, the second part adds what writable file systems need: changes, open files, and answers with a
limited validity.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from struct import Struct

from bootseer.fuse.filesystem import Attributes, Changes, Listed, Space

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
"""Without ASYNC_DIO: with it, a process that waits for a direct read cannot be killed."""

PAGE = 4096
MAX_READ = 1024 * 1024
"""Bytes of the largest read request; the kernel's own limit (fs.fuse.max_pages_limit) is 256 pages unless raised."""
MAX_WRITE = 4096  # the kernel takes no less
REQUEST_BYTES = 8192
"""Buffer for the largest request of a read-only tree; the kernel refuses smaller ones."""
MAX_BACKGROUND = 1024
"""How many read-ahead requests the kernel sends before the first is answered. With its default of 12, a dozen reads
that wait for the network would block all others."""
FOREVER_S = 1 << 31
"""Validity of names and attributes: the mount never changes."""

IN_HEADER = Struct("=IIQQIIIHH")  # len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding
READ_IN = Struct("=QQI")  # fh, offset, size; flags follow that a read-only tree has no use for
INTERRUPT_IN = Struct("=Q")
XATTR_IN = Struct("=II")  # size, padding
_INIT_IN = Struct("=IIII")  # major, minor, max_readahead, flags
OUT_HEADER = Struct("=IiQ")  # len, negative error, unique
NOTIFY_RESEND = 7  # instead of an error, and to no request
_INIT_OUT = Struct("=IIIIHHIIHHI28x")
ATTR = Struct("=QQQQQQIIIIIIIIII")
ENTRY_OUT = Struct("=QQQQII")
_ATTR_OUT = Struct("=QII")
DIRENT = Struct("=QQII")
STATFS_OUT = Struct("=QQQQQIIII24x")
SIZE_OUT = Struct("=II")  # of an extended attribute, or of what was written; padding


def parse_name(body: memoryview) -> bytes:
    """The NUL-terminated name at the beginning of a request's body."""
    return bytes(body).partition(b"\0")[0]


def init_out(body: memoryview, *, writable: bool = False) -> bytes:
    """Negotiate the version, capabilities, and large requests; for `writable`, in both directions."""
    major, _, max_readahead, offered = _INIT_IN.unpack_from(body)
    if major > MAJOR:  # the kernel asks again with our version
        return _INIT_OUT.pack(MAJOR, MINOR, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    wanted, max_background, max_write = (
        (_WRITABLE_WANTED, WRITABLE_BACKGROUND, MAX_READ) if writable else (WANTED, MAX_BACKGROUND, MAX_WRITE)
    )
    exact_ns = 1  # times are exact to the nanosecond
    congested = max_background * 3 // 4
    return _INIT_OUT.pack(
        MAJOR, MINOR, max_readahead, offered & wanted, max_background, congested, max_write, exact_ns,
        MAX_READ // PAGE, 0, 0,
    )  # fmt: skip


def attributes(of: Attributes, file_unit: int = PAGE) -> bytes:
    """struct fuse_attr. `file_unit` becomes st_blksize of files, the preferred size of reads and writes."""
    seconds, nanoseconds = divmod(of.mtime_ns, 1_000_000_000)
    # Times before 1970 are sent as two's complement, which is how the kernel reads them.
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
        file_unit if of.is_file else PAGE,
        0,
    )


def attr_out(of: Attributes, valid_s: int = FOREVER_S, file_unit: int = PAGE) -> bytes:
    """struct fuse_attr_out: attributes valid for `valid_s` seconds."""
    return _ATTR_OUT.pack(valid_s, 0, 0) + attributes(of, file_unit)


def entry_out(node: int, of: Attributes | None, valid_s: int = FOREVER_S, file_unit: int = PAGE) -> bytes:
    """struct fuse_entry_out, the answer to a lookup; None for a missing name, which the kernel caches as well."""
    if of is None:
        return ENTRY_OUT.pack(0, 0, valid_s, 0, 0, 0) + bytes(ATTR.size)
    return ENTRY_OUT.pack(node, 0, valid_s, valid_s, 0, 0) + attributes(of, file_unit)


def directory(entries: Sequence[Listed], start: int, room: int) -> bytes:
    """The entries from number `start` on that fit into `room` bytes. An entry's offset is its successor's number."""
    out = bytearray()
    for number in range(start, len(entries)):
        packed = dirent(entries[number], number)
        if len(out) + len(packed) > room:
            break
        out += packed
    return bytes(out)


def dirent(entry: Listed, number: int) -> bytes:
    """struct fuse_dirent of entry `number`, padded; its offset is its successor's number."""
    packed = DIRENT.pack(entry.inode, number + 1, len(entry.name), stat.S_IFMT(entry.mode) >> 12) + entry.name
    return packed + bytes(-len(packed) % 8)


def statfs_out(space: Space, unit: int, num_files: int = 0) -> bytes:
    """struct fuse_statfs_out, in blocks of `unit` bytes."""
    free = space.free // unit
    return STATFS_OUT.pack(space.total // unit, free, free, num_files, 0, unit, 255, unit, 0)


# Writable file systems

SETATTR, SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK = 4, 6, 8, 9, 10, 11, 12, 13
WRITE, RELEASE, FSYNC, FLUSH, RELEASEDIR, FSYNCDIR = 16, 18, 20, 25, 29, 30
CREATE, READDIRPLUS, RENAME2 = 35, 44, 45

_ATOMIC_O_TRUNC, _BIG_WRITES, _DO_READDIRPLUS, _READDIRPLUS_AUTO = 1 << 3, 1 << 5, 1 << 13, 1 << 14
_WRITABLE_WANTED = (
    ASYNC_READ | PARALLEL_DIROPS | MAX_PAGES | _ATOMIC_O_TRUNC | _BIG_WRITES | _DO_READDIRPLUS | _READDIRPLUS_AUTO
)
"""ATOMIC_O_TRUNC: truncation becomes visible only with the new content. No write-back cache: a write is acknowledged
when the file system has it. No AUTO_INVAL_DATA: pages belong to a node, and a node to one version."""

WRITE_REQUEST_BYTES = MAX_READ + PAGE
"""Buffer for the largest request: the data of a write and its header."""
WRITABLE_BACKGROUND = 64
"""How many read-ahead requests the kernel sends before the first is answered: a read-ahead of 16 MiB for four files."""
PREFERRED_BYTES = MAX_READ
"""st_blksize of files, as for network file systems: Python and the C library use it for their buffers."""

_FOPEN_KEEP_CACHE, _FOPEN_NOFLUSH = 1 << 1, 1 << 5
RENAME_NOREPLACE = 1 << 0

FORGET_IN = Struct("=Q")  # count
_BATCH_FORGET_IN = Struct("=II")  # count, dummy
_FORGET_ONE = Struct("=QQ")  # node, count
_SETATTR_IN = Struct("=IIQQQQQQIIIIIIII")
MKNOD_IN = Struct("=IIII")  # mode, rdev, umask, padding
MKDIR_IN = Struct("=II")  # mode, umask
_RENAME_IN = Struct("=Q")  # new folder
_RENAME2_IN = Struct("=QII")  # new folder, flags, padding
OPEN_IN = Struct("=II")  # flags, open_flags
CREATE_IN = Struct("=IIII")  # flags, mode, umask, open_flags
HANDLE_IN = Struct("=Q")  # fh: the first field of all requests with an open file
WRITE_IN = Struct("=QQIIQII")  # fh, offset, size, write_flags, lock_owner, flags, padding
_OPEN_OUT = Struct("=QII")

_MODE, _UID, _GID, _SIZE, _MTIME, _MTIME_NOW = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8


def parse_forgets(body: memoryview) -> list[tuple[int, int]]:
    """Nodes and counts of a BATCH_FORGET; truncated entries are ignored."""
    count, _ = _BATCH_FORGET_IN.unpack_from(body)
    rest = body[_BATCH_FORGET_IN.size :]
    whole = min(count, len(rest) // _FORGET_ONE.size)
    return list(_FORGET_ONE.iter_unpack(rest[: whole * _FORGET_ONE.size]))


def parse_changes(body: memoryview, now_ns: int) -> Changes:
    """The changes of a SETATTR. Access times are not kept."""
    valid, _, _, size, _, _, mtime, _, _, mtime_ns, _, mode, _, uid, gid, _ = _SETATTR_IN.unpack_from(body)
    seconds = mtime - (1 << 64) if mtime >> 63 else mtime
    given = seconds * 1_000_000_000 + mtime_ns if valid & _MTIME else None
    return Changes(
        size=size if valid & _SIZE else None,
        mode=stat.S_IMODE(mode) if valid & _MODE else None,
        uid=uid if valid & _UID else None,
        gid=gid if valid & _GID else None,
        mtime_ns=now_ns if valid & _MTIME_NOW else given,
    )


def parse_rename(body: memoryview, *, has_flags: bool) -> tuple[bytes, int, bytes, int]:
    """A RENAME, or a RENAME2 when it `has_flags`: name, new folder, new name, and flags as in renameat2(2)."""
    head = _RENAME2_IN if has_flags else _RENAME_IN
    to_parent, flags, *_ = (*head.unpack_from(body), 0)
    name, to_name, *_ = bytes(body[head.size :]).split(b"\0")
    return name, to_parent, to_name, flags


def open_out(handle: int, *, keep_pages: bool = False, writes: bool = True) -> bytes:
    """struct fuse_open_out. For a handle that does not write (`writes`), FLUSH is disabled: only RELEASE is sent."""
    return _OPEN_OUT.pack(handle, _FOPEN_KEEP_CACHE * keep_pages | _FOPEN_NOFLUSH * (not writes), 0)


def listed(entry: Listed, number: int, valid_s: int, *, plus: bool) -> bytes:
    """struct fuse_dirent or fuse_direntplus of entry `number`; its offset is its successor's number."""
    packed = dirent(entry, number)
    node, of = entry.found or (0, None)  # 0: the kernel gets no attributes
    return entry_out(node, of, valid_s, PREFERRED_BYTES) + packed if plus else packed

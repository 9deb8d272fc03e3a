"""The structures of <linux/fuse.h> that a file system needs beyond a read-only tree (`protocol`): requests that
change something, open files, and answers that are true for a while only.

Bytes in and bytes out.
"""

from __future__ import annotations

import stat
from struct import Struct
from typing import NamedTuple

from bootseer.fuse import protocol
from bootseer.fuse.filesystem import Attributes, Changes, FoundNode, Listed, Space

SETATTR, SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK = 4, 6, 8, 9, 10, 11, 12, 13
WRITE, RELEASE, FSYNC, FLUSH, RELEASEDIR, FSYNCDIR = 16, 18, 20, 25, 29, 30
CREATE, FALLOCATE, READDIRPLUS, RENAME2 = 35, 43, 44, 45

_ATOMIC_O_TRUNC, _BIG_WRITES, _DO_READDIRPLUS, _READDIRPLUS_AUTO = 1 << 3, 1 << 5, 1 << 13, 1 << 14
_WANTED = (
    protocol.ASYNC_READ
    | protocol.PARALLEL_DIROPS
    | protocol.MAX_PAGES
    | _ATOMIC_O_TRUNC
    | _BIG_WRITES
    | _DO_READDIRPLUS
    | _READDIRPLUS_AUTO
)
"""ATOMIC_O_TRUNC: what O_TRUNC empties stays for all others until the new content is complete. No write-back cache: a
write is answered when the file system has it. No AUTO_INVAL_DATA: pages belong to a node, and a node to one version."""

MAX_WRITE = protocol.MAX_READ
REQUEST_BYTES = MAX_WRITE + protocol.PAGE
"""Room for the largest request: the data of a write, and what stands before them."""
MAX_BACKGROUND = 64
"""Reads that the kernel sends ahead before the first is answered: what a read-ahead of 16 MiB makes of four files."""
PREFERRED_BYTES = protocol.MAX_READ
"""st_blksize of files, as of network file systems: what Python and the C library take for their buffers."""

_FOPEN_KEEP_CACHE, _FOPEN_NOFLUSH = 1 << 1, 1 << 5
_RENAME_NOREPLACE = 1 << 0

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
_WRITE_OUT = Struct("=II")
_NO_ENTRY = bytes(protocol.ENTRY_OUT.size + protocol.ATTR.size)

_MODE, _UID, _GID, _SIZE, _MTIME, _HANDLE, _MTIME_NOW = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 6, 1 << 8
_NANOSECONDS = 1_000_000_000


class Rename(NamedTuple):
    """A wish for another name. `flags` are those of renameat2(2)."""

    name: bytes
    to_parent: int
    to_name: bytes
    flags: int

    @property
    def replace(self) -> bool:
        return not self.flags & _RENAME_NOREPLACE

    @property
    def is_known(self) -> bool:
        """Whether all flags have a meaning here: exchanging two names has none."""
        return not self.flags & ~_RENAME_NOREPLACE


def init_out(hello: protocol.Hello) -> bytes:
    """Agree on a version, on what both sides can do, and on large requests both ways."""
    return protocol.init_out(hello, wanted=_WANTED, max_background=MAX_BACKGROUND, max_write=MAX_WRITE)


def parse_forgets(body: memoryview) -> list[tuple[int, int]]:
    """Nodes and counts of a BATCH_FORGET; what does not fit into the request is not there."""
    count, _ = _BATCH_FORGET_IN.unpack_from(body)
    rest = body[_BATCH_FORGET_IN.size :]
    whole = min(count, len(rest) // _FORGET_ONE.size)
    return list(_FORGET_ONE.iter_unpack(rest[: whole * _FORGET_ONE.size]))


def parse_changes(body: memoryview, now_ns: int) -> Changes:
    """What a SETATTR asks for. The time of the last access is nothing that is kept."""
    valid, _, handle, size, _, _, mtime, _, _, mtime_ns, _, mode, _, uid, gid, _ = _SETATTR_IN.unpack_from(body)
    seconds = mtime - (1 << 64) if mtime >> 63 else mtime
    given = seconds * _NANOSECONDS + mtime_ns if valid & _MTIME else None
    return Changes(
        size=size if valid & _SIZE else None,
        mode=stat.S_IMODE(mode) if valid & _MODE else None,
        uid=uid if valid & _UID else None,
        gid=gid if valid & _GID else None,
        mtime_ns=now_ns if valid & _MTIME_NOW else given,
        handle=handle if valid & _HANDLE else None,
    )


def parse_rename(body: memoryview, *, has_flags: bool) -> Rename:
    """A RENAME, or a RENAME2 when it `has_flags`."""
    if has_flags:
        to_parent, flags, _ = _RENAME2_IN.unpack_from(body)
        names = bytes(body[_RENAME2_IN.size :])
    else:
        (to_parent,), flags = _RENAME_IN.unpack_from(body), 0
        names = bytes(body[_RENAME_IN.size :])
    name, _, rest = names.partition(b"\0")
    return Rename(name, to_parent, rest.partition(b"\0")[0], flags)


def _preferred_bytes(of: Attributes) -> int:
    return PREFERRED_BYTES if of.is_file else protocol.PAGE


def attr_out(of: Attributes, valid_s: int) -> bytes:
    """struct fuse_attr_out: attributes that hold for `valid_s` seconds."""
    return protocol.attr_out(of, valid_s, _preferred_bytes(of))


def entry_out(found: FoundNode | None, valid_s: int) -> bytes:
    """struct fuse_entry_out. A name that is not there is not remembered: another machine may be about to make it."""
    if found is None:
        return _NO_ENTRY
    of = found.attributes
    validity = protocol.ENTRY_OUT.pack(found.node, 0, valid_s, valid_s, 0, 0)
    return validity + protocol.attributes(of, _preferred_bytes(of))


def open_out(handle: int, *, keep_pages: bool = False, writes: bool = True) -> bytes:
    """struct fuse_open_out. Of a handle that does not write (`writes`), no close is told before the last."""
    return _OPEN_OUT.pack(handle, _FOPEN_KEEP_CACHE * keep_pages | _FOPEN_NOFLUSH * (not writes), 0)


def write_out(size: int) -> bytes:
    """struct fuse_write_out."""
    return _WRITE_OUT.pack(size, 0)


def statfs_out(space: Space) -> bytes:
    """struct fuse_statfs_out. Files are not counted."""
    unit = PREFERRED_BYTES
    free = space.free // unit
    return protocol.STATFS_OUT.pack(space.total // unit, free, free, 0, 0, unit, 255, unit, 0)


def entry_size(name: bytes, *, plus: bool) -> int:
    """Bytes that an entry of this name takes in a listing."""
    head = len(_NO_ENTRY) if plus else 0
    return head + -(-(protocol.DIRENT.size + len(name)) // 8) * 8


def listed(entry: Listed, number: int, valid_s: int, *, plus: bool) -> bytes:
    """struct fuse_dirent, or fuse_direntplus, of entry `number`; its offset is its successor's number."""
    packed = protocol.dirent(entry, number)
    return entry_out(entry.found, valid_s) + packed if plus else packed

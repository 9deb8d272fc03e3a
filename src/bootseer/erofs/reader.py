"""Read an EROFS image as `writer` writes it, without mounting it.

The image is untrusted: every field is checked before use, and a damaged image raises `CorruptError` instead of causing
an endless loop or unbounded memory. Data comes from a callable, so that the image can be a file, or blocks in a store.

Thread-safe if that callable is.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator

from msgspec import Struct

from bootseer.erofs.format import (
    BLOCK,
    EXTENDED,
    FLAT_INLINE,
    FLAT_PLAIN,
    INODE,
    MAX_NAME,
    MAX_TARGET,
    SLOT,
    Attributes,
    Superblock,
    decode_directory_block,
    decode_rdev,
    decode_xattrs,
    file_type,
    known_mode,
    xattr_bytes,
)
from bootseer.errors import CorruptError

Read = Callable[[int, int], bytes]
_PIECE = 1 << 20
_MAX_DIRECTORY = 64 << 20  # some two million names
_MAX_DEPTH = 4096


class Inode(Struct, frozen=True):
    """One inode. `number` is its nid, which hard links share."""

    number: int
    mode: int
    size: int
    nlink: int
    uid: int
    gid: int
    mtime_ns: int
    rdev: tuple[int, int]
    first_block: int
    """First block of the content, without an inline tail."""
    tail_at: int | None
    """Byte offset of the inline tail, the content's last partial block; None if the content has none."""
    xattrs_at: int
    xattrs_bytes: int


class Entry(Struct, frozen=True):
    """A name in a directory."""

    name: bytes
    number: int
    kind: int


class ErofsReader:
    """An image, read with `read(offset, length)`, which returns exactly that many bytes or raises.

    All methods raise `CorruptError` for a damaged image, and the errors of `read`.
    """

    def __init__(self, read: Read) -> None:
        self._read_raw = read
        self.superblock = Superblock.parse(self._exactly(0, BLOCK))
        self.size_bytes = self.superblock.blocks * BLOCK
        self._meta = self.superblock.meta_block * BLOCK
        if not BLOCK <= self._meta < self.size_bytes:
            raise CorruptError("EROFS image: the metadata area lies outside the image")

    def root(self) -> Inode:
        root = self.inode(self.superblock.root_nid)
        if not stat.S_ISDIR(root.mode):
            raise CorruptError("EROFS image: the root is not a directory")
        return root

    def inode(self, number: int) -> Inode:
        at = self._meta + number * SLOT
        fields = INODE.unpack(self._read(at, INODE.size))
        form, xattr_count, mode, _, size, first_block, _, uid, gid, seconds, nanoseconds, nlink = fields
        data_layout = form >> 1
        if not form & EXTENDED or data_layout not in (FLAT_PLAIN, FLAT_INLINE) or not known_mode(mode):
            raise CorruptError(f"EROFS image: inode {number} is malformed")
        if nanoseconds >= 1_000_000_000 or not nlink:
            raise CorruptError(f"EROFS image: inode {number} has invalid attributes")
        device = stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
        area = xattr_bytes(xattr_count)
        tail_at = at + INODE.size + area if data_layout == FLAT_INLINE else None
        if not device:
            plain = size if tail_at is None else size - size % BLOCK
            if plain and (first_block < 1 or first_block * BLOCK + plain > self.size_bytes):
                raise CorruptError(f"EROFS image: the content of inode {number} lies outside the image")
            if size > plain and tail_at is not None and tail_at % BLOCK + size - plain > BLOCK:
                raise CorruptError(f"EROFS image: the inline tail of inode {number} crosses a block")
        return Inode(
            number,
            mode,
            size,
            nlink,
            uid,
            gid,
            seconds * 1_000_000_000 + nanoseconds,
            decode_rdev(first_block) if device else (0, 0),
            first_block,
            tail_at,
            at + INODE.size,
            area,
        )

    def attributes(self, inode: Inode) -> Attributes:
        """All attributes except size and link count."""
        return Attributes(inode.mode, inode.uid, inode.gid, inode.mtime_ns, inode.rdev, self.xattrs(inode))

    def xattrs(self, inode: Inode) -> dict[bytes, bytes]:
        return decode_xattrs(self._read(inode.xattrs_at, inode.xattrs_bytes)) if inode.xattrs_bytes else {}

    def read(self, inode: Inode) -> Iterator[bytes]:
        """The content of a regular file, in pieces."""
        at = 0
        while at < inode.size:
            piece = self.pread(inode, at, min(_PIECE, inode.size - at))
            at += len(piece)
            yield piece

    def pread(self, inode: Inode, offset: int, length: int) -> bytes:
        """At most `length` bytes of a file's content, fewer only at its end."""
        length = max(0, min(length, inode.size - offset))
        inline_from = inode.size if inode.tail_at is None else inode.size - inode.size % BLOCK
        plain = max(0, min(length, inline_from - offset))
        data = self._read(inode.first_block * BLOCK + offset, plain) if plain else b""
        if length > plain and inode.tail_at is not None:
            data += self._read(inode.tail_at + offset + plain - inline_from, length - plain)
        return data

    def readlink(self, inode: Inode) -> bytes:
        target = self.pread(inode, 0, inode.size) if stat.S_ISLNK(inode.mode) and inode.size <= MAX_TARGET else b""
        if not target or b"\0" in target:
            raise CorruptError(f"EROFS image: inode {inode.number} is not a symbolic link")
        return target

    def entries(self, directory: Inode) -> Iterator[Entry]:
        """The entries of a directory, without `.` and `..`, sorted by name."""
        if not stat.S_ISDIR(directory.mode) or directory.size > _MAX_DIRECTORY:
            raise CorruptError(f"EROFS image: inode {directory.number} is not a directory")
        last = b""
        for at in range(0, directory.size, BLOCK):
            for name, number, kind in decode_directory_block(self.pread(directory, at, BLOCK)):
                if name <= last:
                    raise CorruptError(f"EROFS image: directory {directory.number} is not in order")
                last = name
                if name not in {b".", b".."}:
                    yield Entry(name, number, kind)

    def lookup(self, directory: Inode, name: bytes) -> Inode | None:
        """The file of this name in a directory, or None. Bisects over the directory's blocks."""
        if not stat.S_ISDIR(directory.mode) or not directory.size or len(name) > MAX_NAME:
            return None
        low, high = 0, (directory.size - 1) // BLOCK
        while low < high:  # find the last block whose first name is not greater than `name`
            middle = (low + high + 1) // 2
            first = next(iter(decode_directory_block(self.pread(directory, middle * BLOCK, BLOCK))))[0]
            low, high = (middle, high) if first <= name else (low, middle - 1)
        for found, number, kind in decode_directory_block(self.pread(directory, low * BLOCK, BLOCK)):
            if found == name:
                return self.checked(number, kind)
        return None

    def walk(self) -> Iterator[tuple[bytes, Inode]]:
        """Every path (`b""` is the root) with its inode, parents before children."""
        seen: set[int] = set()
        root = self.root()
        pending: list[tuple[bytes, Inode, int]] = [(b"", root, 0)]
        yield b"", root
        while pending:
            path, directory, depth = pending.pop()
            if directory.number in seen or depth > _MAX_DEPTH:
                raise CorruptError("EROFS image: a directory contains itself or has two names")
            seen.add(directory.number)
            deeper = []
            for entry in self.entries(directory):
                inode = self.checked(entry.number, entry.kind)
                name = path + b"/" + entry.name if path else entry.name
                yield name, inode
                if stat.S_ISDIR(inode.mode):
                    deeper.append((name, inode, depth + 1))
            pending.extend(reversed(deeper))

    def checked(self, number: int, kind: int) -> Inode:
        """The inode of a directory entry of this kind. Raises `CorruptError` if it is of another."""
        inode = self.inode(number)
        if file_type(inode.mode) != kind:
            raise CorruptError(f"EROFS image: the types of inode {number} and of its directory entry differ")
        return inode

    def _read(self, offset: int, length: int) -> bytes:
        if offset < 0 or offset + length > self.size_bytes:
            raise CorruptError("EROFS image: an offset is outside the image")
        return self._exactly(offset, length)

    def _exactly(self, offset: int, length: int) -> bytes:
        data = self._read_raw(offset, length)
        if len(data) != length:
            raise CorruptError(f"EROFS image: {len(data)} bytes read at {offset}, {length} expected")
        return data

"""The EROFS structures that BootSeer writes and reads: superblock, extended inode, directory block, inline xattrs.

Everything is little-endian and uncompressed, in blocks of 4 KiB, as in the kernel's `fs/erofs/erofs_fs.h`;
docs/formats/erofs.md describes the subset. The order and placement of the structures is `writer.Layout`'s. No I/O.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from msgspec import Struct, field

from bootseer.errors import CorruptError, PermanentError

BLOCK = 4096
SLOT = 32  # an inode's number (nid) is its offset in the metadata area in units of this size
SUPER_OFFSET = 1024
MAGIC = 0xE0F5E1E2
FEATURE_CHECKSUM = 0x1
FEATURE_MTIME = 0x2
MAX_BLOCKS = 2**32 - 1
MAX_NAME = 255
MAX_TARGET = 4095

EXTENDED = 1  # bit 0 of i_format; the bits above it are the data layout
FLAT_PLAIN = 0
FLAT_INLINE = 2

_SUPER = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQ24x")
_CHECKSUM = struct.Struct("<I")
INODE = struct.Struct("<HHHHQIIIIqII16x")
DIRENT = struct.Struct("<QHBx")
_XATTR_HEADER = struct.Struct("<IB7x")
_XATTR_ENTRY = struct.Struct("<BBH")
_XATTR_MAX = _XATTR_HEADER.size + 4 * (0xFFFF - 1)  # i_xattr_icount is 16 bits wide

# Indexes of name prefixes. The two ACLs are whole names, stored without a suffix.
_PREFIXES = (
    (2, b"system.posix_acl_access"),
    (3, b"system.posix_acl_default"),
    (1, b"user."),
    (4, b"trusted."),
    (6, b"security."),
)
_PREFIX_OF = dict(_PREFIXES)
_WHOLE_NAMES = (2, 3)

_FILE_TYPES = {
    stat.S_IFREG: 1,
    stat.S_IFDIR: 2,
    stat.S_IFCHR: 3,
    stat.S_IFBLK: 4,
    stat.S_IFIFO: 5,
    stat.S_IFSOCK: 6,
    stat.S_IFLNK: 7,
}
MODE_OF_TYPE = {number: mode for mode, number in _FILE_TYPES.items()}
"""The type bits of `st_mode`, by the type byte of a directory entry."""
NO_XATTRS: Mapping[bytes, bytes] = {}


class Attributes(Struct, frozen=True):
    """A file's attributes as in stat(2) and getxattr(2), without size and link count.

    `mode` includes the type. `rdev` is a pair (major, minor), used for devices only.
    """

    mode: int
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    rdev: tuple[int, int] = (0, 0)
    xattrs: Mapping[bytes, bytes] = field(default_factory=lambda: NO_XATTRS)


class Superblock(Struct, frozen=True):
    """The superblock's variable fields."""

    root_nid: int
    inodes: int
    blocks: int
    meta_block: int
    uuid: bytes = bytes(16)

    def encode(self) -> bytes:
        packed = _SUPER.pack(
            MAGIC,
            0,
            FEATURE_CHECKSUM | FEATURE_MTIME,
            BLOCK.bit_length() - 1,
            0,
            self.root_nid,
            self.inodes,
            0,  # no build time, so that equal input gives equal images
            0,
            self.blocks,
            self.meta_block,
            0,
            self.uuid,
            bytes(16),
            *([0] * 8),
        )
        block = bytearray(BLOCK)
        block[SUPER_OFFSET : SUPER_OFFSET + len(packed)] = packed
        _CHECKSUM.pack_into(block, SUPER_OFFSET + 4, _crc32c(memoryview(block)[SUPER_OFFSET:]))
        return bytes(block)

    @classmethod
    def parse(cls, block: bytes) -> Superblock:
        """Parse block 0. Raises `CorruptError`, and `PermanentError` for an EROFS image with unsupported features."""
        if len(block) != BLOCK:
            raise CorruptError("EROFS image: shorter than one block")
        fields = _SUPER.unpack_from(block, SUPER_OFFSET)
        magic, checksum, compat, bits, slots, root, inodes, _, _, blocks, meta, _, uuid, _, incompat = fields[:15]
        if magic != MAGIC:
            raise CorruptError("not an EROFS image: wrong magic number")
        if incompat or slots or bits != BLOCK.bit_length() - 1 or not compat & FEATURE_CHECKSUM:
            raise PermanentError("EROFS image: unsupported features; BootSeer reads only images that it wrote")
        clean = bytearray(block[SUPER_OFFSET:])
        _CHECKSUM.pack_into(clean, 4, 0)
        if _crc32c(clean) != checksum:
            raise CorruptError("EROFS image: checksum of the superblock does not match")
        return cls(root, inodes, blocks, meta, uuid)


def encode_rdev(major: int, minor: int) -> int:
    """Encode device numbers as the kernel's `new_encode_dev`. Raises `PermanentError` if they are out of range."""
    if not (0 <= major < 1 << 12 and 0 <= minor < 1 << 20):
        raise PermanentError(f"device number {major}:{minor} is outside Linux's range")
    return (minor & 0xFF) | major << 8 | (minor & ~0xFF) << 12


def decode_rdev(value: int) -> tuple[int, int]:
    return (value >> 8) & 0xFFF, (value & 0xFF) | (value >> 12) & 0xFFF00


def file_type(mode: int) -> int:
    """The type byte of a directory entry."""
    return _FILE_TYPES[stat.S_IFMT(mode)]


def known_mode(mode: int) -> bool:
    """Whether the mode has a valid file type."""
    return stat.S_IFMT(mode) in _FILE_TYPES


def has_prefix(name: bytes) -> bool:
    """Whether EROFS can store an extended attribute of this name: only those with known prefixes."""
    return _split_name(name) is not None


def encode_xattrs(xattrs: Mapping[bytes, bytes]) -> bytes:
    """The inline xattr area that follows an inode, empty without attributes. Raises `PermanentError` if an attribute
    or the area is too large."""
    if not xattrs:
        return b""
    parts = [_XATTR_HEADER.pack(0, 0)]
    for name in sorted(xattrs):
        value = xattrs[name]
        split = _split_name(name)
        if split is None or len(name) > MAX_NAME or len(value) > 0xFFFF:
            shown = name[:MAX_NAME].decode("utf-8", "replace")
            raise PermanentError(f"extended attribute {shown!r} ({len(value)} bytes): EROFS cannot hold it")
        index, suffix = split
        entry = _XATTR_ENTRY.pack(len(suffix), index, len(value)) + suffix + value
        parts.append(entry.ljust(align(len(entry), 4), b"\0"))
    area = b"".join(parts)
    if len(area) > _XATTR_MAX:
        raise PermanentError(f"extended attributes take {len(area)} bytes, more than EROFS can hold ({_XATTR_MAX})")
    return area


def decode_xattrs(area: bytes) -> dict[bytes, bytes]:
    """Reverse of `encode_xattrs`. Raises `CorruptError`."""
    if not area:
        return {}
    if len(area) < _XATTR_HEADER.size or area[4]:
        raise CorruptError("EROFS image: unsupported form of extended attributes")
    found: dict[bytes, bytes] = {}
    at = _XATTR_HEADER.size
    while at + _XATTR_ENTRY.size <= len(area):
        name_length, index, value_length = _XATTR_ENTRY.unpack_from(area, at)
        begin = at + _XATTR_ENTRY.size
        end = begin + name_length + value_length
        name = area[begin : begin + name_length]
        if end > len(area) or index not in _PREFIX_OF or b"\0" in name:
            raise CorruptError("EROFS image: an extended attribute exceeds its area or has an invalid name")
        found[_PREFIX_OF[index] + name] = area[begin + name_length : end]
        at += align(end - at, 4)
    return found


def xattr_count(area_bytes: int) -> int:
    """`i_xattr_icount` for an area of this length in bytes."""
    return (area_bytes - _XATTR_HEADER.size) // 4 + 1 if area_bytes else 0


def xattr_bytes(count: int) -> int:
    return _XATTR_HEADER.size + 4 * (count - 1) if count else 0


def split_directory(names: Sequence[bytes]) -> Iterator[tuple[int, int, int]]:
    """Split sorted names into directory blocks: (first name, end, bytes used) of each block."""
    first, used = 0, 0
    for number, name in enumerate(names):
        need = DIRENT.size + len(name)
        if used + need > BLOCK:
            yield first, number, used
            first, used = number, 0
        used += need
    yield first, len(names), used


def encode_directory_block(entries: Sequence[tuple[bytes, int, int]]) -> bytes:
    """One directory block of (name, nid, file type), without the padding."""
    at = DIRENT.size * len(entries)
    head, names = [], []
    for name, nid, kind in entries:
        head.append(DIRENT.pack(nid, at, kind))
        names.append(name)
        at += len(name)
    return b"".join(head) + b"".join(names)


@lru_cache(maxsize=64)  # names of one directory are looked up in a row
def decode_directory_block(block: bytes) -> Iterable[tuple[bytes, int, int]]:
    """Reverse of `encode_directory_block`, padding allowed. Raises `CorruptError`."""
    if len(block) < DIRENT.size:
        raise CorruptError("EROFS image: a directory block is too short")
    first = DIRENT.unpack_from(block)[1]
    if first % DIRENT.size or not DIRENT.size <= first < len(block):
        raise CorruptError("EROFS image: a directory block has no valid number of entries")
    entries = list(DIRENT.iter_unpack(block[:first]))
    found = []
    for number, (nid, begin, kind) in enumerate(entries):
        end = entries[number + 1][1] if number + 1 < len(entries) else len(block)
        if not first <= begin < end <= len(block):
            raise CorruptError("EROFS image: a name lies outside its directory block")
        name = block[begin:end]
        if number + 1 == len(entries):
            name = name.partition(b"\0")[0]
        if not name or len(name) > MAX_NAME or b"/" in name or b"\0" in name:
            raise CorruptError("EROFS image: a directory has an invalid name")
        found.append((name, nid, kind))
    return found


def align(value: int, unit: int) -> int:
    """`value`, rounded up to a multiple of `unit`."""
    return -(-value // unit) * unit


def _split_name(name: bytes) -> tuple[int, bytes] | None:
    for index, prefix in _PREFIXES:
        if name.startswith(prefix):
            suffix = name[len(prefix) :]
            return (index, suffix) if bool(suffix) != (index in _WHOLE_NAMES) and b"\0" not in suffix else None
    return None


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC = _crc_table()


def _crc32c(data: bytes | bytearray | memoryview) -> int:
    """CRC-32C with an initial value of all ones and no final inversion, as the kernel's `crc32c(~0, ...)`."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _CRC[(value ^ byte) & 0xFF] ^ value >> 8
    return value

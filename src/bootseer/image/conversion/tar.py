"""Read a tar archive as a stream, with the same result as container runtimes: v7, ustar, star, GNU and pax.

Global pax headers are ignored, because runtimes ignore them. The archive ends with two blocks of zeros, or at the end
of the stream where a header would begin. A member's data is yielded in pieces, and a hole of a sparse file as its
length, so that neither takes memory. Names stay bytes, numbers stay exact (times are never floats), every length is
checked, and everything that is read into memory is bounded.
"""

from __future__ import annotations

import re
import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from bootseer.errors import CorruptError
from bootseer.image.sources.decompress import Stream

BLOCK = 512
HARD_LINK = 0
MAX_SEGMENTS = 1 << 18
"""Limit of a sparse file's segments."""
_FIELDS = struct.Struct("100s8s8s8s12s12s8sc100s8s32s32s8s8s155s12s")
_ZERO = bytes(BLOCK)
_SPACES = b" " * 8
_TIME = re.compile(rb"(-?)([0-9]{1,19})(?:\.([0-9]*))?")
_DECIMAL = re.compile(rb"[0-9]{1,19}")
_SCHILY = b"SCHILY.xattr."
_SCHILY_USER = _SCHILY + b"user."
MAX_RECORDS_BYTES = 1 << 20
"""Limit of a pax header or a long name, as in other readers."""
_KINDS = {
    b"0": stat.S_IFREG,
    b"7": stat.S_IFREG,  # "contiguous file": all readers treat it as a regular one
    b"\0": stat.S_IFREG,
    b"S": stat.S_IFREG,
    b"1": HARD_LINK,
    b"2": stat.S_IFLNK,
    b"3": stat.S_IFCHR,
    b"4": stat.S_IFBLK,
    b"5": stat.S_IFDIR,
    b"6": stat.S_IFIFO,
}
_IGNORED = (b"g", b"V")  # global headers and volume labels

Segment = tuple[int, int]
"""Offset in the file and length of a piece of data between holes, in bytes."""


@dataclass(slots=True)
class Member:
    """One member."""

    name: bytes
    kind: int
    """The type as in `st_mode`, or `HARD_LINK`."""
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    rdev: tuple[int, int]
    link: bytes
    """The target of a hard or symbolic link."""
    size: int
    """In bytes, with holes."""
    xattrs: dict[bytes, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class Header(Member):
    """A member's header block; `apply_records` changes it. Until `tar` has located the data, `size` is that of the data
    in the archive, without padding, and `kind` is unknown."""

    type: bytes = b""
    segments: list[Segment] | None = None
    """Map of a sparse file. `real_size` is the size with holes."""
    real_size: int = 0
    more_segments: bool = False
    """Whether the map continues in the member's data."""


@dataclass(slots=True)
class Records:
    """A pax header's records, which describe the next member."""

    values: dict[bytes, bytes] = field(default_factory=dict)
    sparse: list[Segment] = field(default_factory=list)
    """The sparse map of GNU format 0.0, whose keys repeat."""


def parse_header(block: bytes) -> Header | None:
    """A header, or None for a block of zeros. Raises `CorruptError`."""
    if block == _ZERO:
        return None
    checksum = _number(block[148:156])
    # The checksum is computed as if its own field were spaces. Some old programs summed signed bytes.
    total = _sum(block[:148]) + sum(_SPACES) + _sum(block[156:384]) + _sum(block[384:])
    if checksum != total and checksum != total - 256 * sum(byte > 127 for byte in block[:148] + block[156:]):
        raise CorruptError("a tar header has a wrong checksum")
    (name, mode, uid, gid, size, mtime, _, kind, link, magic, _, _, major, minor, prefix, _) = _FIELDS.unpack(block)
    header = Header(
        _text(name),
        0,
        _number(mode) & 0o7777,
        _number(uid),
        _number(gid),
        _number(mtime) * 1_000_000_000,
        (0, 0),
        _text(link),
        _number(size),
        type=kind,
    )
    if magic[:5] == b"ustar":
        if kind in {b"3", b"4"}:
            header.rdev = (_number(major), _number(minor))
        if magic[:6] == b"ustar\0":
            # star's prefix has 131 bytes; times follow it, and "tar\0" at the block's end marks the format.
            start = _text(prefix[:131] if block[508:512] == b"tar\0" else prefix)
            if start:
                header.name = start + b"/" + header.name
    if kind == b"S":
        header.segments, header.more_segments = parse_gnu_sparse(block[386:482], block[482])
        header.real_size = _number(block[483:495])
    if header.size < 0 or header.real_size < 0:
        raise CorruptError("a tar header has a negative size")
    return header


def parse_gnu_sparse(pieces: bytes, more: int) -> tuple[list[Segment], bool]:
    """The map of an old GNU sparse file (pairs of 12-byte numbers), and whether another block of it follows."""
    found = []
    for at in range(0, len(pieces), 24):
        if not pieces[at]:
            break
        found.append((_number(pieces[at : at + 12]), _number(pieces[at + 12 : at + 24])))
    return found, bool(more)


def parse_sparse_map(numbers: list[bytes]) -> list[Segment]:
    """Pairs of decimal numbers (GNU formats 0.1 and 1.0)."""
    if len(numbers) % 2 or len(numbers) > 2 * MAX_SEGMENTS:
        raise CorruptError("the map of a sparse file has an odd count of numbers, or is too long")
    values = [decimal(number) for number in numbers]
    return list(zip(values[::2], values[1::2], strict=True))


def parse_records(data: bytes) -> Records:
    """The records of a pax header: `length key=value newline`. An empty value deletes an earlier one, except that of a
    user's extended attribute, which may be empty."""
    records = Records()
    at = 0
    offset: int | None = None
    while at < len(data):
        space = data.find(b" ", at, at + 20)
        length = decimal(data[at:space]) if space > at else 0
        record = data[space + 1 : at + length]
        key, equals, value = record[:-1].partition(b"=")
        if at + length > len(data) or not equals or not key or record[-1:] != b"\n":
            raise CorruptError("a pax header is damaged")
        at += length
        if key == b"GNU.sparse.offset":
            offset = decimal(value)
        elif key == b"GNU.sparse.numbytes":
            if offset is None or len(records.sparse) >= MAX_SEGMENTS:
                raise CorruptError("the map of a sparse file is damaged, or too long")
            records.sparse.append((offset, decimal(value)))
            offset = None
        elif value or key.startswith(_SCHILY_USER):
            records.values[key] = value
        else:
            records.values.pop(key, None)
    return records


def apply_records(header: Header, records: Records) -> None:
    """Override a header's fields with those of a pax header. Raises `CorruptError`."""
    values = records.values
    if not values:
        return
    for key in (b"path", b"linkpath"):
        if b"\0" in values.get(key, b""):
            raise CorruptError("a pax header names a file with a NUL byte")
    header.name = values.get(b"path", header.name)
    header.link = values.get(b"linkpath", header.link)
    if b"size" in values:
        header.size = decimal(values[b"size"])
    if b"uid" in values:
        header.uid = decimal(values[b"uid"])
    if b"gid" in values:
        header.gid = decimal(values[b"gid"])
    if b"mtime" in values:
        header.mtime_ns = parse_time(values[b"mtime"])
    header.xattrs = {key[len(_SCHILY) :]: value for key, value in values.items() if key.startswith(_SCHILY)}
    real_size = values.get(b"GNU.sparse.realsize") or values.get(b"GNU.sparse.size")
    text = values.get(b"GNU.sparse.map")
    version = values.get(b"GNU.sparse.major", b"") + values.get(b"GNU.sparse.minor", b"")
    # Runtimes ignore the records of a form that they do not know. The first forms have no version.
    is_known = version in {b"00", b"01", b"10"} or (not version and (text or records.sparse))
    if real_size is not None and header.type != b"S" and is_known:
        header.name = values.get(b"GNU.sparse.name") or header.name
        header.real_size = decimal(real_size)
        header.segments = parse_sparse_map(text.split(b",")) if text else records.sparse
        header.more_segments = values.get(b"GNU.sparse.major") == b"1"


def check_segments(header: Header, stored: int) -> None:
    """Raise `CorruptError` unless a sparse map ascends, stays inside the file, and needs at most `stored` bytes."""
    at = total = 0
    for offset, length in header.segments or ():
        if offset < at or length < 0:
            raise CorruptError("the map of a sparse file is not in order")
        at = offset + length
        total += length
    if at > header.real_size or total > stored:
        raise CorruptError("the map of a sparse file exceeds the file")


def parse_time(text: bytes) -> int:
    """Decimal seconds as nanoseconds, exactly; further digits are cut off. Raises `CorruptError`."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise CorruptError(f"invalid time in a pax header: {text[:40]!r}")
    sign, whole, fraction = found.groups()
    value = int(whole) * 1_000_000_000 + int((fraction or b"0")[:9].ljust(9, b"0"))
    return -value if sign else value


def decimal(text: bytes) -> int:
    """A non-negative decimal number. Raises `CorruptError`."""
    if not _DECIMAL.fullmatch(text):
        raise CorruptError(f"invalid number in a tar header: {text[:40]!r}")
    return int(text)


def _sum(data: bytes) -> int:
    """The sum of up to 256 bytes. Adler-32's lower half is that sum modulo 65521, in a sixth of the time of `sum`."""
    return zlib.adler32(data, 0) & 0xFFFF


def _text(raw: bytes) -> bytes:
    return raw.partition(b"\0")[0]


@lru_cache(maxsize=1024)  # owners, modes and times repeat
def _number(raw: bytes) -> int:
    """A number field: octal digits, or base 256 with the highest bit set."""
    if raw[0] & 0x80:
        bits = 8 * len(raw) - 1
        value = int.from_bytes(raw, "big") & ((1 << bits) - 1)
        return value - (1 << bits) if raw[0] & 0x40 else value
    digits = raw.strip(b" \0").partition(b"\0")[0].rstrip(b" ")
    if not digits:
        return 0
    if not digits.isdigit() or b"8" in digits or b"9" in digits:
        raise CorruptError(f"invalid number in a tar header: {raw[:20]!r}")
    return int(digits, 8)


class TarReader:
    """The members of a tar stream, one after another."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._left = 0  # unread bytes of the current member's data
        self._padding = 0
        self._segments: list[Segment] | None = None
        self._real_size = 0

    def __iter__(self) -> Iterator[Member]:
        """Raises `CorruptError`. Data that was not read with `content` is skipped."""
        records = Records()
        long_name = long_link = b""
        while (header := self._next_header()) is not None:
            kind = header.type
            if kind in _IGNORED:
                self._begin(header.size)
                continue
            if kind in {b"x", b"X"}:
                records = parse_records(self._small(header))
                continue
            if kind == b"L":
                long_name = self._small(header).partition(b"\0")[0]
                continue
            if kind == b"K":
                long_link = self._small(header).partition(b"\0")[0]
                continue
            apply_records(header, records)
            header.name = long_name or header.name
            header.link = long_link or header.link
            yield self._member(header)
            records, long_name, long_link = Records(), b"", b""
        if records.values or long_name or long_link:
            raise CorruptError("the archive ends after an extended header, without its member")

    def content(self) -> Iterator[memoryview | int]:
        """Data of the current member: bytes, and the length of each hole as a number. Raises `CorruptError`."""
        if self._segments is None:
            yield from self._data(self._left)
            return
        at = 0
        for offset, length in self._segments:
            if offset > at:
                yield offset - at
            yield from self._data(length)
            at = offset + length
        if self._real_size > at:
            yield self._real_size - at

    def _data(self, count: int) -> Iterator[memoryview]:
        while count:
            taken = self._stream.some(count)
            if not taken:
                raise CorruptError("the archive ends in the middle of a file")
            count -= len(taken)
            self._left -= len(taken)
            yield taken

    def _next_header(self) -> Header | None:
        if self._stream.skip(self._left):
            raise CorruptError("the archive ends in the middle of a file")
        self._stream.skip(self._padding)  # may be missing: some writers omit the last padding
        self._begin(0)
        block = self._block()
        header = parse_header(block) if block else None
        if block and header is None:
            second = self._block()
            if second and parse_header(second) is not None:
                raise CorruptError("a block of zeros between two tar headers")
        return header

    def _block(self) -> bytes:
        block = self._stream.exactly(BLOCK)
        if block and len(block) < BLOCK:
            raise CorruptError("the archive ends in the middle of a header")
        return block

    def _begin(self, size: int) -> None:
        self._left, self._padding, self._segments = size, -size % BLOCK, None

    def _small(self, header: Header) -> bytes:
        """The data of an extended header, which describes the next member."""
        if header.size > MAX_RECORDS_BYTES:
            raise CorruptError(f"a tar header of {header.size} bytes; the limit is {MAX_RECORDS_BYTES}")
        self._begin(header.size)
        data = self._stream.exactly(header.size)
        self._left -= len(data)
        return data

    def _member(self, header: Header) -> Member:
        kind = _KINDS.get(header.type)
        if kind is None:
            raise CorruptError(f"{shown(header.name)}: a tar member of unknown kind {header.type!r}")
        if header.type == b"\0" and header.name.endswith(b"/"):
            kind = stat.S_IFDIR  # v7 archives have no type for directories
        self._begin(header.size if kind == stat.S_IFREG else 0)
        header.kind, header.size = kind, self._left
        if header.segments is not None and kind == stat.S_IFREG:
            header.segments += self._read_map(header)
            check_segments(header, self._left)
            self._segments, self._real_size = header.segments, header.real_size
            header.size = header.real_size
        header.segments = None  # members may be queued
        return header

    def _read_map(self, header: Header) -> list[Segment]:
        """The part of a sparse file's map that precedes its data."""
        if header.type != b"S":
            return parse_sparse_map(list(self._decimal_lines())) if header.more_segments else []
        found: list[Segment] = []
        more = header.more_segments
        while more:
            block = self._block()
            if not block or len(found) > MAX_SEGMENTS:
                raise CorruptError("the map of a sparse file is cut off, or too long")
            pieces, more = parse_gnu_sparse(block[:504], block[504])
            found += pieces
        return found

    def _decimal_lines(self) -> Iterator[bytes]:
        """GNU format 1.0: the number of segments, then offset and length of each, one per line, padded to blocks."""
        pending = b""
        wanted: int | None = None
        while wanted is None or wanted:
            block = self._stream.exactly(min(BLOCK, self._left))
            self._left -= len(block)
            if not block:
                raise CorruptError("the map of a sparse file is cut off")
            *lines, pending = (pending + block).split(b"\n")
            for line in lines:
                if wanted is None:
                    wanted = 2 * decimal(line)
                    if wanted > 2 * MAX_SEGMENTS:
                        raise CorruptError("the map of a sparse file is too long")
                elif wanted:
                    wanted -= 1
                    yield line
            if wanted != 0 and len(pending) > 20:
                raise CorruptError("the map of a sparse file has an invalid number")


def shown(name: bytes) -> str:
    """A name in quotes, for messages."""
    return repr(name[:200].decode("utf-8", "backslashreplace"))

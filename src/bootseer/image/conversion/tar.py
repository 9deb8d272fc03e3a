"""Read a tar archive as a stream, with the same result as container runtimes.

Global pax headers are ignored, because runtimes ignore them. The archive ends with two blocks of zeros, or at the end
of the stream where a header would begin. A member's data is yielded in pieces, and a hole of a sparse file as its
length, so that neither takes memory. Everything that is read into memory is bounded.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator

from bootseer.errors import CorruptError
from bootseer.image.conversion.tar_header import (
    BLOCK,
    HARD_LINK,
    MAX_SEGMENTS,
    Header,
    Member,
    Records,
    Segment,
    apply_records,
    check_segments,
    decimal,
    parse_gnu_sparse,
    parse_header,
    parse_records,
    parse_sparse_map,
)
from bootseer.image.sources.decompress import Stream

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

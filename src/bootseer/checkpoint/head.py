"""The head of a striped file: the small file at the file's own path that lists its parts.

`parse_head` accepts only what `encode_head` could have written. What follows from the arithmetic of `layout` is
computed, not stored, so that no forged head can point outside of its parts: a head stores sizes of segments, names and
digests of parts, their nodes, and digests of chunks. The format is docs/formats/striped-file.md.

A head's length tells a listing that it may be one (`is_head_size`), on every file system and after every copy; its
first `PEEK_BYTES` contain the file's size. Decides and touches nothing.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right

from blake3 import blake3
from msgspec import Struct

from bootseer.blocks.codec import DIGEST_BYTES, digest_of
from bootseer.blocks.index import MAX_STRIPES, Index
from bootseer.checkpoint.layout import CHUNK_BYTES, index_of, num_chunks, part_size
from bootseer.errors import CorruptError, PermanentError

MAGIC = b"BSSTRIPE"
VERSION = 1
STRIPES = ".stripes"
"""The folder beside the files that contains one folder of parts per file."""
ATTEMPTS = ".attempts"
"""The folder of unpublished checkpoints."""
PEEK_BYTES = 64
"""The first bytes of a head, which contain the file's size and id."""
MAX_HEAD_BYTES = 256 << 20
"""Enough for files of up to 7 TiB."""

_HEADER = struct.Struct("<8sIIQ16sQII")  # magic, version, zero, size, id, length of the body, segments, zero
_MARK = MAGIC + struct.pack("<II", VERSION, 0)
_SEGMENT = struct.Struct("<QHBB")  # size, stripes, parity parts, zero
_CHECK_BYTES = PEEK_BYTES - _HEADER.size
# One of 4096 other files has such a length by chance, and is peeked into for nothing.
_LENGTH_STEP = 4096
_LENGTH_REST = 4083
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_NODE = re.compile(r"[!-~]{1,255}")
_HEX = re.compile(r"[0-9a-f]+")
_MAX_NODES = 64


class Part(Struct, frozen=True):
    """One file with every S-th chunk of a segment, or with their parity."""

    name: str
    """Name in the file's folder of parts."""
    size_bytes: int
    sha256: str
    """64 hexadecimal digits."""
    nodes: tuple[str, ...]
    """The nodes it was written to, `host:port` each; it may have moved."""


class Segment(Struct, frozen=True):
    """A section of a file, which is a block file of its own."""

    start: int
    """Offset in the file."""
    index: Index
    parts: tuple[Part, ...]
    """In the order of the stripes."""
    parity: Part | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the file in it."""
        return self.index.size_bytes

    @property
    def stripes(self) -> int:
        """Number of parts without the parity."""
        return len(self.parts)

    @property
    def all_parts(self) -> tuple[Part, ...]:
        """The parts, the parity last if there is one."""
        return self.parts if self.parity is None else (*self.parts, self.parity)


class Head(Struct, frozen=True):
    """A striped file. Its segments are contiguous; all but the last end at a whole chunk."""

    id: str
    """32 hexadecimal digits: the name of its folder of parts."""
    size_bytes: int
    segments: tuple[Segment, ...]

    @property
    def parts(self) -> list[Part]:
        """Those of all segments."""
        return [part for segment in self.segments for part in segment.all_parts]

    def segment_at(self, offset: int) -> int:
        """The index of the segment with the byte at `offset`. Raises `IndexError`."""
        if not 0 <= offset < self.size_bytes:
            raise IndexError(f"byte {offset} of {self.size_bytes}")
        return bisect_right(self.segments, offset, key=lambda segment: segment.start) - 1

    def matches(self, offset: int, data: memoryview) -> bool:
        """Whether whole chunks of the file, from `offset` on, have their digests."""
        while data:
            segment = self.segments[self.segment_at(offset)]
            chunk = (offset - segment.start) // CHUNK_BYTES
            length = segment.index.length(chunk)
            if digest_of(data[:length]) != segment.index.digest(chunk):
                return False
            offset, data = offset + length, data[length:]
        return True


def make_segment(
    start: int, size_bytes: int, digests: bytes | bytearray, parts: tuple[Part, ...], parity: Part | None = None
) -> Segment:
    """A segment whose parts were written; `digests` are the concatenated BLAKE3 digests of its chunks."""
    return Segment(start, index_of(size_bytes, tuple(part.sha256 for part in parts), digests), parts, parity)


def is_head_size(size_bytes: int) -> bool:
    """Whether a head can have this length."""
    return size_bytes % _LENGTH_STEP == _LENGTH_REST and size_bytes <= MAX_HEAD_BYTES


def is_hidden(name: str) -> bool:
    """Whether a name is reserved: parts, attempts, temporary files."""
    return name.startswith((STRIPES, ATTEMPTS))


def parts_folder(path: str, head_id: str) -> str:
    folder = path.rpartition("/")[0]
    return f"{folder}/{STRIPES}/{head_id}" if folder else f"{STRIPES}/{head_id}"


def part_path(path: str, head_id: str, part: str) -> str:
    return f"{parts_folder(path, head_id)}/{part}"


def check_size(size_bytes: int) -> None:
    """Raise `PermanentError` for a file whose digests alone are too large for a head: known before hours of writing."""
    if num_chunks(size_bytes) * DIGEST_BYTES > MAX_HEAD_BYTES:
        raise PermanentError(f"a file of {size_bytes} bytes is too large to be striped")


def encode_head(head: Head) -> bytes:
    """Encode a head. Raises `ValueError` for an inconsistent one, `PermanentError` for one too large."""
    _check_head(head)
    body = [bytes(PEEK_BYTES)]
    for segment in head.segments:
        body.append(_SEGMENT.pack(segment.size_bytes, segment.stripes, segment.parity is not None, 0))
        body += [_encoded_part(part) for part in segment.all_parts]
        body.append(_digests(segment))
    data = bytearray(b"".join(body))
    header = _HEADER.pack(MAGIC, VERSION, 0, head.size_bytes, bytes.fromhex(head.id), len(data), len(head.segments), 0)
    data[:PEEK_BYTES] = header + _check(header)
    data += blake3(data).digest()
    data += bytes(_padded(len(data)) - len(data))
    if len(data) > MAX_HEAD_BYTES:
        raise PermanentError(f"a file of {head.size_bytes} bytes is too large to be striped")
    return bytes(data)


def peek(first: bytes) -> int | None:
    """The file's size from the first bytes of a head of any version; None if this is not a head.

    Raises `CorruptError` for a head with a damaged beginning: as an ordinary file it would be shown as content.
    """
    if len(first) < PEEK_BYTES:
        return None
    check = first[_HEADER.size : PEEK_BYTES]
    if not first.startswith(MAGIC) or check != _check(first[: _HEADER.size]):
        if first.startswith(_MARK) or check == _check(_MARK + first[len(_MARK) : _HEADER.size]):
            raise CorruptError("the head of a striped file is damaged")
        return None
    return int(_HEADER.unpack_from(first)[3])


def peek_id(first: bytes) -> str | None:
    """The file's id from the first bytes of a head; None if this is not a head."""
    return None if peek(first) is None else _HEADER.unpack_from(first)[4].hex()


def parse_head(data: bytes) -> Head:
    """Decode a head. Raises `CorruptError`, or `PermanentError` for an unknown version."""
    size_bytes = peek(data[:PEEK_BYTES])
    if size_bytes is None:
        raise CorruptError("this is not the head of a striped file")
    _, version, zero, _, head_id, end, num_segments, also_zero = _HEADER.unpack_from(data)
    if version != VERSION:
        raise PermanentError(f"a striped file of version {version}; this BootSeer supports version {VERSION}")
    if zero or also_zero or end < PEEK_BYTES or end > MAX_HEAD_BYTES or len(data) != _padded(end + DIGEST_BYTES):
        raise CorruptError("the head of a striped file is not as long as it says; it was cut or mixed up")
    view = memoryview(data)
    if blake3(view[:end]).digest() != data[end : end + DIGEST_BYTES] or any(view[end + DIGEST_BYTES :]):
        raise CorruptError("the head of a striped file does not have its own digest")
    segments = _Parser(data, end).segments(num_segments)
    head = Head(head_id.hex(), size_bytes, segments)
    try:
        _check_head(head)
    except ValueError as error:
        raise CorruptError(f"the head of a striped file: {error}") from error
    return head


class _Parser:
    """Parses the body front to back; every length is checked against what is left before it is used."""

    def __init__(self, data: bytes, end: int) -> None:
        self._data = data
        self._at = PEEK_BYTES
        self._end = end

    def segments(self, count: int) -> tuple[Segment, ...]:
        found = []
        start = 0
        for _ in range(count):
            segment = self._segment(start)
            found.append(segment)
            start += segment.size_bytes
        if self._at != self._end:
            raise CorruptError("the head of a striped file has trailing bytes")
        return tuple(found)

    def _segment(self, start: int) -> Segment:
        size_bytes, stripes, num_parity, zero = _SEGMENT.unpack(self._take(_SEGMENT.size))
        chunks = num_chunks(size_bytes)
        if not 1 <= stripes <= min(chunks, MAX_STRIPES) or num_parity > 1 or zero:
            raise CorruptError(f"the head of a striped file has a segment of {chunks} chunks in {stripes} parts")
        parts = tuple(self._part(part_size(size_bytes, stripes, number)) for number in range(stripes))
        parity = self._part(part_size(size_bytes, stripes, 0)) if num_parity else None
        return make_segment(start, size_bytes, self._take(chunks * DIGEST_BYTES), parts, parity)

    def _part(self, size_bytes: int) -> Part:
        name = self._text()
        sha256 = self._take(32).hex()
        nodes = tuple(self._text() for _ in range(self._take(1)[0]))
        return Part(name, size_bytes, sha256, nodes)

    def _text(self) -> str:
        return self._take(self._take(1)[0]).decode("latin-1")

    def _take(self, length: int) -> bytes:
        start = self._at
        if length > self._end - start:
            raise CorruptError("the head of a striped file ends in the middle")
        self._at = start + length
        return self._data[start : self._at]


def _check_head(head: Head) -> None:
    """The checks of both `encode_head` and `parse_head`. Raises `ValueError`."""
    if len(head.id) != 32 or not _HEX.fullmatch(head.id):
        raise ValueError("the id is not of 32 hexadecimal digits")
    names: set[str] = set()
    end = 0
    for segment in head.segments:
        if segment.start != end or end % CHUNK_BYTES:
            raise ValueError(f"a segment begins at {segment.start}, the one before it ends at {end}")
        end += segment.size_bytes
        for number, part in enumerate(segment.all_parts):
            _check_part(part, names)
            if part.size_bytes != part_size(segment.size_bytes, segment.stripes, number % segment.stripes):
                raise ValueError(f"part {part.name} cannot have {part.size_bytes} bytes")
    if end != head.size_bytes or not head.segments:
        raise ValueError(f"segments of {end} bytes for a file of {head.size_bytes}")


def _check_part(part: Part, names: set[str]) -> None:
    if not _NAME.fullmatch(part.name) or part.name in names:
        raise ValueError(f"invalid name of a part: {part.name[:40]!r}")
    names.add(part.name)
    if len(part.sha256) != 64 or not _HEX.fullmatch(part.sha256):
        raise ValueError(f"part {part.name} has no SHA-256")
    if len(part.nodes) > _MAX_NODES or not all(_NODE.fullmatch(node) for node in part.nodes):
        raise ValueError(f"part {part.name} lists invalid nodes")


def _encoded_part(part: Part) -> bytes:
    nodes = b"".join(bytes([len(node)]) + node.encode("ascii") for node in part.nodes)
    name = part.name.encode("ascii")
    return bytes([len(name)]) + name + bytes.fromhex(part.sha256) + bytes([len(part.nodes)]) + nodes


def _digests(segment: Segment) -> bytes:
    """The digests of the chunks. Raises `ValueError` if the index does not follow from the parts."""
    index = segment.index
    digests = b"".join(index.digest(chunk) for chunk in range(index.num_blocks))
    expected = index_of(index.size_bytes, tuple(part.sha256 for part in segment.parts), digests)
    if expected.identity != index.identity:
        raise ValueError("a segment's index does not belong to its parts")
    return digests


def _padded(length: int) -> int:
    return length + (_LENGTH_REST - length) % _LENGTH_STEP


def _check(header: bytes) -> bytes:
    return blake3(header).digest()[:_CHECK_BYTES]

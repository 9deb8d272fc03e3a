"""The bytes of a layer as they were before compression: gzip, zstd, or as they stand.

The first bytes tell which, as for runtimes, not the media type. Several gzip members and several zstd frames may follow
each other (`zstd:chunked` has frames that hold no data at all). Output comes in pieces of bounded size, whatever the
ratio, so that a bomb costs time until somebody's limit is reached, and never memory.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import IO, cast

import zstandard

from bootseer.errors import CorruptError, PermanentError

_PIECE = 1 << 20
_INPUT = 1 << 16
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = tuple(bytes([number]) + b"\x2a\x4d\x18" for number in range(0x50, 0x60))
_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x04\x22\x4d\x18": "lz4"}
_MAX_WINDOW = 1 << 27  # what the zstd program takes without being asked


def decompressed(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The content of a compressed stream. Raises `CorruptError`, or `PermanentError` for an unknown compression."""
    pieces = iter(pieces)
    start = b""
    for piece in pieces:
        start += piece
        if len(start) >= 6:
            break
    for magic, name in _OTHERS.items():
        if start.startswith(magic):
            raise PermanentError(f"compressed with {name}; gzip, zstd and no compression are known")
    everything = itertools.chain([start], pieces)
    if start.startswith(_GZIP):
        return _gunzip(everything)
    if start.startswith((_ZSTD, *_SKIPPABLE)):
        return _unzstd(everything)
    return (piece for piece in everything if piece)


def _gunzip(pieces: Iterator[bytes]) -> Iterator[bytes]:
    member: zlib._Decompress | None = None
    for piece in pieces:
        for at in range(0, len(piece), _INPUT):
            data = piece[at : at + _INPUT]
            while True:
                if member is None:
                    data = data.lstrip(b"\0")  # some writers fill up with zeros
                    if not data:
                        break
                    member = zlib.decompressobj(31)
                try:
                    output = member.decompress(data, _PIECE)
                except zlib.error as error:
                    raise CorruptError(f"damaged gzip data: {error}") from error
                if output:
                    yield output
                data = member.unconsumed_tail
                if member.eof:
                    data, member = member.unused_data, None
                elif not data and len(output) < _PIECE:
                    break  # a full piece means that more may come without more input
    if member is not None:
        raise CorruptError("the gzip data ends too early")


def _unzstd(pieces: Iterator[bytes]) -> Iterator[bytes]:
    source = cast("IO[bytes]", _Readable(pieces))  # no more of a file is needed
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    try:
        with decompressor.stream_reader(source, read_size=_INPUT, read_across_frames=True) as reader:
            while data := reader.read(_PIECE):
                yield data
    except zstandard.ZstdError as error:
        raise CorruptError(f"damaged zstd data: {error}") from error


class _Readable:
    """Pieces as a file that can be read."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def read(self, count: int) -> bytes:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._rest = memoryview(piece)
        taken, self._rest = self._rest[:count], self._rest[count:]
        return bytes(taken)

"""The bytes of a layer as they were before compression: gzip, zstd, xz, bzip2, or as they stand.

The first bytes tell which, as for runtimes, not the media type. Several gzip members, zstd frames and xz streams may
follow each other (`zstd:chunked` has frames that hold no data at all). Output comes in pieces of bounded size, whatever
the ratio, so that a bomb costs time until a limit is reached, and never memory.
"""

from __future__ import annotations

import gzip
import importlib
import io
import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, cast

import zstandard

from bootseer.errors import CorruptError, PermanentError

_PIECE = 1 << 20
_GZIP_PIECE = 1 << 18  # what a core's cache holds: with 1 MiB inflating takes a quarter longer, and so does the rest
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = tuple(bytes([number]) + b"\x2a\x4d\x18" for number in range(0x50, 0x60))
_XZ = b"\xfd7zXZ\0"
_BZIP2 = b"BZh"
_LZ4 = b"\x04\x22\x4d\x18"
_MAX_WINDOW = 1 << 27  # what the zstd program takes without being asked; xz -9 takes half of it


def decompressed(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The content of a compressed stream. Raises `CorruptError`, or `PermanentError` for an unknown compression."""
    pieces = iter(pieces)
    start = b""
    for piece in pieces:
        start += piece
        if len(start) >= 6:
            break
    if start.startswith(_LZ4):
        raise PermanentError("compressed with lz4; gzip, zstd, xz, bzip2 and no compression are known")
    everything = itertools.chain([start], pieces)
    if start.startswith(_GZIP):
        return _gunzip(everything)
    if start.startswith((_ZSTD, *_SKIPPABLE)):
        return _unzstd(everything)
    if start.startswith(_XZ):
        lzma = _module("lzma")
        return _streams(everything, "xz", lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, _MAX_WINDOW), lzma.LZMAError)
    if start.startswith(_BZIP2):
        return _streams(everything, "bzip2", _module("bz2").BZ2Decompressor, OSError)
    return (piece for piece in everything if piece)


def inflating() -> Any:
    """What reads gzip: ISA-L, the extra `convert`, in less than half the time, or the standard library's `gzip`."""
    try:
        return importlib.import_module("isal.igzip")
    except ImportError:
        return gzip


def _gunzip(pieces: Iterator[bytes]) -> Iterator[bytes]:
    library = inflating()
    failed = zlib.error if library is gzip else library.isal_zlib.error
    try:
        with library.open(_Readable(pieces)) as reader:
            while data := reader.read(_GZIP_PIECE):
                yield data
    except EOFError as error:
        raise CorruptError("the gzip data ends too early") from error
    except (gzip.BadGzipFile, failed) as error:
        raise CorruptError(f"damaged gzip data: {error}") from error


def _unzstd(pieces: Iterator[bytes]) -> Iterator[bytes]:
    source = cast("IO[bytes]", _Readable(pieces))
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    try:
        with decompressor.stream_reader(source, read_size=1 << 16, read_across_frames=True) as reader:
            while data := reader.read(_PIECE):
                yield data
    except zstandard.ZstdError as error:
        raise CorruptError(f"damaged zstd data: {error}") from error


def _module(name: str) -> Any:
    """A part of the standard library that a Python which was built without the library behind it does not have."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PermanentError(f"this Python was built without {name}, with which the layer is compressed") from error


def _streams(pieces: Iterator[bytes], name: str, new: Callable[[], Any], damaged: type[Exception]) -> Iterator[bytes]:
    """What `lzma` and `bz2` have in common."""
    stream: Any = None
    for piece in pieces:
        data = piece
        while True:
            if stream is None:
                data = data.lstrip(b"\0")  # padding between streams and behind the last one
                if not data:
                    break
                stream = new()
            try:
                output = stream.decompress(data, _PIECE)
            except damaged as error:
                raise CorruptError(f"damaged {name} data: {error}") from error
            if output:
                yield output
            data = b""
            if stream.eof:
                data, stream = stream.unused_data, None
            elif stream.needs_input:
                break
    if stream is not None:
        raise CorruptError(f"the {name} data ends too early")


class _Readable(io.RawIOBase):
    """Pieces as a file that can be read."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        taken, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)

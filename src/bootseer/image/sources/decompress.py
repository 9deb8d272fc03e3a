"""Decompress a layer: gzip, zstd, xz, bzip2 or uncompressed.

Like container runtimes, this reads the compression from the first bytes and ignores the media type. Gzip members, zstd
frames and xz streams may be concatenated (`zstd:chunked` has skippable frames). Output pieces have a bounded size, so
a decompression bomb takes time until a limit is reached, but no memory.
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
_GZIP_PIECE = 1 << 18  # fits a core's cache: with 1 MiB inflating takes a quarter longer, and so does what follows
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_SKIPPABLE = tuple(bytes([number]) + b"\x2a\x4d\x18" for number in range(0x50, 0x60))
_XZ = b"\xfd7zXZ\0"
_BZIP2 = b"BZh"
_LZ4 = b"\x04\x22\x4d\x18"
_TAR, _TAR_AT = b"ustar", 257
_MAX_WINDOW = 1 << 27  # the zstd program's own default limit; xz -9 needs half of it


def decompressed(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The decompressed stream. Raises `CorruptError`, and `PermanentError` for an unsupported compression."""
    pieces = iter(pieces)
    start = b""
    for piece in pieces:
        start += piece
        if len(start) >= _TAR_AT + len(_TAR):
            break
    if start.startswith(_LZ4):
        raise PermanentError("compressed with lz4; supported are gzip, zstd, xz, bzip2 and no compression")
    everything = itertools.chain([start], pieces)
    if start.startswith(_GZIP):
        return _gunzip(everything)
    if start.startswith((_ZSTD, *_SKIPPABLE)):
        return _unzstd(everything)
    if start.startswith(_XZ):
        lzma = _module("lzma")
        return _streams(everything, "xz", lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, _MAX_WINDOW), lzma.LZMAError)
    if start.startswith(_BZIP2) and not start.startswith(_TAR, _TAR_AT):  # else the name of the first file
        return _streams(everything, "bzip2", _module("bz2").BZ2Decompressor, OSError)
    return (piece for piece in everything if piece)


def gzip_module() -> Any:
    """ISA-L's `igzip` if the extra `convert` is installed (less than half the time), else the standard `gzip`."""
    try:
        return importlib.import_module("isal.igzip")
    except ImportError:
        return gzip


def _gunzip(pieces: Iterator[bytes]) -> Iterator[bytes]:
    library = gzip_module()
    library_error = zlib.error if library is gzip else library.isal_zlib.error
    try:
        with library.open(Stream(pieces)) as reader:
            while data := reader.read(_GZIP_PIECE):
                yield data
    except EOFError as error:
        raise CorruptError("the gzip data ends too early") from error
    except (gzip.BadGzipFile, library_error) as error:
        raise CorruptError(f"damaged gzip data: {error}") from error


def _unzstd(pieces: Iterator[bytes]) -> Iterator[bytes]:
    source = cast("IO[bytes]", Stream(pieces))
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
    try:
        with decompressor.stream_reader(source, read_size=1 << 16, read_across_frames=True) as reader:
            while data := reader.read(_PIECE):
                yield data
    except zstandard.ZstdError as error:
        raise CorruptError(f"damaged zstd data: {error}") from error


def _module(name: str) -> Any:
    """An optional module of the standard library. Raises `PermanentError` if this Python was built without it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PermanentError(f"the layer needs {name}, and this Python was built without it") from error


def _streams(pieces: Iterator[bytes], name: str, new: Callable[[], Any], damaged: type[Exception]) -> Iterator[bytes]:
    """Decompress concatenated streams with the interface that `lzma` and `bz2` share."""
    stream: Any = None
    for piece in pieces:
        data = piece
        while True:
            if stream is None:
                data = data.lstrip(b"\0")  # padding between and after streams
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


class Stream(io.RawIOBase):
    """Reads pieces of any size from an iterator of pieces of other sizes."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._current = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        taken = self.some(len(buffer))
        buffer[: len(taken)] = taken
        return len(taken)

    def some(self, limit: int) -> memoryview:
        """Between 1 and `limit` bytes, without a copy; empty at the end."""
        while not self._current:
            piece = next(self._pieces, None)
            if piece is None:
                return self._current
            self._current = memoryview(piece)
        taken, self._current = self._current[:limit], self._current[limit:]
        return taken

    def exactly(self, count: int) -> bytes:
        """`count` bytes, fewer at the end."""
        taken = self.some(count)
        if len(taken) == count:
            return bytes(taken)
        data = bytearray(taken)
        while len(data) < count and (taken := self.some(count - len(data))):
            data += taken
        return bytes(data)

    def skip(self, count: int) -> int:
        """Skip `count` bytes; returns how many of them were missing at the end."""
        while count and (taken := self.some(count)):
            count -= len(taken)
        return count

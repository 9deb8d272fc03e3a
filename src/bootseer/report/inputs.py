"""Open what the user names: files, folders, stdin; plain, gzip or zstd; as streams of bytes.

Compression is recognised by the first bytes, not by the name. Compressed files are read in pieces, so that a small file
that unpacks to terabytes costs time but no memory; a truncated one yields everything before the cut.
"""

from __future__ import annotations

import io
import math
import os
import select
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bootseer.errors import PermanentError, UsageError, os_errors_as

STDIN = "-"
_READ_BYTES = 1 << 20
"""Blocks that fit into the CPU cache are searched faster than larger ones."""
_STEP_BYTES = 1024
"""Fed to a decompressor at once; all of a damaged piece is lost. A zstd block of 3 bytes can expand to 128 KiB, so this
bounds what is held at 45 MB."""
_GZIP = b"\x1f\x8b"
_ZSTD = (b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18")
"""The second one begins what pzstd writes."""
_HINT = "give log files, folders with logs, or - for standard input"


@dataclass(frozen=True, slots=True)
class Source:
    """One stream of log bytes."""

    name: str
    """As shown to the user."""
    path: Path | None
    """None for standard input."""
    named: bool = True
    """The user named it; otherwise it was found in a folder, and it is no error if it cannot be read."""
    data: Iterable[bytes] | None = None
    """The content, instead of that of the file, as uncompressed pieces; `path` is then only a name."""
    data_ns: int = 0
    """When `data` was written."""

    @property
    def modified_ns(self) -> int:
        """When the log was last written; used to complete times without a year."""
        if self.data is not None:
            return self.data_ns
        try:
            return self.path.stat().st_mtime_ns if self.path is not None else time.time_ns()
        except OSError:  # rotated away since it was listed
            return time.time_ns()


def exists(place: str) -> bool:
    """Whether something of this name exists, readable or not."""
    try:
        Path(place).stat()
    except PermissionError:
        return True
    except (OSError, ValueError):  # including a name that is too long, and a circle of links
        return False
    return True


def sources(places: Sequence[str]) -> list[Source]:
    """The streams for what the user named; folders are walked, hidden files ignored.

    Raises `UsageError` for names that do not exist and for folders without files.
    """
    found: list[Source] = []
    for place in places:
        path = Path(place)
        if place == STDIN:
            found.append(Source("(standard input)", None))
        elif not exists(place):
            raise UsageError(f"{_shown(place)}: no such file or folder", hint=_HINT)
        elif os.path.isdir(place):  # noqa: PTH112 - pathlib raises for a folder without search permission
            files = inside(place)
            if not files:
                raise UsageError(f"{_shown(place)}: the folder contains no files", hint=_HINT, exit_code=1)
            found += files
        else:
            found.append(Source(_shown(place), path))
    return found


def inside(place: str) -> list[Source]:
    """The files below a folder, except hidden ones; links to folders are not followed."""
    with os_errors_as(PermanentError, f"{_shown(place)}: cannot be read"):
        next(Path(place).iterdir(), None)
    paths = sorted(
        path
        for folder, _, names in os.walk(place)
        for name in names
        if not name.startswith(".") and _is_file(path := Path(folder, name))
    )
    return [Source(_shown(str(path)), path, named=False) for path in paths]


def _is_file(path: Path) -> bool:
    """Whether this is a file; if that cannot be determined it counts as one, to be reported as unreadable."""
    try:
        return path.is_file()
    except PermissionError:
        return True


def _shown(name: str) -> str:
    """A printable name: a file name may contain a newline, or bytes that are not text."""
    return name if name.isprintable() else ascii(name)


class Cut(Exception):  # noqa: N818 - a condition that the reader counts, not an error of the program
    """A compressed file is truncated or damaged."""


def blocks(source: Source) -> Iterator[bytes]:
    """The bytes of a source, uncompressed, in blocks.

    Raises `Cut` after the last block of a truncated or damaged compressed file, `PermanentError` if it cannot be read.
    """
    with os_errors_as(PermanentError, f"{source.name}: cannot be read"):
        if source.data is not None:
            yield from source.data
        elif source.path is None:
            if sys.stdin is None:
                raise PermanentError("standard input is closed: name a file, or pipe a log into it")
            yield from _unpacked(sys.stdin.buffer)
        else:
            with source.path.open("rb", buffering=0) as file:
                yield from _unpacked(file)


def state(source: Source) -> tuple[int, float]:
    """Inode and size of a file that may grow; 0 if it does not exist. Standard input has infinite size."""
    if source.path is None:
        return 0, math.inf
    try:
        status = source.path.stat()
    except OSError:
        return 0, 0
    return status.st_ino, status.st_size


def is_archive(source: Source) -> bool:
    """Whether a file is compressed, and so does not grow. Raises `PermanentError` if it cannot be read."""
    path = source.path or Path(os.devnull)
    with os_errors_as(PermanentError, f"{source.name}: cannot be read"), path.open("rb") as file:
        return file.read(4).startswith((_GZIP, *_ZSTD))


def new_blocks(source: Source, offset: int) -> Iterator[bytes]:
    """The content after `offset` in blocks, without waiting for more. For standard input, an empty block is the end.

    Raises `PermanentError` if it cannot be read.
    """
    with os_errors_as(PermanentError, f"{source.name}: cannot be read"):
        if source.path is None:
            block = b"."
            while block and select.select([0], [], [], 0)[0]:
                yield (block := os.read(0, _READ_BYTES))
            return
        with source.path.open("rb", buffering=0) as file:
            file.seek(offset)
            while block := file.read(_READ_BYTES):
                yield block


def _unpacked(raw: io.RawIOBase | BinaryIO) -> Iterator[bytes]:
    block = raw.read(_READ_BYTES) or b""
    while 0 < len(block) < 4:  # a pipe may deliver the magic number in pieces
        more = raw.read(_READ_BYTES)
        if not more:
            break
        block += more
    if block.startswith(_GZIP):
        yield from _decompressed(raw, block, lambda: zlib.decompressobj(wbits=31), zlib.error)
    elif block.startswith(_ZSTD):
        from zstandard import ZstdDecompressor, ZstdError

        window_bytes = 1 << 27
        yield from _decompressed(
            raw, block, lambda: ZstdDecompressor(max_window_size=window_bytes).decompressobj(), ZstdError
        )
    else:
        while block:
            yield block
            block = raw.read(_READ_BYTES) or b""


def _decompressed(
    raw: io.RawIOBase | BinaryIO, block: bytes, new: Callable[[], Any], damage: type[Exception]
) -> Iterator[bytes]:
    """The content of members or frames that follow each other; `new` makes a decompressor, which raises `damage`."""
    unpacker, ready = new(), bytearray()
    while block:
        for start in range(0, len(block), _STEP_BYTES):
            piece = block[start : start + _STEP_BYTES]
            while piece:
                if unpacker.eof:  # log rotation appends one member to another, with padding between or behind them
                    if not (piece := piece.lstrip(b"\0")):
                        break
                    unpacker = new()
                try:
                    ready += unpacker.decompress(piece)
                except damage as error:
                    if ready:
                        yield bytes(ready)
                    raise Cut from error
                piece = unpacker.unused_data
            if len(ready) > _READ_BYTES // 4:  # not after each step: every block is searched by itself
                yield bytes(ready)
                ready.clear()
        block = raw.read(_READ_BYTES) or b""
    if ready:
        yield bytes(ready)
    if not unpacker.eof:
        raise Cut

"""What every source of images gives: manifest and configuration, and layers as streams that are verified as they pass.

`open.open_source` chooses the kind: a registry, an OCI layout, a docker archive or a folder.
"""

from __future__ import annotations

import hashlib
import os
import random
import stat
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

from bootseer.errors import CorruptError, UsageError
from bootseer.io.retry import retrying

if TYPE_CHECKING:
    from pathlib import Path


_STALL_S = 300.0
"""How long a source may give nothing at all, tries included."""


@dataclass(frozen=True, slots=True)
class SourceLayer:
    """A layer as the source has it."""

    digest: str
    """Of the bytes that `read` gives; empty when the source does not tell."""
    size_bytes: int
    diff_id: str
    """Digest of the uncompressed tar stream."""
    read: Callable[[int], Generator[bytes, None, None]]
    """The bytes from an offset on. After a `TransientError` it may be called again with the offset that was reached."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image that can be converted. Call `close` at the end."""

    name: str
    """For people."""
    digest: str
    """Of the manifest. Empty for a folder, whose digest is known when it was read."""
    config: Mapping[str, object]
    config_data: bytes
    """The configuration to the byte."""
    layers: tuple[SourceLayer, ...] = ()
    """Bottom first; none for a folder."""
    folder: Path | None = None
    location: str = ""
    """URI of the store that holds the manifest, when it is one: the converted image can be attached to it there."""
    manifest: bytes = b""
    """To the byte; empty for a source that has none."""
    close: Callable[[], None] = field(default=lambda: None)


def open_plain(path: Path) -> IO[bytes]:
    """A file for reading, of which every part can be read again. Raises `UsageError` for a FIFO or a device, which
    could keep the reader waiting, and `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise UsageError(f"{path}: not a regular file", hint="write what comes from a pipe into a file first")


def read_resumed(layer: SourceLayer) -> Iterator[bytes]:
    """The bytes of a layer. A stream that breaks is opened again at the byte it had reached, as long as it moves on."""
    at = 0
    stream: Generator[bytes, None, None] | None = None
    rng = random.Random()  # noqa: S311 - spreads requests, keeps no secret

    def next_piece(_left_s: float) -> bytes | None:
        nonlocal stream
        if stream is None:
            stream = layer.read(at)
        try:
            return next(stream, None)
        except BaseException:
            stream.close()
            stream = None
            raise

    try:
        while at < layer.size_bytes:
            piece = retrying(next_piece, deadline_s=_STALL_S, rng=rng)
            if piece is None:
                return  # too short: the digest says so
            at += len(piece)
            yield piece
    finally:
        if stream is not None:
            stream.close()


def check_size(pieces: Iterator[bytes], layer: SourceLayer) -> Iterator[bytes]:
    """The bytes as the source has them. Raises `CorruptError` at the end unless there are as many as it said.

    Which ones they are, `check_content` finds out: nothing is kept but what they unpack to, and its digest is in the
    configuration, which the manifest's digest covers.
    """
    size = 0
    for piece in pieces:
        size += len(piece)
        yield piece
    if size != layer.size_bytes:
        raise CorruptError(f"{size} bytes came, the manifest says {layer.size_bytes}")


def check_content(pieces: Iterator[bytes], layer: SourceLayer) -> Iterator[bytes]:
    """The uncompressed bytes. Raises `CorruptError` at the end unless they are those that the configuration names."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
        yield piece
    if "sha256:" + digest.hexdigest() != layer.diff_id:
        raise CorruptError(f"uncompressed, the bytes are not those of {layer.diff_id}")

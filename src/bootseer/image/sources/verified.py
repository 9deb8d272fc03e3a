"""The stream of a layer, taken up again where it broke, and checked against both of its digests as it passes.

Called by `image.conversion.layer_job`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Generator, Iterator

from bootseer.errors import CorruptError
from bootseer.image.sources.source import SourceLayer
from bootseer.store.retry import retrying

_STALL_S = 300.0
"""How long a source may give nothing at all, tries included."""


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


def check_stored(pieces: Iterator[bytes], layer: SourceLayer) -> Iterator[bytes]:
    """The bytes as the source has them. Raises `CorruptError` at the end unless they are those of the digest."""
    digest = hashlib.sha256()
    size = 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
        yield piece
    if size != layer.size_bytes:
        raise CorruptError(f"{size} bytes came, the manifest says {layer.size_bytes}")
    if layer.digest and "sha256:" + digest.hexdigest() != layer.digest:
        raise CorruptError(f"the bytes are not those of {layer.digest}")


def check_content(pieces: Iterator[bytes], layer: SourceLayer) -> Iterator[bytes]:
    """The uncompressed bytes. Raises `CorruptError` at the end unless they are those that the configuration names."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
        yield piece
    if "sha256:" + digest.hexdigest() != layer.diff_id:
        raise CorruptError(f"uncompressed, the bytes are not those of {layer.diff_id}")

"""One request to an origin: a range of a stripe comes back as the stored bytes of its blocks, while it streams in.

Called by `engine` in its worker threads. Holds no more than one block and one piece of the answer at a time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing

from bootseer.blocks.codec import Buffer
from bootseer.blocks.index import Index
from bootseer.errors import TransientError
from bootseer.store.store import Store


def transfer(index: Index, origin: Store, blocks: range, timeout_s: float) -> Generator[tuple[int, Buffer], None, None]:
    """Each of the blocks, which are adjacent in their stripe, with its stored bytes: not verified, not decompressed.

    Raises what `Store.read` raises. Closing the iterator ends the request.
    """
    places = [index.place(block) for block in blocks]
    start = next((place.offset for place in places if place.length), 0)
    total = sum(place.length for place in places)
    stripe = index.stripes[places[0].stripe].name
    if not total:  # blocks of zeros are stored in no bytes
        yield from ((block, b"") for block in blocks)
        return
    with closing(origin.read(stripe, start, total, timeout_s=timeout_s)) as pieces:
        for block, data in zip(blocks, _cut(pieces, [place.length for place in places]), strict=True):
            if data is None:
                raise TransientError(f"{origin.uri}: {stripe}: the answer ended too early")
            yield block, data
        if next(pieces, b""):
            raise TransientError(f"{origin.uri}: {stripe}: the answer is longer than what was asked for")


def _cut(pieces: Iterator[bytes], lengths: list[int]) -> Iterator[Buffer | None]:
    """The same bytes in parts of these lengths; None when they end too early."""
    piece = memoryview(b"")
    for length in lengths:
        if length <= len(piece):  # the usual case within a piece: nothing is copied
            yield piece[:length]
            piece = piece[length:]
            continue
        parts = [piece] if piece else []
        missing = length - len(piece)
        while missing:
            piece = memoryview(next(pieces, b""))
            if not piece:
                yield None
                return
            parts.append(piece[:missing])
            missing -= len(parts[-1])
        piece = piece[len(parts[-1]) :]
        yield parts[0] if len(parts) == 1 else b"".join(parts)

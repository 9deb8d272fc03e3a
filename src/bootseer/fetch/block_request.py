"""One request for blocks: claim them, read them from an origin, verify them, and store them in the cache.

Runs on a worker thread of the fetcher without locks. Holds at most one block and one piece of the response in memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from msgspec import Struct, field

from bootseer.blocks.codec import RAW, Buffer, decode
from bootseer.blocks.index import Index
from bootseer.cache.cached_file import CachedFile
from bootseer.errors import BootseerError, CorruptError, TransientError
from bootseer.fetch.ledger import Fetch
from bootseer.fetch.routed import Routes
from bootseer.logs import logger
from bootseer.store.store import Store

_LOG = logger(__name__)


class Origin(Protocol):
    """A source of blocks. Usable from any thread."""

    @property
    def uri(self) -> str:
        """Its name in errors and statistics; files whose origins have the same name share its pace."""

    sends_plain: ClassVar[bool]
    """Whether it sends the bytes of the file, as in the cache, instead of stored ones."""

    def read(self, index: Index, blocks: range, timeout_s: float) -> Generator[tuple[int, Buffer], None, None]:
        """Yield each block with its bytes, neither verified nor decompressed. The blocks are adjacent.

        Raises the errors of `bootseer.errors`. Closing the iterator ends the request.
        """


class Peers(Routes, Protocol):
    """The other nodes that have blocks of a file: the origin that is asked before its store. Usable from any thread."""

    def at(self, step: Any) -> Origin:
        """The origin for one step of a route."""

    def store_sent(self, num_bytes: int, seconds: float) -> None:
        """The store has sent so many bytes of the file to one request: peers are compared with it."""

    def sent_wrong(self, step: Any, error: CorruptError) -> None:
        """The peer of `step` sent a block with a wrong digest."""


class StoreOrigin(Struct, frozen=True):
    """The store with the stripe of a file: a range is streamed."""

    sends_plain: ClassVar[bool] = False
    store: Store
    on_sent: Callable[[int, float], object] | None = None
    """Called after each request with the bytes of the file and its seconds."""

    @property
    def uri(self) -> str:
        return self.store.uri

    def read(self, index: Index, blocks: range, timeout_s: float) -> Generator[tuple[int, Buffer], None, None]:
        places = [index.place(block) for block in blocks]
        start = next((place.offset for place in places if place.length), 0)
        total = sum(place.length for place in places)
        stripe = index.stripes[places[0].stripe].name
        if not total:  # all-zero blocks are not stored
            yield from ((block, b"") for block in blocks)
            return
        begun_s = time.monotonic()
        with contextlib.closing(self.store.read(stripe, start, total, timeout_s=timeout_s)) as pieces:
            for block, data in zip(blocks, _cut(pieces, [place.length for place in places]), strict=True):
                if data is None:
                    raise TransientError(f"{self.uri}: {stripe}: the answer ended too early")
                yield block, data
            if next(pieces, b""):
                raise TransientError(f"{self.uri}: {stripe}: the answer is longer than what was asked for")
        if self.on_sent is not None:
            self.on_sent(sum(map(index.length, blocks)), time.monotonic() - begun_s)


class Claim(Struct):
    """How the blocks of one request are divided among processes."""

    owned: list[int] = field(default_factory=list)
    """To be fetched by this process."""
    held: set[int] = field(default_factory=set)
    """Those of them with a claim held by this process."""
    ready: list[int] = field(default_factory=list)
    """Cached meanwhile."""
    claimed_elsewhere: list[int] = field(default_factory=list)
    """Claimed by another process."""


class ArrivedBlock(NamedTuple):
    """A block received from an origin."""

    block: int
    received_bytes: int
    data: Buffer | CorruptError
    """The verified block, or the error that names the damaged one."""
    cache_error: BootseerError | None
    """Why it could not be cached."""


class File(Struct, frozen=True, eq=False):
    """One block file."""

    index: Index
    store: StoreOrigin
    peers: Peers | None
    """Asked before the store."""
    cached: CachedFile
    needed: bytearray
    """1 for each block that a reader has needed. Written under the fetcher's lock, read without: bits are only
    added."""
    prefetched_hot: bytearray
    """1 for each block that was fetched because it is hot."""

    def origin(self, fetch: Fetch) -> Origin:
        return self.store if self.peers is None or fetch.step is None else self.peers.at(fetch.step)

    def state(self, block: int) -> Literal["cached", "claimed", "free"]:
        """Whether the block is cached, claimed by a process, or neither. Polled often, so it does not try to claim."""
        with contextlib.suppress(BootseerError):
            if self.cached.ready(block):
                return "cached"
            if self.cached.is_claimed(block):
                return "claimed"
        return "free"  # if it was cached in between, the request for it will find it

    def assemble(self, offset: int, length: int, held: Mapping[int, Buffer]) -> Buffer:
        """A range of the file, from blocks in memory and from the cache. Raises `MissingBlocks`."""
        size = self.index.block_size
        end = min(offset + length, self.index.size_bytes)
        pieces: list[Buffer] = []
        for block in self.index.blocks_of(offset, length):
            start = block * size
            low, high = max(offset, start), min(end, start + size)
            data = held.get(block)
            if data is None:
                pieces.append(self.cached.read(low, high - low))
            else:
                pieces.append(memoryview(data)[low - start : high - start])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def missing(self) -> list[range]:
        return list(_ranges(self.cached.missing(0, self.index.size_bytes)))


def fetch_blocks(
    file: File,
    fetch: Fetch,
    distrusted: Container[int],
    decode_slot: Callable[[], contextlib.AbstractContextManager[object]],
) -> Generator[Claim | ArrivedBlock, None, None]:
    """Execute a request: yields a `Claim` if other processes have or fetch some blocks, then each block as it arrives.

    `decode_slot` is entered while a block is decoded. Closing the iterator ends the request.
    """
    claim = _claim(file.cached, fetch, distrusted)
    try:
        if claim.ready or claim.claimed_elsewhere:
            yield claim
        origin = file.origin(fetch)
        for blocks in _ranges(claim.owned):
            with contextlib.closing(origin.read(file.index, blocks, fetch.timeout_s)) as answer:
                for block, received in answer:
                    with decode_slot():
                        arrived = _verify_and_cache(file, origin, block, received)
                    _release(file.cached, claim.held & {block})
                    claim.held.discard(block)
                    yield arrived
    finally:
        _release(file.cached, claim.held)


def _claim(cached: CachedFile, fetch: Fetch, distrusted: Container[int]) -> Claim:
    """Claim the blocks of a request. Hedges ignore claims of others; `distrusted` blocks are fetched without one."""
    claim = Claim()
    for block in fetch.blocks:
        if block in distrusted:
            claim.owned.append(block)
            continue
        try:
            if cached.claim(block):
                claim.held.add(block)
                claim.owned.append(block)
            elif cached.ready(block):
                claim.ready.append(block)
            else:
                (claim.owned if fetch.hedge else claim.claimed_elsewhere).append(block)
        except BootseerError as error:  # without claims a block may be fetched twice, which is better than not at all
            _LOG.debug("block %d cannot be claimed: %s", block, error)
            claim.owned.append(block)
    return claim


def _verify_and_cache(file: File, origin: Origin, block: int, received: Buffer) -> ArrivedBlock:
    index, place = file.index, file.index.place(block)
    codec = RAW if origin.sends_plain else place.codec
    cache_error: BootseerError | None = None
    data: Buffer | CorruptError
    try:
        data = decode(codec, received, index.length(block), index.digest(block))
    except CorruptError as error:
        stripe = index.stripes[place.stripe].name
        data = CorruptError(f"{origin.uri}: {stripe}: block {block} of file {index.identity[:16]}: {error}")
    if not isinstance(data, CorruptError):
        try:
            file.cached.put(block, data)
        except BootseerError as error:
            cache_error = error
    return ArrivedBlock(block, len(received), data, cache_error)


def _release(cached: CachedFile, blocks: Iterable[int]) -> None:
    for block in blocks:
        # The kernel releases the others when the process ends.
        with contextlib.suppress(BootseerError):
            cached.release(block)


def _cut(pieces: Iterator[bytes], lengths: list[int]) -> Iterator[Buffer | None]:
    """The same bytes in parts of these lengths; None if they end too early."""
    piece = memoryview(b"")
    for length in lengths:
        if length <= len(piece):  # usually within one piece: no copy
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


def _ranges(blocks: list[int]) -> Iterator[range]:
    """The same ascending numbers as maximal ranges."""
    start = 0
    for position in range(1, len(blocks) + 1):
        if position == len(blocks) or blocks[position] != blocks[position - 1] + 1:
            yield range(blocks[start], blocks[position - 1] + 1)
            start = position

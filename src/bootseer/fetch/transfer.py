"""One request for blocks: which of them are ours to fetch, from which origin, verified, and kept in the cache.

Runs on a worker thread of the fetcher and takes no lock. Holds no more than one block and one piece of the answer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from bootseer.blocks.codec import RAW, Buffer, decode
from bootseer.blocks.index import Index
from bootseer.cache.file import CachedFile
from bootseer.errors import BootseerError, CorruptError, TransientError
from bootseer.fetch.ledger import Fetch
from bootseer.fetch.routed import Routes
from bootseer.logs import logger
from bootseer.store.store import Store

_LOG = logger(__name__)


class Form(Enum):
    """In which form an origin hands out blocks."""

    STORED = "stored"
    """As a store has them: compressed, as the index says."""
    PLAIN = "plain"
    """The bytes of the file, as the node's cache has them."""


class Origin(Protocol):
    """A place that blocks come from. May be used from any thread."""

    @property
    def uri(self) -> str:
        """Its name for errors and figures; files of origins of one name share its pace."""

    @property
    def form(self) -> Form:
        """In which form blocks travel."""

    def read(self, index: Index, blocks: range, timeout_s: float) -> Generator[tuple[int, Buffer], None, None]:
        """Each of the blocks, which are adjacent in their stripe, with its bytes: not verified, not decompressed.

        Raises the errors of `bootseer.errors`. Closing the iterator ends the request.
        """


class Peers(Routes, Protocol):
    """Other nodes that have blocks of a file: the origin that is asked before its store. Used from any thread."""

    uri: str
    """Their name in all, as `Origin.uri`."""

    def at(self, step: Any) -> Origin:
        """One of them: a step of a route."""

    def sent_wrong(self, step: Any, error: CorruptError) -> None:
        """It sent a block whose digest is wrong."""

    def stats(self) -> dict[str, dict[str, float]]:
        """What each of them sent, by name."""


@dataclass(frozen=True, slots=True)
class StoreOrigin:
    """The store that has the stripes of a file: ranges of them come back while they stream in."""

    store: Store

    @property
    def uri(self) -> str:
        return self.store.uri

    @property
    def form(self) -> Form:
        return Form.STORED

    def read(self, index: Index, blocks: range, timeout_s: float) -> Generator[tuple[int, Buffer], None, None]:
        places = [index.place(block) for block in blocks]
        start = next((place.offset for place in places if place.length), 0)
        total = sum(place.length for place in places)
        stripe = index.stripes[places[0].stripe].name
        if not total:  # blocks of zeros are stored in no bytes
            yield from ((block, b"") for block in blocks)
            return
        with contextlib.closing(self.store.read(stripe, start, total, timeout_s=timeout_s)) as pieces:
            for block, data in zip(blocks, _cut(pieces, [place.length for place in places]), strict=True):
                if data is None:
                    raise TransientError(f"{self.uri}: {stripe}: the answer ended too early")
                yield block, data
            if next(pieces, b""):
                raise TransientError(f"{self.uri}: {stripe}: the answer is longer than what was asked for")


@dataclass(slots=True)
class Claim:
    """The state of the blocks of one request before it is sent."""

    owned: list[int] = field(default_factory=list)
    """Fetched by this process."""
    held: set[int] = field(default_factory=set)
    """Those of them that this process holds a claim on."""
    ready: list[int] = field(default_factory=list)
    """Cached by now."""
    foreign: list[int] = field(default_factory=list)
    """Claimed by another process."""


class Arrived(NamedTuple):
    """A block that an origin sent."""

    block: int
    received_bytes: int
    data: bytes | CorruptError
    """Verified, or the error that names the damaged block."""
    not_kept: BootseerError | None
    """Why the cache did not take it."""
    decode_s: float


@dataclass(frozen=True, slots=True, eq=False)
class File:
    """One block file."""

    index: Index
    store: StoreOrigin
    peers: Peers | None
    """Asked before the store."""
    cached: CachedFile
    needed: bytearray
    """1 for each block that a reader has needed. Written under the fetcher's lock, read without: it only ever grows."""
    brought_hot: bytearray
    """1 for each block that was fetched because it is hot."""

    def origin(self, fetch: Fetch) -> Origin:
        """The origin of a request."""
        return self.store if self.peers is None or fetch.step is None else self.peers.at(fetch.step)

    def is_here(self, block: int) -> bool | None:
        """Whether the block is cached; None where it is neither cached nor claimed. Asked hundreds of times a second:
        no claim is made to find out."""
        try:
            return self.cached.ready(block) or (False if self.cached.is_claimed(block) else None)
        except BootseerError:
            return None  # and a block that came between both questions is found by the request for it

    def assembled(self, offset: int, length: int, held: Mapping[int, bytes]) -> Buffer:
        """A range of the file, from blocks at hand and from the cache. Raises `MissingBlocks`."""
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


def bring(
    file: File, fetch: Fetch, distrusted: Container[int], turn: Callable[[], contextlib.AbstractContextManager[object]]
) -> Generator[Claim | Arrived, None, None]:
    """Send a request: first yields a claim if other processes have or fetch blocks; then each block as it arrives.

    `turn` is waited for before a block is decompressed. Closing the iterator ends the request.
    """
    claim = _claim(file.cached, fetch, distrusted)
    try:
        if claim.ready or claim.foreign:
            yield claim
        origin = file.origin(fetch)
        for blocks in _ranges(claim.owned, fetch.blocks.step):
            with contextlib.closing(origin.read(file.index, blocks, fetch.timeout_s)) as answer:
                for block, received in answer:
                    with turn():
                        arrived = _keep(file, origin, block, received)
                    _release(file.cached, claim.held & {block})
                    claim.held.discard(block)
                    yield arrived
    finally:
        _release(file.cached, claim.held)


def _claim(cached: CachedFile, fetch: Fetch, distrusted: Container[int]) -> Claim:
    """Divide blocks by the process that fetches them. Hedges do not wait; `distrusted` blocks are always fetched."""
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
                (claim.owned if fetch.hedge else claim.foreign).append(block)
        except BootseerError as error:  # without claims a block may be fetched twice: better than not at all
            _LOG.debug("block %d cannot be claimed: %s", block, error)
            claim.owned.append(block)
    return claim


def _keep(file: File, origin: Origin, block: int, received: Buffer) -> Arrived:
    begin, index, place = time.perf_counter(), file.index, file.index.place(block)
    codec = place.codec if origin.form is Form.STORED else RAW
    not_kept: BootseerError | None = None
    data: bytes | CorruptError
    try:
        data = decode(codec, received, index.length(block), index.digest(block))
    except CorruptError as error:
        stripe = index.stripes[place.stripe].name
        data = CorruptError(f"{origin.uri}: {stripe}: block {block} of file {index.identity[:16]}: {error}")
    decode_s = time.perf_counter() - begin
    if not isinstance(data, CorruptError):
        try:
            file.cached.put(block, data)
        except BootseerError as error:
            not_kept = error
    return Arrived(block, len(received), data, not_kept, decode_s)


def _release(cached: CachedFile, blocks: Iterable[int]) -> None:
    """Leave these blocks to other processes."""
    for block in blocks:
        # The kernel releases what is left with the process.
        with contextlib.suppress(BootseerError):
            cached.release(block)


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


def _ranges(blocks: list[int], step: int = 1) -> Iterator[range]:
    """The same ascending numbers as ranges, each as long as possible."""
    start = 0
    for position in range(1, len(blocks) + 1):
        if position == len(blocks) or blocks[position] != blocks[position - 1] + step:
            yield range(blocks[start], blocks[position - 1] + step, step)
            start = position

"""Reading checkpoints: opens files of a place, striped or ordinary, for all readers.

One `Reading` per process or mount. Its files share memory, threads and the node's cache; handles of the same version of
a file share what was read ahead.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count

from bootseer.blocks.codec import digest_of
from bootseer.cache.cache import Cache
from bootseer.checkpoint.files import check_visible
from bootseer.checkpoint.head import PEEK_BYTES, Head, Segment, is_head_size, parse_head, peek
from bootseer.checkpoint.layout import CHUNK_BYTES, make_ready, row_of
from bootseer.checkpoint.reading.chunk_read import ChunkRead
from bootseer.checkpoint.reading.context import Engine, ReadContext, reworded
from bootseer.checkpoint.reading.file import CheckpointFile, SharedFile
from bootseer.checkpoint.reading.peer_chunks import Unit
from bootseer.checkpoint.reading.row import Row
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.checkpoint.reading.transfer import Job, RangeRequest, Source, failure
from bootseer.errors import BootseerError, PermanentError
from bootseer.io.fork import after_fork
from bootseer.io.pooled_reads import ReadOutcome
from bootseer.peers.job import JobPeers
from bootseer.peers.readers import UNIT_BLOCKS
from bootseer.places.place import OpenFile, Place, Ticket, read_blocking


class OrdinarySource:
    """A `Source` over one ordinary file, which it takes over."""

    whole_units = False
    num_lanes = 0

    def __init__(self, file: OpenFile, engine: Engine) -> None:
        self.size_bytes = file.size_bytes
        self.version = file.version
        self.unit_bytes = self.row_bytes = engine.settings.unit_bytes
        self.max_ahead_bytes = engine.settings.ahead_ordinary_bytes
        self._file = file
        self._engine = engine

    def is_local(self, start: int) -> bool:
        """See `Source.is_local`: without digests, nothing is cached."""
        return False

    def read_local(self, start: int, into: memoryview) -> bool:
        return False

    def jobs(self, requests: Sequence[RangeRequest]) -> list[Job]:
        return [_Piece(self._file, request, self._engine) for request in requests]

    def close(self) -> None:
        self._file.close()


_LANE_BYTES, _NUM_LANES = 4 << 20, 16


class _Piece:
    """A `Job`: one range of the file."""

    __slots__ = ("_cancelled", "_engine", "_file", "_request", "_ticket", "lane", "num_bytes")

    def __init__(self, file: OpenFile, request: RangeRequest, engine: Engine) -> None:
        # Where the nodes are unknown, as in buckets, more is in flight than of one lane, in the order of the file.
        self.lane: Hashable = frozenset(file.nodes(request.start)) or request.start // _LANE_BYTES % _NUM_LANES
        self.num_bytes = len(request.into)
        self._file = file
        self._request = request
        self._engine = engine
        self._cancelled = False
        self._ticket: Ticket | None = None

    def start(self, *, urgent: bool) -> None:
        request = self._request
        try:
            ticket = self._file.read_into(
                request.start,
                request.into,
                self._arrived,
                urgent=urgent,
                deadline_s=self._engine.settings.deadline_s,
                inline=request.inline,
            )
        except BaseException as error:
            request.done(failure(error, f"bytes {request.start} to {request.start + self.num_bytes}"))
            if not isinstance(error, Exception):
                raise
            return
        self._ticket = ticket
        if self._cancelled:
            ticket.cancel()

    def prioritize(self) -> None:
        if self._ticket is not None:
            self._ticket.prioritize()

    def cancel(self) -> None:
        self._cancelled = True
        if self._ticket is not None:
            self._ticket.cancel()

    def _arrived(self, outcome: ReadOutcome) -> None:
        if outcome.error is None:
            self._engine.facts.add("chunks")
            self._engine.facts.add("place_bytes", self.num_bytes)
        self._request.done(outcome.error)


class StripedSource(ReadContext):
    """A `Source` over the parts of one striped file."""

    whole_units = True
    unit_bytes = CHUNK_BYTES

    def __init__(self, path: str, head: Head, version: str, engine: Engine) -> None:
        super().__init__(path, head, engine)
        self.size_bytes = head.size_bytes
        self.version = version
        self.num_lanes = max(segment.stripes for segment in head.segments)
        self.row_bytes = self.num_lanes * CHUNK_BYTES
        self.max_ahead_bytes = self.settings.ahead.max_bytes

    def is_local(self, start: int) -> bool:
        if self.cache_writer is None:
            return False
        chunk = start // CHUNK_BYTES
        segment = self.acquire(chunk)
        try:
            return segment.is_cached(chunk)
        finally:
            self.release(segment)

    def read_local(self, start: int, into: memoryview) -> bool:
        chunk = start // CHUNK_BYTES
        inside = start - chunk * CHUNK_BYTES
        segment = self.acquire(chunk)
        try:
            is_here = segment.is_cached(chunk) and segment.read_cached(chunk, inside, into)
            if is_here:
                self.facts.add("cache_bytes", len(into))
            return is_here
        finally:
            self.release(segment)

    def jobs(self, requests: Sequence[RangeRequest]) -> list[Job]:
        """See `Source.jobs`. Chunks of a row with parity share a `Row`."""
        jobs: list[Job] = []
        segment: Segment | None = None
        row: Row | None = None
        chunks = range(0)
        unit: Unit | None = None
        for request in requests:
            chunk = request.start // CHUNK_BYTES
            if segment is None or not segment.start <= request.start < segment.start + segment.size_bytes:
                segment = self.head.segments[self.head.segment_at(request.start)]
                row, chunks, unit = None, range(0), None
            first = segment.start // CHUNK_BYTES
            if self.peers is not None:
                first_of_unit = (chunk - first) // UNIT_BLOCKS * UNIT_BLOCKS
                if unit is None or unit.first != first_of_unit:
                    unit = Unit(self.peers, segment.index, first_of_unit)
                unit.add(chunk - first)
            if segment.parity is not None and chunk not in chunks:
                of_segment = row_of(chunk - first, segment.index.num_blocks, segment.stripes)
                chunks = range(of_segment.start + first, of_segment.stop + first)
                make_ready()
                row = Row(self, chunks)
            stripe = (chunk - first) % segment.stripes
            job = ChunkRead(self, request, stripe) if row is None else row.read(request, stripe)
            job.unit = unit
            jobs.append(job)
        return jobs


_FIRST_BYTES = 1 << 20
"""Nearly all heads are smaller, and read by one request."""


class Reading:
    """Opens files. Safe to use from many threads, and in a child after `fork`, which starts with empty buffers."""

    def __init__(
        self,
        place: Place,
        *,
        cache: Cache | None = None,
        settings: ReadingSettings | None = None,
        job: JobPeers | None = None,
    ) -> None:
        """`cache`: the node's, for chunks of striped files. `job`: peers that read the same place and share chunks;
        needs the cache. The caller closes `place`."""
        self._place = place
        self._make_engine = partial(Engine, place, cache, settings or ReadingSettings(), job)
        self._numbers = count(1)
        self._files: dict[tuple[str, str], SharedFile] = {}
        self._closed = False
        self._begin()
        after_fork(self._renew)
        _readings.add(self)

    def open(self, path: str) -> CheckpointFile:
        """Open the current version of a visible file; to be closed. Raises `NotFoundError` and other errors."""
        check_visible(path)
        if self._closed:
            raise self._after_close(path)
        file = self._place.open(path)
        with ExitStack() as unused:
            unused.callback(file.close)
            head, version = _read_head(file, path, self._engine.settings.deadline_s)
            make: Callable[[Engine], Source] = partial(OrdinarySource, file)
            if head is not None:
                make = partial(StripedSource, path, head, version)
            key = (path, version)
            with self._lock:
                if self._closed:  # closed by another thread meanwhile
                    raise self._after_close(path)
                shared = self._files.get(key)
                if shared is None:
                    shared = self._files[key] = SharedFile(next(self._numbers), path, self._engine, make)
                    if head is None:
                        unused.pop_all()  # the source has taken the file over
                shared.users += 1
        return CheckpointFile(shared, partial(self._release, key))

    @property
    def position(self) -> float:
        """Where this node starts within long reads, as a fraction: see `PeerChunks.position`."""
        return 0.0 if self._engine.peers is None else self._engine.peers.position

    def facts(self) -> dict[str, object]:
        """Statistics of all reads: the counters `transfer.NAMES`, bytes in memory, the place's own under `place`."""
        peers = self._engine.peers
        return {
            **self._engine.facts.all(),
            "peers": {} if peers is None else peers.facts(),
            "memory_bytes": self._engine.buffer.used_bytes,
            "most_memory_bytes": self._engine.buffer.peak_bytes,
            "place": dict(self._place.facts()),
        }

    def close(self) -> None:
        """Close all files, and wait briefly for the cache writer. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            files = list(self._files.values())
            self._files.clear()
        for shared in files:
            shared.close()
        self._engine.close()

    def settle(self) -> None:
        """At exit without `close`: wait briefly for the cache writer."""
        settings, cache_writer = self._engine.settings, self._engine.cache_writer
        if not self._closed and cache_writer is not None:
            cache_writer.settle(settings.keep_s, settings.keep_still_s)

    def _renew(self) -> None:
        """In a forked child: no threads of the parent, locks that may be held for ever, buffers that are not ours."""
        self._begin()
        for shared in self._files.values():
            shared.renew(self._engine)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._engine = self._make_engine()

    def _release(self, key: tuple[str, str]) -> None:
        with self._lock:
            shared = self._files.get(key)
            if shared is None:
                return
            shared.users -= 1
            if shared.users:
                return
            del self._files[key]
        shared.close()

    def _after_close(self, path: str) -> PermanentError:
        return PermanentError(f"{path}: read after the reading of {self._place.uri} was closed")


def _read_head(file: OpenFile, path: str, deadline_s: float) -> tuple[Head | None, str]:
    """The head in this file, None if it is an ordinary file; and the version of the content.

    Of a striped file that is the head's digest: a file that is written on after an fsync keeps its id.
    """
    if not is_head_size(file.size_bytes):
        return None, file.version
    data = read_blocking(file, 0, min(file.size_bytes, _FIRST_BYTES), path, deadline_s)
    try:
        if peek(bytes(data[:PEEK_BYTES])) is None:
            return None, file.version
        if len(data) < file.size_bytes:
            data += read_blocking(file, len(data), file.size_bytes - len(data), path, deadline_s)
        return parse_head(bytes(data)), digest_of(data).hex()
    except BootseerError as error:
        raise reworded(error, f"{path}: {error}") from error


_readings: weakref.WeakSet[Reading] = weakref.WeakSet()


def _at_exit() -> None:
    for reading in list(_readings):
        reading.settle()


atexit.register(_at_exit)

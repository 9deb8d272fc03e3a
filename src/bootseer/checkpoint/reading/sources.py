"""The two sources of reads: ordinary files of the place, and striped files.

The blocks of an ordinary file lie one after the other, each on disks of its own; the place tells which. Reads of
different blocks are different lanes, so that a large read keeps all of their disks busy. Its bytes are checked by the
place's own checksums.

A chunk of a striped file is read from its part, or from this node's cache. It is compared with its digest before it
leaves here: by `chunk_read` when it came from the place, by the cache when it lies on this node's disk.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from bootseer.checkpoint.head import Head, Segment
from bootseer.checkpoint.layout import CHUNK_BYTES, make_ready, row_of
from bootseer.checkpoint.places.place import OpenFile, Ticket
from bootseer.checkpoint.reading.chunk_read import ChunkRead
from bootseer.checkpoint.reading.context import ReadContext
from bootseer.checkpoint.reading.node_cache import DedupSources
from bootseer.checkpoint.reading.row import Row
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.checkpoint.reading.source import Counters, Job, Want, failure
from bootseer.hdfs.requests import ReadOutcome


class OrdinarySource:
    """A `Source` over one open file. Takes it over."""

    whole_units = False
    num_lanes = 0

    def __init__(self, file: OpenFile, settings: ReadingSettings, facts: Counters) -> None:
        self.size_bytes = file.size_bytes
        self.version = file.version
        self.unit_bytes = self.row_bytes = settings.unit_bytes
        self.max_ahead_bytes = settings.ahead_ordinary_bytes
        self._file = file
        self._settings = settings
        self._facts = facts

    def prepare(self) -> None:
        """See `Source.prepare`."""

    def is_local(self, start: int) -> bool:
        """See `Source.is_local`: without digests, nothing can be kept safely."""
        return False

    def read_local(self, start: int, into: memoryview) -> bool:
        return False

    def jobs(self, wants: Sequence[Want]) -> list[Job]:
        return [_Piece(self._file, want, self._settings.deadline_s, self._facts) for want in wants]

    def close(self) -> None:
        self._file.close()


class _Piece:
    """A `Job`: one range of the file."""

    __slots__ = ("_cancelled", "_deadline_s", "_facts", "_file", "_ticket", "_want", "lane", "num_bytes")

    def __init__(self, file: OpenFile, want: Want, deadline_s: float, facts: Counters) -> None:
        self.lane: Hashable = frozenset(file.nodes(want.start))
        self.num_bytes = len(want.into)
        self._file = file
        self._want = want
        self._deadline_s = deadline_s
        self._facts = facts
        self._cancelled = False
        self._ticket: Ticket | None = None

    def start(self, *, urgent: bool) -> None:
        want = self._want
        try:
            ticket = self._file.read_into(
                want.start, want.into, self._arrived, urgent=urgent, deadline_s=self._deadline_s, here=want.here
            )
        except BaseException as error:
            want.done(failure(error, f"bytes {want.start} to {want.start + self.num_bytes}"))
            if not isinstance(error, Exception):
                raise
            return
        self._ticket = ticket
        if self._cancelled:
            ticket.cancel()

    def hurry(self) -> None:
        if self._ticket is not None:
            self._ticket.hurry()

    def cancel(self) -> None:
        self._cancelled = True
        if self._ticket is not None:
            self._ticket.cancel()

    def _arrived(self, outcome: ReadOutcome) -> None:
        if outcome.error is None:
            self._facts.add("chunks")
            self._facts.add("place_bytes", self.num_bytes)
        self._want.done(outcome.error)


class StripedSource:
    """A `Source` over the parts of one striped file."""

    whole_units = True
    unit_bytes = CHUNK_BYTES

    def __init__(self, head: Head, context: ReadContext, dedup_sources: DedupSources | None) -> None:
        self.size_bytes = head.size_bytes
        self.version = head.id
        self.num_lanes = max(segment.stripes for segment in head.segments)
        self.row_bytes = self.num_lanes * CHUNK_BYTES
        self.max_ahead_bytes = context.settings.ahead.max_bytes
        self._head = head
        self._context = context
        self._dedup_sources = dedup_sources

    def prepare(self) -> None:
        if any(segment.parity is not None for segment in self._head.segments):
            make_ready()
        if self._dedup_sources is not None:
            self._dedup_sources.search()

    def is_local(self, start: int) -> bool:
        if self._context.cache_writer is None:
            return False
        chunk = start // CHUNK_BYTES
        segment = self._context.segments.acquire(chunk)
        try:
            if self._context.is_cached(segment, chunk):
                return True
            return self._dedup_sources is not None and self._dedup_sources.has(
                segment.index.digest(chunk - segment.first_chunk)
            )
        finally:
            self._context.segments.release(segment)

    def read_local(self, start: int, into: memoryview) -> bool:
        """See `Source.read_local`. What another file gave is kept as this one's, for when that one is gone."""
        chunk = start // CHUNK_BYTES
        inside = start - chunk * CHUNK_BYTES
        context = self._context
        segment = context.segments.acquire(chunk)
        try:
            if context.is_cached(segment, chunk) and context.read_cached(segment, chunk, inside, into):
                return True
            block = chunk - segment.first_chunk
            if self._dedup_sources is None or not self._dedup_sources.read(segment.index.digest(block), inside, into):
                return False
            context.facts.add("donor_bytes", len(into))
            if len(into) == segment.index.length(block):
                context.keep(segment, chunk, into, None)
            return True
        finally:
            context.segments.release(segment)

    def jobs(self, wants: Sequence[Want]) -> list[Job]:
        """See `Source.jobs`. Chunks of a row with parity know each other."""
        jobs: list[Job] = []
        segment: Segment | None = None
        row: Row | None = None
        chunks = range(0)
        for want in wants:
            chunk = want.start // CHUNK_BYTES
            if segment is None or not segment.start <= want.start < segment.start + segment.size_bytes:
                segment = self._head.segments[self._head.segment_at(want.start)]
                row, chunks = None, range(0)
            first = segment.start // CHUNK_BYTES
            if segment.parity is not None and chunk not in chunks:
                of_segment = row_of(chunk - first, segment.index.num_blocks, segment.stripes)
                chunks = range(of_segment.start + first, of_segment.stop + first)
                row = Row(self._context, chunks)
            stripe = (chunk - first) % segment.stripes
            jobs.append(ChunkRead(self._context, want, stripe) if row is None else row.read(want, stripe))
        return jobs

    def close(self) -> None:
        self._context.segments.close()
        if self._dedup_sources is not None:
            self._dedup_sources.give_back()

"""Striped files: chunks from their parts, and what this node has of them already. Made by `reading`.

Whatever chunk leaves here was compared with its digest: by `chunk_read` when it came from the place, by the cache when
it lies on this node's disk.
"""

from __future__ import annotations

from collections.abc import Sequence

from bootseer.checkpoint.head import Head, Segment
from bootseer.checkpoint.layout import CHUNK_BYTES, row_of
from bootseer.checkpoint.parity import make_ready
from bootseer.checkpoint.reading.chunk_read import ChunkRead
from bootseer.checkpoint.reading.donors import Donors
from bootseer.checkpoint.reading.means import Means
from bootseer.checkpoint.reading.row import Row
from bootseer.checkpoint.reading.source import Job, Want


class Striped:
    """A `Source` over the parts of one striped file."""

    whole_units = True
    unit_bytes = CHUNK_BYTES

    def __init__(self, head: Head, means: Means, donors: Donors | None) -> None:
        self.size_bytes = head.size_bytes
        self.version = head.id
        self.num_lanes = max(segment.stripes for segment in head.segments)
        self.row_bytes = self.num_lanes * CHUNK_BYTES
        self.max_ahead_bytes = means.settings.ahead.max_bytes
        self._head = head
        self._means = means
        self._donors = donors

    def prepare(self) -> None:
        """See `Source.prepare`."""
        if any(segment.parity is not None for segment in self._head.segments):
            make_ready()
        if self._donors is not None:
            self._donors.search()

    def is_local(self, start: int) -> bool:
        """See `Source.is_local`."""
        if self._means.keeper is None:
            return False
        chunk = start // CHUNK_BYTES
        segment = self._means.segments.acquire(chunk)
        try:
            if self._means.is_cached(segment, chunk):
                return True
            return self._donors is not None and self._donors.has(segment.index.digest(chunk - segment.first_chunk))
        finally:
            self._means.segments.release(segment)

    def read_local(self, start: int, into: memoryview) -> bool:
        """See `Source.read_local`. What another file gave is kept as this one's, for when that one is gone."""
        chunk = start // CHUNK_BYTES
        inside = start - chunk * CHUNK_BYTES
        means = self._means
        segment = means.segments.acquire(chunk)
        try:
            if means.is_cached(segment, chunk) and means.read_cached(segment, chunk, inside, into):
                return True
            block = chunk - segment.first_chunk
            if self._donors is None or not self._donors.read(segment.index.digest(block), inside, into):
                return False
            means.facts.add("donor_bytes", len(into))
            if len(into) == segment.index.length(block):
                means.keep(segment, chunk, into, None)
            return True
        finally:
            means.segments.release(segment)

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
                row = Row(self._means, chunks)
            job = ChunkRead(self._means, want, (chunk - first) % segment.stripes, row=row)
            if row is not None:
                row.add(job)
            jobs.append(job)
        return jobs

    def close(self) -> None:
        """See `Source.close`."""
        self._means.segments.close()
        if self._donors is not None:
            self._donors.give_back()

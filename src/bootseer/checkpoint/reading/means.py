"""What the reads of one striped file have in common: where its chunks are, where they are kept, and who counts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from bootseer.checkpoint.reading.buffer import ChunkBuffer
from bootseer.checkpoint.reading.facts import Facts
from bootseer.checkpoint.reading.keeper import Keeper
from bootseer.checkpoint.reading.segments import OpenSegment, Segments
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.errors import BootseerError, CorruptError, PermanentError, TransientError
from bootseer.io.timer import Timer


@dataclass(frozen=True, slots=True, eq=False)
class Means:
    """Of one file. `keeper` is None when there is no cache."""

    path: str
    segments: Segments
    settings: ReadingSettings
    facts: Facts
    timer: Timer
    buffer: ChunkBuffer
    keeper: Keeper | None

    def claim(self, segment: OpenSegment, chunk: int) -> bool:
        """Whether no other process of this node fetches this chunk from now on. Without a cache, nobody knows."""
        if segment.cached is None:
            return False
        try:
            return segment.cached.claim(chunk - segment.first_chunk)
        except BootseerError:
            return False  # then a chunk may be read twice

    def release_claim(self, segment: OpenSegment, chunk: int) -> None:
        """Undo `claim`."""
        if segment.cached is not None:
            with contextlib.suppress(BootseerError):  # else the kernel does it, when this process ends
                segment.cached.release(chunk - segment.first_chunk)

    def is_cached(self, segment: OpenSegment, chunk: int) -> bool:
        """Whether the chunk is in this node's cache, as far as is known."""
        return segment.cached is not None and segment.cached.ready(chunk - segment.first_chunk)

    def read_cached(self, segment: OpenSegment, chunk: int, start: int, into: memoryview) -> bool:
        """Read from the cache, from byte `start` of the chunk on: whether it was there and right."""
        if segment.cached is None:
            return False
        offset = (chunk - segment.first_chunk) * segment.index.block_size + start
        try:
            segment.cached.readinto(offset, into)
        except BootseerError:
            return False
        self.facts.add("cache_bytes", len(into))
        return True

    def keep(
        self, segment: OpenSegment, chunk: int, data: memoryview, hold: Callable[[], Callable[[], None]] | None
    ) -> None:
        """Put a verified chunk into the cache behind the caller's back, and give up the claim on it.

        `hold` keeps `data` as it is until what it returns is called; without it, a copy is kept.
        """
        keeper = self.keeper
        if keeper is None or segment.cached is None:
            return
        if not keeper.has_room(len(data)) or (hold is None and not self.buffer.take(len(data), demand=False)):
            self.facts.add("not_kept_chunks")
            self.release_claim(segment, chunk)
            return
        if hold is None:
            let_go: Callable[[], None] = lambda: self.buffer.give(len(data))  # noqa: E731
            kept = memoryview(bytes(data))
        else:
            let_go, kept = hold(), data
        self.segments.hold(segment)

        def done() -> None:
            let_go()
            self.segments.release(segment)

        keeper.put(segment.cached, chunk - segment.first_chunk, kept, done)


def alike(error: BootseerError, message: str) -> BootseerError:
    """An error that means the same, with more words."""
    if isinstance(error, CorruptError):
        return CorruptError(message)
    return PermanentError(message) if isinstance(error, PermanentError) else TransientError(message)

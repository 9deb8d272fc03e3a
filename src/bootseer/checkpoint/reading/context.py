"""What reads share: the `Engine` of all files (memory, threads, counters), and the `ReadContext` of one striped
file."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from bootseer.cache.cache import Cache
from bootseer.checkpoint.places.place import Place
from bootseer.checkpoint.reading.buffer import ChunkBuffer
from bootseer.checkpoint.reading.node_cache import CacheWriter, DedupSources
from bootseer.checkpoint.reading.segments import OpenSegment, Segments
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.checkpoint.reading.source import Counters
from bootseer.errors import BootseerError, CorruptError, PermanentError, TransientError
from bootseer.io.executor import Executor
from bootseer.io.timer import Timer

_OPENING = 8
_CLOSE_S = 10.0
_RECOUNT_S = 0.25


class Engine:
    """Of one process: a forked child makes its own. Threads are started when they are needed."""

    def __init__(self, place: Place, cache: Cache | None, settings: ReadingSettings, facts: Counters) -> None:
        self.place = place
        self.cache = cache
        self.settings = settings
        self.facts = facts
        self.timer = Timer()
        self.workers = Executor("bootseer-open", _OPENING)
        self.buffer = ChunkBuffer(settings.memory_bytes, settings.idle_s, self.timer, facts)
        self.cache_writer = CacheWriter(facts) if cache is not None else None
        self.dedup_sources = (
            DedupSources(cache, settings.max_dedup_segments, settings.dedup_search_s) if cache is not None else None
        )
        self._lock = threading.Lock()
        self._streams: dict[int, tuple[float, int]] = {}
        self._counted_s = 0.0

    def share_bytes(self, file: int, num_streams: int) -> int:
        """What may be read ahead for one stream, when this file has so many: half of the memory, for all in use."""
        now = time.monotonic()
        with self._lock:
            self._streams[file] = (now, num_streams)
            if now - self._counted_s >= _RECOUNT_S:
                self._counted_s = now
                before = now - self.settings.idle_s
                self._streams = {one: seen for one, seen in self._streams.items() if seen[0] >= before}
            total = sum(count for _, count in self._streams.values())
            return self.settings.memory_bytes // 2 // max(total, 1)

    def close(self) -> None:
        """All files were closed: end what is on its way, wait a little for what is to be kept, and end the threads."""
        self.buffer.cancel(TransientError(f"{self.place.uri}: the reading was closed"))
        if self.cache_writer is not None:
            self.cache_writer.close(self.settings.keep_s, self.settings.keep_still_s)
        self.buffer.wait_empty(_CLOSE_S)
        self.timer.close()

    def settle(self) -> None:
        """The process ends: wait a little for what is to be kept."""
        if self.cache_writer is not None:
            self.cache_writer.settle(self.settings.keep_s, self.settings.keep_still_s)


@dataclass(frozen=True, slots=True, eq=False)
class ReadContext:
    """Of one file. `cache_writer` is None when there is no cache."""

    path: str
    segments: Segments
    settings: ReadingSettings
    facts: Counters
    timer: Timer
    buffer: ChunkBuffer
    cache_writer: CacheWriter | None

    def claim(self, segment: OpenSegment, chunk: int) -> bool:
        """Whether no other process of this node fetches this chunk from now on. Without a cache, that is not known."""
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
        cache_writer = self.cache_writer
        if cache_writer is None or segment.cached is None:
            return
        if not cache_writer.has_room(len(data)) or (hold is None and not self.buffer.take(len(data), demand=False)):
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

        cache_writer.put(segment.cached, chunk - segment.first_chunk, kept, done)


def alike(error: BootseerError, message: str) -> BootseerError:
    """An error that means the same, with more words."""
    if isinstance(error, CorruptError):
        return CorruptError(message)
    return PermanentError(message) if isinstance(error, PermanentError) else TransientError(message)

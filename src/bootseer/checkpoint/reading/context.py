"""State shared by reads: the `Engine` of all files (memory, threads, counters), and the `ReadContext` of one striped
file with its open segments (`OpenSegment`): their parts, and their block files in the node's cache.

Few segments of all files together are open at a time: those in use, and the most recently used. Parts are opened on
first use: a file of a terabyte has tens of thousands. Opening is an RPC, so a few threads do it, and reads wait for it
without holding a thread.
"""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from bootseer.cache.cache import Cache
from bootseer.cache.cached_file import CachedFile
from bootseer.checkpoint.head import Head, Part, Segment, part_path
from bootseer.checkpoint.layout import CHUNK_BYTES, chunk_place
from bootseer.checkpoint.reading.buffer import ChunkBuffer
from bootseer.checkpoint.reading.node_cache import CacheWriter
from bootseer.checkpoint.reading.peer_chunks import PeerChunks
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.checkpoint.reading.transfer import Counters, failure
from bootseer.errors import BootseerError, CorruptError, NotFoundError, PermanentError, TransientError
from bootseer.io.executor import Executor, run_reported
from bootseer.io.timer import Timer
from bootseer.peers.job import JobPeers
from bootseer.places.place import OpenFile, Place

Opened = Callable[["OpenFile | None", "BootseerError | None"], None]
"""Called with the open file, or with the error."""


class LazyPart:
    """A part that is opened on first use."""

    def __init__(self, place: Place, path: str, part: Part, workers: Executor) -> None:
        self.path = path
        self._place = place
        self._part = part
        self._workers = workers
        self._lock = threading.Lock()
        self._file: OpenFile | None = None
        self._waiting: list[Opened] = []

    def when_open(self, call: Opened) -> None:
        """Call `call` with the open file: at once if it is open, else from another thread."""
        with self._lock:
            file = self._file
            if file is None:
                self._waiting.append(call)
                if len(self._waiting) > 1:
                    return
        if file is not None:
            call(file, None)
        else:
            try:
                self._workers.submit(self._open)
            except TransientError as error:
                self._opened(None, error)

    def delay_s(self, offset: int, length: int) -> float:
        file = self._file
        return self._place.delay_s(self._part.nodes, length) if file is None else file.delay_s(offset, length)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        file: OpenFile | None = None
        problem: BootseerError | None = None
        try:
            file = self._place.open(self.path)
            if file.size_bytes != self._part.size_bytes:
                problem = CorruptError(
                    f"{self.path}, a part of a striped file, has {file.size_bytes} bytes instead of "
                    f"{self._part.size_bytes}"
                )
        except NotFoundError:
            problem = TransientError(
                f"{self.path}: this part is gone: the file was replaced or removed (open it again), or it came from "
                "another folder without its parts, as by `hdfs dfs -mv`"
            )
        except BaseException as error:  # readers wait for this part; panics of Rust code are not Exceptions
            problem = failure(error, self.path)
        if file is not None and problem is not None:
            with contextlib.suppress(BootseerError):
                file.close()
            file = None
        self._opened(file, problem)

    def _opened(self, file: OpenFile | None, problem: BootseerError | None) -> None:
        with self._lock:
            self._file = file
            waiting, self._waiting = self._waiting, []
        for call in waiting:
            run_reported(partial(call, file, problem))


_CACHE_DESCRIPTORS = 3
"""Of a file in the node's cache: its lease, its data and its live map."""


class OpenSegment:
    """One open segment. `cached` is None without a usable cache. Chunks are counted from the beginning of the file."""

    def __init__(self, segment: Segment, parts: list[LazyPart], cached: CachedFile | None) -> None:
        self.index = segment.index
        self.parts = parts
        """In the order of the stripes, the parity part last."""
        self.cached = cached
        self.users = 0
        self.num_descriptors = (_CACHE_DESCRIPTORS if cached is not None else 0) + len(parts)
        """At most: places other than folders need none for their parts."""
        self._first_chunk = segment.start // CHUNK_BYTES
        self._stripes = segment.stripes

    def block(self, chunk: int) -> int:
        """The number of a chunk in the segment's index."""
        return chunk - self._first_chunk

    def length(self, chunk: int) -> int:
        return self.index.length(self.block(chunk))

    def digest(self, chunk: int) -> bytes:
        return self.index.digest(self.block(chunk))

    def place_of(self, chunk: int) -> tuple[LazyPart, int]:
        """The part that holds a chunk, and the offset in it."""
        stripe, offset = chunk_place(self.block(chunk), self._stripes)
        return self.parts[stripe], offset

    def parity_of(self, chunk: int) -> tuple[LazyPart, int]:
        """The parity part, and the offset of this chunk's row in it. Only for segments with parity."""
        return self.parts[-1], chunk_place(self.block(chunk), self._stripes)[1]

    def claim(self, chunk: int) -> bool:
        """Claim a chunk: no other process of this node fetches it then. False if it is claimed, or without a cache."""
        if self.cached is None:
            return False
        try:
            return self.cached.claim(self.block(chunk))
        except BootseerError:
            return False  # then a chunk may be read twice

    def release_claim(self, chunk: int) -> None:
        if self.cached is not None:
            with contextlib.suppress(BootseerError):  # otherwise the kernel releases it at the end of the process
                self.cached.release(self.block(chunk))

    def is_cached(self, chunk: int) -> bool:
        """Whether the chunk is in this node's cache, as far as known."""
        return self.cached is not None and self.cached.ready(self.block(chunk))

    def read_cached(self, chunk: int, start: int, into: memoryview) -> bool:
        """Read from the cache, from byte `start` of the chunk on. Returns whether the chunk was there and right."""
        if self.cached is None:
            return False
        try:
            self.cached.readinto(self.block(chunk) * CHUNK_BYTES + start, into)
        except BootseerError:
            return False
        return True


class SegmentPool:
    """The open segments of all files. Beyond a number of descriptors unused ones are closed, the least recently used
    first. All but `lock` is used under it."""

    def __init__(self, max_descriptors: int) -> None:
        self.lock = threading.Lock()
        self._max_descriptors = max_descriptors
        self._num_descriptors = 0
        self._open: OrderedDict[tuple[ReadContext, int], OpenSegment] = OrderedDict()

    def use(self, file: ReadContext, number: int, made: OpenSegment | None) -> OpenSegment | None:
        """Add a user to a file's segment, which is `made` if it is not open yet; None without either."""
        opened = self._open.get((file, number))
        if opened is None and made is not None:
            opened = self._open[file, number] = made
            self._num_descriptors += made.num_descriptors
        if opened is not None:
            self._open.move_to_end((file, number))
            opened.users += 1
        return opened

    def surplus(self, closed: ReadContext | None) -> list[OpenSegment]:
        """Remove the segments to be closed, with all unused ones of the file `closed`."""
        found = []
        if closed is not None or self._num_descriptors > self._max_descriptors:
            for key, opened in list(self._open.items()):
                if not opened.users and (key[0] is closed or self._num_descriptors > self._max_descriptors):
                    found.append(self._open.pop(key))
                    self._num_descriptors -= opened.num_descriptors
        return found


_OPENING = 8
_SHARE_OF_DESCRIPTORS = 4
"""Unused segments take at most this part (a quarter) of the process's descriptors: it has files of its own."""
_CLOSE_S = 10.0
_RECOUNT_S = 0.25


class Engine:
    """The shared resources of one process: a forked child makes its own. Threads are started on demand."""

    def __init__(self, place: Place, cache: Cache | None, settings: ReadingSettings, job: JobPeers | None) -> None:
        self.place = place
        facts = self.facts = Counters()
        # A node can serve its peers only what it keeps in its cache.
        self.peers = PeerChunks(job, cache.root, facts) if job is not None and cache is not None else None
        self.cache = cache
        self.settings = settings
        self.timer = Timer()
        self.workers = Executor("bootseer-open", _OPENING)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE_OF_DESCRIPTORS
        self.segments = SegmentPool(min(settings.max_descriptors, most))
        self.buffer = ChunkBuffer(settings.memory_bytes, settings.idle_s, self.timer, facts)
        self.cache_writer = CacheWriter(facts) if cache is not None else None
        self._lock = threading.Lock()
        self._streams: dict[int, tuple[float, int]] = {}
        self._counted_s = 0.0

    def share_bytes(self, file: int, num_streams: int) -> int:
        """Read-ahead limit of each of this file's streams: half of the memory, divided among all active streams."""
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
        """After all files were closed: end reads in flight, wait briefly for the cache writer, and end the threads."""
        self.buffer.cancel(TransientError(f"{self.place.uri}: the reading was closed"))
        if self.cache_writer is not None:
            self.cache_writer.close(self.settings.keep_s, self.settings.keep_still_s)
        self.buffer.wait_empty(_CLOSE_S)
        self.timer.close()
        if self.peers is not None:
            self.peers.close()


class ReadContext:
    """One striped file that is being read, with its open segments."""

    def __init__(self, path: str, head: Head, engine: Engine) -> None:
        self.path = path
        self.head = head
        self.settings = engine.settings
        self.facts = engine.facts
        self.timer = engine.timer
        self.buffer = engine.buffer
        self.cache_writer = engine.cache_writer
        self.peers = engine.peers
        self._engine = engine
        self._pool = engine.segments
        self._closed = False

    def acquire(self, chunk: int) -> OpenSegment:
        """The segment of a chunk of the file; to be released by `release`."""
        number = self.head.segment_at(chunk * CHUNK_BYTES)
        made: OpenSegment | None = None
        while True:
            with self._pool.lock:
                opened = self._pool.use(self, number, made)
                if opened is not None:
                    closing = self._surplus()
                    break
            # Not under the lock, because the cache may be slow. So two threads may make the same segment: the second
            # one finds the other's in the pool, uses that, and closes its own.
            made = self._opened(self.head.segments[number])
        self._close(closing if made in (None, opened) else [*closing, made])
        return opened

    def release(self, opened: OpenSegment) -> None:
        """A user does not need the segment any more."""
        with self._pool.lock:
            opened.users -= 1
            closing = self._surplus()
        self._close(closing)

    def retain(self, opened: OpenSegment) -> None:
        """Add a user to an acquired segment."""
        with self._pool.lock:
            opened.users += 1

    def close(self) -> None:
        """Close all segments; those in use when they are released."""
        with self._pool.lock:
            self._closed = True
            closing = self._surplus()
        self._close(closing)

    def _surplus(self) -> list[OpenSegment]:
        return self._pool.surplus(self if self._closed else None)

    def _opened(self, segment: Segment) -> OpenSegment:
        engine = self._engine
        parts = [
            LazyPart(engine.place, part_path(self.path, self.head.id, part.name), part, engine.workers)
            for part in segment.all_parts
        ]
        cached: CachedFile | None = None
        if engine.cache is not None:
            try:
                cached = engine.cache.open(segment.index)
            except BootseerError:
                cached = None  # the cache is an optimisation: reads do not fail with it
        return OpenSegment(segment, parts, cached)

    def _close(self, closing: list[OpenSegment]) -> None:
        for opened in closing:
            for part in opened.parts:
                part.close()
            if opened.cached is not None and self.cache_writer is not None:
                self.cache_writer.close_file(opened.cached)

    def will_keep(self, num_bytes: int) -> bool:
        """Whether `num_bytes` that are read now will probably be kept in the cache."""
        return self.cache_writer is not None and self.cache_writer.has_room(num_bytes)

    def keep(
        self, segment: OpenSegment, chunk: int, data: memoryview, hold: Callable[[], Callable[[], None]] | None
    ) -> None:
        """Put a verified chunk into the cache in the background, and release the claim on it.

        `hold` pins `data` until the function that it returns is called; without it, a copy is kept.
        """
        cache_writer = self.cache_writer
        if cache_writer is None or segment.cached is None:
            return
        if not cache_writer.has_room(len(data)) or (hold is None and not self.buffer.reserve(len(data), demand=False)):
            self.facts.add("not_kept_chunks")
            segment.release_claim(chunk)
            if self.peers is not None:
                self.peers.not_kept(segment.index, segment.block(chunk))
            return
        if hold is None:
            release: Callable[[], None] = lambda: self.buffer.free(len(data))  # noqa: E731
            kept = memoryview(bytes(data))
        else:
            release, kept = hold(), data
        self.retain(segment)

        def done() -> None:
            release()
            self.release(segment)

        cache_writer.put(segment.cached, segment.block(chunk), kept, done)


def reworded(error: BootseerError, message: str) -> BootseerError:
    """An error of the same kind with another message."""
    if isinstance(error, CorruptError):
        return CorruptError(message)
    return PermanentError(message) if isinstance(error, PermanentError) else TransientError(message)

"""The segments of one striped file that are open: their parts, and where they are kept in the node's cache.

Few segments are open at once, however many there are: those that were used last, and those that are in use. Parts are
opened when they are first read: a file of a terabyte has tens of thousands of them. Opening is a question to a server,
so it is done by a few threads of its own, and a read waits for it without holding one.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from bootseer.cache.cache import Cache
from bootseer.cache.file import CachedFile
from bootseer.checkpoint.head import Head, Part, Segment, part_path
from bootseer.checkpoint.layout import CHUNK_BYTES, chunk_place
from bootseer.checkpoint.places.place import OpenFile, Place
from bootseer.checkpoint.reading.node_cache import CacheWriter
from bootseer.errors import BootseerError, CorruptError, NotFoundError, TransientError
from bootseer.io.executor import Executor, report_exception, run_reported

Opened = Callable[["OpenFile | None", "BootseerError | None"], None]
"""Called with the open file, or with the reason why there is none."""


class LazyPart:
    """A part that is open, or will be when it is read."""

    def __init__(self, place: Place, path: str, part: Part, workers: Executor) -> None:
        self.path = path
        self._place = place
        self._part = part
        self._workers = workers
        self._lock = threading.Lock()
        self._file: OpenFile | None = None
        self._waiting: list[Opened] = []

    def then(self, call: Opened) -> None:
        """Call it with the open file: at once when it is open, else from another thread."""
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

    def nodes(self, offset: int) -> tuple[str, ...]:
        """The nodes that have the byte at `offset`, as far as is known."""
        file = self._file
        return self._part.nodes if file is None else file.nodes(offset)

    def delay_s(self, offset: int, length: int) -> float:
        file = self._file
        return self._place.delay_s(self._part.nodes, length) if file is None else file.delay_s(offset, length)

    def close(self) -> None:
        """Not read any more."""
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
            problem = TransientError(f"{self.path}: this part is gone; the file was replaced or removed: open it again")
        except BootseerError as error:
            problem = error
        except Exception as error:  # readers wait for this part: they must hear of what was not foreseen, too
            problem = TransientError(f"{self.path}: {type(error).__name__}: {error}")
            report_exception()
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


class OpenSegment:
    """One segment. `cached` is None when there is no cache, or none that can be used."""

    def __init__(self, segment: Segment, parts: list[LazyPart], cached: CachedFile | None) -> None:
        self.segment = segment
        self.index = segment.index
        self.first_chunk = segment.start // CHUNK_BYTES
        self.parts = parts
        """In the order of the stripes, and behind them the parity if there is one."""
        self.cached = cached
        self.users = 0

    def place_of(self, chunk: int) -> tuple[LazyPart, int]:
        """Part of a chunk of the file, and its offset there."""
        stripe, offset = chunk_place(chunk - self.first_chunk, self.segment.stripes)
        return self.parts[stripe], offset

    def parity_of(self, chunk: int) -> tuple[LazyPart, int]:
        """The parity part, and the offset of this chunk's row there. Only where there is parity."""
        return self.parts[-1], chunk_place(chunk - self.first_chunk, self.segment.stripes)[1]


class Segments:
    """The open segments of one file."""

    def __init__(
        self,
        place: Place,
        path: str,
        head: Head,
        *,
        workers: Executor,
        cache: Cache | None,
        cache_writer: CacheWriter | None,
        max_open: int,
    ) -> None:
        self._place = place
        self._path = path
        self._head = head
        self._workers = workers
        self._cache = cache
        self._cache_writer = cache_writer
        self._max_open = max_open
        self._lock = threading.Lock()
        self._open: OrderedDict[int, OpenSegment] = OrderedDict()
        self._closed = False

    def acquire(self, chunk: int) -> OpenSegment:
        """The segment of a chunk of the file; `release` it afterwards."""
        number = self._head.segment_at(chunk * CHUNK_BYTES)
        made: OpenSegment | None = None
        while True:
            with self._lock:
                opened = self._open.get(number, made)
                if opened is not None:
                    self._open[number] = opened
                    self._open.move_to_end(number)
                    opened.users += 1
                    closing = self._surplus()
                    break
            made = self._opened(self._head.segments[number])  # not under the lock: the cache may be slow
        self._close(closing if made in (None, opened) else [*closing, made])
        return opened

    def release(self, opened: OpenSegment) -> None:
        """A segment is not used any more by one of its users."""
        with self._lock:
            opened.users -= 1
            closing = self._surplus()
        self._close(closing)

    def hold(self, opened: OpenSegment) -> None:
        """Use an acquired segment once more."""
        with self._lock:
            opened.users += 1

    def close(self) -> None:
        """Close all segments, those in use when they are released."""
        with self._lock:
            self._closed = True
            closing = self._surplus()
        self._close(closing)

    def _surplus(self) -> list[OpenSegment]:
        """Take out what is to be closed. Called with the lock."""
        surplus = len(self._open) if self._closed else len(self._open) - self._max_open
        if surplus <= 0:
            return []
        unused = [number for number, opened in self._open.items() if not opened.users]
        return [self._open.pop(number) for number in unused[:surplus]]

    def _opened(self, segment: Segment) -> OpenSegment:
        parts = [
            LazyPart(self._place, part_path(self._path, self._head.id, part.name), part, self._workers)
            for part in segment.all_parts
        ]
        cached: CachedFile | None = None
        if self._cache is not None:
            try:
                cached = self._cache.open(segment.index)
            except BootseerError:
                cached = None  # the cache saves time, and nothing depends on it
        return OpenSegment(segment, parts, cached)

    def _close(self, closing: list[OpenSegment]) -> None:
        for opened in closing:
            for part in opened.parts:
                part.close()
            if opened.cached is not None and self._cache_writer is not None:
                self._cache_writer.close_file(opened.cached)

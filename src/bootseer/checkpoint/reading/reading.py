"""Reading checkpoints: opens files of a place, striped or ordinary, for everything that reads them.

One for each process or mount. All its files share memory, threads and what is known of the node's cache; handles of the
same version of a file share what was read ahead.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from functools import partial
from itertools import count

from bootseer.cache.cache import Cache
from bootseer.checkpoint.head import PEEK_BYTES, Head, is_head_size, parse_head, peek
from bootseer.checkpoint.places.place import OpenFile, Place
from bootseer.checkpoint.reading.context import Engine, ReadContext, alike
from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.checkpoint.reading.segments import Segments
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.checkpoint.reading.shared_file import SharedFile
from bootseer.checkpoint.reading.source import Counters, Source
from bootseer.checkpoint.reading.sources import OrdinarySource, StripedSource
from bootseer.checkpoint.reading.transfer import Waiting
from bootseer.errors import BootseerError, PermanentError
from bootseer.hdfs.requests import ReadOutcome
from bootseer.io.fork import after_fork

_FIRST_BYTES = 1 << 20
"""Most heads are smaller, and one request brings them."""


class Reading:
    """Safe to use from many threads, and in a child after `fork`, which begins with empty memory."""

    def __init__(self, place: Place, *, cache: Cache | None = None, settings: ReadingSettings | None = None) -> None:
        """`cache`: this node's, where chunks of striped files are kept; the caller closes `place`."""
        self._place = place
        self._cache = cache
        self._settings = settings or ReadingSettings()
        self._facts = Counters()
        self._numbers = count(1)
        self._files: dict[tuple[str, str], tuple[SharedFile, int]] = {}
        self._closed = False
        self._begin()
        after_fork(self._renew)
        _readings.add(self)

    def open(self, path: str) -> CheckpointFile:
        """Begin to read a file as it is now; `close` it. Raises `NotFoundError` and other `BootseerError`s."""
        if self._closed:
            raise self._after_close(path)
        file = self._place.open(path)
        try:
            head = _read_head(file, path, self._settings)
        except BaseException:
            file.close()
            raise
        if head is None:
            make: Callable[[Engine], Source] = partial(self._ordinary, file)
            key = (path, file.version)
        else:
            file.close()
            make = partial(self._striped, path, head)
            key = (path, head.id)
        with self._lock:
            if self._closed:  # since it was looked at, and with it all files
                if head is None:
                    file.close()
                raise self._after_close(path)
            shared, users = self._files.get(key, (None, 0))
            if shared is None:
                shared = SharedFile(next(self._numbers), path, self._engine, make)
            elif head is None:
                file.close()
            self._files[key] = (shared, users + 1)
        if not users:
            shared.prepare()
        return CheckpointFile(shared, is_striped=head is not None, release=partial(self._release, key))

    def facts(self) -> dict[str, object]:
        """Figures of all reads so far: counts of `facts.NAMES`, bytes in memory, and the place's own under `place`."""
        return {
            **self._facts.all(),
            "memory_bytes": self._engine.buffer.taken_bytes,
            "most_memory_bytes": self._engine.buffer.most_bytes,
            "place": dict(self._place.facts()),
        }

    def close(self) -> None:
        """Close all files and wait a little for what is to be kept. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            files = [shared for shared, _ in self._files.values()]
            self._files.clear()
        for shared in files:
            shared.close()
        self._engine.close()

    def settle(self) -> None:
        """The process ends without `close`: wait a little for what is to be kept, a moment where nothing is."""
        if not self._closed:
            self._engine.settle()

    def _renew(self) -> None:
        """In a child: the parent's threads are not here, its locks may be held for ever, its memory is not ours."""
        self._facts = Counters()
        self._begin()
        for shared, _ in self._files.values():
            shared.renew(self._engine)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._engine = Engine(self._place, self._cache, self._settings, self._facts)

    def _release(self, key: tuple[str, str]) -> None:
        with self._lock:
            shared, users = self._files.get(key, (None, 0))
            if shared is None:
                return
            if users > 1:
                self._files[key] = (shared, users - 1)
                return
            del self._files[key]
        shared.close()

    def _after_close(self, path: str) -> PermanentError:
        return PermanentError(f"{path}: read after the reading of {self._place.uri} was closed")

    def _ordinary(self, file: OpenFile, engine: Engine) -> Source:
        return OrdinarySource(file, self._settings, engine.facts)

    def _striped(self, path: str, head: Head, engine: Engine) -> Source:
        segments = Segments(
            self._place, path, head,
            workers=engine.workers, cache=engine.cache, cache_writer=engine.cache_writer,
            max_open=self._settings.max_segments,
        )  # fmt: skip
        context = ReadContext(
            path, segments, self._settings, engine.facts, engine.timer, engine.buffer, engine.cache_writer
        )
        return StripedSource(head, context, engine.dedup_sources)


def _read_head(file: OpenFile, path: str, settings: ReadingSettings) -> Head | None:
    """The head that this file is; None when it is an ordinary file."""
    if not is_head_size(file.size_bytes):
        return None
    data = _read(file, path, 0, min(file.size_bytes, _FIRST_BYTES), settings)
    if peek(bytes(data[:PEEK_BYTES])) is None:
        return None
    if len(data) < file.size_bytes:
        data += _read(file, path, len(data), file.size_bytes - len(data), settings)
    try:
        return parse_head(bytes(data))
    except BootseerError as error:
        raise alike(error, f"{path}: {error}") from error


def _read(file: OpenFile, path: str, offset: int, length: int, settings: ReadingSettings) -> bytearray:
    data = bytearray(length)
    waiting = Waiting()

    def done(outcome: ReadOutcome) -> None:
        waiting.ended(outcome.error)

    file.read_into(offset, memoryview(data), done, deadline_s=settings.deadline_s)
    waiting.wait(path, settings.deadline_s + settings.lost_s)
    return data


_readings: weakref.WeakSet[Reading] = weakref.WeakSet()


def _at_exit() -> None:
    for reading in list(_readings):
        reading.settle()


atexit.register(_at_exit)

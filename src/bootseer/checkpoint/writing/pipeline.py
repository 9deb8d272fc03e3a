"""The segments of one file in flight: a few at a time, started in the order in which they were added.

A segment is started when the placement of the one before is known, so that it can go to other nodes where there are
any.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

from msgspec.structs import replace

from bootseer.checkpoint.head import check_size
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.writing.lane import Lane, WritingSettings
from bootseer.checkpoint.writing.publication import Progress, Publication, Written
from bootseer.checkpoint.writing.segment import SegmentWriter, Target
from bootseer.errors import NotFoundError, PermanentError
from bootseer.io.executor import Executor
from bootseer.io.retry import ExcludedNodes

Read = Callable[[int, int], bytes]
"""Returns bytes of a file by offset and length; called repeatedly, and by many threads."""


class Pipeline:
    """`read` returns bytes of the file up to which a segment was grown. `on_end` and `on_sent` are called by worker
    threads."""

    def __init__(
        self,
        target: Target,
        workers: Executor,
        read: Read,
        on_end: Callable[[SegmentWriter], None],
        on_sent: Callable[[int], None] = lambda length: None,
    ) -> None:
        self._target = target
        self._lane = Lane(workers, target.stripes + target.parity)
        self._read = read
        self._on_end = on_end
        self._on_sent = on_sent
        self._lock = threading.Lock()
        self._open: list[SegmentWriter] = []
        self._waiting: deque[SegmentWriter] = deque()

    def add(self, start: int, *, stripes: int) -> SegmentWriter:
        """Add a segment, which is started as soon as there is room for it."""
        self._target.before_write()
        segment = SegmentWriter(
            self._target, self._lane, start, self._read,
            self._ended, self._begin_next, self._on_sent, stripes=stripes,
        )  # fmt: skip
        with self._lock:
            self._waiting.append(segment)
        self._begin_next()
        return segment

    def cancel(self, segment: SegmentWriter) -> None:
        """Cancel a segment. `read` may still be called until `wait_idle` returns."""
        segment.cancel()
        self._remove(segment)

    def wait_idle(self, timeout_s: float) -> bool:
        return self._lane.wait_idle(timeout_s)

    def check_progress(self) -> None:
        """Raise `TransientError` when nothing has moved for minutes."""
        self._lane.check_progress(f"{self._target.place.uri}/{self._target.folder}")

    def _ended(self, segment: SegmentWriter) -> None:
        if segment.error is None:  # otherwise the file has failed, and no further segment is started
            self._remove(segment)
        self._on_end(segment)

    def _remove(self, segment: SegmentWriter) -> None:
        with self._lock:
            if segment in self._open:
                self._open.remove(segment)
            elif segment in self._waiting:
                self._waiting.remove(segment)
        self._begin_next()

    def _begin_next(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or len(self._open) >= self._target.settings.segments_ahead:
                    return
                if self._open and not self._open[-1].is_placed:
                    return
                segment = self._waiting.popleft()
                self._open.append(segment)
            segment.begin()


class FileSource:
    """A local file, of the length that it has now. Use it as a context manager."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFoundError(f"there is no file {path}") from error
        except OSError as error:
            raise PermanentError(f"{path} cannot be read: {error.strerror}") from error
        self._path = path
        self.size_bytes = os.fstat(self._descriptor).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes. Raises `PermanentError` when the file has become shorter."""
        try:
            data = os.pread(self._descriptor, length, offset)
            while len(data) < length:
                more = os.pread(self._descriptor, length - len(data), offset + len(data))
                if not more:
                    raise PermanentError(f"{self._path} became shorter while it was read")
                data += more
        except OSError as error:
            raise PermanentError(f"{self._path} cannot be read: {error.strerror}") from error
        return data


_LOOK_S = 0.5


class _Count:
    """Progress of the worker threads. Safe to use from many threads."""

    def __init__(self) -> None:
        self.change = threading.Condition()
        self.sent = 0
        self.num_ended = 0
        self.failed: SegmentWriter | None = None

    def on_sent(self, length: int) -> None:
        with self.change:
            self.sent += length
            self.change.notify()

    def on_end(self, segment: SegmentWriter) -> None:
        with self.change:
            self.num_ended += 1
            if segment.error is not None:
                self.failed = self.failed or segment
            self.change.notify()


def write_from_source(
    publication: Publication,
    size_bytes: int,
    read: Read,
    policy: Policy,
    *,
    workers: Executor,
    excluded: ExcludedNodes,
    settings: WritingSettings,
    verify: str,
    progress: Progress | None,
) -> Written:
    """Write a file and publish it. A failure leaves nothing behind. `progress` is called in the calling thread."""
    check_size(size_bytes)
    count = _Count()
    pipeline = Pipeline(publication.target(excluded), workers, read, count.on_end, count.on_sent)
    segments: list[SegmentWriter] = []
    try:
        for start, length, stripes in policy.segments_of(size_bytes):
            segments.append(pipeline.add(start, stripes=stripes))
            segments[-1].grow(start + length, seal=True)
        _wait(count, pipeline, len(segments), size_bytes, progress)
        results = [segment.result for segment in segments if segment.result is not None]
        written = publication.publish(results, verify=verify)
    except BaseException:
        for segment in segments:
            pipeline.cancel(segment)
        # Requests in flight still create files in the folder that is about to be removed.
        pipeline.wait_idle(settings.end_s)
        publication.remove_unreferenced()
        raise
    return replace(written, num_retries=sum(segment.num_retries for segment in segments))


def _wait(count: _Count, pipeline: Pipeline, num_segments: int, size_bytes: int, progress: Progress | None) -> None:
    """Wait for all segments. Raises their errors, and `TransientError` when nothing moves for minutes."""
    reported = -1
    while True:
        with count.change:
            while not (count.failed or count.num_ended == num_segments or (progress and count.sent > reported)):
                count.change.wait(_LOOK_S)
                pipeline.check_progress()
            failed, is_over, sent = count.failed, count.num_ended == num_segments, count.sent
        if failed is not None and failed.error is not None:
            raise failed.error
        if progress is not None and sent != reported:
            reported = sent
            progress(sent, size_bytes)
        if is_over:
            return

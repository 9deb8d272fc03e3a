"""Writing a striped file whose bytes are all there, and stay until it is written: a local file, or memory. They can be
read again, because a part that failed is sent a second time.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from bootseer.checkpoint.policy import Policy
from bootseer.checkpoint.writing.pipeline import Pipeline
from bootseer.checkpoint.writing.placement import ExcludedNodes
from bootseer.checkpoint.writing.publication import Progress, Publication, Written
from bootseer.checkpoint.writing.segment import SegmentWriter
from bootseer.checkpoint.writing.settings import WritingSettings
from bootseer.errors import NotFoundError, PermanentError
from bootseer.io.executor import Executor


class Replayable(Protocol):
    """Bytes of a known number that can be read anywhere and more than once, by many threads."""

    @property
    def size_bytes(self) -> int:
        """How many there are."""

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes, which are there. Raises `PermanentError` when they are not any more."""


class BytesSource:
    """A `Replayable` of bytes in memory, which must not change meanwhile."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data).cast("B")

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self._data[offset : offset + length])


class FileSource:
    """A `Replayable` of a local file as long as it was when this was made. Use it as a context manager."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFoundError(f"there is no file {path}") from error
        except OSError as error:
            raise PermanentError(f"{path} cannot be read: {error.strerror}") from error
        self._path = path
        self._size_bytes = os.fstat(self._descriptor).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def read(self, offset: int, length: int) -> bytes:
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
    """What the workers have done. Safe to use from many threads."""

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


def write_replayed(
    publication: Publication,
    source: Replayable,
    policy: Policy,
    *,
    workers: Executor,
    excluded: ExcludedNodes,
    settings: WritingSettings,
    verify: str,
    progress: Progress | None,
) -> Written:
    """Write a file and show it. Whatever fails leaves nothing behind. `progress` is called in this thread."""
    count = _Count()
    pipeline = Pipeline(publication.target(excluded), workers, source.read, count.on_end, count.on_sent)
    segments: list[SegmentWriter] = []
    try:
        for start, length, stripes in policy.segments_of(source.size_bytes):
            segments.append(pipeline.add(start, stripes=stripes))
            segments[-1].grow(start + length, seal=True)
        _wait(count, pipeline, len(segments), source.size_bytes, progress)
        results = [segment.result for segment in segments if segment.result is not None]
        written = publication.publish(results, verify=verify)
    except BaseException:
        for segment in segments:
            pipeline.cancel(segment)
        # What is still on its way makes files in the folder that is to be removed.
        pipeline.wait_idle(settings.end_s)
        publication.remove_rest()
        raise
    return replace(written, num_retries=sum(segment.num_retries for segment in segments))


def _wait(count: _Count, pipeline: Pipeline, num_segments: int, size_bytes: int, progress: Progress | None) -> None:
    """Wait for all segments. Raises their errors, and `TransientError` when nothing moves for minutes."""
    reported = -1
    while True:
        with count.change:
            while not (count.failed or count.num_ended == num_segments or (progress and count.sent > reported)):
                count.change.wait(_LOOK_S)
                pipeline.check_moves()
            failed, is_over, sent = count.failed, count.num_ended == num_segments, count.sent
        if failed is not None and failed.error is not None:
            raise failed.error
        if progress is not None and sent != reported:
            reported = sent
            progress(sent, size_bytes)
        if is_over:
            return

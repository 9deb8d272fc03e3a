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

from bootseer.checkpoint.writing.lane import Lane
from bootseer.checkpoint.writing.segment import SegmentWriter, Target
from bootseer.errors import NotFoundError, PermanentError

Read = Callable[[int, int], bytes]
"""Returns bytes of a file by offset and length; called repeatedly, and by many threads."""


class Pipeline:
    """`read` returns bytes of the file up to which a segment was grown. `on_end` and `on_sent` are called by worker
    threads."""

    def __init__(
        self,
        target: Target,
        read: Read,
        on_end: Callable[[SegmentWriter], None],
        on_sent: Callable[[int], None],
    ) -> None:
        self.target = target
        self.lane = Lane(target.workers, target.policy.stripes + target.policy.parity)
        self.read = read
        self._on_end = on_end
        self.on_sent = on_sent
        self._lock = threading.Lock()
        self._open: list[SegmentWriter] = []
        self._waiting: deque[SegmentWriter] = deque()

    def add(self, start: int, *, stripes: int) -> SegmentWriter:
        """Add a segment, which is started as soon as there is room for it."""
        self.target.before_write()
        segment = SegmentWriter(self, start, stripes=stripes)
        with self._lock:
            self._waiting.append(segment)
        self.begin_next()
        return segment

    def cancel(self, segment: SegmentWriter) -> None:
        """Cancel a segment. `read` may still be called until `wait_idle` returns."""
        segment.cancel()
        self._remove(segment)

    def wait_idle(self, timeout_s: float) -> bool:
        return self.lane.wait_idle(timeout_s)

    def check_progress(self) -> None:
        """Raise `TransientError` when nothing has moved for minutes."""
        self.lane.check_progress(f"{self.target.place.uri}/{self.target.folder}")

    def ended(self, segment: SegmentWriter) -> None:
        if segment.error is None:  # otherwise the file has failed, and no further segment is started
            self._remove(segment)
        self._on_end(segment)

    def _remove(self, segment: SegmentWriter) -> None:
        with self._lock:
            if segment in self._open:
                self._open.remove(segment)
            elif segment in self._waiting:
                self._waiting.remove(segment)
        self.begin_next()

    def begin_next(self) -> None:
        """Start waiting segments, as far as there is room and the nodes of the one before are known."""
        while True:
            with self._lock:
                if not self._waiting or len(self._open) >= self.target.settings.segments_ahead:
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

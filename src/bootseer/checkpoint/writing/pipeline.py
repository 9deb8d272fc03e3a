"""The segments of one file on their way: a few open at a time, begun in the order in which they were asked for.

The next one begins when it is known where the one before lies, and goes elsewhere as far as there are other nodes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from bootseer.checkpoint.writing.lane import Lane
from bootseer.checkpoint.writing.segment import SegmentWriter, Target
from bootseer.io.executor import Executor


class Pipeline:
    """`read` gives bytes of the file that a segment was grown to. `on_end` and `on_sent` are called by workers."""

    def __init__(
        self,
        target: Target,
        workers: Executor,
        read: Callable[[int, int], bytes],
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
        """A new segment, which begins as soon as there is room for it."""
        self._target.begins()
        segment = SegmentWriter(
            self._target, self._lane, start, self._read,
            self._ended, self._begin_next, self._on_sent, stripes=stripes,
        )  # fmt: skip
        with self._lock:
            self._waiting.append(segment)
        self._begin_next()
        return segment

    def cancel(self, segment: SegmentWriter) -> None:
        """Drop a segment. Bytes may still be asked for until `wait_idle`."""
        segment.cancel()
        self._remove(segment)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is on its way any more: whether that was so in time."""
        return self._lane.wait_idle(timeout_s)

    def check_moves(self) -> None:
        """Raise `TransientError` when nothing has moved for minutes."""
        self._lane.check_moves(f"{self._target.place.uri}/{self._target.folder}")

    def _ended(self, segment: SegmentWriter) -> None:
        if segment.error is None:  # otherwise the file has failed, and nothing more is begun for it
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

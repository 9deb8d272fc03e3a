"""Write-back of one file: its bytes on the way from the local spool to the place.

What a sequential writer has left behind is sent as segments while the writer goes on; a durable segment frees its spool
space. A range that was sent is recalled into the spool before it is overwritten. Invariant: each byte of the file is in
the spool, or in a complete segment, or in a hole that was never written.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from bootseer.checkpoint.head import Segment
from bootseer.checkpoint.layout import CHUNK_BYTES
from bootseer.checkpoint.ranges import Ranges
from bootseer.checkpoint.writing.lane import Lane
from bootseer.checkpoint.writing.publication import Publication
from bootseer.checkpoint.writing.segment import SegmentWriter
from bootseer.checkpoint.writing.spool import Budget, Spool
from bootseer.errors import BootseerError, NotFoundError, PermanentError, TransientError


def _gone(error: NotFoundError) -> TransientError:
    """The error of an open file whose published parts are missing."""
    return TransientError(f"{error}: the file was removed or replaced")


_LOOK_S = 0.5
_MAX_RECALLS = 4
"""A file whose segments were recalled so often is sent at publication and not before."""


class Sending:
    """The bytes of one file. Reading and statistics are safe from many threads."""

    def __init__(self, publication: Publication, spool: Spool, budget: Budget) -> None:
        self.sent_bytes = 0
        """Bytes of the file that were written to the place, whether complete yet or not."""
        self.publication = publication
        self.spool = spool
        self.lane = Lane(publication.workers, publication.policy.stripes + publication.policy.parity)
        self._policy = publication.policy
        self._budget = budget
        self._lock = threading.RLock()  # taken by blocks, as in `io.executor`
        self._state = threading.Condition(self._lock)
        self._present = Ranges()
        """Ranges in the spool."""
        self._sent: list[SegmentWriter] = []
        """Segments that were sent, or are in flight while they have no `result`: in no order; they do not overlap, and
        start at whole chunks."""
        self._tail: SegmentWriter | None = None
        """A short last chunk that was published as a segment of its own: it stays in the spool, and will be sent again.
        """
        self._in_flight: list[SegmentWriter] = []
        """Segments that have not ended, in their order. The first ones are started, `segments_ahead` at most."""
        self._growing: SegmentWriter | None = None
        self._sent_up_to = 0
        """All before this offset was sent, or was recalled and waits for publication."""
        self._num_recalls = 0
        self._held_from: int | None = None
        """Nothing from this offset on is sent, because it is being changed."""
        self._error: BootseerError | None = None
        self._is_open = True

    def check(self) -> None:
        """Raise the error of a failed segment: the file cannot be published any more."""
        if self._error is not None:
            raise self._error

    @contextlib.contextmanager
    def hold_back(self, start: int) -> Iterator[None]:
        """Within the block nothing from `start` on is sent: otherwise a writer that waits for spool space, here or in
        another file, could send the very range that is being changed."""
        with self._lock:
            self._held_from = start
        try:
            yield
        finally:
            with self._lock:
                self._held_from = None

    def missing(self, start: int, end: int) -> int:
        with self._lock:
            return self._present.missing(start, end)

    def on_written(self, start: int, end: int) -> None:
        """A range is in the spool now: send what a sequential writer has left behind."""
        with self._lock:
            self._present.add(start, end)
            self._send_sequential()

    def read(self, offset: int, end: int) -> bytes:
        """A range, wherever it is; zeros where nothing was written."""
        pieces: list[bytes | bytearray] = []
        while offset < end:
            with self._lock:
                if not self._is_open:
                    raise PermanentError(f"{self.publication.folder}: read after its end")
                sent = self._complete_at(offset)
                if sent is None:
                    starts = [one.start for one in self._sent if one.result is not None and one.start > offset]
                    stop = min([end, *starts])
                    pieces.append(self.spool.read(offset, stop - offset))
                    offset = stop
                    continue
                segment = sent.result
            stop = min(end, sent.end)
            assert segment is not None  # noqa: S101 - it is complete
            try:
                self.publication.read(segment, offset, stop, lambda at, data: pieces.append(data))
            except NotFoundError as error:
                if self._complete_at(offset) is sent:
                    raise _gone(error) from error
                continue  # recalled by a writer meanwhile
            offset = stop
        return b"".join(pieces)

    def recall(self, start: int, end: int) -> None:
        """Bring a range back into the spool: segments that contain some of it are no longer part of the file."""
        while True:
            with self._lock:
                hit = next((sent for sent in self._sent if sent.start < end and start < sent.end), None)
                if hit is None:
                    return
                self._num_recalls += 1
                segment = hit.result
                if segment is None:
                    self._drop(hit)
                    continue
                missing = self._present.missing(hit.start, hit.end)
            self._budget.reserve_extra(missing)
            try:
                self.publication.read(segment, hit.start, hit.end, self.spool.write)
            except BaseException as error:
                self._budget.free(missing)
                if isinstance(error, NotFoundError):
                    raise _gone(error) from error
                raise
            with self._lock:
                self._sent.remove(hit)
                self._present.add(hit.start, hit.end)

    def truncate(self, size_bytes: int, old_size_bytes: int) -> None:
        with self._lock:
            is_cut = any(sent.start < size_bytes < sent.end for sent in self._sent)
        if is_cut:  # first, because it may fail: then the file must be as it was
            self.recall(size_bytes, size_bytes + 1)
        with self._lock:
            for sent in [sent for sent in self._sent if sent.start >= size_bytes]:
                self._drop(sent)
        self.spool.truncate(size_bytes)
        with self._lock:
            self._budget.free(self._present.remove(size_bytes, old_size_bytes))
            self._sent_up_to = min(self._sent_up_to, size_bytes // CHUNK_BYTES * CHUNK_BYTES)
            if size_bytes == 0:
                self._num_recalls = 0

    def send_all(self, size_bytes: int, *, separate_tail: bool, check: Callable[[], None]) -> list[Segment]:
        """Send all of a file of `size_bytes` that was not sent yet, and wait: returns all segments in order.

        `separate_tail`: send a short last chunk as a segment of its own, because the file is likely to grow; otherwise
        its whole segment would have to be recalled then. `check` is called regularly while this waits.
        """
        with self._lock:
            end = size_bytes
            if separate_tail and all(sent.end < size_bytes for sent in self._sent):
                end = size_bytes // CHUNK_BYTES * CHUNK_BYTES
            self._send_rest(end)
            self._tail = None
            if end < size_bytes:
                self._tail = SegmentWriter(self, end, stripes=1)
                self._start(self._tail)
                self._tail.grow(size_bytes, seal=True)
            every = [*self._sent, *([self._tail] if self._tail is not None else [])]
        while not self._wait_for_all(every):
            check()  # without the lock: it may take its time, and worker threads need that
            self.lane.check_progress(f"{self.publication.place.uri}/{self.publication.folder}")
        self.check()
        return sorted((sent.result for sent in every if sent.result is not None), key=lambda one: one.start)

    def _wait_for_all(self, every: Sequence[SegmentWriter]) -> bool:
        """Wait a moment until these are complete, or one has failed; returns whether that is so."""
        with self._lock:
            return self._state.wait_for(
                lambda: self._error is not None or all(sent.result is not None for sent in every), _LOOK_S
            )

    def seal_idle(self, idle_s: float) -> None:
        """Seal the open segment if one of its parts has waited for bytes for `idle_s`."""
        with self._lock:
            if self._growing is not None and self._growing.is_idle(idle_s):
                self._seal_growing()

    def flush_some(self) -> bool:
        """Send what could wait for more bytes, to free its spool space. Returns whether there was any."""
        with self._lock:
            if self._seal_growing():
                return True
            length = min(self._ready_end() - self._sent_up_to, self._policy.segment_bytes)
            if length == 0:
                return False
            writer = self._begin(self._sent_up_to, self._policy.stripes_for(length))
            self._sent_up_to += length
            writer.grow(self._sent_up_to, seal=True)
            return True

    def expected_free_bytes(self) -> tuple[int, int]:
        """Bytes of spool space that will be freed anyway, and bytes that would be freed after `flush_some`."""
        with self._lock:
            if self._error is not None:
                return 0, 0
            on_the_way = sum(one.end - one.start for one in self._sent if one.result is None and one.is_sealed)
            growing = self._growing.size_bytes if self._growing is not None else 0
            return on_the_way, growing + self._ready_end() - self._sent_up_to

    def close(self, timeout_s: float) -> None:
        """Cancel what is in flight, and drop the rest."""
        with self._lock:
            self._is_open = False
            for sent in list(self._sent):
                self._drop(sent)
            if self._tail is not None and self._tail.result is None:
                self._cancel(self._tail)
        # Segments in flight still read from the spool.
        self.lane.wait_idle(timeout_s)
        with self._lock:
            self.spool.close()
            self._budget.free(self._present.total())

    # The methods below are called with the lock held.

    def _ready_end(self) -> int:
        """The end of the whole chunks that a sequential writer has left behind."""
        if self._policy.stripes == 1 or self._num_recalls > _MAX_RECALLS:
            return self._sent_up_to
        ready = self._present.end_from(self._sent_up_to)
        if self._held_from is not None:
            ready = min(ready, self._held_from)
        return max(ready // CHUNK_BYTES * CHUNK_BYTES, self._sent_up_to)

    def _send_sequential(self) -> None:
        ready, policy = self._ready_end(), self._policy
        while ready > self._sent_up_to:
            growing = self._growing
            if growing is None:
                enough = CHUNK_BYTES if self._sent else policy.min_bytes_per_stripe
                if ready - self._sent_up_to < enough * policy.stripes:
                    return
                growing = self._growing = self._begin(self._sent_up_to, policy.stripes)
            self._sent_up_to = min(ready, growing.start + growing.capacity)
            is_full = self._sent_up_to == growing.start + growing.capacity
            growing.grow(self._sent_up_to, seal=is_full)
            if is_full:
                self._growing = None

    def _send_rest(self, end: int) -> None:
        at = 0
        for sent in sorted(self._sent, key=lambda one: one.start):
            self._send(at, sent.start)
            at = sent.end
        self._send(at, end)
        self._seal_growing()
        self._sent_up_to = end // CHUNK_BYTES * CHUNK_BYTES

    def _send(self, start: int, end: int) -> None:
        growing, policy = self._growing, self._policy
        if start < end and growing is not None and growing.end == start:
            start = min(end, growing.start + growing.capacity)
            growing.grow(start, seal=True)
            self._growing = None
        while start < end:
            stop = min(start + policy.segment_bytes, end)
            self._begin(start, policy.stripes_for(stop - start)).grow(stop, seal=True)
            start = stop

    def _begin(self, start: int, stripes: int) -> SegmentWriter:
        writer = SegmentWriter(self, start, stripes=stripes)
        self._sent.append(writer)
        self._start(writer)
        return writer

    def _start(self, writer: SegmentWriter) -> None:
        """Start a segment as soon as there is room for it. It may fail at once."""
        self.publication.has_folder = True
        self._in_flight.append(writer)
        self.begin_next()

    def _seal_growing(self) -> bool:
        growing, self._growing = self._growing, None
        if growing is not None:
            growing.grow(growing.end, seal=True)
        return growing is not None

    def _complete_at(self, offset: int) -> SegmentWriter | None:
        for sent in self._sent:
            if sent.result is not None and sent.start <= offset < sent.end:
                return sent
        return None

    def _drop(self, sent: SegmentWriter) -> None:
        self._sent.remove(sent)
        if self._growing is sent:
            self._growing = None
        if sent.result is None:
            self._cancel(sent)

    def _cancel(self, writer: SegmentWriter) -> None:
        """Cancel a segment. The spool may still be read for it until `wait_idle` returns."""
        writer.cancel()
        self._make_room(writer)

    # Called by worker threads too.

    def begin_next(self) -> None:
        """Start waiting segments, as far as there is room. A segment is started when the placement of the one before is
        known, so that it can go to other nodes where there are any."""
        while True:
            with self._lock:
                ahead = self._in_flight[: self.publication.settings.segments_ahead]
                started = [one for one in ahead if one.is_started]
                if len(started) == len(ahead) or (started and not started[-1].is_placed):
                    return
                writer = ahead[len(started)]
                writer.is_started = True
            writer.begin()

    def _make_room(self, ended: SegmentWriter) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._in_flight.remove(ended)
        self.begin_next()

    def chunk_sent(self, length: int) -> None:
        """A chunk was written for the first time."""
        with self._lock:
            self.sent_bytes += length

    def segment_ended(self, writer: SegmentWriter, result: Segment | None) -> None:
        """Called once for each segment, unless it was cancelled. Without a `result` it has failed."""
        if result is not None:  # otherwise the file has failed, and no further segment is started
            self._make_room(writer)
        with self._lock:
            if writer in self._sent or writer is self._tail:
                writer.result = result
                self._error = self._error or writer.error
            if result is not None and writer in self._sent and self.spool.punch(writer.start, writer.size_bytes):
                self._budget.free(self._present.remove(writer.start, writer.end))
            self._state.notify_all()

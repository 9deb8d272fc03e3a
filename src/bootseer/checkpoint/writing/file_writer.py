"""Writing a file as programs do: at any offset, of any length, nobody knows how many bytes will come.

Everything goes to the spool first. What a writer has left behind, in whole chunks from the front, is sent while it
goes on, and its room in the spool is given back when a segment is safe. A write into what was sent takes that segment
back: dropped if it is on its way, read back if it is complete. So sequential writers need little room whatever the
size of the file, and all others need as much as they write out of order.

`sync` and `commit` make what was written so far durable, verified and visible, in one step, and nothing is visible
before. A file that is written on after a `sync` shows its old content until the next one.

Methods may be called from many threads; those that change the file take turns. Made by `writing`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from bootseer.checkpoint.files import Files
from bootseer.checkpoint.head import Segment
from bootseer.checkpoint.layout import CHUNK_BYTES
from bootseer.checkpoint.policy import Policy
from bootseer.checkpoint.writing.budget import Budget, TooLargeError
from bootseer.checkpoint.writing.ordinary import write_ordinary
from bootseer.checkpoint.writing.pipeline import Pipeline
from bootseer.checkpoint.writing.publication import Publication, Written
from bootseer.checkpoint.writing.ranges import Ranges
from bootseer.checkpoint.writing.readback import read_segment
from bootseer.checkpoint.writing.segment import SegmentWriter
from bootseer.checkpoint.writing.settings import WritingSettings
from bootseer.checkpoint.writing.sick import SickNodes
from bootseer.checkpoint.writing.spool import Spool
from bootseer.checkpoint.writing.workers import Workers
from bootseer.errors import BootseerError, NotFoundError, PermanentError

_STUCK_S = 300.0
"""A writer that waits for room in the spool fails when for so long none comes back."""
_MAX_BACK = 4
"""A file whose segments were taken back so often is sent when it is committed, not before."""


@dataclass(eq=False, slots=True)
class _Sent:
    """A segment that was sent, or is on its way while `segment` is None."""

    writer: SegmentWriter
    segment: Segment | None = None

    @property
    def start(self) -> int:
        return self.writer.start

    @property
    def end(self) -> int:
        return self.writer.end


class FileWriter:
    """A new file. It ends with `commit`, which shows it, or with `abort`, which leaves what was shown before."""

    def __init__(
        self,
        files: Files,
        publication: Publication,
        policy: Policy,
        spool: Spool,
        budget: Budget,
        *,
        mode: int,
        verify: str,
        workers: Workers,
        sick: SickNodes,
        settings: WritingSettings,
        free_some: Callable[[], bool],
        ended: Callable[[FileWriter], None],
    ) -> None:
        self._files = files
        self._publication = publication
        self._policy = policy
        self._spool = spool
        self._budget = budget
        self._mode = mode
        self._verify = verify
        self._settings = settings
        self._free_some = free_some
        self._ended = ended
        self._pipeline = Pipeline(publication.target(sick), workers, spool.read, self._segment_ended)
        # Whoever changes the file holds `_turn`, for as long as it takes; `_state` guards the rest for moments.
        self._turn = threading.RLock()
        self._state = threading.Condition()
        self._size_bytes = 0
        self._present = Ranges()
        """What lies in the spool."""
        self._sent: list[_Sent] = []
        """In any order; they do not overlap, and begin at whole chunks."""
        self._tail: _Sent | None = None
        """The last chunk, if it is short and the file may go on: it stays in the spool, and is sent again later."""
        self._growing: SegmentWriter | None = None
        self._grown_s = 0.0
        self._stream_at = 0
        """Up to here everything was sent, or waits for a commit because it was taken back."""
        self._streams = policy.stripes > 1
        self._num_back = 0
        self._num_retries = 0
        self._error: BootseerError | None = None
        self._written: Written | None = None
        self._is_dirty = True
        self._goes_on = False
        """Whether there were writes after a `sync`."""
        self._is_open = True

    @property
    def size_bytes(self) -> int:
        """As long as it is now."""
        return self._size_bytes

    @property
    def path(self) -> str:
        """Where it will be visible."""
        return self._publication.path

    @path.setter
    def path(self, path: str) -> None:
        with self._turn:
            self._publication.path = path

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write bytes. Gaps are zeros. Waits while the spool is full of what is being sent.

        Raises what sending raised meanwhile, `TooLargeError` for what does not fit into the spool and cannot be sent
        yet, and `TransientError` when nothing could be sent for minutes.
        """
        length = memoryview(data).nbytes
        if length == 0:
            return
        with self._turn:
            self._check()
            end = offset + length
            if end > self._size_bytes:
                self._before_growth(offset)
            self._take_back(offset, end)
            with self._state:
                fresh = self._present.missing(offset, end)
            if fresh:
                self._budget.take(fresh, free_some=self._free_some, stuck_s=_STUCK_S)
            try:
                self._spool.write(offset, data)
            except BaseException:
                self._budget.give_back(fresh)
                # What it took of this must not show through when the file becomes longer.
                self._spool.truncate(self._size_bytes)
                raise
            with self._state:
                self._present.add(offset, end)
                self._size_bytes = max(self._size_bytes, end)
                self._touched()
                self._feed()

    def read_at(self, offset: int, length: int) -> bytes:
        """The bytes from `offset` on as they were last written; fewer at the end of the file."""
        end = min(offset + length, self._size_bytes)
        pieces: list[bytes | bytearray] = []
        while offset < end:
            with self._state:
                sent = self._durable_at(offset)
                if sent is None:
                    starts = [one.start for one in self._sent if one.segment is not None and one.start > offset]
                    stop = min([end, *starts])
                    pieces.append(self._spool.read(offset, stop - offset))
                    offset = stop
                    continue
            stop = min(end, sent.end)
            try:
                self._read_back(sent, offset, stop, lambda at, data: pieces.append(data))
            except NotFoundError:
                if self._durable_at(offset) is sent:
                    raise
                continue  # a writer has taken it back meanwhile
            offset = stop
        return b"".join(pieces)

    def truncate(self, size_bytes: int) -> None:
        """Make the file so long: cut, or continued by zeros."""
        with self._turn:
            self._check()
            if size_bytes > self._size_bytes:
                self._before_growth(size_bytes)
            elif size_bytes < self._size_bytes:
                self._cut(size_bytes)
            with self._state:
                if size_bytes != self._size_bytes:
                    self._size_bytes = size_bytes
                    self._touched()

    def sync(self) -> Written:
        """Make what was written so far durable, verified and visible. The file may be written on."""
        with self._turn:
            self._check()
            return self._publish()

    def commit(self) -> Written:
        """`sync`, and end. After an error the writer is aborted: what was visible before is visible still."""
        with self._turn:
            try:
                self._check()
                return self._publish()
            finally:
                self.abort()

    def abort(self) -> None:
        """End, and drop what is not visible. Safe to call at any time, also after `commit`."""
        with self._turn:
            if not self._is_open:
                return
            self._is_open = False
            with self._state:
                sent, self._sent = self._sent, []
                self._growing = None
                room = self._present.total()
            for one in sent:
                if one.segment is None:
                    self._pipeline.cancel(one.writer)
            # What is still on its way makes files in the folder that is to be removed, and reads from the spool.
            self._pipeline.wait_idle(self._settings.end_s)
            self._publication.remove_rest()
            self._spool.close()
            self._budget.give_back(room)
        self._ended(self)

    def end_idle(self, idle_s: float) -> None:
        """End the segment that grows, if it has not grown for so long."""
        with self._state:
            if time.monotonic() - self._grown_s >= idle_s:
                self._end_growing()

    def send_now(self) -> bool:
        """Send what could wait for more, so that its room in the spool comes back: whether there was any."""
        with self._state:
            if self._end_growing():
                return True
            ready = self._ready()
            if ready > self._stream_at:
                length = min(ready - self._stream_at, self._policy.segment_bytes)
                writer = self._begin(self._stream_at, self._policy.stripes_for(length))
                self._stream_at += length
                writer.grow(self._stream_at, seal=True)
                return True
            return False

    def room_to_come(self) -> tuple[int, int]:
        """Bytes of the spool that come back by themselves, and those that come back after `send_now`."""
        with self._state:
            if self._error is not None:
                return 0, 0
            on_the_way = sum(one.end - one.start for one in self._sent if one.segment is None and one.writer.is_sealed)
            growing = self._growing.size_so_far if self._growing is not None else 0
            return on_the_way, growing + self._ready() - self._stream_at

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._is_open:
            raise PermanentError(f"{self.path}: written to after its end")

    def _touched(self) -> None:
        self._is_dirty = True
        self._goes_on = self._goes_on or self._written is not None

    def _before_growth(self, offset: int) -> None:
        """The file is about to become longer than it is, by a write at `offset`: its last chunk need not stay short."""
        size_bytes = self._size_bytes
        if offset - size_bytes > self._settings.random_bytes:
            raise TooLargeError(f"{self.path}: a gap of {offset - size_bytes} bytes is too large")
        if size_bytes % CHUNK_BYTES:
            self._take_back(size_bytes - 1, size_bytes)

    def _cut(self, size_bytes: int) -> None:
        with self._state:
            for sent in [sent for sent in self._sent if sent.start >= size_bytes]:
                self._drop(sent)
        self._take_back(size_bytes, self._size_bytes)
        self._spool.truncate(size_bytes)
        with self._state:
            room = self._present.remove(size_bytes, self._size_bytes)
            self._stream_at = min(self._stream_at, size_bytes // CHUNK_BYTES * CHUNK_BYTES)
            if size_bytes == 0:
                self._num_back = 0
        self._budget.give_back(room)

    def _ready(self) -> int:
        """How far a sequential writer has left whole chunks behind. `_state` is held."""
        if not self._streams or self._num_back > _MAX_BACK:
            return self._stream_at
        return max(self._present.end_from(self._stream_at) // CHUNK_BYTES * CHUNK_BYTES, self._stream_at)

    def _feed(self) -> None:
        """Send what a sequential writer has left behind. `_state` is held."""
        ready, policy = self._ready(), self._policy
        while ready > self._stream_at:
            growing = self._growing
            if growing is None:
                enough = CHUNK_BYTES if self._sent else policy.min_bytes_per_stripe
                if ready - self._stream_at < enough * policy.stripes:
                    return
                growing = self._growing = self._begin(self._stream_at, policy.stripes)
            self._stream_at = min(ready, growing.start + growing.capacity)
            is_full = self._stream_at == growing.start + growing.capacity
            growing.grow(self._stream_at, seal=is_full)
            self._grown_s = time.monotonic()
            if is_full:
                self._growing = None

    def _end_growing(self) -> bool:
        """`_state` is held."""
        growing, self._growing = self._growing, None
        if growing is not None:
            growing.grow(growing.end, seal=True)
        return growing is not None

    def _begin(self, start: int, stripes: int) -> SegmentWriter:
        writer = self._pipeline.add(start, stripes=stripes)
        self._sent.append(_Sent(writer))
        return writer

    def _segment_ended(self, writer: SegmentWriter) -> None:
        """A worker says so."""
        with self._state:
            self._num_retries += writer.num_retries
            if self._tail is not None and self._tail.writer is writer:
                self._tail.segment = writer.result
                self._error = self._error or writer.error
            for sent in self._sent:
                if sent.writer is writer:
                    sent.segment = writer.result
                    self._error = self._error or writer.error
                    if writer.result is not None and self._spool.punch(sent.start, sent.end - sent.start):
                        self._budget.give_back(self._present.remove(sent.start, sent.end))
            self._state.notify_all()

    def _durable_at(self, offset: int) -> _Sent | None:
        for sent in self._sent:
            if sent.segment is not None and sent.start <= offset < sent.end:
                return sent
        return None

    def _take_back(self, start: int, end: int) -> None:
        """Have a range in the spool only: what was sent of it is not part of the file any more."""
        while True:
            with self._state:
                hit = next((sent for sent in self._sent if sent.start < end and start < sent.end), None)
                if hit is None:
                    return
                self._num_back += 1
                if hit.segment is None:
                    self._drop(hit)
                    continue
                missing = self._present.missing(hit.start, hit.end)
            self._budget.take_more(missing)
            try:
                self._read_back(hit, hit.start, hit.end, self._spool.write)
            except BaseException:
                self._budget.give_back(missing)
                raise
            with self._state:
                self._sent.remove(hit)
                self._present.add(hit.start, hit.end)

    def _drop(self, sent: _Sent) -> None:
        """`_state` is held."""
        self._sent.remove(sent)
        if self._growing is sent.writer:
            self._growing = None
        if sent.segment is None:
            self._pipeline.cancel(sent.writer)

    def _read_back(self, sent: _Sent, start: int, end: int, take: Callable[[int, bytearray], None]) -> None:
        assert sent.segment is not None  # noqa: S101 - callers ask for what is complete
        read_segment(self._files.place, self._publication.folder, sent.segment, start, end, take)

    def _publish(self) -> Written:
        if self._written is not None and not self._is_dirty:
            return self._written
        size_bytes = self._size_bytes
        if self._policy.is_striped(size_bytes):
            written = self._publish_striped(size_bytes)
        else:
            self._take_back(0, size_bytes)
            self._pipeline.wait_idle(self._settings.end_s)
            written = write_ordinary(
                self._files,
                self._publication,
                size_bytes,
                self._spool.read,
                policy=self._policy,
                mode=self._mode,
                tries=self._settings.part_tries,
            )
        self._written = replace(written, num_retries=written.num_retries + self._num_retries)
        self._is_dirty = False
        return self._written

    def _publish_striped(self, size_bytes: int) -> Written:
        with self._state:
            self._tail = None
            end = self._end_without_tail(size_bytes)
            self._send_rest(end)
            if end < size_bytes:
                writer = self._pipeline.add(end, stripes=1)
                self._tail = _Sent(writer)
                writer.grow(size_bytes, seal=True)
            every = [*self._sent, *([self._tail] if self._tail is not None else [])]
            # Every step has a deadline and every retry a bound, so that this ends.
            self._state.wait_for(lambda: self._error is not None or all(sent.segment is not None for sent in every))
        self._check()
        # Parts that were taken back are removed when nothing makes them any more.
        self._pipeline.wait_idle(self._settings.end_s)
        segments = sorted((sent.segment for sent in every if sent.segment is not None), key=lambda one: one.start)
        return self._publication.publish(segments, verify=self._verify)

    def _end_without_tail(self, size_bytes: int) -> int:
        """Who has written on after a `sync` may do so again: then a short last chunk goes apart.

        Otherwise its whole segment would have to be taken back each time.
        """
        if not self._goes_on or any(sent.end == size_bytes for sent in self._sent):
            return size_bytes
        return size_bytes // CHUNK_BYTES * CHUNK_BYTES

    def _send_rest(self, end: int) -> None:
        """Send what was not sent yet, up to `end`. `_state` is held."""
        at = 0
        for sent in sorted(self._sent, key=lambda one: one.start):
            self._send(at, sent.start)
            at = sent.end
        self._send(at, end)
        self._end_growing()
        self._stream_at = end // CHUNK_BYTES * CHUNK_BYTES

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

"""What lies in a file's spool and what was sent from there: one file's bytes between the disk and the place.

A sequential writer leaves whole chunks behind, which are sent as segments while it goes on; a segment that is safe
gives its room in the spool back. What is written into a sent range is taken back first. At every moment each byte of
the file is in the spool, or in a segment that is complete, or a hole that was never written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bootseer.cache.disk import punch, write_all
from bootseer.checkpoint.head import Segment
from bootseer.checkpoint.layout import CHUNK_BYTES, Policy
from bootseer.checkpoint.ranges import Ranges
from bootseer.checkpoint.writing.pipeline import Pipeline
from bootseer.checkpoint.writing.publication import read_segment
from bootseer.checkpoint.writing.segment import SegmentWriter, Target
from bootseer.errors import BootseerError, NoSpaceError, NotFoundError, PermanentError, TransientError
from bootseer.io.executor import Executor
from bootseer.places.place import Place


class TooLargeError(PermanentError):
    """More bytes than fit on the local disk would have to wait there (EFBIG)."""


class Budget:
    """Bytes of room. Safe to use from many threads.

    What is on its way gives its room back soon, and writers wait for that. When nothing is, because files were written
    out of order and nothing of them can be sent before they are committed, `random_bytes` more may be used.
    """

    def __init__(self, spool_bytes: int, random_bytes: int) -> None:
        self._soft = spool_bytes
        self._hard = spool_bytes + random_bytes
        self._used = 0
        self._freed = 0
        self._change = threading.Condition()

    @property
    def used_bytes(self) -> int:
        return self._used

    def take(self, length: int, *, free_some: Callable[[], bool], stuck_s: float) -> None:
        """Take room, waiting for it as long as `free_some` says that some will come back.

        Raises `TooLargeError`, or `TransientError` when for `stuck_s` none came back.
        """
        freed, until = self._freed, time.monotonic() + stuck_s
        while not self._try(length):
            if not free_some():
                self.take_more(length)
                return
            if freed != self._freed:
                freed, until = self._freed, time.monotonic() + stuck_s
            elif time.monotonic() >= until:
                raise TransientError(f"no room on the local disk came back within {stuck_s:.0f} s: writes are stuck")
            with self._change:
                self._change.wait_for(lambda: self._used + length <= self._soft, timeout=_LOOK_S)

    def take_more(self, length: int) -> None:
        """Take room without waiting, of what is kept for files that are written out of order."""
        with self._change:
            if self._used + length > self._hard:
                raise TooLargeError(
                    f"{self._used + length} bytes that cannot be sent yet do not fit into the spool's {self._hard}: "
                    "the file is too large to be written out of order"
                )
            self._used += length

    def give_back(self, length: int) -> None:
        with self._change:
            self._used -= length
            self._freed += length
            self._change.notify_all()

    def _try(self, length: int) -> bool:
        with self._change:
            if self._used + length > self._soft:
                return False
            self._used += length
            return True


class Spool:
    """A file of holes. Raises `NoSpaceError`, and `PermanentError` for all else that a local disk may say."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            raise self._mapped(error) from error

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        try:
            write_all(self._descriptor, memoryview(data).cast("B"), offset)
        except OSError as error:
            raise self._mapped(error) from error

    def read(self, offset: int, length: int) -> bytes:
        """The bytes there: zeros where nothing was written."""
        try:
            data = os.pread(self._descriptor, length, offset)
            while len(data) < length:
                more = os.pread(self._descriptor, length - len(data), offset + len(data))
                if not more:
                    return data + bytes(length - len(data))
                data += more
        except OSError as error:
            raise self._mapped(error) from error
        return data

    def punch(self, offset: int, length: int) -> bool:
        """Give the room of a range back, whose bytes are lost then: whether the file system can do that."""
        try:
            punch(self._descriptor, offset, length)
        except OSError:
            return False
        return True

    def truncate(self, size_bytes: int) -> None:
        try:
            os.ftruncate(self._descriptor, size_bytes)
        except OSError as error:
            raise self._mapped(error) from error

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _mapped(self, error: OSError) -> PermanentError:
        message = f"the spool folder {self._folder}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return NoSpaceError(f"{message}; give it room, or name another folder")
        return PermanentError(message)


_LOOK_S = 0.5
_MAX_BACK = 4
"""A file whose segments were taken back so often is sent when it is published, not before."""


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


class Sending:
    """The bytes of one file. Reading and the figures are safe from many threads."""

    def __init__(self, target: Target, policy: Policy, spool: Spool, budget: Budget, workers: Executor) -> None:
        self.num_retries = 0
        """Parts that were begun again."""
        self._place: Place = target.place
        self._folder = target.folder
        self._policy = policy
        self._spool = spool
        self._budget = budget
        self._pipeline = Pipeline(target, workers, spool.read, self._segment_ended)
        self._state = threading.Condition()
        self._present = Ranges()
        """What lies in the spool."""
        self._sent: list[_Sent] = []
        """In any order; they do not overlap, and begin at whole chunks."""
        self._tail: _Sent | None = None
        """A short last chunk that was published apart: it stays in the spool, and will be sent again."""
        self._growing: SegmentWriter | None = None
        self._grown_s = 0.0
        self._stream_at = 0
        """Up to here everything was sent, or waits to be published because it was taken back."""
        self._num_back = 0
        self._kept_from: int | None = None
        """From here on nothing new is sent, because it is being changed."""
        self._error: BootseerError | None = None
        self._is_open = True

    def check(self) -> None:
        """Raise what made sending fail: such a file cannot be published any more."""
        if self._error is not None:
            raise self._error

    @contextlib.contextmanager
    def keeping(self, start: int) -> Iterator[None]:
        """Nothing from `start` on begins to be sent within the block: what waits for room, here or in another file,
        would else send what is just being changed."""
        with self._state:
            self._kept_from = start
        try:
            yield
        finally:
            with self._state:
                self._kept_from = None

    def missing(self, start: int, end: int) -> int:
        with self._state:
            return self._present.missing(start, end)

    def wrote(self, start: int, end: int) -> None:
        """A range lies in the spool now: send what a sequential writer has left behind."""
        with self._state:
            self._present.add(start, end)
            self._feed()

    def read(self, offset: int, end: int) -> bytes:
        """The bytes of a range, wherever they are; zeros where nothing was written."""
        pieces: list[bytes | bytearray] = []
        while offset < end:
            with self._state:
                if not self._is_open:
                    raise PermanentError(f"{self._folder}: read after its end")
                sent = self._complete_at(offset)
                if sent is None:
                    starts = [one.start for one in self._sent if one.segment is not None and one.start > offset]
                    stop = min([end, *starts])
                    pieces.append(self._spool.read(offset, stop - offset))
                    offset = stop
                    continue
                segment = sent.segment
            stop = min(end, sent.end)
            assert segment is not None  # noqa: S101 - it is complete
            try:
                read_segment(self._place, self._folder, segment, offset, stop, lambda at, data: pieces.append(data))
            except NotFoundError:
                if self._complete_at(offset) is sent:
                    raise
                continue  # a writer has taken it back meanwhile
            offset = stop
        return b"".join(pieces)

    def take_back(self, start: int, end: int) -> None:
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
                read_segment(self._place, self._folder, hit.segment, hit.start, hit.end, self._spool.write)
            except BaseException:
                self._budget.give_back(missing)
                raise
            with self._state:
                self._sent.remove(hit)
                self._present.add(hit.start, hit.end)

    def cut(self, size_bytes: int, old_size_bytes: int) -> None:
        with self._state:
            for sent in [sent for sent in self._sent if sent.start >= size_bytes]:
                self._drop(sent)
        self.take_back(size_bytes, old_size_bytes)
        self._spool.truncate(size_bytes)
        with self._state:
            self._budget.give_back(self._present.remove(size_bytes, old_size_bytes))
            self._stream_at = min(self._stream_at, size_bytes // CHUNK_BYTES * CHUNK_BYTES)
            if size_bytes == 0:
                self._num_back = 0

    def send_all(self, size_bytes: int, *, tail_apart: bool, check: Callable[[], None]) -> list[Segment]:
        """Send what was not sent yet of a file of so many bytes, and wait for it: all segments, in their order.

        `tail_apart`: send the last chunk as a segment of its own if it is short, because the file is likely to go on;
        otherwise its whole segment would have to be taken back then. `check` is called now and then while this waits.
        """
        with self._state:
            end = size_bytes
            if tail_apart and all(sent.end < size_bytes for sent in self._sent):
                end = size_bytes // CHUNK_BYTES * CHUNK_BYTES
            self._send_rest(end)
            self._tail = None
            if end < size_bytes:
                self._tail = _Sent(self._pipeline.add(end, stripes=1))
                self._tail.writer.grow(size_bytes, seal=True)
                self._error = self._error or self._tail.writer.error  # it may have failed before it was ours
            every = [*self._sent, *([self._tail] if self._tail is not None else [])]
            while not self._state.wait_for(
                lambda: self._error is not None or all(sent.segment is not None for sent in every), _LOOK_S
            ):
                check()
                self._pipeline.check_moves()
        self.check()
        return sorted((sent.segment for sent in every if sent.segment is not None), key=lambda one: one.start)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing that was dropped is on its way any more: whether that was so in time."""
        return self._pipeline.wait_idle(timeout_s)

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
            length = min(self._ready() - self._stream_at, self._policy.segment_bytes)
            if length == 0:
                return False
            writer = self._begin(self._stream_at, self._policy.stripes_for(length))
            self._stream_at += length
            writer.grow(self._stream_at, seal=True)
            return True

    def room_to_come(self) -> tuple[int, int]:
        """Bytes of the spool that come back by themselves, and those that come back after `send_now`."""
        with self._state:
            if self._error is not None:
                return 0, 0
            on_the_way = sum(one.end - one.start for one in self._sent if one.segment is None and one.writer.is_sealed)
            growing = self._growing.size_so_far if self._growing is not None else 0
            return on_the_way, growing + self._ready() - self._stream_at

    def close(self, timeout_s: float) -> None:
        """Drop what is on its way, and forget the rest."""
        with self._state:
            self._is_open = False
            for sent in list(self._sent):
                self._drop(sent)
            if self._tail is not None and self._tail.segment is None:
                self._pipeline.cancel(self._tail.writer)
        # What is still on its way reads from the spool.
        self._pipeline.wait_idle(timeout_s)
        with self._state:
            self._spool.close()
            self._budget.give_back(self._present.total())

    # From here on `_state` is held.

    def _ready(self) -> int:
        """How far a sequential writer has left whole chunks behind."""
        if self._policy.stripes == 1 or self._num_back > _MAX_BACK:
            return self._stream_at
        ready = self._present.end_from(self._stream_at)
        if self._kept_from is not None:
            ready = min(ready, self._kept_from)
        return max(ready // CHUNK_BYTES * CHUNK_BYTES, self._stream_at)

    def _feed(self) -> None:
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

    def _send_rest(self, end: int) -> None:
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

    def _begin(self, start: int, stripes: int) -> SegmentWriter:
        writer = self._pipeline.add(start, stripes=stripes)
        self._sent.append(_Sent(writer))
        self._error = self._error or writer.error  # it may have failed before it was ours
        return writer

    def _end_growing(self) -> bool:
        growing, self._growing = self._growing, None
        if growing is not None:
            growing.grow(growing.end, seal=True)
        return growing is not None

    def _complete_at(self, offset: int) -> _Sent | None:
        for sent in self._sent:
            if sent.segment is not None and sent.start <= offset < sent.end:
                return sent
        return None

    def _drop(self, sent: _Sent) -> None:
        self._sent.remove(sent)
        if self._growing is sent.writer:
            self._growing = None
        if sent.segment is None:
            self._pipeline.cancel(sent.writer)

    # A worker calls.

    def _segment_ended(self, writer: SegmentWriter) -> None:
        with self._state:
            self.num_retries += writer.num_retries
            for sent in [*self._sent, *([self._tail] if self._tail is not None else [])]:
                if sent.writer is writer:
                    sent.segment = writer.result
                    self._error = self._error or writer.error
                    is_tail = sent is self._tail
                    if (
                        writer.result is not None
                        and not is_tail
                        and self._spool.punch(sent.start, sent.end - sent.start)
                    ):
                        self._budget.give_back(self._present.remove(sent.start, sent.end))
            self._state.notify_all()

"""The bytes of objects: read in ranges by many requests at once, written as parts.

A request that is late is made a second time over another connection (hedged), and the first answer counts. One that
fails is made again until its deadline. More are made at once as long as that brings more; half as many after the server
has said that it is asked too much (429, 503).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import PreconditionError

from bootseer.errors import BootseerError, PermanentError, TransientError
from bootseer.io.executor import Executor
from bootseer.io.retry import pause_s
from bootseer.io.timer import Timer
from bootseer.places.bucket import (
    MAX_PARTS,
    PART_BYTES,
    PARTS_AT_ONCE,
    WRITE_S,
    Bucket,
    OtherRangeError,
    SilentError,
    status_of,
    time_ns,
)
from bootseer.places.place import ChangedError, Entry

if TYPE_CHECKING:
    from bootseer.hdfs.requests import ReadOutcome

_MAX_AT_ONCE = 48
_FIRST_AT_ONCE = 8.0
_GAIN = 1.1
"""Half as many requests again must bring so many times the rate, or it is the link that is full."""
_LEAST_LATE_S, _FIRST_LATE_S = 1.0, 10.0
_MOST_HEDGES = 0.05
_MOST_PUT_OFF = 4
_NUM_TIMES = 64
_MOST_BYTES = 8 << 20
"""Of one request: what costs a server little more than a small one."""
_MAX_LIES = 5
"""A server that sends other bytes than it is asked for is not asked more often."""
FILE_MODE = 0o644
_MAX_OBJECT_BYTES = 5 << 40
_MAX_AHEAD = 2
"""Pieces of a part that wait for being sent."""


class _Read:
    """One range that a caller waits for. What is read by several requests is delivered once."""

    def __init__(
        self, file: ObjectFile, offset: int, into: memoryview, done: Callable[[ReadOutcome], None], until_s: float
    ) -> None:
        self.file = file
        self.offset = offset
        self.end = offset + len(into)
        self.until_s = until_s
        self.is_over = False
        self._into = into
        self._done = done
        self._lock = threading.Lock()

    def cancel(self) -> None:
        self.finish(TransientError(f"{self.file.what}: the read was cancelled"))

    def hurry(self) -> None:
        self.file.reads.hurry(self)

    def left_s(self) -> float:
        """See `Ticket.left_s`: not known."""
        return 0.0

    def finish(self, error: BootseerError | None, data: memoryview | bytes = b"") -> bool:
        """Deliver what the first request got, or the error: whether this was the first."""
        from bootseer.hdfs.requests import ReadOutcome  # its module is of no use to starts without such reads

        with self._lock:
            if self.is_over:
                return False
            self.is_over = True
            if error is None:
                self._into[:] = data
        self._done(ReadOutcome(error, ""))
        return True


class _Request:
    """One range of an object that is asked for at once: of a read, and of those that go on where it ends."""

    def __init__(self, read: _Read) -> None:
        self.reads = [read]
        self.file = read.file
        self.start = read.offset
        self.end = read.end
        self.until_s = read.until_s
        self.deadline_s = read.until_s - time.monotonic()
        self.put_off = 0
        """How often its deadline was put off."""
        self.num_failures = 0
        self.num_running = 0
        self.is_hedged = False
        self.is_taken = False
        """Whether it is asked for, or a part of one that is."""

    @property
    def is_over(self) -> bool:
        return all(read.is_over for read in self.reads)

    def left_s(self, heard_s: float) -> float:
        """Seconds until its deadline, which is put off, but not for ever, while the server gives others their bytes:
        what is asked for at once shares one link. `heard_s`: when it last did."""
        now_s = time.monotonic()
        if self.until_s <= now_s and self.put_off < _MOST_PUT_OFF and heard_s > now_s - self.deadline_s:
            self.put_off += 1
            self.until_s = now_s + self.deadline_s
        return self.until_s - now_s

    def finish(self, error: BootseerError | None, data: memoryview | bytes = b"") -> bool:
        """Finish all its reads: whether one of them was not."""
        each = [read.finish(error, data[read.offset - self.start : read.end - self.start]) for read in self.reads]
        return any(each)


class ObjectReads:
    """All reads of a place. Safe to use from many threads."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._threads = Executor("bootseer-objects", _MAX_AT_ONCE)
        self._timer = Timer("bootseer-objects-timer", threads=1)
        self._lock = threading.Lock()
        self._urgent: deque[_Request] = deque()
        self._others: deque[_Request] = deque()
        self._by_start: dict[tuple[ObjectFile, int], _Request] = {}
        """Those that wait, by where they begin."""
        self._at_once = _FIRST_AT_ONCE
        self._best_rate = 0.0
        self._window = (time.monotonic(), 0, 0)
        """Since when, how many requests have brought how many bytes."""
        self._running = 0
        self._times: deque[float] = deque(maxlen=_NUM_TIMES)
        self._closed = False
        self._counts = {"bytes": 0, "requests": 0, "failures": 0}
        self._seconds = 0.0
        self._heard_s = 0.0
        self._events = {"retries": 0, "hedges": 0, "hedges_won": 0, "slow_downs": 0}

    def submit(self, read: _Read, *, urgent: bool) -> None:
        """Do it soon. Raises `TransientError` when there is no thread for it."""
        self._queue(_Request(read), urgent=urgent)

    def _queue(self, request: _Request, *, urgent: bool) -> None:
        if self._closed:
            raise PermanentError(f"{self._bucket.uri}: read after it was closed")
        with self._lock:
            (self._urgent if urgent else self._others).append(request)
            self._by_start[request.file, request.start] = request
            wanted = min(len(self._urgent) + len(self._others), int(self._at_once) - self._running)
            self._running += max(wanted, 0)
        for number in range(wanted):
            try:
                self._threads.submit(self._work)
            except TransientError:
                with self._lock:
                    self._running -= wanted - number
                    if self._running:
                        return
                raise

    def hurry(self, read: _Read) -> None:
        """A caller waits for it now."""
        with self._lock:
            request = self._by_start.get((read.file, read.offset))
            if request is not None and request in self._others:
                self._others.remove(request)
                self._urgent.append(request)

    def _work(self) -> None:
        while (request := self._take()) is not None:
            if not request.is_over:
                self._ask(request)

    def _take(self) -> _Request | None:
        """What is asked for next, with what goes on where it ends; None when this thread is not needed any more."""
        with self._lock:
            while self._running <= int(self._at_once) and (waiting := self._urgent or self._others):
                request = waiting.popleft()
                if request.is_taken:
                    continue
                more: _Request | None = request
                while more is not None and more.end - request.start <= _MOST_BYTES:
                    more.is_taken = True
                    self._by_start.pop((more.file, more.start), None)
                    request.reads += more.reads if more is not request else []
                    request.end = more.end
                    more = self._by_start.get((request.file, request.end))
                return request
            self._running -= 1
            return None

    def _ask(self, request: _Request) -> None:
        began_s = time.monotonic()
        is_hedge = request.num_running > 0
        if self._closed or request.left_s(self._heard_s) <= 0:
            why = "the place was closed" if self._closed else "not read in time"
            request.finish(TransientError(f"{request.file.what}: {why}"))
            return
        request.num_running += 1
        if not is_hedge:
            self._timer.after(min(self._late_s(), request.until_s - began_s), partial(self._look, request))
        try:
            data = self._get(request)
        except BootseerError as error:
            self._failed(request, error)
            return
        finally:
            request.num_running -= 1
        seconds = time.monotonic() - began_s
        self._heard_s = time.monotonic()
        is_first = request.finish(None, data)
        with self._lock:
            self._times.append(seconds)
            self._counts["requests"] += 1
            self._counts["bytes"] += len(data)
            self._seconds += seconds
            self._events["hedges_won"] += is_hedge and is_first
            self._adapt(len(data))

    def _adapt(self, num_bytes: int) -> None:
        """Make more requests at once where that brings more. Under the lock."""
        began_s, num_requests, num_before = self._window
        self._window = (began_s, num_requests + 1, num_before + num_bytes)
        if num_requests + 1 < self._at_once:
            return
        now_s = time.monotonic()
        rate = self._window[2] / max(now_s - began_s, 1e-6)
        self._window = (now_s, 0, 0)
        # Where nothing waits, the rate is that of the readers.
        if (self._urgent or self._others) and rate > _GAIN * self._best_rate:
            self._best_rate = rate
            self._at_once = min(1.5 * self._at_once, _MAX_AT_ONCE)

    def _get(self, request: _Request) -> memoryview:
        file, length = request.file, request.end - request.start
        options: Any = {"if_match": file.e_tag}
        if length < file.size_bytes:  # some servers answer as if all of it was no range
            options["range"] = (request.start, request.end)
        with self._bucket.mapping(file.key):
            try:
                data = memoryview(obstore.get(self._bucket.reader, file.key, options=options).bytes())
            except PreconditionError as error:
                raise ChangedError(f"{file.what} was changed while it was read") from error
            except Exception as error:
                if status_of(error) in (429, 503):
                    self._slow_down()
                raise
        if len(data) != length:
            raise OtherRangeError(f"{file.what}: the server sends {len(data)} bytes, {length} were requested")
        return data

    def _slow_down(self) -> None:
        with self._lock:
            self._at_once, self._best_rate = max(self._at_once / 2, 1.0), 0.0
            self._events["slow_downs"] += 1

    def _failed(self, request: _Request, error: BootseerError) -> None:
        """Ask again later, unless another request for the same is under way."""
        with self._lock:
            self._counts["failures"] += 1
            request.num_failures += 1
        if request.num_running > 1:
            return
        is_liar = isinstance(error, OtherRangeError) and request.num_failures >= _MAX_LIES
        wait_s = pause_s(request.num_failures, error)
        if (
            is_liar
            or isinstance(error, ChangedError | SilentError)
            or not isinstance(error, TransientError)
            or time.monotonic() + wait_s > request.until_s
        ):
            if time.monotonic() + wait_s > request.until_s:
                self._tell_silence(request)
            request.finish(error)
            return
        with self._lock:
            self._events["retries"] += 1
        self._timer.after(wait_s, partial(self._again, request))

    def _tell_silence(self, request: _Request) -> None:
        """A request had all its time: the server answers nothing, unless others got their bytes meanwhile."""
        if not request.is_over and self._heard_s < time.monotonic() - request.deadline_s:
            self._bucket.note_silence()

    def _again(self, request: _Request) -> None:
        request.is_taken = False
        try:
            self._queue(request, urgent=True)
        except BootseerError as error:
            request.finish(error)

    def _look(self, request: _Request) -> None:
        """A request had its time, or its reads have."""
        left_s = request.left_s(self._heard_s)
        if left_s <= 0:
            self._tell_silence(request)
            request.finish(TransientError(f"{request.file.what}: the server did not answer in time"))
        if request.is_over or not request.num_running:
            return
        self._timer.after(left_s, partial(self._look, request))
        with self._lock:
            if request.is_hedged or self._events["hedges"] > _MOST_HEDGES * self._counts["requests"]:
                return
            self._events["hedges"] += 1
        request.is_hedged = True
        with suppress(BootseerError):
            self._threads.submit(partial(self._ask, request))

    def _late_s(self) -> float:
        """After how long a request is late: four times what nineteen of twenty take."""
        with self._lock:
            times = sorted(self._times)
        return max(4 * times[len(times) * 19 // 20], _LEAST_LATE_S) if times else _FIRST_LATE_S

    def facts(self) -> dict[str, object]:
        """See `Place.facts`; a bucket is one nameless node."""
        with self._lock:
            node = {**self._counts, "seconds": self._seconds}
            return {"nodes": {"": node}, **self._events, "refreshes": 0, "fallback": ""}

    def close(self) -> None:
        """Reads that have not ended end with an error."""
        self._closed = True
        with self._lock:
            left = [*self._urgent, *self._others]
        for request in left:
            request.finish(TransientError(f"{self._bucket.uri}: closed before it was read"))
        self._timer.close(drop=True)
        self._threads.close()


class ObjectFile:
    """An `OpenFile`: one version of an object, by its entity tag."""

    def __init__(self, reads: ObjectReads, key: str, what: str, meta: Any) -> None:
        self.reads = reads
        self.key = key
        self.what = what
        self.e_tag: str = meta["e_tag"]
        self.size_bytes: int = meta["size"]
        self.version = f"{self.e_tag}-{self.size_bytes:x}"
        self._closed = False

    def nodes(self, offset: int) -> tuple[str, ...]:
        """See `OpenFile.nodes`: a bucket has none."""
        return ()

    def delay_s(self, offset: int, length: int) -> float:
        return 0.0

    def read_into(
        self,
        offset: int,
        into: memoryview,
        done: Callable[[ReadOutcome], None],
        *,
        check: bool = True,
        urgent: bool = True,
        avoid: frozenset[str] = frozenset(),
        deadline_s: float = 60.0,
        here: bool = False,
    ) -> _Read:
        """See `OpenFile.read_into`. Servers check nothing that they send: only digests of our own find wrong bytes."""
        if offset < 0 or offset + len(into) > self.size_bytes:
            raise PermanentError(f"{self.what}: bytes {offset} to {offset + len(into)} of {self.size_bytes}")
        if self._closed:
            raise PermanentError(f"{self.what}: read after it was closed")
        read = _Read(self, offset, into, done, time.monotonic() + deadline_s)
        if not len(into):
            read.finish(None)
        else:
            self.reads.submit(read, urgent=urgent)
        return read

    def close(self) -> None:
        self._closed = True


def entry_of(path: str, meta: Any) -> Entry:
    """An object as a file of a place."""
    return Entry(path, False, meta["size"], time_ns(meta), FILE_MODE, "", "", f"{meta['e_tag']}-{meta['size']:x}")


class ObjectPart:
    """A `PartWriter`. Small ones are put at their end, by one request; larger ones go in parts while they are written.
    Nothing is there before the end, and nothing is left of one that was dropped."""

    nodes: tuple[str, ...] = ()

    def __init__(self, bucket: Bucket, path: str, key: str, most_bytes: int = 0) -> None:
        self.path = path
        # An upload has at most MAX_PARTS parts. Of unknown length: parts of the usual size.
        self._part_bytes = max(PART_BYTES, -(-most_bytes // MAX_PARTS) if most_bytes <= _MAX_OBJECT_BYTES else 0)
        self._bucket = bucket
        self._key = key
        self._buffer = bytearray()
        self._pieces: queue.Queue[bytes | None] = queue.Queue(_MAX_AHEAD)
        self._is_sending = False
        self._outcome: queue.Queue[BaseException | None] = queue.Queue()
        self._is_dropped = False
        self._ended = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer += data
        while len(self._buffer) > self._part_bytes:
            if not self._is_sending:
                _uploads.submit(self._send)
                self._is_sending = True
            self._give(bytes(memoryview(self._buffer)[: self._part_bytes]))
            del self._buffer[: self._part_bytes]

    def _give(self, piece: bytes | None) -> None:
        until_s = time.monotonic() + WRITE_S
        while time.monotonic() < until_s and self._outcome.empty():
            with suppress(queue.Full):
                self._pieces.put(piece, timeout=0.5)
                return
        self._check()
        raise TransientError(f"{self._bucket.uri}/{self.path}: the server took nothing for {WRITE_S:.0f} s")

    def _check(self) -> None:
        with suppress(queue.Empty):
            error = self._outcome.get_nowait()
            if error is not None:
                self._outcome.put(error)
                raise error

    def _send(self) -> None:
        def pieces() -> Iterator[bytes]:
            while (piece := self._pieces.get()) is not None:
                yield piece
            if self._is_dropped:  # obstore ends the upload then, and the server forgets its parts
                raise TransientError("dropped")

        try:
            with self._bucket.mapping(self.path):
                obstore.put(
                    self._bucket.writer, self._key, pieces(), use_multipart=True, chunk_size=self._part_bytes,
                    max_concurrency=PARTS_AT_ONCE,
                )  # fmt: skip
            self._outcome.put(None)
        except BaseException as error:  # panics of Rust code are not Exceptions
            self._outcome.put(error if isinstance(error, BootseerError) else TransientError(str(error)))

    def close(self) -> tuple[str, ...]:
        self._ended = True
        if not self._is_sending:
            data = bytes(self._buffer)
            put = partial(obstore.put, self._bucket.writer, self._key, data, use_multipart=False)
            self._bucket.call(self.path, put, WRITE_S)
            return ()
        if self._buffer:
            self._give(bytes(self._buffer))
        self._give(None)
        try:
            error = self._outcome.get(timeout=WRITE_S)
        except queue.Empty:
            raise TransientError(
                f"{self._bucket.uri}/{self.path}: the server did not end the upload within {WRITE_S:.0f} s"
            ) from None
        if error is not None:
            raise error
        return ()

    def abort(self) -> None:
        if self._ended:
            return
        self._ended = self._is_dropped = True
        if self._is_sending:
            with suppress(BootseerError):
                self._give(None)
                self._outcome.get(timeout=WRITE_S)


_uploads = Executor("bootseer-upload")

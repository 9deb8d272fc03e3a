"""Reading objects: ranges, by many requests at once.

Bytes go to their readers as they arrive. A request that has brought nothing for long is made again for what is missing,
over another connection (hedged); one that fails is made again, until its deadline. One that is only slow is
not: where many share a full link, what it has left would cross that twice. More are made at once as long as that brings
more; half as many after the server has said that it is asked too much (429, 503). Each is for as much as lies together,
up to a share of what readers wait for: a server's work for a byte falls with the size of the request.
"""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Unpack

import obstore
from obstore.exceptions import PreconditionError

from bootseer.errors import BootseerError, PermanentError, TransientError
from bootseer.io.executor import Executor, report_exception, run_reported
from bootseer.io.pooled_reads import DEADLINE_S, FileWithoutNodes, ReadOptions, ReadOutcome
from bootseer.io.retry import pause_s
from bootseer.io.timer import Timer
from bootseer.places.bucket import Bucket, OtherRangeError, SilentError, status_of, time_ns
from bootseer.places.place import ChangedError, Entry

_MAX_AT_ONCE = 48
_FIRST_AT_ONCE = 4.0
_GAIN = 1.2
"""Half as many requests again must bring so many times the rate, or the link or the processors are the limit."""
_FORGETS = 0.9
"""How fast the best rate is forgotten, so that more requests at once are tried again when conditions have changed."""
_LEAST_LATE_S, _FIRST_LATE_S = 1.0, 10.0
"""Bounds of how long a request may bring nothing, and that bound before it is known how long they usually do."""
_MOST_HEDGES = 0.05
"""Hedges per request, unless one has brought nothing for `_DEAD` times the time after which it is late: then its
connection is dead, and nothing crosses a full link twice."""
_DEAD = 4.0
_MAX_HEDGES = 3
"""Of one request."""
_MOST_PUT_OFF = 4
_NUM_PAUSES = 64
_PIECE_BYTES = 256 << 10
"""So much is handed over at a time: it still is in the processor's cache when it is copied to its reader."""
_MOST_BYTES = 8 << 20
"""Of one request: what costs a server little more than a small one."""
_LARGEST_BYTES = 32 << 20
"""... and where readers wait for so much that all requests at once can be as large."""
_MAX_LIES = 5
"""A server that sends other bytes than it is asked for is not asked more often."""
FILE_MODE = 0o644
FOLDER_MODE = 0o755


class _Read:
    """One range that a caller waits for."""

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

    def prioritize(self) -> None:
        self.file.reads.prioritize(self)

    def remaining_s(self) -> float:
        return 0.0

    def put(self, start: int, data: memoryview) -> bool:
        """Take what has arrived from `start` on, as all of this read before it has: whether this was the last of it."""
        low, high = max(start, self.offset), min(start + len(data), self.end)
        if low >= high:
            return False
        with self._lock:
            if self.is_over:
                return False
            self._into[low - self.offset : high - self.offset] = data[low - start : high - start]
            is_last = self.is_over = high == self.end
        if is_last:  # not `is_over`: another connection, or the deadline, may have ended the read since
            self._tell(None)
        return is_last

    def finish(self, error: BootseerError | None) -> None:
        """Nothing more is written; the caller gets the error, unless the read has ended."""
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
        self._tell(error)

    def _tell(self, error: BootseerError | None) -> None:
        run_reported(partial(self._done, ReadOutcome(error, "")))  # its error must not end the reads joined to it


class _Request:
    """One range of an object that is asked for at once: of a read, and of those that go on where it ends."""

    def __init__(self, read: _Read) -> None:
        self.reads = [read]
        self.file = read.file
        self.start = read.offset
        self.end = read.end
        self.at = read.offset
        """All before it has arrived."""
        self.heard_s = 0.0
        """When something of it last arrived, or it was asked for."""
        self.until_s = read.until_s
        self.deadline_s = read.until_s - time.monotonic()
        self.put_off = 0
        """How often its deadline was put off."""
        self.num_failures = 0
        self.num_running = 0
        self.num_hedges = 0

    @property
    def is_over(self) -> bool:
        return all(read.is_over for read in reversed(self.reads))  # the last one goes on longest

    def remaining_s(self, heard_s: float) -> float:
        """Seconds until its deadline, which is put off, but not for ever, while the server gives others their bytes:
        what is asked for at once shares one link. `heard_s`: when it last did."""
        now_s = time.monotonic()
        if self.until_s <= now_s and self.put_off < _MOST_PUT_OFF and heard_s > now_s - self.deadline_s:
            self.put_off += self.heard_s > 0  # while it waits for its turn, nothing is wrong with it
            self.until_s = now_s + self.deadline_s
        return self.until_s - now_s

    def put(self, start: int, data: memoryview) -> bool:
        """Give its reads what has arrived from `start` on: whether this was the last that they needed."""
        end, is_last = start + len(data), False
        first = bisect_right(self.reads, start, key=lambda read: read.offset) - 1
        for number in range(first, len(self.reads)):
            if self.reads[number].offset >= end:
                break
            is_last = self.reads[number].put(start, data)
        self.at = max(self.at, end)
        self.heard_s = time.monotonic()
        return is_last and end >= self.end

    def finish(self, error: BootseerError) -> None:
        """End those of its reads that have not ended."""
        for read in self.reads:
            read.finish(error)


class ObjectReads:
    """All reads of a place. Safe to use from many threads."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        # As many again for hedges: a thread whose connection is dead waits for obstore's timeout.
        self._threads = Executor("bootseer-objects", 2 * _MAX_AT_ONCE)
        self._timer = Timer("bootseer-objects-timer", threads=1)
        self._lock = threading.Lock()
        self._urgent: OrderedDict[tuple[ObjectFile, int], _Request] = OrderedDict()
        self._others: OrderedDict[tuple[ObjectFile, int], _Request] = OrderedDict()
        """Those that wait, by file and where they begin."""
        self._unfinished: weakref.WeakSet[_Read] = weakref.WeakSet()
        """Reads that may not have ended; those that have ended are removed with their last reference."""
        self._at_once = self._enough = _FIRST_AT_ONCE
        """How many requests are made at once, and with how many the best rate was reached."""
        self._best_rate = 0.0
        self._begin_window()
        self._running = 0
        """Threads that take requests. One whose request was hedged is not counted: the hedge's goes on in its place."""
        self._pauses: deque[float] = deque(maxlen=_NUM_PAUSES)
        """Of each request, the longest time in which nothing arrived."""
        self._closed = False
        self._counts = {"bytes": 0, "requests": 0, "failures": 0}
        self._seconds = 0.0
        self._heard_s = 0.0
        self._events = {"retries": 0, "hedges": 0, "hedges_won": 0, "slow_downs": 0}

    def submit(self, read: _Read, *, urgent: bool) -> None:
        """Do it soon. Raises `TransientError` when there is no thread for it."""
        self._bucket.check_process()
        with self._lock:
            self._unfinished.add(read)
        self._queue(_Request(read), urgent=urgent)

    def _queue(self, request: _Request, *, urgent: bool) -> None:
        if self._closed:
            raise PermanentError(f"{self._bucket.uri}: read after it was closed")
        with self._lock:
            waiting, key = self._urgent if urgent else self._others, (request.file, request.start)
            if key in self._urgent or key in self._others:
                key = (request.file, -1 - id(request))  # of another reader: what ends there goes on with that one
            waiting[key] = request
            if not self._running:
                self._begin_window()
            try:
                self._start_threads()
            except BaseException as error:
                if not self._running or not isinstance(error, TransientError):
                    del waiting[key]  # the caller uses the memory for something else now
                    raise

    def _start_threads(self) -> None:
        """As many as may work and have something to do. Under the lock. Raises `TransientError`."""
        for _ in range(min(len(self._urgent) + len(self._others), int(self._at_once) - self._running)):
            self._threads.submit(self._work)
            self._running += 1

    def prioritize(self, read: _Read) -> None:
        """A caller waits for it now."""
        key = (read.file, read.offset)
        with self._lock:
            if (request := self._others.pop(key, None)) is not None:
                self._urgent[key] = request

    def _work(self, request: _Request | None = None, hedge: int = 0) -> None:
        """Make requests, one after another, beginning with the given hedge, until a later one goes on in this thread's
        place."""
        while True:
            if request is None:
                if (request := self._take()) is None:
                    return
                hedge = request.num_hedges
            if not request.is_over:
                self._ask(request)
            with self._lock:
                if request.num_hedges != hedge:
                    return
            request = None

    def _take(self) -> _Request | None:
        """What is asked for next, with what goes on where it ends; None when this thread is not needed any more."""
        with self._lock:
            waiting = self._urgent or self._others
            if not waiting or self._running > int(self._at_once):
                self._running -= 1
                return None
            most_bytes = self._most_bytes()
            _, request = waiting.popitem(last=False)
            while True:
                key = (request.file, request.end)
                waiting = self._urgent if key in self._urgent else self._others
                more = waiting.get(key)
                if more is None or more.end - request.start > most_bytes:
                    return request
                del waiting[key]
                request.reads += more.reads
                request.end = more.end

    def _most_bytes(self) -> float:
        """Of the next request: twice its share of what readers wait for, since that grows again as others bring theirs.
        What is only read ahead is not joined to so much: a reader may want another part of it sooner. Under the lock.
        """
        wanted = sum(request.end - request.start for request in self._urgent.values())
        return max(_MOST_BYTES, min(2 * wanted / self._at_once, _LARGEST_BYTES))

    def _ask(self, request: _Request) -> None:
        began_s = time.monotonic()
        if self._closed or request.remaining_s(self._heard_s) <= 0:
            why = "the place was closed" if self._closed else "not read in time"
            request.finish(TransientError(f"{request.file.what}: {why}"))
            return
        with self._lock:
            is_hedge = request.num_running > 0
            request.num_running += 1
        request.heard_s = began_s
        if not is_hedge:
            with suppress(TransientError):  # no thread for the timer: the request is not hedged, and obstore ends it
                self._timer.after(min(self._late_s(), request.until_s - began_s), partial(self._look, request))
        failure: BootseerError | None = None
        is_first = False
        try:
            is_first = self._receive(request)
        except BaseException as error:  # panics of Rust code are not Exceptions
            if isinstance(error, BootseerError):
                failure = error
            else:
                report_exception()
                failure = TransientError(f"{request.file.what}: {type(error).__name__}: {error}")
        with self._lock:
            request.num_running -= 1
            is_alone = not request.num_running
        if failure is not None:
            self._failed(request, failure, is_alone=is_alone)
            return
        with self._lock:
            self._counts["requests"] += 1
            self._seconds += time.monotonic() - began_s
            self._events["hedges_won"] += is_hedge and is_first
            self._window_requests += 1
            self._adapt()

    def _receive(self, request: _Request) -> bool:
        """Ask for what is missing of a request, until all of it has arrived, by whichever connection: whether the last
        of it came by this one."""
        file, start = request.file, request.at
        at, heard_s, pause_s, is_first = start, time.monotonic(), 0.0, False
        options: Any = {} if file.e_tag.startswith("W/") else {"if_match": file.e_tag}  # a weak tag never matches
        if request.end - start < file.size_bytes:  # some servers answer as if all of it was no range
            options["range"] = (start, request.end)
        with self._bucket.mapping(file.key):
            try:
                answer = obstore.get(self._bucket.reader, file.key, options=options)
                if (answer.meta["e_tag"] or file.e_tag).removeprefix("W/") != file.e_tag.removeprefix("W/"):
                    raise PreconditionError("the server ignores If-Match")
                for piece in answer.stream(min_chunk_size=_PIECE_BYTES):
                    data, now_s = memoryview(piece), time.monotonic()
                    at, heard_s, pause_s = at + len(data), now_s, max(pause_s, now_s - heard_s)
                    if at > request.end:
                        break
                    is_first = request.put(at - len(data), data)
                    self._heard(len(data))
                    if request.is_over and at < request.end:
                        return False  # which closes the connection: the rest is not sent
            except PreconditionError as error:
                raise ChangedError(f"{file.what} was changed while it was read") from error
            except Exception as error:
                if status_of(error) in (429, 503):
                    self._slow_down()
                raise
        if at != request.end:
            raise OtherRangeError(
                f"{file.what}: the server sends {at - start} bytes, {request.end - start} were requested"
            )
        with self._lock:
            self._pauses.append(pause_s)
        return is_first

    def _heard(self, num_bytes: int) -> None:
        with self._lock:
            self._heard_s = time.monotonic()
            self._counts["bytes"] += num_bytes
            self._window_bytes += num_bytes
            self._adapt()

    def _adapt(self) -> None:
        """Make more requests at once where that brings more, and else as many as before. Under the lock."""
        if self._window_requests < self._at_once and self._window_bytes < self._at_once * _MOST_BYTES:
            return
        rate = self._window_bytes / max(time.monotonic() - self._window_began_s, 1e-6)
        self._begin_window()
        if not (self._urgent or self._others):
            return  # the rate is that of the readers
        if rate > _GAIN * self._best_rate:
            self._best_rate, self._enough = rate, self._at_once
            self._at_once = min(1.5 * self._at_once, _MAX_AT_ONCE)
            with suppress(TransientError):
                self._start_threads()
        else:
            self._best_rate, self._at_once = _FORGETS * self._best_rate, self._enough

    def _begin_window(self) -> None:
        """From now on, what arrives and ends is counted for the next measurement of the rate."""
        self._window_began_s = time.monotonic()
        self._window_bytes = self._window_requests = 0

    def _slow_down(self) -> None:
        with self._lock:
            self._at_once = self._enough = max(self._at_once / 2, 1.0)
            self._best_rate = 0.0
            self._events["slow_downs"] += 1

    def _failed(self, request: _Request, error: BootseerError, *, is_alone: bool) -> None:
        """Ask again later, unless another connection is still asked for the same."""
        with self._lock:
            self._counts["failures"] += 1
            request.num_failures += 1
        if not is_alone:
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
                self._note_silence(request)
            request.finish(error)
            return
        with self._lock:
            self._events["retries"] += 1
        try:
            self._timer.after(wait_s, partial(self._again, request))
        except TransientError:
            request.finish(error)

    def _note_silence(self, request: _Request) -> None:
        """A request had all its time: the server is silent, unless it has sent bytes of others meanwhile."""
        if not request.is_over and self._heard_s < time.monotonic() - request.deadline_s:
            self._bucket.note_silence()

    def _again(self, request: _Request) -> None:
        try:
            self._queue(request, urgent=True)
        except BootseerError as error:
            request.finish(error)

    def _look(self, request: _Request) -> None:
        """It may be late, or its time may be up."""
        left_s = request.remaining_s(self._heard_s)
        if left_s <= 0:
            self._note_silence(request)
            request.finish(TransientError(f"{request.file.what}: the server did not answer in time"))
        if request.is_over or not request.num_running:
            return
        late_s = self._late_s()
        with self._lock:
            is_allowed = self._events["hedges"] <= _MOST_HEDGES * self._counts["requests"]
            wait_s = request.heard_s + (late_s if is_allowed else _DEAD * late_s) - time.monotonic()
            # Under the lock: a thread whose request has just ended goes on, and no hedge may take its place.
            if wait_s <= 0 and request.num_running and request.num_hedges < _MAX_HEDGES:
                with suppress(BootseerError):
                    self._threads.submit(partial(self._work, request, request.num_hedges + 1))
                    request.num_hedges += 1
                    self._events["hedges"] += 1
        self._timer.after(min(left_s, wait_s if wait_s > 0 else late_s), partial(self._look, request))

    def _late_s(self) -> float:
        """How long a request may bring nothing: four times the longest pause of nineteen of twenty."""
        with self._lock:
            pauses = sorted(self._pauses)
        return max(4 * pauses[len(pauses) * 19 // 20], _LEAST_LATE_S) if pauses else _FIRST_LATE_S

    def facts(self) -> dict[str, object]:
        """See `Place.facts`; a bucket is one nameless node."""
        with self._lock:
            node = {**self._counts, "seconds": self._seconds}
            return {"nodes": {"": node}, **self._events, "refreshes": 0, "fallback": ""}

    def close(self) -> None:
        """Reads that have not ended end with an error."""
        self._closed = True
        with self._lock:
            left = list(self._unfinished)
        for read in left:
            read.finish(TransientError(f"{self._bucket.uri}: closed before it was read"))
        self._timer.close(drop=True)
        self._threads.close()


class ObjectFile(FileWithoutNodes):
    """An `OpenFile`: one version of an object, by its entity tag."""

    def __init__(self, reads: ObjectReads, key: str, what: str, meta: Any) -> None:
        self.reads = reads
        self.key = key
        self.what = what
        self.e_tag: str = meta["e_tag"]
        self.size_bytes: int = meta["size"]
        self.version = f"{self.e_tag}-{self.size_bytes:x}"
        self._closed = False

    def read_into(
        self, offset: int, into: memoryview, done: Callable[[ReadOutcome], None], **options: Unpack[ReadOptions]
    ) -> _Read:
        """See `OpenFile.read_into`. Servers check nothing that they send: only digests of our own find wrong bytes."""
        if offset < 0 or offset + len(into) > self.size_bytes:
            raise PermanentError(f"{self.what}: bytes {offset} to {offset + len(into)} of {self.size_bytes}")
        if self._closed:
            raise PermanentError(f"{self.what}: read after it was closed")
        read = _Read(self, offset, into, done, time.monotonic() + options.get("deadline_s", DEADLINE_S))
        if not len(into):
            read.finish(None)
        else:
            self.reads.submit(read, urgent=options.get("urgent", True))
        return read

    def close(self) -> None:
        self._closed = True


def entry_of(path: str, meta: Any) -> Entry:
    """An object as a file of a place."""
    return Entry(path, False, meta["size"], time_ns(meta), FILE_MODE, "", "", f"{meta['e_tag']}-{meta['size']:x}")


def folder_entry(path: str, mtime_ns: int) -> Entry:
    """A folder, of which a bucket knows nothing but when its link was made."""
    return Entry(path, True, 0, mtime_ns, FOLDER_MODE, "", "", "")

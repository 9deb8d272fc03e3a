"""Reading objects: ranges, by many concurrent requests.

- Bytes are copied to their readers as they arrive.
- A request that has received nothing for long is hedged: its missing bytes are requested over another connection. A
  failed one is retried until its deadline. A slow one is neither: on a full link its bytes would be sent twice.
- The number of concurrent requests grows as long as the throughput grows, and is halved when the server is overloaded
  (429, 503).
- Adjacent ranges are joined into one request, up to a share of what readers wait for: large requests cost a server less
  per byte.
"""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from typing import Any, Unpack

from obstore.exceptions import PreconditionError

from bootseer.errors import BootseerError, PermanentError, TransientError
from bootseer.io.executor import Executor, report_exception, run_reported
from bootseer.io.pooled_reads import DEADLINE_S, FileWithoutNodes, ReadOptions, ReadOutcome
from bootseer.io.retry import pause_s
from bootseer.io.timer import Timer
from bootseer.places.bucket import Bucket, OtherRangeError, SilentError, status_of, time_ns
from bootseer.places.gets import Gets
from bootseer.places.place import ChangedError, Entry

_MAX_CONCURRENT = 48
_FIRST_CONCURRENT = 4.0
_GAIN = 1.2
"""1.5 times as many requests must have this many times the throughput; otherwise link or processors are the limit."""
_DECAY = 0.9
"""The best throughput decays, so that more concurrent requests are tried again when conditions have changed."""
_MIN_LATE_S, _FIRST_LATE_S = 1.0, 10.0
"""When a request that receives nothing is late: at the earliest, and before the usual pauses are known."""
_HEDGE_SHARE, _FREE_HEDGES = 0.05, 4
"""Hedges per request, and a few more, because many places make few requests. Beyond that, only a request that has
received nothing for `_DEAD` times as long as a late one is hedged: its connection is dead, so nothing is sent twice."""
_DEAD = 4.0
_MAX_HEDGES = 3
"""Per request."""
_MAX_EXTENSIONS = 4
"""How often the deadline of a request is extended while the server sends others their bytes."""
_NUM_PAUSES = 64
_REQUEST_BYTES = 8 << 20
"""Usual limit of one request, which costs a server little more than a small one."""
_MAX_REQUEST_BYTES = 32 << 20
"""The limit if readers wait for enough bytes to make all concurrent requests as large."""
_MAX_WRONG_RANGES = 5
"""After this many responses with another range than requested, a request fails."""
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
        """Copy bytes from `start` on, after all earlier ones of this read. Returns whether the read is complete."""
        low, high = max(start, self.offset), min(start + len(data), self.end)
        if low >= high:
            return False
        with self._lock:
            if self.is_over:
                return False
            self._into[low - self.offset : high - self.offset] = data[low - start : high - start]
            is_last = self.is_over = high == self.end
        if is_last:  # not `is_over`: another connection or the deadline may have ended the read since
            self._report(None)
        return is_last

    def finish(self, error: BootseerError | None) -> None:
        """End the read with this error, unless it has ended. Its memory is not written to any more."""
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
        self._report(error)

    def _report(self, error: BootseerError | None) -> None:
        done = self._done
        del self._done, self._into  # the caller keeps its ticket, and the timer its request for some seconds
        run_reported(partial(done, ReadOutcome(error, "")))  # its error must not end the joined reads


class _Request:
    """One requested range of an object: that of a read, and of adjacent reads after it."""

    def __init__(self, read: _Read) -> None:
        self.reads = [read]
        self.file = read.file
        self.start = read.offset
        self.end = read.end
        self.at = read.offset
        """All bytes before this offset have arrived."""
        self.received_s = 0.0
        """When bytes last arrived, or the request was sent."""
        self.until_s = read.until_s
        self.deadline_s = read.until_s - time.monotonic()
        self.num_extensions = 0
        """Of the deadline."""
        self.num_failures = 0
        self.num_running = 0
        self.num_hedges = 0
        self.is_left = False
        """Whether the latest of its threads has gone on to other requests."""

    @property
    def is_over(self) -> bool:
        return all(read.is_over for read in reversed(self.reads))  # the last one ends last

    def remaining_s(self, received_s: float) -> float:
        """Seconds until its deadline, which is extended a few times while the server sends bytes of other requests:
        they share the link. `received_s`: when bytes of any request last arrived."""
        now_s = time.monotonic()
        if self.until_s <= now_s and self.num_extensions < _MAX_EXTENSIONS and received_s > now_s - self.deadline_s:
            self.num_extensions += self.received_s > 0  # while it is queued, extensions do not count
            self.until_s = now_s + self.deadline_s
        return self.until_s - now_s

    def put(self, start: int, data: memoryview) -> bool:
        """Copy bytes from `start` on to the reads. Returns whether these completed the last one."""
        end, is_last = start + len(data), False
        first = bisect_right(self.reads, start, key=lambda read: read.offset) - 1
        for number in range(first, len(self.reads)):
            if self.reads[number].offset >= end:
                break
            is_last = self.reads[number].put(start, data)
        self.at = max(self.at, end)
        self.received_s = time.monotonic()
        return is_last and end >= self.end

    def finish(self, error: BootseerError) -> None:
        """End its unfinished reads with this error."""
        for read in self.reads:
            read.finish(error)


class ObjectReads:
    """All reads of a place. Safe to use from many threads."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._gets = Gets(bucket)
        # Twice as many, for hedges: a thread whose connection is dead waits for its timeout.
        self._threads = Executor("bootseer-objects", 2 * _MAX_CONCURRENT)
        self._timer = Timer("bootseer-objects-timer", threads=1)
        self._lock = threading.Lock()
        self._urgent: OrderedDict[tuple[ObjectFile, int], _Request] = OrderedDict()
        self._others: OrderedDict[tuple[ObjectFile, int], _Request] = OrderedDict()
        """Queued requests, by file and offset."""
        self._unfinished: weakref.WeakSet[_Read] = weakref.WeakSet()
        """Reads that may not have ended; those that have ended are removed with their last reference."""
        self._concurrent = self._best_concurrent = _FIRST_CONCURRENT
        """The limit of concurrent requests, and the limit at which the best throughput was measured."""
        self._best_rate = 0.0
        self._begin_window()
        self._running = 0
        """Threads that take requests. A hedge's thread replaces that of the hedged request, which is not counted."""
        self._pauses: deque[float] = deque(maxlen=_NUM_PAUSES)
        """The longest time without bytes of each recent request."""
        self._closed = False
        self._counts = {"bytes": 0, "requests": 0, "failures": 0}
        self._seconds = 0.0
        self._received_s = 0.0
        self._events = {"retries": 0, "hedges": 0, "hedges_won": 0, "slow_downs": 0}

    def submit(self, read: _Read, *, urgent: bool) -> None:
        """Queue a read. Raises `TransientError` if no thread can be started."""
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
                key = (request.file, -1 - id(request))  # the same range for another reader: it is not joined to others
            waiting[key] = request
            if not self._running:
                self._begin_window()
            try:
                self._start_threads()
            except BaseException as error:
                if not self._running or not isinstance(error, TransientError):
                    del waiting[key]  # the caller may reuse the memory
                    raise

    def _start_threads(self) -> None:
        """Start threads up to the limit and the number of queued requests. Under the lock. Raises `TransientError`."""
        for _ in range(min(len(self._urgent) + len(self._others), int(self._concurrent) - self._running)):
            self._threads.submit(self._work)
            self._running += 1

    def prioritize(self, read: _Read) -> None:
        """A reader waits for this read now."""
        key = (read.file, read.offset)
        with self._lock:
            if (request := self._others.pop(key, None)) is not None:
                self._urgent[key] = request

    def _work(self, request: _Request | None = None, hedge: int = 0) -> None:
        """Send queued requests one after another, first the given hedge. Ends when the current request is hedged,
        because the hedge's thread replaces this one."""
        while True:
            if request is None:
                if (request := self._take()) is None:
                    return
                hedge, request.is_left = request.num_hedges, False
            if not request.is_over:
                self._request(request)
            with self._lock:
                if request.num_hedges != hedge:
                    return
                request.is_left = True
            request = None

    def _take(self) -> _Request | None:
        """The next request, joined with adjacent ones; None if this thread is not needed any more."""
        with self._lock:
            waiting = self._urgent or self._others
            if not waiting or self._running > int(self._concurrent):
                self._running -= 1
                return None
            max_bytes = self._next_bytes()
            _, request = waiting.popitem(last=False)
            while True:
                key = (request.file, request.end)
                waiting = self._urgent if key in self._urgent else self._others
                more = waiting.get(key)
                if more is None or more.end - request.start > max_bytes:
                    return request
                del waiting[key]
                request.reads += more.reads
                request.end = more.end

    def _next_bytes(self) -> float:
        """The limit of the next request: twice its share of the bytes that readers wait for, because readers continue
        when other requests complete. Reads ahead do not count: a reader may need another part of them sooner. Under the
        lock."""
        wanted = sum(request.end - request.start for request in self._urgent.values())
        return max(_REQUEST_BYTES, min(2 * wanted / self._concurrent, _MAX_REQUEST_BYTES))

    def _request(self, request: _Request) -> None:
        began_s = time.monotonic()
        if self._closed or request.remaining_s(self._received_s) <= 0:
            why = "the place was closed" if self._closed else "not read in time"
            request.finish(TransientError(f"{request.file.what}: {why}"))
            return
        with self._lock:
            is_hedge = request.num_running > 0
            request.num_running += 1
        request.received_s = began_s
        if not is_hedge:
            with suppress(TransientError):  # no thread for the timer: no hedges, and its connection times out
                self._timer.after(min(self._late_s(), request.until_s - began_s), partial(self._check_late, request))
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
        """Receive the missing bytes of a request, until all have arrived over this or another connection. Returns
        whether the last ones arrived over this one."""
        file, start = request.file, request.at
        at, received_s, pause_s, is_first = start, time.monotonic(), 0.0, False
        with self._bucket.mapping(file.key), closing(self._gets.pieces(file, start, request.end)) as pieces:
            try:
                for piece in pieces:
                    data, now_s = memoryview(piece), time.monotonic()
                    at, received_s, pause_s = at + len(data), now_s, max(pause_s, now_s - received_s)
                    if at > request.end:
                        break
                    is_first = request.put(at - len(data), data)
                    self._received(len(data))
                    if request.is_over and at < request.end:
                        return False  # this closes the connection, so the rest is not sent
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

    def _received(self, num_bytes: int) -> None:
        with self._lock:
            self._received_s = time.monotonic()
            self._counts["bytes"] += num_bytes
            self._window_bytes += num_bytes
            self._adapt()

    def _adapt(self) -> None:
        """Raise the limit of concurrent requests if the throughput has grown, otherwise return to the best one. Under
        the lock."""
        if self._window_requests < self._concurrent and self._window_bytes < self._concurrent * _REQUEST_BYTES:
            return
        rate = self._window_bytes / max(time.monotonic() - self._window_began_s, 1e-6)
        self._begin_window()
        if not (self._urgent or self._others):
            return  # the readers, not the requests, limit the throughput
        if rate > _GAIN * self._best_rate:
            self._best_rate, self._best_concurrent = rate, self._concurrent
            self._concurrent = min(1.5 * self._concurrent, _MAX_CONCURRENT)
            with suppress(TransientError):
                self._start_threads()
        else:
            self._best_rate, self._concurrent = _DECAY * self._best_rate, self._best_concurrent

    def _begin_window(self) -> None:
        """Begin the next measurement of the throughput."""
        self._window_began_s = time.monotonic()
        self._window_bytes = self._window_requests = 0

    def _slow_down(self) -> None:
        with self._lock:
            self._concurrent = self._best_concurrent = max(self._concurrent / 2, 1.0)
            self._best_rate = 0.0
            self._events["slow_downs"] += 1

    def _failed(self, request: _Request, error: BootseerError, *, is_alone: bool) -> None:
        """Retry later, unless another connection still receives the same range."""
        with self._lock:
            self._counts["failures"] += 1
            request.num_failures += 1
        if not is_alone:
            return
        is_wrong = isinstance(error, OtherRangeError) and request.num_failures >= _MAX_WRONG_RANGES
        is_final = is_wrong or not isinstance(error, TransientError) or isinstance(error, ChangedError | SilentError)
        wait_s = pause_s(request.num_failures, error)
        is_late = time.monotonic() + wait_s > request.until_s
        if is_late:
            self._note_silence(request)
        if is_late or is_final:
            request.finish(error)
            return
        with self._lock:
            self._events["retries"] += 1
        try:
            self._timer.after(wait_s, partial(self._retry, request))
        except TransientError:
            request.finish(error)

    def _note_silence(self, request: _Request) -> None:
        """A request reached its deadline: the server is silent, unless it has sent bytes of other requests."""
        if not request.is_over and self._received_s < time.monotonic() - request.deadline_s:
            self._bucket.note_silence()

    def _retry(self, request: _Request) -> None:
        try:
            self._queue(request, urgent=True)
        except BootseerError as error:
            request.finish(error)

    def _check_late(self, request: _Request) -> None:
        """Hedge a late request, and fail it at its deadline."""
        left_s = request.remaining_s(self._received_s)
        if left_s <= 0:
            self._note_silence(request)
            request.finish(TransientError(f"{request.file.what}: the server did not answer in time"))
        if request.is_over or not request.num_running:
            return
        late_s = self._late_s()
        with self._lock:
            is_allowed = self._events["hedges"] < _FREE_HEDGES + _HEDGE_SHARE * self._counts["requests"]
            wait_s = request.received_s + (late_s if is_allowed else _DEAD * late_s) - time.monotonic()
            # Under the lock: the thread of a request that has just ended continues, so no hedge may replace it.
            if wait_s <= 0 and request.num_running and request.num_hedges < _MAX_HEDGES:
                with suppress(BootseerError):
                    self._threads.submit(partial(self._work, request, request.num_hedges + 1))
                    request.num_hedges += 1
                    self._running += request.is_left  # otherwise the hedge replaces a thread
                    request.is_left = False
                    self._events["hedges"] += 1
        self._timer.after(min(left_s, wait_s if wait_s > 0 else late_s), partial(self._check_late, request))

    def _late_s(self) -> float:
        """After how long without bytes a request is late: four times the 95th percentile of the longest pauses."""
        with self._lock:
            pauses = sorted(self._pauses)
        return max(4 * pauses[len(pauses) * 19 // 20], _MIN_LATE_S) if pauses else _FIRST_LATE_S

    def facts(self) -> dict[str, object]:
        """See `Place.facts`. The bucket is one node without a name."""
        with self._lock:
            node = {**self._counts, "seconds": self._seconds}
            return {"nodes": {"": node}, **self._events, "refreshes": 0, "fallback": ""}

    def close(self) -> None:
        """End all unfinished reads with an error."""
        self._closed = True
        with self._lock:
            left = list(self._unfinished)
        for read in left:
            read.finish(TransientError(f"{self._bucket.uri}: closed before it was read"))
        self._timer.close(drop=True)
        self._threads.close()
        self._gets.close()


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
        """See `OpenFile.read_into`. Servers send no checksums: only BootSeer's own digests detect wrong bytes."""
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
    """A folder, of which a bucket knows only the time of its link."""
    return Entry(path, True, 0, mtime_ns, FOLDER_MODE, "", "", "")

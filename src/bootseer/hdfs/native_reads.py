"""Reading through hdfs-native, for what `reads` does not support: encryption zones, erasure coding.

The same questions and answers as `reads`, with less knowledge: the library does not say which DataNode served, nor can
it be told which one to ask. A file that is opened again lists the replicas in another order; that is the hedge when no
bytes have come for a second.

A read is cut into pieces of 4 MiB within a block, larger ones being slowed down by the library's copies. Each is
fetched by a thread that may be left behind in the library, and only the worker that waits for it writes to the caller's
buffer: what comes too late goes nowhere. At most `_MAX_FETCHES` threads exist at a time, each with at most one piece.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from hdfs_native import Client, FileReader

from bootseer.errors import BootseerError, PermanentError, TransientError
from bootseer.hdfs.native import Native, mapping, never_destroy, note_read, wait_until_own
from bootseer.hdfs.requests import ReadOutcome
from bootseer.io.executor import Executor, report_exception
from bootseer.io.fork import after_fork, in_each_process

_PIECE_BYTES = 4 * 1024 * 1024
_WORKERS = 8
_MAX_FETCHES = 64
_MAX_TRIES = 6
"""Each asks another replica by chance."""
_LATE_S = 1.0
"""Without a byte for so long, another replica is asked too. Busy disks answer sooner."""
_LOST_S = 0.2
"""So soon a worker leaves a read that was given up."""
_OPEN_S = 60.0

Done: TypeAlias = Callable[[ReadOutcome], None]


class NativeReads:
    """Reads of many files. Safe to use from many threads."""

    def __init__(self, native: Native) -> None:
        self.native = native
        self.reason = ""
        """Why these reads do not go over own connections."""
        self.threads = Executor("bootseer-hdfs-native", _WORKERS)
        self._fetches = Executor("bootseer-hdfs-fetch", _MAX_FETCHES)
        self._facts = {"bytes": 0, "requests": 0, "seconds": 0.0, "failures": 0}
        self._counts = {"retries": 0, "hedges": 0, "hedges_won": 0, "refreshes": 0}
        in_each_process(self._begin_process)

    def open(self, path: str, *, deadline_s: float = _OPEN_S) -> NativeFile:
        """Begin to read a file as it is now. Raises `NotFoundError` and the like."""
        opened = self.native.call(f"{self.native.uri}{path}", lambda client: _open(client, path), deadline_s)
        return NativeFile(self, path, opened)

    def facts(self) -> Mapping[str, object]:
        """Figures of all reads so far; the nodes are not known."""
        with self._lock:
            return {"nodes": {"": dict(self._facts)}, **self._counts, "fallback": self.reason}

    def close(self) -> None:
        """End the workers once they have nothing to do. Nothing is read any more."""
        self._closed = True
        self.threads.close()
        self._fetches.close()

    def submit(self, piece: _Piece, urgent: bool) -> None:
        """Have a piece fetched. Raises `TransientError` when there is no thread for it."""
        if self._closed:
            raise PermanentError(f"{self.native.uri}: reading has ended")
        self.threads.submit(piece.run, urgent=urgent)

    def fetch(
        self, file: NativeFile, start: int, length: int, until: float, is_lost: Callable[[], bool]
    ) -> list[bytes]:
        """The bytes, from whichever try has all of them first. `is_lost`: whether they are not wanted any more."""
        ends: queue.SimpleQueue[_Fetch] = queue.SimpleQueue()
        running: list[_Fetch] = []
        problem: BootseerError | None = None
        try:
            for number in range(_MAX_TRIES):
                self._begin(_Fetch(file, start, length, again=number > 0, ends=ends), running)
                while running:
                    now = time.monotonic()
                    if is_lost():
                        raise TransientError(f"{file.what}: this read was given up")
                    if now >= until:
                        raise TransientError(f"{file.what}: bytes {start} to {start + length} did not come in time")
                    late_at = (
                        max(fetch.progress_at for fetch in running) + _LATE_S if number + 1 < _MAX_TRIES else until
                    )
                    if now >= late_at:
                        self._count("hedges")
                        break
                    with suppress(queue.Empty):
                        ended = ends.get(timeout=min(min(until, late_at) - now, _LOST_S))
                        running.remove(ended)
                        if ended.error is None:
                            if ended.again and running:
                                self._count("hedges_won")
                            return ended.pieces
                        problem = ended.error
                else:
                    if isinstance(problem, PermanentError):
                        break
                    self._count("retries")
        finally:
            for fetch in running:
                fetch.stopped = True
        raise problem or TransientError(f"{file.what}: nothing came")

    def done(self, num_bytes: int, seconds: float, *, failed: bool) -> None:
        """Count a piece."""
        with self._lock:
            self._facts["requests"] += 1
            self._facts["bytes"] += num_bytes
            self._facts["seconds"] += seconds
            self._facts["failures"] += failed

    def _begin(self, fetch: _Fetch, running: list[_Fetch]) -> None:
        try:
            self._fetches.submit(fetch.run, at_once=True)
        except TransientError as error:
            raise TransientError(f"{fetch.what}: {error}") from None
        running.append(fetch)

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def _begin_process(self) -> None:
        self._lock = threading.Lock()
        self._closed = False


class NativeFile:
    """One version of one file: what is read from it is of this version, or an error."""

    def __init__(self, reads: NativeReads, path: str, opened: _Opened) -> None:
        self.path = path
        self.size_bytes = opened.size_bytes
        self.version = opened.version
        self.block_size = opened.block_size
        self.what = f"{reads.native.uri}{path}"
        self._reads = reads
        self._reader: FileReader | None = opened.reader
        after_fork(self._forget_reader)

    def nodes(self, offset: int) -> tuple[str, ...]:
        """Not known."""
        return ()

    def delay_s(self, offset: int, length: int) -> float:
        """Not known."""
        return 0.0

    def read_into(
        self,
        offset: int,
        into: memoryview,
        done: Done,
        *,
        check: bool = True,
        urgent: bool = True,
        avoid: frozenset[str] = frozenset(),
        deadline_s: float = 60.0,
        here: bool = False,
    ) -> NativeTicket:
        """Fill `into` with the bytes from `offset` on, which lie inside the file; `done` is called once, from any
        thread, and from then on no thread writes to `into`. The library always compares checksums, and knows no nodes
        that it could avoid."""
        ticket = NativeTicket(self._reads, self, offset, into, done, time.monotonic() + deadline_s)
        ticket.start(urgent=urgent)
        return ticket

    def close(self) -> None:
        """Not read any more."""

    def reader(self, *, again: bool) -> FileReader:
        """A reader of this version; `again`: one that lists the replicas anew. Raises `PermanentError` when the file
        was replaced."""
        reader = self._reader
        if not again and reader is not None:
            return reader
        opened = _open(self._reads.native.client(), self.path)
        if opened.version != self.version:
            raise PermanentError(f"{self.what} was replaced while it was read")
        if reader is None:
            self._reader = opened.reader
        return opened.reader

    def _forget_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            never_destroy(reader)


class NativeTicket:
    """A read on its way."""

    def __init__(
        self, reads: NativeReads, file: NativeFile, offset: int, into: memoryview, done: Done, until: float
    ) -> None:
        self.reads, self.file, self.until = reads, file, until
        self.cancelled = False
        self._done = done
        self._lock = threading.Lock()
        self._error: BootseerError | None = None
        into = into.cast("B")
        if offset < 0 or offset + len(into) > file.size_bytes:
            self._error = PermanentError(
                f"{file.what} has {file.size_bytes} bytes; {offset + len(into)} were asked for"
            )
        self._pieces: list[_Piece] = []
        at = 0
        while at < len(into) and self._error is None:
            # Within one block: of two, each could hang.
            end = min(at + _PIECE_BYTES, at + file.block_size - (offset + at) % file.block_size, len(into))
            self._pieces.append(_Piece(self, offset + at, into[at:end]))
            at = end
        self._left = len(self._pieces)

    def start(self, *, urgent: bool) -> None:
        """Have all pieces fetched."""
        if not self._pieces:
            self._done(ReadOutcome(self._error, ""))
        for piece in self._pieces:
            try:
                self.reads.submit(piece, urgent)
            except TransientError as error:
                self.ended(error)

    def cancel(self) -> None:
        """It is not wanted any more; `done` is still called."""
        self.cancelled = True

    def hurry(self) -> None:
        """A reader waits for it now."""
        for piece in self._pieces:
            self.reads.threads.hurry(piece.run)

    def left_s(self) -> float:
        """Not known."""
        return 0.0

    def ended(self, error: BootseerError | None) -> None:
        """One piece less."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
        self._done(ReadOutcome(self._error, ""))

    @property
    def is_lost(self) -> bool:
        """Whether the rest of it is of no use."""
        return self.cancelled or self._error is not None


class _Piece:
    """A part of a read that is fetched at once."""

    def __init__(self, ticket: NativeTicket, start: int, into: memoryview) -> None:
        self._ticket, self._start, self._into = ticket, start, into

    def run(self) -> None:
        """Fetch it; called by the workers."""
        ticket = self._ticket
        began = time.monotonic()
        error: BootseerError | None = None
        if ticket.is_lost or began >= ticket.until:
            error = TransientError(f"{ticket.file.what}: this read was given up, or its time is over")
        else:
            try:
                length = len(self._into)
                self._fill(ticket.reads.fetch(ticket.file, self._start, length, ticket.until, lambda: ticket.is_lost))
            except BootseerError as raised:
                error = raised
            except Exception as raised:  # whatever it is, a reader waits for this piece
                error = TransientError(f"{ticket.file.what}: {type(raised).__name__}: {raised}")
                report_exception()
            num_bytes = 0 if error else len(self._into)
            ticket.reads.done(num_bytes, time.monotonic() - began, failed=error is not None)
        ticket.ended(error)

    def _fill(self, pieces: list[bytes]) -> None:
        at = 0
        for piece in pieces:
            self._into[at : at + len(piece)] = piece
            at += len(piece)


class _Fetch:
    """One try to get a piece, in a thread of its own that may hang in the library."""

    def __init__(
        self, file: NativeFile, start: int, length: int, *, again: bool, ends: queue.SimpleQueue[_Fetch]
    ) -> None:
        self.what = file.what
        self.again = again
        self.pieces: list[bytes] = []
        self.error: BootseerError | None = None
        self.progress_at = time.monotonic()
        self.stopped = False
        """No worker waits for it any more."""
        self._file, self._start, self._length = file, start, length
        self._ends = ends

    def run(self) -> None:
        """Fetch; the outcome goes to `ends`."""
        try:
            with mapping(self.what):
                self._run()
        except BootseerError as error:
            self.error = error
        except BaseException as error:  # panics of Rust code are no `Exception`
            self.error = TransientError(f"{self.what}: {type(error).__name__}: {error}")
        note_read()
        self._ends.put(self)

    def _run(self) -> None:
        received = 0
        for piece in self._stream():
            if self.stopped:
                return
            self.pieces.append(piece)
            self.progress_at = time.monotonic()
            received += len(piece)
        if received != self._length:
            raise TransientError(f"{self.what}: {self._length - received} bytes are missing from the answer")

    def _stream(self) -> Iterator[bytes]:
        # Not read_range: of an answer of MiBs it makes three copies in fresh pages.
        wait_until_own()
        reader = self._file.reader(again=self.again)
        return reader.read_range_stream(self._start, self._length)


@dataclass(frozen=True, slots=True)
class _Opened:
    reader: FileReader
    size_bytes: int
    version: str
    block_size: int


def _open(client: Client, path: str) -> _Opened:
    """A file as it is now."""
    for _ in range(_MAX_TRIES):
        before = client.get_file_info(path)
        reader = client.read(path)
        after = client.get_file_info(path)
        seen = [(found.modification_time, found.length) for found in (before, after)]
        # Otherwise it was replaced meanwhile, and the reader may be of either.
        if seen[0] == seen[1] and reader.size == after.length:
            version = f"{after.modification_time}-{after.length}"
            return _Opened(reader, after.length, version, after.blocksize or _PIECE_BYTES)
    raise TransientError(f"{path} is being written")

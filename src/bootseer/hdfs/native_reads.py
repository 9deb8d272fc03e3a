"""Reading through hdfs-native, for what `reads` does not support: encryption zones, erasure coding.

The library chooses the DataNode itself, and turns to another replica when one has said nothing for its socket timeout
(`NativeSettings.socket_timeout_s`). Which node served is not known.

A read is cut into pieces of 4 MiB within a block, larger ones being slowed down by the library's copies. Each piece is
fetched by a thread that may be left behind in the library, and only the worker that waits for it writes to the caller's
buffer: what comes too late goes nowhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from hdfs_native import Client, FileReader

from bootseer.errors import BootseerError, PermanentError, TransientError
from bootseer.hdfs.native import Native, never_destroy, note_read, wait_until_own
from bootseer.hdfs.requests import ReadOutcome
from bootseer.io.executor import Executor, report_exception
from bootseer.io.fork import after_fork, in_each_process

_PIECE_BYTES = 4 * 1024 * 1024
_WORKERS = 16
_MAX_TRIES = 3
_OPEN_S = 60.0

Done: TypeAlias = Callable[[ReadOutcome], None]


class NativeReads:
    """Reads of many files. Safe to use from many threads."""

    def __init__(self, native: Native) -> None:
        self.native = native
        self.reason = ""
        """Why these reads do not go over own connections."""
        self.threads = Executor("bootseer-hdfs-native", _WORKERS)
        self._facts = {"bytes": 0, "requests": 0, "seconds": 0.0, "failures": 0}
        self._num_retries = 0
        in_each_process(self._begin_process)

    def open(self, path: str, *, deadline_s: float = _OPEN_S) -> NativeFile:
        opened = self.native.call(f"{self.native.uri}{path}", lambda client: _open(client, path), deadline_s)
        return NativeFile(self, path, opened)

    def facts(self) -> Mapping[str, object]:
        """Figures of all reads so far; the nodes are not known."""
        with self._lock:
            return {"nodes": {"": dict(self._facts)}, "retries": self._num_retries, "fallback": self.reason}

    def close(self) -> None:
        self._closed = True
        self.threads.close()

    def submit(self, job: Callable[[], None], urgent: bool) -> None:
        """Have a worker do this. Raises `TransientError` when there is none."""
        if self._closed:
            raise PermanentError(f"{self.native.uri}: reading has ended")
        self.threads.submit(job, urgent=urgent)

    def fetch(self, file: NativeFile, start: int, length: int, until: float) -> list[bytes]:
        """The bytes, in pieces. After an error the file is opened again, which lists the replicas in another order."""

        def receive(_: Client) -> list[bytes]:
            wait_until_own()
            try:
                # Not read_range: of an answer of MiBs it makes three copies in fresh pages.
                return list(file.reader(again=tries > 0).read_range_stream(start, length))
            finally:
                note_read()

        tries = 0
        while True:
            try:
                pieces = self.native.call(file.what, receive, max(until - time.monotonic(), 0.001))
                missing = length - sum(map(len, pieces))
                if not missing:
                    return pieces
                raise TransientError(f"{file.what}: {missing} bytes are missing from the answer")
            except TransientError:
                tries += 1
                if tries == _MAX_TRIES or time.monotonic() >= until:
                    raise
                with self._lock:
                    self._num_retries += 1

    def done(self, num_bytes: int, seconds: float, *, failed: bool) -> None:
        with self._lock:
            self._facts["requests"] += 1
            self._facts["bytes"] += num_bytes
            self._facts["seconds"] += seconds
            self._facts["failures"] += failed

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
        return ()

    def delay_s(self, offset: int, length: int) -> float:
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
    """A read on its way. Each of its jobs, which workers carry out, fetches a piece of it."""

    def __init__(
        self, reads: NativeReads, file: NativeFile, offset: int, into: memoryview, done: Done, until: float
    ) -> None:
        self._reads, self._file, self._done, self._until = reads, file, done, until
        self._cancelled = False
        self._lock = threading.Lock()
        self._error: BootseerError | None = None
        into = into.cast("B")
        if offset < 0 or offset + len(into) > file.size_bytes:
            self._error = PermanentError(
                f"{file.what} has {file.size_bytes} bytes; {offset + len(into)} were asked for"
            )
        self._jobs: list[Callable[[], None]] = []
        at = 0
        while at < len(into) and self._error is None:
            # Within one block: of two, each could hang.
            end = min(at + _PIECE_BYTES, at + file.block_size - (offset + at) % file.block_size, len(into))
            self._jobs.append(partial(self._fetch, offset + at, into[at:end]))
            at = end
        self._left = len(self._jobs)

    def start(self, *, urgent: bool) -> None:
        if not self._jobs:
            self._done(ReadOutcome(self._error, ""))
        for job in self._jobs:
            try:
                self._reads.submit(job, urgent)
            except TransientError as error:
                self._ended(error)

    def cancel(self) -> None:
        self._cancelled = True

    def hurry(self) -> None:
        for job in self._jobs:
            self._reads.threads.hurry(job)

    def left_s(self) -> float:
        return 0.0

    def _fetch(self, start: int, into: memoryview) -> None:
        began = time.monotonic()
        error: BootseerError | None = None
        if self._cancelled or self._error is not None or began >= self._until:
            error = TransientError(f"{self._file.what}: this read was given up, or its time is over")
        else:
            try:
                at = 0
                for piece in self._reads.fetch(self._file, start, len(into), self._until):
                    into[at : at + len(piece)] = piece
                    at += len(piece)
            except BootseerError as raised:
                error = raised
            except Exception as raised:  # whatever it is, a reader waits for this piece
                error = TransientError(f"{self._file.what}: {type(raised).__name__}: {raised}")
                report_exception()
            num_bytes = 0 if error else len(into)
            self._reads.done(num_bytes, time.monotonic() - began, failed=error is not None)
        self._ended(error)

    def _ended(self, error: BootseerError | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
        self._done(ReadOutcome(self._error, ""))


@dataclass(frozen=True, slots=True)
class _Opened:
    reader: FileReader
    size_bytes: int
    version: str
    block_size: int


def _open(client: Client, path: str) -> _Opened:
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

"""Reads through hdfs-native, for what `reads` does not support: encryption zones, erasure coding.

The library chooses the DataNode, and turns to another replica after its socket timeout
(`NativeSettings.socket_timeout_s`). Which node served a read is unknown.

A call that exceeds its deadline is left behind in its thread, and only the worker that waited for it would have written
to the caller's buffer: late bytes are dropped. Callers read at most a few MiB at once; the library's copies slow down
larger reads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from hdfs_native import Client, FileReader

from bootseer.errors import BootseerError, PermanentError, TransientError
from bootseer.hdfs.native import Native, leak, note_read, wait_for_inherited_connections
from bootseer.hdfs.requests import ReadOutcome
from bootseer.io.executor import Executor, report_exception
from bootseer.io.fork import after_fork, in_each_process

_WORKERS = 16
_MAX_TRIES = 3
_OPEN_S = 60.0

Done: TypeAlias = Callable[[ReadOutcome], None]


class NativeReads:
    """Reads of many files. Safe to use from many threads."""

    def __init__(self, native: Native) -> None:
        self.native = native
        self.threads = Executor("bootseer-hdfs-native", _WORKERS)
        self._facts = {"bytes": 0, "requests": 0, "seconds": 0.0, "failures": 0}
        self._num_retries = 0
        in_each_process(self._begin_process)

    def open(self, path: str, *, deadline_s: float = _OPEN_S) -> NativeFile:
        opened = self.native.call(f"{self.native.uri}{path}", lambda client: _open(client, path), deadline_s)
        return NativeFile(self, path, opened)

    def facts(self) -> tuple[dict[str, dict[str, float]], int]:
        """Statistics of all reads so far, for one node with the name "", and the number of retries."""
        with self._lock:
            return {"": dict(self._facts)}, self._num_retries

    def close(self) -> None:
        self._closed = True
        self.threads.close()

    def submit(self, job: Callable[[], None], urgent: bool) -> None:
        """Run in a worker thread. Raises `TransientError` if there is none."""
        if self._closed:
            raise PermanentError(f"{self.native.uri}: reading has ended")
        self.threads.submit(job, urgent=urgent)

    def fetch(self, file: NativeFile, start: int, length: int, until: float) -> list[bytes]:
        """Read a range. After an error the file is opened again, which lists the replicas in another order."""

        def receive(_: Client) -> list[bytes]:
            wait_for_inherited_connections()
            try:
                # Not read_range, which copies answers of several MiB three times.
                return list(file.reader(again=tries > 0).read_range_stream(start, length))
            finally:
                note_read()

        tries = 0
        while True:
            try:
                pieces = self.native.call(file.uri, receive, max(until - time.monotonic(), 0.001))
                missing = length - sum(map(len, pieces))
                if not missing:
                    return pieces
                raise TransientError(f"{file.uri}: {missing} bytes are missing from the answer")
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
    """One version of one file: reads return bytes of this version or an error."""

    def __init__(self, reads: NativeReads, path: str, opened: _Opened) -> None:
        self.path = path
        self.size_bytes = opened.size_bytes
        self.version = opened.version
        self.uri = f"{reads.native.uri}{path}"
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
        inline: bool = False,
    ) -> NativeRead:
        """See `OpenFile.read_into`. The library always verifies checksums, and cannot avoid nodes."""
        ticket = NativeRead(self._reads, self, offset, into, done, time.monotonic() + deadline_s)
        ticket.start(urgent=urgent)
        return ticket

    def close(self) -> None:
        """Reads in flight still end."""

    def reader(self, *, again: bool) -> FileReader:
        """A reader of this version; `again`: a new one, with the replicas in another order. Raises `PermanentError` if
        the file was replaced."""
        reader = self._reader
        if not again and reader is not None:
            return reader
        opened = _open(self._reads.native.client(), self.path)
        if opened.version != self.version:
            raise PermanentError(f"{self.uri} was replaced while it was read")
        if reader is None:
            self._reader = opened.reader
        return opened.reader

    def _forget_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            leak(reader)


class NativeRead:
    """A read in flight, carried out by one worker thread."""

    def __init__(
        self, reads: NativeReads, file: NativeFile, offset: int, into: memoryview, done: Done, until: float
    ) -> None:
        self._reads, self._file, self._done, self._until = reads, file, done, until
        self._offset, self._into = offset, into.cast("B")
        self._cancelled = False

    def start(self, *, urgent: bool) -> None:
        end = self._offset + len(self._into)
        if self._offset < 0 or end > self._file.size_bytes:
            text = f"{self._file.uri} has {self._file.size_bytes} bytes; {end} were asked for"
            self._done(ReadOutcome(PermanentError(text), ""))
        elif not self._into:
            self._done(ReadOutcome(None, ""))
        else:
            try:
                self._reads.submit(self._run, urgent)
            except TransientError as error:
                self._done(ReadOutcome(error, ""))

    def cancel(self) -> None:
        self._cancelled = True

    def prioritize(self) -> None:
        self._reads.threads.prioritize(self._run)

    def remaining_s(self) -> float:
        return 0.0

    def _run(self) -> None:
        began = time.monotonic()
        error: BootseerError | None = None
        if self._cancelled or began >= self._until:
            error = TransientError(f"{self._file.uri}: this read was cancelled, or its deadline is over")
        else:
            try:
                at = 0
                for piece in self._reads.fetch(self._file, self._offset, len(self._into), self._until):
                    self._into[at : at + len(piece)] = piece
                    at += len(piece)
            except BootseerError as raised:
                error = raised
            except Exception as raised:  # the reader waits, whatever the error
                error = TransientError(f"{self._file.uri}: {type(raised).__name__}: {raised}")
                report_exception()
            num_bytes = 0 if error else len(self._into)
            self._reads.done(num_bytes, time.monotonic() - began, failed=error is not None)
        self._done(ReadOutcome(error, ""))


@dataclass(frozen=True, slots=True)
class _Opened:
    reader: FileReader
    size_bytes: int
    version: str


def _open(client: Client, path: str) -> _Opened:
    for _ in range(_MAX_TRIES):
        before = client.get_file_info(path)
        reader = client.read(path)
        after = client.get_file_info(path)
        seen = [(found.modification_time, found.length) for found in (before, after)]
        # Otherwise the file was replaced meanwhile, and the reader may be of either version.
        if seen[0] == seen[1] and reader.size == after.length:
            return _Opened(reader, after.length, f"{after.modification_time}-{after.length}")
    raise TransientError(f"{path} is being written")

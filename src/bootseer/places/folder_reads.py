"""Reads of files in a folder by a small thread pool, so that several are in flight and no caller blocks.

Urgent reads go first. A hung file system cannot be interrupted: deadlines only end reads that have not started.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError, IsFolderError, NotFoundError, PermanentError, TransientError
from bootseer.io.executor import Executor
from bootseer.io.fork import in_each_process

if TYPE_CHECKING:
    from bootseer.hdfs.requests import ReadOutcome

_NUM_THREADS = 8


def version_of(status: os.stat_result) -> str:
    """Differs for every other file, and changes with every write."""
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


@dataclass(eq=False, slots=True)
class _Read:
    file: FolderFile
    offset: int
    into: memoryview
    done: Callable[[ReadOutcome], None]
    until: float
    reads: FolderReads
    cancelled: bool = field(default=False)

    def cancel(self) -> None:
        self.cancelled = True

    def prioritize(self) -> None:
        self.reads.threads.prioritize(self.run)

    def remaining_s(self) -> float:
        """See `Ticket.remaining_s`: unknown here."""
        return 0.0

    def run(self) -> None:
        """Carries out the read in this thread."""
        from bootseer.hdfs.requests import (
            ReadOutcome,
        )  # imported late: jobs that only read local files here do not need the module

        error: BootseerError | None = TransientError(f"{self.file.uri}: reading failed unexpectedly")
        try:
            error = self._try()
        finally:
            self.file.release()
            self.done(ReadOutcome(error, ""))

    def _try(self) -> BootseerError | None:
        if self.reads.closed:
            return TransientError(f"{self.file.uri}: the folder was closed")
        if self.cancelled:
            return TransientError(f"{self.file.uri}: the read was cancelled")
        began = time.monotonic()
        if began > self.until:
            return TransientError(f"{self.file.uri}: the read did not begin in time; the disk is slow or overloaded")
        error = self.file.fill(self.offset, self.into)
        self.reads.count(0 if error else len(self.into), time.monotonic() - began, failed=error is not None)
        return error


class FolderReads:
    """The thread pool and statistics of one place."""

    def __init__(self) -> None:
        self.threads = Executor("bootseer-folder", _NUM_THREADS)
        in_each_process(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self.closed = False
        self._bytes = self._requests = self._failures = 0
        self._seconds = 0.0

    def submit(self, read: _Read, *, urgent: bool) -> None:
        """Queue a read. Raises `TransientError` if no thread can be started."""
        if self.closed:
            raise PermanentError("this folder is not read any more: it was closed")
        self.threads.submit(read.run, urgent=urgent)

    def count(self, num_bytes: int, seconds: float, *, failed: bool) -> None:
        """Count a finished read."""
        with self._lock:
            self._seconds += seconds
            self._requests += 1
            self._failures += failed
            self._bytes += num_bytes

    def facts(self) -> dict[str, object]:
        """See `Place.facts`; a folder counts as one node without a name."""
        with self._lock:
            node = {
                "bytes": self._bytes,
                "requests": self._requests,
                "seconds": self._seconds,
                "failures": self._failures,
            }
        return {"nodes": {"": node}, "retries": 0, "hedges": 0, "hedges_won": 0, "refreshes": 0, "fallback": ""}

    def close(self) -> None:
        """End the threads. Queued reads end with an error."""
        self.closed = True
        self.threads.close()


class FolderFile:
    """An `OpenFile` in a folder. Takes over the descriptor, which is closed when the last read has ended."""

    def __init__(
        self, descriptor: int, uri: str, reads: FolderReads, mapped: Callable[[OSError], BootseerError]
    ) -> None:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise (
                IsFolderError(f"{uri} is a folder") if stat.S_ISDIR(status.st_mode) else NotFoundError(f"no file {uri}")
            )
        self.uri = uri
        self.size_bytes = status.st_size
        self.version = version_of(status)
        self._descriptor = descriptor
        self._reads = reads
        self._mapped = mapped
        self._closed = False
        in_each_process(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._users = 1  # the opener, and each read of this process in flight

    def nodes(self, offset: int) -> tuple[str, ...]:
        """See `OpenFile.nodes`: a folder has none."""
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
        inline: bool = False,
    ) -> _Read:
        """See `OpenFile.read_into`. The file system does its own checks, and there is only one copy."""
        if offset < 0 or offset + len(into) > self.size_bytes:
            raise PermanentError(f"{self.uri}: bytes {offset} to {offset + len(into)} of {self.size_bytes}")
        with self._lock:
            if self._closed:
                raise PermanentError(f"{self.uri}: read after it was closed")
            self._users += 1
        read = _Read(self, offset, into, done, time.monotonic() + deadline_s, self._reads)
        try:
            self._reads.submit(read, urgent=urgent)
        except BaseException:
            self.release()
            raise
        return read

    def read_here(self, offset: int, length: int) -> bytes:
        """A range inside the file, read by the calling thread, which keeps the file open meanwhile."""
        data = bytearray(length)
        if (error := self.fill(offset, memoryview(data))) is not None:
            raise error
        return bytes(data)

    def fill(self, offset: int, into: memoryview) -> BootseerError | None:
        """Read in this thread. Returns the error, or None."""
        try:
            while into:
                count = os.preadv(self._descriptor, [into], offset)
                if count == 0:
                    return TransientError(f"{self.uri} became shorter while it was read")
                offset, into = offset + count, into[count:]
            # Checked after the read: bytes read before a change belong to this version.
            if version_of(os.fstat(self._descriptor)) != self.version:
                return TransientError(f"{self.uri} was changed while it was read")
        except OSError as error:
            return self._mapped(error)
        return None

    def release(self) -> None:
        """A read has ended, or the opener has closed the file."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.release()

"""Reads of files in a folder, by a few threads: those of one disk or file server overlap, and no caller waits in one.

Reads that somebody waits for go first. A file system that hangs cannot be interrupted: a deadline ends only what has
not been begun. Called by `folder` alone.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from bootseer.checkpoint.places.place import IsFolderError, Outcome
from bootseer.errors import BootseerError, NotFoundError, PermanentError, TransientError
from bootseer.io.executor import Executor
from bootseer.io.fork import in_each_process

_NUM_THREADS = 8


def version_of(status: os.stat_result) -> str:
    """Differs for every other file, and whenever this one was written to."""
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


@dataclass(eq=False, slots=True)
class _Read:
    file: FolderFile
    offset: int
    into: memoryview
    done: Callable[[Outcome], None]
    until: float
    reads: FolderReads
    cancelled: bool = field(default=False)

    def cancel(self) -> None:
        """See `Ticket.cancel`."""
        self.cancelled = True

    def hurry(self) -> None:
        """See `Ticket.hurry`."""
        self.reads.hurry(self)

    def left_s(self) -> float:
        """See `Ticket.left_s`: nobody knows."""
        return 0.0


class FolderReads:
    """The threads of one place, and what they have done."""

    def __init__(self) -> None:
        self._threads = Executor("bootseer-folder", _NUM_THREADS)
        in_each_process(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._urgent: OrderedDict[_Read, None] = OrderedDict()
        self._others: OrderedDict[_Read, None] = OrderedDict()
        self._closed = False
        self._bytes = self._requests = self._failures = 0
        self._seconds = 0.0

    def submit(self, read: _Read, *, urgent: bool) -> None:
        """Do it soon. Raises `TransientError` when there is no thread for it."""
        with self._lock:
            if self._closed:
                raise PermanentError("this folder is not read any more: it was closed")
            self._threads.submit(self._read_next)  # which waits for the lock
            (self._urgent if urgent else self._others)[read] = None

    def hurry(self, read: _Read) -> None:
        """Somebody waits for it now."""
        with self._lock:
            if read in self._others:
                del self._others[read]
                self._urgent[read] = None

    def facts(self) -> dict[str, object]:
        """See `Place.facts`; a folder is one nameless node."""
        with self._lock:
            node = {
                "bytes": self._bytes,
                "requests": self._requests,
                "seconds": self._seconds,
                "failures": self._failures,
            }
        return {"nodes": {"": node}, "retries": 0, "hedges": 0, "hedges_won": 0, "refreshes": 0, "fallback": ""}

    def close(self) -> None:
        """End the threads. Reads that were not begun end with an error."""
        with self._lock:
            self._closed = True
            rest = [*self._urgent, *self._others]
            self._urgent.clear()
            self._others.clear()
        self._threads.close()
        for read in rest:
            self._end(read, TransientError(f"{read.file.what}: the folder was closed"))

    def _read_next(self) -> None:
        with self._lock:
            queue = self._urgent or self._others
            if not queue:
                return
            read = queue.popitem(last=False)[0]
        error: BootseerError | None = TransientError(f"{read.file.what}: reading failed in a way that was not foreseen")
        try:
            error = self._try(read)
        finally:
            self._end(read, error)

    def _try(self, read: _Read) -> BootseerError | None:
        if read.cancelled:
            return TransientError(f"{read.file.what}: the read was cancelled")
        if time.monotonic() > read.until:
            return TransientError(f"{read.file.what}: the read did not begin in time; the disk is slow or overloaded")
        began = time.monotonic()
        error = read.file.fill(read.offset, read.into)
        with self._lock:
            self._seconds += time.monotonic() - began
            self._requests += 1
            self._failures += error is not None
            self._bytes += len(read.into) if error is None else 0
        return error

    @staticmethod
    def _end(read: _Read, error: BootseerError | None) -> None:
        read.file.release()
        read.done(Outcome(error, ""))


class FolderFile:
    """An `OpenFile` of a folder. Takes over the descriptor, which is closed when the last read has ended."""

    def __init__(
        self, descriptor: int, what: str, reads: FolderReads, mapped: Callable[[OSError], BootseerError]
    ) -> None:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise (
                IsFolderError(f"{what} is a folder")
                if stat.S_ISDIR(status.st_mode)
                else NotFoundError(f"no file {what}")
            )
        self.what = what
        self.size_bytes = status.st_size
        self.version = version_of(status)
        self._descriptor = descriptor
        self._reads = reads
        self._mapped = mapped
        self._closed = False
        in_each_process(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._users = 1  # who opened it, and each read of this process

    def nodes(self, offset: int) -> tuple[str, ...]:
        """See `OpenFile.nodes`: a folder has none."""
        return ()

    def delay_s(self, offset: int, length: int) -> float:
        """See `OpenFile.delay_s`."""
        return 0.0

    def read_into(
        self,
        offset: int,
        into: memoryview,
        done: Callable[[Outcome], None],
        *,
        check: bool = True,
        urgent: bool = True,
        avoid: frozenset[str] = frozenset(),
        deadline_s: float = 60.0,
        here: bool = False,
    ) -> _Read:
        """See `OpenFile.read_into`. File systems check themselves what they check, and there is one copy only."""
        if offset < 0 or offset + len(into) > self.size_bytes:
            raise PermanentError(f"{self.what}: bytes {offset} to {offset + len(into)} of {self.size_bytes}")
        with self._lock:
            if self._closed:
                raise PermanentError(f"{self.what}: read after it was closed")
            self._users += 1
        read = _Read(self, offset, into, done, time.monotonic() + deadline_s, self._reads)
        try:
            self._reads.submit(read, urgent=urgent)
        except BaseException:
            self.release()
            raise
        return read

    def fill(self, offset: int, into: memoryview) -> BootseerError | None:
        """Read now: None, or what went wrong."""
        try:
            while into:
                count = os.preadv(self._descriptor, [into], offset)
                if count == 0:
                    return TransientError(f"{self.what} became shorter while it was read")
                offset, into = offset + count, into[count:]
            # Looked at afterwards: what was read before somebody wrote is of this version.
            if version_of(os.fstat(self._descriptor)) != self.version:
                return TransientError(f"{self.what} was changed while it was read")
        except OSError as error:
            return self._mapped(error)
        return None

    def release(self) -> None:
        """A read has ended."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def close(self) -> None:
        """See `OpenFile.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.release()

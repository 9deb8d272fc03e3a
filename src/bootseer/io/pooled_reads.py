"""Reads of files by calls that block, in a small pool of threads, so that several are in flight and no caller waits.

Urgent reads go first. A call that hangs cannot be interrupted: deadlines end reads that have not begun.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

from bootseer.errors import BootseerError, PermanentError, TransientError
from bootseer.io.executor import Executor, report_exception
from bootseer.io.fork import in_each_process

DEADLINE_S = 60.0


class ReadOutcome(NamedTuple):
    """The end of one read."""

    error: BootseerError | None
    node: str
    """`host:port` of the DataNode that served it, of the last one if several did; "" if none did."""


class ReadOptions(TypedDict, total=False):
    """Options of a read of an `OpenFile`."""

    check: bool
    """Verify the place's own checksums (the default); callers with better digests do without."""
    urgent: bool
    """A reader waits (the default)."""
    avoid: frozenset[str]
    """Nodes that returned wrong bytes, used only if there is no other."""
    deadline_s: float
    """Default: `DEADLINE_S`."""
    inline: bool
    """The caller holds no lock, and its own thread may read before the call returns, which for a few bytes is cheaper
    than waking another thread."""


class FileWithoutNodes:
    """Mixin of an `OpenFile` whose nodes and waiting times are unknown."""

    def nodes(self, offset: int) -> tuple[str, ...]:
        return ()

    def delay_s(self, offset: int, length: int) -> float:
        return 0.0


class PooledReads:
    """The threads and statistics of one file system. Safe to use from many threads, and in the child of a fork."""

    def __init__(self, name: str, max_threads: int, uri: str) -> None:
        self.threads = Executor(name, max_threads)
        self.uri = uri
        in_each_process(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self.closed = False
        self._node = {"bytes": 0, "requests": 0, "seconds": 0.0, "failures": 0}

    def begin(
        self,
        uri: str,
        num_bytes: int,
        fill: Callable[[], None],
        done: Callable[[ReadOutcome], None],
        options: ReadOptions,
    ) -> PooledRead:
        """Queue a read, by `fill`, of the file at `uri`. Raises `PermanentError` after `close`, and `TransientError` if
        no thread can be started."""
        if self.closed:
            raise PermanentError(f"{self.uri} was closed: it cannot be read")
        until = time.monotonic() + options.get("deadline_s", DEADLINE_S)
        read = PooledRead(self, uri, num_bytes, fill, done, until)
        self.threads.submit(read.run, urgent=options.get("urgent", True))
        return read

    def count(self, num_bytes: int, seconds: float, *, failed: bool) -> None:
        with self._lock:
            self._node["bytes"] += num_bytes
            self._node["requests"] += 1
            self._node["seconds"] += seconds
            self._node["failures"] += failed

    def nodes(self) -> dict[str, dict[str, float]]:
        """The statistics in the form of `Place.facts`, where all of it is one node without a name."""
        with self._lock:
            return {"": dict(self._node)}

    def close(self) -> None:
        """End the threads. Queued reads end with an error."""
        self.closed = True
        self.threads.close()


@dataclass(eq=False, slots=True)
class PooledRead:
    """A read in flight, a `Ticket`."""

    reads: PooledReads
    uri: str
    """Of the file, for messages."""
    num_bytes: int
    fill: Callable[[], None]
    """Reads in the calling thread. Raises `BootseerError`s."""
    done: Callable[[ReadOutcome], None]
    until: float
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True

    def prioritize(self) -> None:
        self.reads.threads.prioritize(self.run)

    def remaining_s(self) -> float:
        return 0.0

    def run(self) -> None:
        error: BootseerError | None = None
        try:
            self._fill()
        except BootseerError as raised:
            error = raised
        except Exception as raised:  # the reader waits, whatever the error
            error = TransientError(f"{self.uri}: {type(raised).__name__}: {raised}")
            report_exception()
        done = self.done
        self.fill = self.done = _nothing  # the caller keeps its ticket; these hold the file open, and memory
        done(ReadOutcome(error, ""))

    def _fill(self) -> None:
        if self.reads.closed:
            raise TransientError(f"{self.uri}: {self.reads.uri} was closed")
        if self.cancelled:
            raise TransientError(f"{self.uri}: the read was cancelled")
        began = time.monotonic()
        if began > self.until:
            raise TransientError(f"{self.uri}: the read did not begin in time; the storage is slow or overloaded")
        failed = True
        try:
            self.fill()
            failed = False
        finally:
            self.reads.count(0 if failed else self.num_bytes, time.monotonic() - began, failed=failed)


def _nothing(*_: object) -> None:
    """Replaces the calls of a read that has ended."""

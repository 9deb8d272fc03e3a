"""Reads through hdfs-native, for what `reads` does not support: encryption zones, erasure coding.

The library chooses the DataNode, and turns to another replica after its socket timeout
(`NativeSettings.socket_timeout_s`). Which node served a read is unknown.

A call that exceeds its deadline is left behind in its thread, and only the worker that waited for it would have written
to the caller's buffer: late bytes are dropped. Callers read at most a few MiB at once; the library's copies slow down
larger reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hdfs_native import Client, FileReader

from bootseer.errors import PermanentError, TransientError
from bootseer.hdfs.native import Native, leak, note_read, wait_for_inherited_connections
from bootseer.io.fork import after_fork
from bootseer.io.reads import PooledRead, PooledReads, ReadOutcome

_WORKERS = 16
_MAX_TRIES = 3
_OPEN_S = 60.0


class NativeReads(PooledReads):
    """Reads of many files."""

    def __init__(self, native: Native) -> None:
        super().__init__("bootseer-hdfs-native", _WORKERS, native.uri)
        self.native = native
        self.num_retries = 0

    def open(self, path: str, *, deadline_s: float = _OPEN_S) -> NativeFile:
        opened = self.native.call(f"{self.native.uri}{path}", lambda client: _open(client, path), deadline_s)
        return NativeFile(self, path, opened)

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
                    self.num_retries += 1


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
        done: Callable[[ReadOutcome], None],
        *,
        check: bool = True,
        urgent: bool = True,
        avoid: frozenset[str] = frozenset(),
        deadline_s: float = 60.0,
        inline: bool = False,
    ) -> PooledRead:
        """See `OpenFile.read_into`. The library always verifies checksums, and cannot avoid nodes."""
        into = into.cast("B")
        if offset < 0 or offset + len(into) > self.size_bytes:
            raise PermanentError(f"{self.uri} has {self.size_bytes} bytes; {offset + len(into)} were asked for")
        until = time.monotonic() + deadline_s

        def fill() -> None:
            at = 0
            for piece in self._reads.fetch(self, offset, len(into), until) if into else []:
                into[at : at + len(piece)] = piece
                at += len(piece)

        read = PooledRead(self._reads, self.uri, len(into), fill, done, until)
        self._reads.submit(read, urgent=urgent)
        return read

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

"""hdfs-native's client, with workarounds for its pitfalls in one place: forks, panics, calls without deadlines, errors
without classes. It reads and writes files with erasure coding or in encryption zones, after the own client has found
that they are such.

Fork: a client that was created before a fork hangs in the child, and so does its destructor; the child leaks it and
creates its own. The library also keeps connections to DataNodes for the whole process: a child that used them would
receive its parent's answers, that is, bytes of other files. So the child waits until they have expired.

Calls are bounded by `io.deadline`. Reading past the end panics, which is not an `Exception`. Most errors have no class:
the name of the Java class in the text decides. Writes fail or hang when a DataNode dies that the NameNode still
considers live: each step has a deadline, and after the first error a writer cannot be used.

A lock guards the creation of the client; it is safe to use from many threads. A writer is used by one thread at a time,
in the process that created it.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar, Unpack

from bootseer.errors import BootseerError, NotFoundError, PermanentError, TransientError, UsageError, needs_extra
from bootseer.hdfs.addresses import ClientSettings, FileOptions
from bootseer.hdfs.block_locations import FileStatus
from bootseer.hdfs.errors import kind_of_error
from bootseer.io.deadline import within
from bootseer.io.fork import after_fork
from bootseer.io.pooled_reads import DEADLINE_S, FileWithoutNodes, PooledRead, PooledReads, ReadOptions, ReadOutcome

if TYPE_CHECKING:
    from hdfs_native import Client, FileReader, FileWriter

T = TypeVar("T")

_LIBRARY_IDLE_S = 5.0
"""The library drops connections that are idle for 3 s."""
_FIXED_SETTINGS = {
    # The sleeps grow; the default of 15 attempts takes 3 minutes if the NameNode is gone.
    "dfs.client.failover.max.attempts": "5",
    "dfs.client.failover.sleep.max.millis": "2000",
}


_REMOTE = re.compile(r'RPCError\("(?:\w+\.)*([\w$]+)", "(.*?)(?:"\))?$')
"""The library's form of a server's error: quoted class and text."""


class Native:
    """The library's client of one file system in one process."""

    def __init__(self, uri: str, settings: ClientSettings, *, server: str = "") -> None:
        """`uri` is used in messages; `server` is the address, if that differs."""
        self.uri = uri
        self.settings = settings
        self._properties = {
            **_FIXED_SETTINGS,
            "dfs.client.socket-timeout": str(round(settings.socket_timeout_s * 1000)),
        }
        self._server = server or uri
        self._lock = threading.Lock()
        self._client: Client | None = None
        after_fork(self.forget_client)

    def call(self, subject: str, function: Callable[[Client], T], timeout_s: float | None = None) -> T:
        """Call `function` with the client, within `timeout_s` (default `call_s`); mapped errors name `subject`."""
        with mapping(subject):
            return within(timeout_s or self.settings.call_s, subject, lambda: function(self.client()))

    def client(self) -> Client:
        """This process's client. May block: call it under a deadline only."""
        # Here, because most clusters do without it: from a cold disk its 17 MB take 60 ms.
        with needs_extra("hdfs", "HDFS"):
            from hdfs_native import Client

        with self._lock:
            if self._client is None:
                self._client = Client(self._server, self._properties, self.settings.conf_dir)
            return self._client

    def close(self) -> None:
        """Drop the client; its connections close when they are idle."""
        with self._lock:
            self._client = None

    def forget_client(self) -> None:
        """In the child of a fork: leak the parent's client."""
        # A thread of the parent may have held the lock.
        self._lock = threading.Lock()
        client, self._client = self._client, None
        if client is not None:
            leak(client)


def leak(value: object) -> None:
    """Keep an object of the library for ever: in the child of a fork its destructor would wait for the parent's
    threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@contextlib.contextmanager
def mapping(subject: str) -> Iterator[None]:
    """Maps errors of the library raised inside; `subject` they concern."""
    try:
        yield
    except BootseerError:
        raise
    except Exception as error:
        raise mapped(error, subject) from error


def mapped(error: Exception, subject: str) -> BootseerError:
    """The BootSeer error for an error of the library."""
    text = str(error)
    # A Java stack trace follows the first line.
    first = text.replace("\\n", "\n").partition("\n")[0]
    if remote := _REMOTE.match(first):
        first = f"{remote[1]}: {remote[2]}".replace('\\"', '"')
    first = first[:300]
    message = f"{subject}: {first}"
    is_missing = isinstance(error, FileNotFoundError) and "Path is not a file" not in text
    kind = NotFoundError if is_missing else kind_of_error(text) or TransientError
    # Some messages are the bare path.
    return kind(message if " " in first or kind is not NotFoundError else f"{subject} does not exist")


class _Library:
    """The library's connections to DataNodes are the process's."""

    last_read_s = -math.inf
    foreign_until_s = -math.inf
    """Until then, some may be the parent's."""

    @classmethod
    def forget(cls) -> None:
        cls.foreign_until_s = max(cls.foreign_until_s, cls.last_read_s + _LIBRARY_IDLE_S)


after_fork(_Library.forget)


_NOT_YET = "Failed to complete file in time"
_DELETE_S = 10.0
_HANG_UP_S = 0.5


class NativeWriter:
    """A file that is being written: visible under its name from the beginning, complete after `close`."""

    def __init__(self, native: Native, path: str, **options: Unpack[FileOptions]) -> None:
        """Create the file. Raises `AlreadyExistsError`."""
        self.path = path
        self.nodes: tuple[str, ...] = ()
        """Unknown here."""
        self.status: FileStatus | None = None
        """Not requested here."""
        self.size_bytes = 0
        """Bytes written so far."""
        self._native = native
        self._uri = f"{native.uri}{path}"

        def create(client: Client) -> FileWriter:
            from hdfs_native import WriteOptions  # there is one, as there is a client

            wanted = WriteOptions(
                block_size=options.get("block_size"), replication=options.get("replication"),
                permission=options.get("mode", 0o644), create_parent=options.get("parents", True),
            )  # fmt: skip
            return client.create(path, wanted)

        self._file = native.call(self._uri, create)
        # Python's finalizer of files calls close(), which may hang the thread that drops the last reference. A file
        # that Python considers closed has no finalizer; the library's own methods still work.
        io.RawIOBase.close(self._file)
        self._is_usable = True
        self._is_over = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append. Blocks while HDFS is slower, at most `write_s`."""
        # The library's path for memoryviews is 10 times slower than this copy.
        content = bytes(data) if isinstance(data, memoryview) else data
        self._step(lambda file: file.write(content), self._native.settings.write_s)
        self.size_bytes += len(data)

    def close(self) -> tuple[str, ...]:
        """Complete the file: DataNodes have acknowledged all bytes, the NameNode has the length. Nodes are unknown."""
        close_s = self._native.settings.close_s
        self._step(lambda file: _complete(file, close_s), close_s)
        self._is_usable = False
        found = self._native.call(self._uri, lambda client: client.get_file_info(self.path).length)
        if found != self.size_bytes:
            raise TransientError(f"{self._uri} has {found} bytes after {self.size_bytes} were written")
        self._is_over = True
        return ()

    def abort(self) -> None:
        """Discard the file. Never raises; does nothing after `close`. A file that cannot be removed stays."""
        if self._is_over:
            return
        self._is_over = True
        self._is_usable = False
        with contextlib.suppress(BootseerError):
            self._native.call(self._uri, lambda client: client.delete(self.path), _DELETE_S)
        # Close the library's connection, which would otherwise stay open forever. A call that hangs is left to its
        # thread.
        with contextlib.suppress(BootseerError):
            self._native.call(self._uri, lambda _: self._file.close(), _HANG_UP_S)

    def _step(self, step: Callable[[FileWriter], object], timeout_s: float) -> None:
        if not self._is_usable:
            raise UsageError(f"{self._uri}: this file was closed or has failed", hint="begin another one")
        try:
            self._native.call(self._uri, lambda _: step(self._file), timeout_s)
        except BaseException:
            self._is_usable = False
            raise


def _complete(file: FileWriter, timeout_s: float) -> None:
    """Complete the file. The library waits 15 s for DataNodes' reports to the NameNode, and can be called again."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            file.close()
            return
        except Exception as error:
            if _NOT_YET not in str(error) or time.monotonic() >= until:
                raise


_WORKERS = 16
_MAX_TRIES = 3
_OPEN_S = 60.0


class NativeReads(PooledReads):
    """Reads of many files, for what `reads` does not support: encryption zones, erasure coding.

    The library chooses the DataNode, and turns to another replica after its socket timeout; which node served a read is
    unknown. A call that exceeds its deadline is left behind in its thread, and only the worker that waited for it would
    have written to the caller's buffer: late bytes are dropped. Callers read at most a few MiB at once; the library's
    copies slow down larger reads.
    """

    def __init__(self, native: Native) -> None:
        super().__init__("bootseer-hdfs-native", _WORKERS, native.uri)
        self.native = native
        self.num_retries = 0

    def open(self, path: str, *, deadline_s: float = _OPEN_S) -> NativeFile:
        reader, version = self.native.call(f"{self.native.uri}{path}", lambda client: _open(client, path), deadline_s)
        return NativeFile(self, path, reader, version)

    def fetch(self, file: NativeFile, start: int, length: int, until: float) -> list[bytes]:
        """Read a range. After an error the file is opened again, which lists the replicas in another order."""

        def receive(client: Client) -> list[bytes]:
            # In the child of a fork, until the library does not reuse connections of the parent any more.
            time.sleep(max(0.0, _Library.foreign_until_s - time.monotonic()))
            reader = file.reader(client, again=tries > 0)
            try:
                # Not read_range, which copies answers of several MiB three times.
                return list(reader.read_range_stream(start, length))
            finally:
                _Library.last_read_s = time.monotonic()  # it keeps the connection

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


class NativeFile(FileWithoutNodes):
    """One version of one file: reads return bytes of this version or an error."""

    def __init__(self, reads: NativeReads, path: str, reader: FileReader, version: str) -> None:
        self.path = path
        self.size_bytes = reader.size
        self.version = version
        self.uri = f"{reads.native.uri}{path}"
        self._reads = reads
        # Kept: a new one asks the NameNode for all blocks of the file, and the key server for the key of its zone.
        self._reader: FileReader | None = reader
        after_fork(self._forget_reader)

    def read_into(
        self, offset: int, into: memoryview, done: Callable[[ReadOutcome], None], **options: Unpack[ReadOptions]
    ) -> PooledRead:
        """See `OpenFile.read_into`. The library always verifies checksums, and cannot avoid nodes."""
        into = into.cast("B")
        if offset < 0 or offset + len(into) > self.size_bytes:
            raise PermanentError(f"{self.uri} has {self.size_bytes} bytes; {offset + len(into)} were asked for")
        until = time.monotonic() + options.get("deadline_s", DEADLINE_S)

        def fill() -> None:
            at = 0
            for piece in self._reads.fetch(self, offset, len(into), until) if into else []:
                into[at : at + len(piece)] = piece
                at += len(piece)

        return self._reads.begin(self.uri, len(into), fill, done, options)

    def close(self) -> None:
        """Reads in flight still end."""

    def reader(self, client: Client, *, again: bool) -> FileReader:
        """A reader of this version; `again`: a new one. Raises `PermanentError` if the file was replaced."""
        reader = self._reader
        if reader is None or again:
            reader, version = _open(client, self.path)
            if version != self.version:
                raise PermanentError(f"{self.uri} was replaced while it was read")
            self._reader = reader
        return reader

    def _forget_reader(self) -> None:
        """In the child of a fork: leak the parent's reader."""
        reader, self._reader = self._reader, None
        if reader is not None:
            leak(reader)


def _open(client: Client, path: str) -> tuple[FileReader, str]:
    """A reader of the file's current version, and the version."""
    for _ in range(_MAX_TRIES):
        before = client.get_file_info(path)
        reader = client.read(path)
        after = client.get_file_info(path)
        seen = [(found.modification_time, found.length) for found in (before, after)]
        # Otherwise the file was replaced meanwhile, and the reader may be of either version.
        if seen[0] == seen[1] and reader.size == after.length:
            return reader, f"{after.modification_time}-{after.length}"
    raise TransientError(f"{path} is being written")

"""hdfs-native's client, with its traps dealt with once: fork, panics, calls that never return, errors that are text.

A client that was made before `fork` hangs in the child, and so does taking it apart: the child forgets it unharmed and
makes its own. Worse, the library keeps connections to DataNodes for the whole process, and a child that used them would
take its parent's answers and give it other files' bytes: it waits until they have expired (`wait_until_own`). Calls
know no deadline (`bounded`), and reading past the end panics, which is no `Exception`. The library has no classes for
most errors: the name of the Java class in their text decides. Its writes fail or hang when a DataNode dies that the
NameNode still counts as live: each step has a deadline here, and after the first error a writer is of no use.

One lock guards the client while it is made; it is safe to use from many threads. A writer belongs to one thread at a
time, and to the process that made it.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import io
import math
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from hdfs_native import Client, FileWriter, WriteOptions
from hdfs_native import FileStatus as Found

from bootseer.errors import BootseerError, NotFoundError, TransientError, UsageError
from bootseer.hdfs.errors import NotReadyError, kind_of_error
from bootseer.hdfs.located import FileStatus
from bootseer.io.deadline import stream_within, within
from bootseer.io.fork import after_fork

T = TypeVar("T")

_KEPT_S = 5.0
"""The library forgets a connection that was idle for 3 s."""
_FIXED_SETTINGS = {
    # Each attempt sleeps longer; the default of 15 keeps a caller 3 minutes at a NameNode that is not there.
    "dfs.client.failover.max.attempts": "5",
    "dfs.client.failover.sleep.max.millis": "2000",
}


@dataclass(frozen=True, slots=True)
class NativeSettings:
    """Time limits, and further settings of the library."""

    call_s: float = 60.0
    """For one question to the NameNodes, all tries and failover included; of a listing, for each page. A restarted
    NameNode is away for half a minute and more."""
    write_s: float = 20.0
    """For one buffer on its way, and for a DataNode to confirm it."""
    close_s: float = 60.0
    """For the end of a file: the last bytes, all confirmations, and the NameNode's own wait for them."""
    socket_timeout_s: float = 5.0
    """After this, a silent DataNode counts as hung. Busy disks answer within 1 or 2 s."""
    conf_dir: str | None = None
    """Hadoop's configuration. None: `$HADOOP_CONF_DIR`, or else `$HADOOP_HOME/etc/hadoop`."""


_REMOTE = re.compile(r'RPCError\("(?:\w+\.)*([\w$]+)", "(.*?)(?:"\))?$')
"""How the library shows an answer that is an error: the class and the text, quoted."""
_KERBEROS = re.compile(r'GSSAPIError\(.*, "(.*?)"?\)?$')


class Native:
    """The library's client of one file system, one per process."""

    def __init__(self, uri: str, settings: NativeSettings, *, server: str = "") -> None:
        """`uri` is what messages call it; `server` is where it is, if that is written in another way."""
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

    def call(self, what: str, function: Callable[[Client], T], timeout_s: float | None = None) -> T:
        """What `ask` returns, within a time (by default `call_s`), its errors mapped; `what` it is about."""
        with mapping(what):
            return within(timeout_s or self.settings.call_s, what, lambda: function(self.client()))

    def stream(self, what: str, function: Callable[[Client], Iterable[T]]) -> Generator[T, None, None]:
        """What `ask` yields, each of it within `call_s`, its errors mapped."""
        items = stream_within(self.settings.call_s, what, lambda: function(self.client()), each=True)
        with mapping(what), contextlib.closing(items):
            yield from items

    def client(self) -> Client:
        """This process's client. May block: only to be called inside of `call` and its like."""
        with self._lock:
            if self._client is None:
                self._client = Client(self._server, self._properties, self.settings.conf_dir)
            return self._client

    def close(self) -> None:
        """Forget the client; its connections close when they are not used any more."""
        with self._lock:
            self._client = None

    def forget_client(self) -> None:
        """In the child of a fork: have no client, and never take apart the one of the parent."""
        # A thread of the parent may have held the lock.
        self._lock = threading.Lock()
        client, self._client = self._client, None
        if client is not None:
            never_destroy(client)


def note_read() -> None:
    """The library has just read from a DataNode, and keeps the connection."""
    _kept.last_read_s = time.monotonic()


def wait_until_own() -> None:
    """In the child of a fork: wait until connections that the parent has read from are not used any more."""
    time.sleep(max(0.0, _kept.foreign_until_s - time.monotonic()))


def never_destroy(value: object) -> None:
    """Keep an object of the library for ever: in the child of a fork its destructor would wait for the parent's
    threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@contextlib.contextmanager
def mapping(what: str) -> Iterator[None]:
    """Errors of the library that pass through here become ours; `what` they are about."""
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException as error:
        if isinstance(error, BootseerError):
            raise
        # Panics of Rust code are not Exceptions.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise mapped(error, what) from error
        raise


def mapped(error: BaseException, what: str) -> BootseerError:
    """An error of the library as one of ours."""
    text = str(error)
    # Below the first line stands a Java stack trace, which tells a user nothing.
    first = text.replace("\\n", "\n").partition("\n")[0]
    if remote := _REMOTE.match(first):
        first = f"{remote[1]}: {remote[2]}".replace('\\"', '"')
    elif kerberos := _KERBEROS.match(first):
        first = f"Kerberos: {kerberos[1]}; is there a ticket (klist, kinit)?"
    elif "RPC listener disconnected" in first:
        first = "the NameNode ends the connection; if it wants Kerberos, HADOOP_CONF_DIR must name its configuration"
    first = first[:300]
    message = f"{what}: {first}"
    is_missing = isinstance(error, FileNotFoundError) and "Path is not a file" not in text
    if is_missing or ("(is not a directory)" in text and "AccessControlException" in text):
        # Some answers are the bare path. Nothing lies below a file; HDFS calls the question a lack of rights.
        return NotFoundError(message if " " in first else f"{what} is not there")
    kind = kind_of_error(text)
    if kind is not None:
        return kind(message)
    if "No NameNode hosts found" in text:
        hint = "name host and port, or set HADOOP_CONF_DIR to where the service's NameNodes are named"
        return UsageError(f"{what}: no NameNode is known for this address", hint=hint)
    return TransientError(message)


class _Kept:
    """The connections to DataNodes that the library keeps for this process."""

    last_read_s = -math.inf
    foreign_until_s = -math.inf
    """Until then, some may be the parent's."""


_kept = _Kept()


def _after_fork() -> None:
    _kept.foreign_until_s = max(_kept.foreign_until_s, _kept.last_read_s + _KEPT_S)


after_fork(_after_fork)


_AGAIN_S = 0.5


class NativeNames:
    """See `names.Names`."""

    def __init__(self, native: Native) -> None:
        self._native = native

    def stat(self, path: str) -> FileStatus:
        return _status(self._call(path, lambda client: client.get_file_info(path)))

    def list(self, path: str) -> Iterator[FileStatus]:
        what = f"{self._native.uri}{path}"
        for found in self._native.stream(what, lambda client: client.list_status(path, False)):
            yield _status(found)

    def make_folder(self, path: str, mode: int, *, parents: bool) -> None:
        self._call(path, lambda client: client.mkdirs(path, mode, parents))

    def rename(self, source: str, target: str, *, overwrite: bool) -> None:
        self._call(source, lambda client: client.rename(source, target, overwrite=overwrite))

    def delete(self, path: str, *, recursive: bool) -> bool:
        return self._call(path, lambda client: client.delete(path, recursive))

    def set_permission(self, path: str, mode: int) -> None:
        self._call(path, lambda client: client.set_permission(path, mode))

    def set_owner(self, path: str, owner: str | None, group: str | None) -> None:
        self._call(path, lambda client: client.set_owner(path, owner, group))

    def set_mtime(self, path: str, mtime_ms: int) -> None:
        self._call(path, lambda client: client.set_times(path, mtime_ms, client.get_file_info(path).access_time))

    def room(self, path: str) -> tuple[int, int]:
        """Bytes that a folder may have, 0 or less for as many as it likes, and how many it has, all copies counted."""
        summary = self._call(path, lambda client: client.get_content_summary(path))
        return summary.space_quota, summary.space_consumed

    def _call(self, path: str, function: Callable[[Client], T]) -> T:
        """An answer about a name, within the time for one question, waiting for a NameNode that has just started."""
        until = time.monotonic() + self._native.settings.call_s
        while True:
            try:
                return self._native.call(f"{self._native.uri}{path}", function, max(until - time.monotonic(), _AGAIN_S))
            except NotReadyError:
                if time.monotonic() + _AGAIN_S >= until:
                    raise
            time.sleep(_AGAIN_S)


def _status(found: Found) -> FileStatus:
    return FileStatus(
        path=found.path,
        is_folder=found.isdir,
        size_bytes=found.length,
        mtime_ms=found.modification_time,
        mode=found.permission & 0o7777,
        owner=found.owner,
        group=found.group,
        replication=found.replication or 0,
        block_size=found.blocksize or 0,
    )


_NOT_YET = "Failed to complete file in time"
_DELETE_S = 10.0
_HANG_UP_S = 0.5


class _State(enum.Enum):
    OPEN = enum.auto()
    SPOILED = enum.auto()
    """Of no use, and not removed yet."""
    ENDED = enum.auto()


class NativeWriter:
    """A file that is being written: visible under its name from the beginning, complete after `close`."""

    def __init__(
        self,
        native: Native,
        path: str,
        *,
        block_size: int | None = None,
        replication: int | None = None,
        mode: int = 0o644,
        parents: bool = True,
    ) -> None:
        """Create the file, and with `parents` its folder when that is missing. Raises `AlreadyExistsError`."""
        self.path = path
        self.nodes: tuple[str, ...] = ()
        """Not known."""
        self.status: FileStatus | None = None
        """Not asked for."""
        self.size_bytes = 0
        """What was written so far."""
        self._native = native
        self._what = f"{native.uri}{path}"
        options = WriteOptions(block_size=block_size, replication=replication, permission=mode, create_parent=parents)
        self._file = native.call(self._what, lambda client: client.create(path, options))
        # Python's finalizer of files calls close(), which may hang the thread that drops the last reference; what
        # is closed for Python has none. The library's own methods do not ask.
        io.RawIOBase.close(self._file)
        self._state = _State.OPEN

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append. Blocks while HDFS is slower, at most `write_s`."""
        # The library's path for memoryviews is 10 times slower than this copy.
        content = bytes(data) if isinstance(data, memoryview) else data
        self._step(lambda file: file.write(content), self._native.settings.write_s)
        self.size_bytes += len(data)

    def close(self) -> tuple[str, ...]:
        """End the file: all DataNodes have confirmed it, and the NameNode knows its length; where it lies is not
        known."""
        close_s = self._native.settings.close_s
        self._step(lambda file: _complete(file, close_s), close_s)
        self._state = _State.SPOILED
        found = self._native.call(self._what, lambda client: client.get_file_info(self.path).length)
        if found != self.size_bytes:
            raise TransientError(f"{self._what} has {found} bytes after {self.size_bytes} were written")
        self._state = _State.ENDED
        return ()

    def abort(self) -> None:
        """Drop the file. Never raises, and does nothing after `close`; what cannot be removed stays."""
        if self._state is _State.ENDED:
            return
        self._state = _State.ENDED
        with contextlib.suppress(BootseerError):
            self._native.call(self._what, lambda client: client.delete(self.path), _DELETE_S)
        # Ends the connection, which would stay for ever; at once, for the NameNode does not wait for what is removed.
        # One that hangs is left to its thread.
        with contextlib.suppress(BootseerError):
            self._native.call(self._what, lambda _: self._file.close(), _HANG_UP_S)

    def _step(self, step: Callable[[FileWriter], object], timeout_s: float) -> None:
        """One call of the library; after an error there is no second."""
        if self._state is not _State.OPEN:
            raise UsageError(f"{self._what}: this file is not written any more", hint="begin another one")
        try:
            self._native.call(self._what, lambda _: step(self._file), timeout_s)
        except BaseException:
            self._state = _State.SPOILED
            raise


def _complete(file: FileWriter, timeout_s: float) -> None:
    """End the file. The library waits 15 s for DataNodes to tell the NameNode of its blocks, and can be asked again."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            file.close()
            return
        except Exception as error:
            if _NOT_YET not in str(error) or time.monotonic() >= until:
                raise

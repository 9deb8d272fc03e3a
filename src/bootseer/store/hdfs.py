"""Objects as files in HDFS, `hdfs://host:port/dir`. Made by `open.open_store`; needs the extra `hdfs`.

The layout is that of `file`: names are paths below the folder, content names lie in `sha256/`, uploads in `.uploads/`
until a rename makes them visible. What is written is as durable as HDFS makes it: its DataNodes have acknowledged it.

hdfs-native has traps that are dealt with here once. A client that was made before `fork` hangs in the child, and so
does taking it apart: the child forgets it unharmed and makes its own, whose first read may cost a socket timeout, for
the library keeps connections that the child cannot use. Calls know no deadline (`bounded`). Reading past the end
panics. A hung DataNode costs a socket timeout, 60 s unless told otherwise, before the next replica is asked.

The client is guarded by one lock while it is made; it is safe to use from many threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

from hdfs_native import Client, FileWriter, WriteOptions

from bootseer.errors import AccessError, BootseerError, NotFoundError, PermanentError, TransientError, UsageError
from bootseer.bounded import stream_within, within
from bootseer.store.store import (
    PIECE_BYTES,
    Stored,
    check_name,
    check_new,
    check_range,
    content_path,
    name_of_upload,
    range_end,
    upload_ended,
)

T = TypeVar("T")

SOCKET_TIMEOUT_S = 5.0
"""After this, a silent DataNode counts as hung and the next replica is asked. Busy disks answer within 1 or 2 s."""
_CALL_S = 60.0
"""For questions to the NameNode."""
_WRITE_S = 120.0
"""For one buffer on its way to all replicas. A DataNode that has just died can hold a write for minutes."""
_BUFFER_BYTES = 4 * 1024 * 1024
_ABANDONED_MS = 24 * 3600 * 1000
_CLIENT_SETTINGS = {
    # Each attempt sleeps longer; the default of 15 keeps a reader 3 minutes at a NameNode that is not there.
    "dfs.client.failover.max.attempts": "5",
    "dfs.client.failover.sleep.max.millis": "2000",
}


class HdfsStore:
    """A `Store` in HDFS. `socket_timeout_s` is how long a silent DataNode is waited for."""

    def __init__(self, uri: str, *, socket_timeout_s: float = SOCKET_TIMEOUT_S) -> None:
        parts = urlsplit(uri)
        if parts.scheme != "hdfs" or not parts.netloc:
            raise UsageError(f"{uri!r} names no file system", hint="use hdfs://host:port/dir or hdfs://service/dir")
        if ".." in parts.path.split("/"):
            raise UsageError(f"{uri!r} has steps upwards", hint="write the folder's own path")
        self._server = f"hdfs://{parts.netloc}"
        self._root = parts.path.rstrip("/")
        self._settings = {**_CLIENT_SETTINGS, "dfs.client.socket-timeout": str(round(socket_timeout_s * 1000))}
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._swept = False
        _stores.add(self)

    @property
    def uri(self) -> str:
        """`hdfs://host:port/dir`."""
        return f"{self._server}{self._root}"

    def read(
        self, name: str, start: int = 0, length: int | None = None, *, timeout_s: float = 60.0
    ) -> Generator[bytes, None, None]:
        """See `Store.read`."""
        check_range(start, length)
        path = self.path(name)

        def produce() -> Iterator[bytes]:
            try:
                file = self.client().read(path)
                size_bytes = file.size
            except Exception as error:
                raise self.mapped(error, name) from error
            end = range_end(f"{self.uri}: {name}", size_bytes, start, length)
            pieces = _joined(file.read_range_stream(start, end - start)) if end > start else iter(())
            sent = 0
            try:
                for piece in pieces:
                    sent += len(piece)
                    yield piece
            except Exception as error:
                raise self.mapped(error, name) from error
            if sent != end - start:
                raise TransientError(f"{self.uri}: {end - start - sent} bytes of {name} are missing from the answer")

        with self._mapping(name), contextlib.closing(stream_within(timeout_s, f"{self.uri}: {name}", produce)) as items:
            yield from items

    def upload(self) -> HdfsUpload:
        """See `Store.upload`."""
        return HdfsUpload(self)

    def create(self, name: str, data: bytes, *, refs: Sequence[Stored] = (), timeout_s: float = 60.0) -> bool:
        """See `Store.create`."""
        check_new(name, data)
        path = self.path(name)

        def make() -> bool:
            if self._is_taken(path, name):
                return False  # what most who ask get to know costs no write
            client = self.client()
            try:
                client.mkdirs(path.rpartition("/")[0], 0o755, True)
            except Exception as error:
                raise (_in_the_way(self.uri, name) if _says_exists(error) else error) from error
            temporary, writer = self._begin_file()
            try:
                writer.write(data)
                writer.close()
                client.rename(temporary, path, overwrite=False)
            except BaseException as error:
                with contextlib.suppress(FileNotFoundError):
                    client.delete(temporary)
                if _says_exists(error):
                    return False
                raise
            return True

        return self.call(name, make, timeout_s)

    def stat(self, name: str) -> Stored:
        """See `Store.stat`."""
        path = self.path(name)
        found = self.call(name, lambda: self.client().get_file_info(path))
        if found.isdir:
            raise NotFoundError(f"{self.uri} has no object {name}")
        return Stored(name, found.length)

    def list(self, prefix: str = "") -> Iterator[Stored]:
        """See `Store.list`."""
        for entry, isdir, length in self._entries("", recursive=False):
            if entry.startswith(".") or entry == "sha256":
                continue
            below = entry + "/"
            if isdir and (below.startswith(prefix) or prefix.startswith(below)):
                for name, isfolder, size_bytes in self._entries(below, recursive=True):
                    if not isfolder and name.startswith(prefix):
                        yield Stored(name, size_bytes)
            elif not isdir and entry.startswith(prefix):
                yield Stored(entry, length)

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        path = self.path(name)
        # A folder has no name of an object, so that it must not be removed by one.
        with contextlib.suppress(NotFoundError):
            self.stat(name)
            self.call(name, lambda: self.client().delete(path))

    def close(self) -> None:
        """Forget the client; its connections close when nobody uses them."""
        with self._lock:
            self._client = None

    def client(self) -> Client:
        """This process's client. May block: only to be called inside of `call` and its like."""
        with self._lock:
            if self._client is None:
                self._client = Client(self._server, self._settings)
            return self._client

    def forget_client(self) -> None:
        """In the child of a fork: have no client, and never take apart the one of the parent."""
        # A thread of the parent may have held the lock.
        self._lock = threading.Lock()
        client, self._client = self._client, None
        if client is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))

    def path(self, name: str) -> str:
        """The path of an object."""
        return f"{self._root}/{content_path(check_name(name))}"

    def call(self, name: str, call: Callable[[], T], timeout_s: float = _CALL_S) -> T:
        """What `call` returns, within a time and with its errors mapped; `name` is what it is about."""
        with self._mapping(name):
            return within(timeout_s, f"{self.uri}: {name}", call)

    def begin_upload(self) -> tuple[str, FileWriter]:
        """A new file for an upload: its path and its writer."""
        return self.call("an upload", self._begin_file)

    def _begin_file(self) -> tuple[str, FileWriter]:
        folder = f"{self._root}/.uploads"
        path = f"{folder}/{secrets.token_hex(16)}"
        client = self.client()
        client.mkdirs(folder, 0o755, True)
        if not self._swept:
            self._swept = True
            oldest = time.time() * 1000 - _ABANDONED_MS
            for entry in client.list_status(folder):
                # A killed writer leaves its file; one that was begun a day ago has no writer any more.
                if entry.modification_time < oldest:
                    client.delete(entry.path)
        return path, client.create(path, WriteOptions())

    def _is_taken(self, path: str, name: str) -> bool:
        """Whether there is an object. Raises `PermanentError` for a folder of others."""
        try:
            found = self.client().get_file_info(path)
        except FileNotFoundError:
            return False
        if found.isdir:
            raise _in_the_way(self.uri, name)
        return True

    def mapped(self, error: BaseException, name: str) -> BootseerError:
        """An error of hdfs-native as one of ours. It has no classes for most, so that its text must do."""
        if isinstance(error, BootseerError):
            return error
        text = str(error)
        # Below the first line stands a Java stack trace, which tells a user nothing.
        first = text.replace("\\n", "\n").partition("\n")[0][:300]
        said = f"{self.uri}: {name}: {first}"
        if isinstance(error, FileNotFoundError) or "(is not a directory)" in text:
            return NotFoundError(f"{self.uri} has no object {name}")
        if "AccessControlException" in text or isinstance(error, PermissionError):
            return AccessError(said)
        if "QuotaExceededException" in text:
            return PermanentError(f"{said}; nothing was stored, make room and try again")
        return TransientError(said)

    def _entries(self, below: str, *, recursive: bool) -> Iterator[tuple[str, bool, int]]:
        """Name, whether it is a folder, and bytes of what lies in a folder; nothing when it is not there."""
        folder = f"{self._root}/{below}".rstrip("/") or "/"
        start = len(self._root) + 1

        def produce() -> Iterator[tuple[str, bool, int]]:
            for entry in self.client().list_status(folder, recursive):
                yield entry.path[start:], entry.isdir, entry.length

        # No deadline for the whole of a list whose length nobody knows; each of its pages comes quickly or never.
        with contextlib.suppress(NotFoundError), self._mapping(below or "the folder"):
            yield from stream_within(10 * _CALL_S, f"{self.uri}: {below}", produce)

    @contextlib.contextmanager
    def _mapping(self, name: str) -> Iterator[None]:
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            # Panics of Rust code are no Exceptions.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise self.mapped(error, name) from error
            raise


class HdfsUpload:
    """An `Upload` into HDFS. Belongs to one thread at a time."""

    def __init__(self, store: HdfsStore) -> None:
        self._store = store
        self._hash = hashlib.sha256()
        self._buffer = bytearray()
        self._size = 0
        self._path, begun = store.begin_upload()
        self._writer: FileWriter | None = begun

    def write(self, data: bytes | memoryview) -> None:
        """See `Upload.write`."""
        if self._writer is None:
            raise upload_ended(self._store.uri)
        self._hash.update(data)
        self._size += memoryview(data).nbytes
        self._buffer += data
        if len(self._buffer) >= _BUFFER_BYTES:
            self._flush(self._writer)

    def commit(self, name: str | None = None, *, refs: Sequence[Stored] = (), subject: str | None = None) -> Stored:
        """See `Upload.commit`."""
        writer, store = self._writer, self._store
        if writer is None:
            raise upload_ended(store.uri)
        name = name_of_upload(store.uri, name, self._hash.hexdigest())
        self._flush(writer)
        target = store.path(name)

        def finish() -> None:
            writer.close()
            client = store.client()
            try:
                client.mkdirs(target.rpartition("/")[0], 0o755, True)
                client.rename(self._path, target, overwrite=True)
            except Exception as error:
                if isinstance(error, FileExistsError) or "director" in str(error):
                    raise _in_the_way(store.uri, name) from error
                raise

        try:
            store.call(name, finish, _WRITE_S)
        except BootseerError:
            self.abort()
            raise
        self._writer = None
        return Stored(name, self._size)

    def abort(self) -> None:
        """See `Upload.abort`."""
        writer, self._writer = self._writer, None
        if writer is None:
            return

        def remove() -> None:
            # Closing first ends the lease; a file that cannot be closed can still be removed.
            with contextlib.suppress(Exception):
                writer.close()
            self._store.client().delete(self._path)

        with contextlib.suppress(BootseerError):
            self._store.call("an upload", remove, _CALL_S)

    def _flush(self, writer: FileWriter) -> None:
        if not self._buffer:
            return
        data, self._buffer = self._buffer, bytearray()
        try:
            self._store.call("an upload", lambda: writer.write(data), _WRITE_S)
        except BootseerError:
            self.abort()
            raise


_stores: weakref.WeakSet[HdfsStore] = weakref.WeakSet()


def _after_fork() -> None:
    for store in _stores:
        store.forget_client()


os.register_at_fork(after_in_child=_after_fork)


def _says_exists(error: BaseException) -> bool:
    return isinstance(error, FileExistsError) or "AlreadyExistsException" in str(error)


def _in_the_way(where: str, name: str) -> PermanentError:
    return PermanentError(f"{where}: {name}: one object's name cannot be the folder of another's")


def _joined(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Pieces of `PIECE_BYTES`: those of hdfs-native are a quarter of it, and each crosses threads."""
    joined: list[bytes] = []
    size = 0
    for piece in pieces:
        if size + len(piece) > PIECE_BYTES and joined:
            yield b"".join(joined)
            joined, size = [], 0
        joined.append(piece)
        size += len(piece)
    if joined:
        yield b"".join(joined)

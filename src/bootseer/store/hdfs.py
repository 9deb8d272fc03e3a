"""Objects as files in HDFS, `hdfs://host:port/dir`. Made by `open.open_store`; needs the extra `hdfs`.

The layout is that of `file`: names are paths below the folder, content names lie in `sha256/`, uploads in `.uploads/`
until a rename makes them visible. What is written is as durable as HDFS makes it: its DataNodes have acknowledged it.

The client below (`bootseer.hdfs`) has the deadlines, knows hung DataNodes, and survives `fork`.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import secrets
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bootseer.errors import AccessError, NotFoundError, PermanentError, TransientError, UsageError
from bootseer.hdfs.client import HdfsClient
from bootseer.hdfs.errors import TakenError
from bootseer.hdfs.located import FileStatus
from bootseer.hdfs.requests import ReadOutcome
from bootseer.io.deadline import within
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

if TYPE_CHECKING:
    from bootseer.hdfs.native import NativeWriter
    from bootseer.hdfs.native_reads import NativeFile
    from bootseer.hdfs.placing import LongWriter
    from bootseer.hdfs.reads import HdfsFile

_WINDOW_BYTES = 1024 * 1024
_WINDOWS = 4
"""Asked for ahead of the consumer: enough that a DataNode need not wait for it."""
_BUFFER_BYTES = 4 * 1024 * 1024
_ABANDONED_MS = 24 * 3600 * 1000


class HdfsStore:
    """A `Store` in HDFS."""

    def __init__(self, uri: str) -> None:
        parts = urlsplit(uri)
        if parts.scheme != "hdfs" or not parts.netloc:
            raise UsageError(f"{uri!r} names no file system", hint="use hdfs://host:port/dir or hdfs://service/dir")
        if ".." in parts.path.split("/"):
            raise UsageError(f"{uri!r} has steps upwards", hint="write the folder's own path")
        self.client = HdfsClient(parts.netloc)
        self._root = parts.path.rstrip("/")
        self._swept = False

    @property
    def uri(self) -> str:
        """`hdfs://host:port/dir`."""
        return f"{self.client.uri}{self._root}"

    def read(
        self, name: str, start: int = 0, length: int | None = None, *, timeout_s: float = 60.0
    ) -> Generator[bytes, None, None]:
        """See `Store.read`."""
        check_range(start, length)
        path = self.path(name)
        until = time.monotonic() + timeout_s
        what = f"{self.uri}: {name}"
        with self._naming(name):
            file = self.client.reads().open(path, deadline_s=timeout_s)
            with contextlib.closing(file):
                end = range_end(what, file.size_bytes, start, length)
                yield from _pieces(file, start, end, until, what)

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
            self._make_folder(path, name)
            temporary = self._new_path()
            try:
                self.client.put(temporary, data)
                self.client.rename(temporary, path)
            except TakenError:
                self.drop(temporary)
                return False
            except BaseException:
                self.drop(temporary)
                raise
            return True

        return within(timeout_s, f"{self.uri}: {name}", make)

    def stat(self, name: str) -> Stored:
        """See `Store.stat`."""
        with self._naming(name):
            found = self.client.stat(self.path(name))
        if found.is_folder:
            raise self._not_found(name)
        return Stored(name, found.size_bytes)

    def list(self, prefix: str = "") -> Iterator[Stored]:
        """See `Store.list`."""
        for name, entry in self._entries("", recursive=False):
            if name.startswith(".") or name == "sha256":
                continue
            below = name + "/"
            if entry.is_folder and (below.startswith(prefix) or prefix.startswith(below)):
                for deeper, file in self._entries(below, recursive=True):
                    if not file.is_folder and deeper.startswith(prefix):
                        yield Stored(deeper, file.size_bytes)
            elif not entry.is_folder and name.startswith(prefix):
                yield Stored(name, entry.size_bytes)

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        # A folder has no name of an object, so that it must not be removed by one.
        with contextlib.suppress(NotFoundError):
            self.stat(name)
            self.client.delete(self.path(name))

    def close(self) -> None:
        """See `Store.close`."""
        self.client.close()

    def path(self, name: str) -> str:
        """The path of an object."""
        return f"{self._root}/{content_path(check_name(name))}"

    def begin_upload(self) -> LongWriter | NativeWriter:
        """A new file for an upload."""
        return self.client.create(self._new_path())

    def publish(self, temporary: str, name: str) -> None:
        """Give a finished upload the name of its object, over what was there."""
        path = self.path(name)
        self._make_folder(path, name)
        try:
            self.client.rename(temporary, path, overwrite=True)
        except AccessError:
            raise
        except PermanentError as error:
            raise self._in_the_way(name) from error

    def drop(self, temporary: str) -> None:
        """Remove the file of an upload, if it is there and can be removed."""
        with contextlib.suppress(PermanentError, TransientError):
            self.client.delete(temporary)

    def _new_path(self) -> str:
        folder = f"{self._root}/.uploads"
        if not self._swept:
            self._swept = True
            oldest = time.time() * 1000 - _ABANDONED_MS
            with contextlib.suppress(NotFoundError):
                for entry in self.client.list(folder):
                    # A killed writer leaves its file; one that was begun a day ago has no writer any more.
                    if entry.mtime_ms < oldest:
                        self.client.delete(entry.path)
        return f"{folder}/{secrets.token_hex(16)}"

    def _make_folder(self, path: str, name: str) -> None:
        """The folder that an object's file lies in."""
        try:
            self.client.make_folder(path.rpartition("/")[0], parents=True)
        except AccessError:
            raise
        except PermanentError as error:
            raise self._in_the_way(name) from error

    def _is_taken(self, path: str, name: str) -> bool:
        """Whether there is an object. Raises `PermanentError` for a folder of others."""
        try:
            found = self.client.stat(path)
        except NotFoundError:
            return False
        if found.is_folder:
            raise self._in_the_way(name)
        return True

    def _entries(self, below: str, *, recursive: bool) -> Iterator[tuple[str, FileStatus]]:
        """What lies in a folder, with names from the store's own on; nothing when it is not there."""
        folder = f"{self._root}/{below}".rstrip("/") or "/"
        with contextlib.suppress(NotFoundError):
            for entry in self.client.list(folder, recursive=recursive):
                yield entry.path[len(self._root) + 1 :], entry

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except NotFoundError as error:
            raise self._not_found(name) from error

    def _not_found(self, name: str) -> NotFoundError:
        return NotFoundError(f"{self.uri} has no object {name}")

    def _in_the_way(self, name: str) -> PermanentError:
        return PermanentError(f"{self.uri}: {name}: one object's name cannot be the folder of another's")


class HdfsUpload:
    """An `Upload` into HDFS. Belongs to one thread at a time."""

    def __init__(self, store: HdfsStore) -> None:
        self._store = store
        self._hash = hashlib.sha256()
        self._buffer = bytearray()
        self._writer: LongWriter | NativeWriter | None = store.begin_upload()

    def write(self, data: bytes | memoryview) -> None:
        """See `Upload.write`."""
        if self._writer is None:
            raise upload_ended(self._store.uri)
        self._hash.update(data)
        self._buffer += data
        if len(self._buffer) >= _BUFFER_BYTES:
            self._flush(self._writer)

    def commit(self, name: str | None = None, *, refs: Sequence[Stored] = (), subject: str | None = None) -> Stored:
        """See `Upload.commit`."""
        writer = self._writer
        if writer is None:
            raise upload_ended(self._store.uri)
        name = name_of_upload(self._store.uri, name, self._hash.hexdigest())
        self._flush(writer)
        try:
            writer.close()
            self._store.publish(writer.path, name)
        except BaseException:
            self.abort()
            self._store.drop(writer.path)  # which is there when only its name was refused
            raise
        self._writer = None
        return Stored(name, writer.size_bytes)

    def abort(self) -> None:
        """See `Upload.abort`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.abort()

    def _flush(self, writer: LongWriter | NativeWriter) -> None:
        if not self._buffer:
            return
        data, self._buffer = self._buffer, bytearray()
        try:
            writer.write(data)
        except BaseException:
            self.abort()
            raise


def _pieces(file: HdfsFile | NativeFile, start: int, end: int, until: float, what: str) -> Iterator[bytes]:
    """The bytes from `start` to `end`, with a few windows on their way at a time."""
    tickets = []
    waiting: collections.deque[tuple[bytearray, Future[ReadOutcome]]] = collections.deque()
    try:
        asked = start
        while waiting or asked < end:
            while asked < end and len(waiting) < _WINDOWS:
                buffer = bytearray(min(_WINDOW_BYTES, end - asked))
                future: Future[ReadOutcome] = Future()
                left_s = until - time.monotonic()
                tickets.append(file.read_into(asked, memoryview(buffer), future.set_result, deadline_s=max(left_s, 0)))
                waiting.append((buffer, future))
                asked += len(buffer)
            buffer, future = waiting.popleft()
            try:
                outcome = future.result(max(until - time.monotonic(), 0))
            except LateError:
                raise TransientError(f"{what}: no complete answer in time") from None
            if outcome.error is not None:
                raise outcome.error
            del tickets[0]
            for at in range(0, len(buffer), PIECE_BYTES):
                yield bytes(memoryview(buffer)[at : at + PIECE_BYTES])
    finally:
        for ticket in tickets:
            ticket.cancel()

"""Objects in S3, Google Cloud Storage or Azure: `s3://bucket/prefix`, `gs://…`, `az://…`. Made by `open.open_store`.

Needs the extra `s3` (obstore, which serves all three). Credentials and endpoints come from the environment variables of
the respective cloud. The layout is that of `file`. Small objects are put in one request; larger ones go in parts to a
name below `.uploads/`, because their own is known only at the end, and are copied to it by the server.

A process killed in between leaves a multipart upload that nobody sees but somebody pays for: give the bucket a rule
that ends those after a day, and objects below `.uploads/` too.

obstore runs on threads that a `fork` does not take along: its child would wait for ever and is told so instead. The
flags that know this are only ever set. Safe to use from many threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, NotSupportedError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from bootseer.errors import AccessError, BootseerError, NotFoundError, PermanentError, TransientError, UsageError
from bootseer.io.deadline import stream_within, within
from bootseer.io.fork import after_fork
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

PART_BYTES = 8 * 1024 * 1024
"""Size of a part, and up to which an object is put in one request."""
_MAX_COPY_BYTES = {"s3": 5 * 1024**3}
"""What the server copies in one request; the only way to give an uploaded object its name."""
_CALL_S = 60.0
_WRITE_S = 300.0
"""For one part, and for the copy of a large object."""
_PARTS_AT_ONCE = 4
_CLIENT = {
    # Deadlines of calls are kept by `bounded`; these end what was left behind.
    "timeout": "3600s",
    "read_timeout": "60s",
    "connect_timeout": "10s",
    "pool_max_idle_per_host": "64",
}
_STATUS = re.compile(r"status code: (\d{3})")


class _Runtime:
    """Whether obstore's threads run in this process."""

    used = False
    lost = False


def _after_fork() -> None:
    _Runtime.lost = _Runtime.used


after_fork(_after_fork)


class ObjectStore:
    """A `Store` in a bucket. `allow_http` permits an endpoint without encryption."""

    def __init__(self, uri: str, *, allow_http: bool = False) -> None:
        self._uri = uri.rstrip("/")
        self._scheme, _, rest = self._uri.partition("://")
        if not rest or ".." in rest.split("/"):
            raise UsageError(f"{uri!r} names no bucket", hint="use s3://bucket/prefix")
        options: Any = {**_CLIENT, "allow_http": allow_http or os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"}
        try:
            # A store makes one attempt; only the parts of an upload, which cannot be begun again, are tried more often.
            self._reader: Any = from_url(self._uri, client_options=options, retry_config={"max_retries": 0})
            self._writer: Any = from_url(self._uri, client_options=options, retry_config={"max_retries": 4})
        except Exception as error:
            raise UsageError(f"{self._uri}: {_first_line(error)}", hint="use s3://bucket/prefix") from error

    @property
    def uri(self) -> str:
        """As it was opened, without a slash at its end."""
        return self._uri

    def read(
        self, name: str, start: int = 0, length: int | None = None, *, timeout_s: float = 60.0
    ) -> Generator[bytes, None, None]:
        """See `Store.read`."""
        check_range(start, length)
        path = content_path(check_name(name))
        if length == 0:
            return

        def produce() -> Iterator[bytes]:
            options: Any = {}
            if start or length is not None:
                options["range"] = {"offset": start} if length is None else (start, start + length)
            try:
                answer = obstore.get(self._reader, path, options=options)
            except Exception as error:
                # The clouds' servers differ in who notices that a range begins at or beyond the end.
                if _status(error) != 416 and "Wanted range starting at" not in str(error):
                    raise
                # Says what is wrong with the range, or that nothing is left to read.
                size_bytes = obstore.head(self._reader, path)["size"]
                if range_end(f"{self._uri}: {name}", size_bytes, start, length) > start:
                    raise
                return
            end = range_end(f"{self._uri}: {name}", answer.meta["size"], start, length)
            missing = end - start
            for piece in answer.stream(min_chunk_size=PIECE_BYTES // 4):
                missing -= len(piece)
                yield from _cut(bytes(piece))
            if missing:
                raise TransientError(f"{self._uri}: the answer for {name} has another length than it should")

        with self._mapping(name):
            _check_runtime(self._uri)
            with contextlib.closing(stream_within(timeout_s, f"{self._uri}: {name}", produce)) as pieces:
                yield from pieces

    def upload(self) -> ObjectUpload:
        """See `Store.upload`."""
        return ObjectUpload(self, self._writer, _MAX_COPY_BYTES.get(self._scheme))

    def create(self, name: str, data: bytes, *, refs: Sequence[Stored] = (), timeout_s: float = 60.0) -> bool:
        """See `Store.create`."""
        check_new(name, data)
        path = content_path(name)

        def make() -> bool:
            # Not with the client that tries again: the second attempt would find what the first one had made.
            try:
                obstore.put(self._reader, path, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            except Exception as error:
                if not isinstance(error, NotSupportedError) and _status(error) != 501:
                    raise
            else:
                return True
            try:
                obstore.head(self._reader, path)
            except FileNotFoundError:
                obstore.put(self._reader, path, data, use_multipart=False)
                return bytes(obstore.get(self._reader, path).bytes()) == data
            return False

        return self.call(name, make, timeout_s)

    def stat(self, name: str) -> Stored:
        """See `Store.stat`."""
        path = content_path(check_name(name))
        return Stored(name, self.call(name, lambda: obstore.head(self._reader, path)["size"]))

    def list(self, prefix: str = "") -> Iterator[Stored]:
        """See `Store.list`."""
        folder = prefix.rpartition("/")[0]
        if folder:
            try:
                folders = [check_name(folder)]
            except UsageError:
                return  # no object can lie there
        else:
            top = self.call(prefix, lambda: obstore.list_with_delimiter(self._reader))
            for entry in top["objects"]:
                if entry["path"].startswith(prefix):
                    yield Stored(entry["path"], entry["size"])
            folders = [found for found in top["common_prefixes"] if found.startswith(prefix)]
        for found in folders:
            if found.startswith(".") or found.partition("/")[0] == "sha256":
                continue
            for entries in self._pages(found):
                for entry in entries:
                    if entry["path"].startswith(prefix):
                        yield Stored(entry["path"], entry["size"])

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        path = content_path(check_name(name))
        with contextlib.suppress(NotFoundError):
            self.call(name, lambda: obstore.delete(self._reader, path))

    def close(self) -> None:
        """Nothing to give back: obstore closes idle connections itself."""

    def call(self, name: str, call: Callable[[], T], timeout_s: float = _CALL_S) -> T:
        """What `call` returns, within a time and with its errors mapped; `name` is what it is about."""
        with self._mapping(name):
            _check_runtime(self._uri)
            return within(timeout_s, f"{self._uri}: {name}", call)

    def _pages(self, folder: str) -> Iterator[Sequence[Any]]:
        with self._mapping(folder):
            # No deadline for the whole of a list whose length nobody knows; each of its pages comes quickly or never.
            produce = lambda: obstore.list(self._reader, folder)  # noqa: E731
            yield from stream_within(10 * _CALL_S, f"{self._uri}: {folder}", produce)

    @contextlib.contextmanager
    def _mapping(self, name: str) -> Iterator[None]:
        try:
            yield
        except BootseerError:
            raise
        except Exception as error:
            raise self._mapped(error, name) from error

    def _mapped(self, error: Exception, name: str) -> BootseerError:
        said = f"{self._uri}: {name}: {_first_line(error)}"
        status = _status(error)
        if isinstance(error, FileNotFoundError):
            return NotFoundError(f"{self._uri} has no object {name}")
        if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403):
            return AccessError(f"{said}; check the credentials in the environment")
        if "169.254.169.254" in said:
            # Without any credentials, obstore asks the machine's own cloud for some.
            return AccessError(f"{self._uri}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        if "builder error" in said:
            return PermanentError(f"{said}; an endpoint of http needs AWS_ALLOW_HTTP=true")
        if status is not None and 400 <= status < 500 and status not in (408, 409, 416, 425, 429):
            return PermanentError(said)
        return TransientError(said)


class ObjectUpload:
    """An `Upload` into a bucket. Belongs to one thread at a time."""

    def __init__(self, store: ObjectStore, client: Any, max_copy_bytes: int | None) -> None:
        self._store = store
        self._client = client
        self._max_copy_bytes = max_copy_bytes
        self._hash = hashlib.sha256()
        self._size = 0
        self._buffer = bytearray()
        self._path = f".uploads/{secrets.token_hex(16)}"
        self._parts: Any = None
        self._ended = False

    def write(self, data: bytes | memoryview) -> None:
        """See `Upload.write`."""
        if self._ended:
            raise upload_ended(self._store.uri)
        self._hash.update(data)
        self._size += memoryview(data).nbytes
        if self._max_copy_bytes is not None and self._size > self._max_copy_bytes:
            self.abort()
            limit = f"an object may have at most {self._max_copy_bytes} bytes"
            raise PermanentError(f"{self._store.uri}: {limit} here; spread it over more stripes")
        self._buffer += data
        if len(self._buffer) >= PART_BYTES:
            self._flush()

    def commit(self, name: str | None = None, *, refs: Sequence[Stored] = (), subject: str | None = None) -> Stored:
        """See `Upload.commit`."""
        if self._ended:
            raise upload_ended(self._store.uri)
        name = name_of_upload(self._store.uri, name, self._hash.hexdigest())
        target = content_path(name)
        client = self._client

        def finish() -> None:
            if self._parts is None:
                obstore.put(client, target, bytes(self._buffer), use_multipart=False)
                return
            self._parts.close()
            obstore.copy(client, self._path, target)
            obstore.delete(client, self._path)

        try:
            if self._parts is not None:
                self._flush()
            self._store.call(name, finish, _WRITE_S)
        except BootseerError:
            self.abort()
            raise
        self._ended = True
        return Stored(name, self._size)

    def abort(self) -> None:
        """See `Upload.abort`."""
        if self._ended:
            return
        self._ended = True
        parts, self._parts = self._parts, None
        if parts is None:
            return

        def remove() -> None:
            # obstore cannot end a multipart upload without completing it; what it completes is removed at once.
            with contextlib.suppress(Exception):
                parts.close()
            obstore.delete(self._client, self._path)

        with contextlib.suppress(BootseerError):
            self._store.call("an upload", remove, _WRITE_S)

    def _flush(self) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        if self._parts is None:
            self._parts = obstore.open_writer(
                self._client, self._path, buffer_size=PART_BYTES, max_concurrency=_PARTS_AT_ONCE
            )
        parts = self._parts
        try:
            self._store.call("an upload", lambda: parts.write(data), _WRITE_S)
        except BootseerError:
            self.abort()
            raise


def _check_runtime(uri: str) -> None:
    if _Runtime.lost:
        raise PermanentError(f"{uri}: object stores do not work in the child of a fork; start a new process instead")
    _Runtime.used = True


def _cut(piece: bytes) -> Iterator[bytes]:
    if len(piece) <= PIECE_BYTES:
        yield piece
        return
    for at in range(0, len(piece), PIECE_BYTES):
        yield piece[at : at + PIECE_BYTES]


def _status(error: Exception) -> int | None:
    match = _STATUS.search(str(error))
    return int(match[1]) if match is not None else None


def _first_line(error: Exception) -> str:
    """Without what stands behind a question mark in an address: it may be a signature."""
    return re.sub(r"\?\S+", "?…", str(error).partition("\n")[0])[:300]

"""Objects in S3, Google Cloud Storage or Azure: `s3://bucket/prefix`, `gs://…`, `az://…`.

Needs the extra `s3` (obstore, which serves all three). The layout is that of `file`. Small objects are put in one
request; larger ones go in parts to a name below `.uploads/`, because their own is known only at the end, and are copied
to it by the server.

A process killed in between leaves a multipart upload that is not shown and is paid for: give the bucket a rule
that ends those after a day, and objects below `.uploads/` too. Safe to use from many threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, NotSupportedError

from bootseer.errors import BootseerError, NotFoundError, PermanentError, TransientError, UsageError
from bootseer.io.deadline import stream_within
from bootseer.places.bucket import MAX_COPY_BYTES, Bucket, status_of
from bootseer.places.uploads import ObjectPart
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


class ObjectStore:
    """A `Store` in a bucket. `allow_http` permits an endpoint without encryption."""

    def __init__(self, uri: str, *, allow_http: bool = False) -> None:
        self._bucket = Bucket(uri, allow_http=allow_http)
        self.uri = self._bucket.uri
        # Not with the client that tries again: a second attempt to create would find what the first one had made.
        self._reader = self._bucket.reader

    def read(
        self, name: str, start: int = 0, length: int | None = None, *, timeout_s: float = 60.0
    ) -> Generator[bytes, None, None]:
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
                # Only some of the clouds' servers notice that a range begins at or beyond the end.
                if status_of(error) != 416 and "Wanted range starting at" not in str(error):
                    raise
                # Says what is wrong with the range, or that nothing is left to read.
                size_bytes = obstore.head(self._reader, path)["size"]
                if range_end(f"{self.uri}: {name}", size_bytes, start, length) > start:
                    raise
                return
            end = range_end(f"{self.uri}: {name}", answer.meta["size"], start, length)
            missing = end - start
            for piece in answer.stream(min_chunk_size=PIECE_BYTES // 4):
                missing -= len(piece)
                data = bytes(piece)
                yield from (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))
            if missing:
                raise TransientError(f"{self.uri}: the answer for {name} has another length than it should")

        pieces = stream_within(timeout_s, f"{self.uri}: {name}", produce)
        with self._bucket.mapping(name), contextlib.closing(pieces):
            yield from pieces

    def upload(self) -> ObjectUpload:
        return ObjectUpload(self._bucket)

    def create(self, name: str, data: bytes, *, refs: Sequence[Stored] = (), timeout_s: float = 60.0) -> bool:
        check_new(name, data)
        path = content_path(name)

        def make() -> bool:
            try:
                obstore.put(self._reader, path, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            except Exception as error:
                if not isinstance(error, NotSupportedError) and status_of(error) != 501:
                    raise
                raise PermanentError(
                    f"{self.uri}: the server does not support conditional writes (If-None-Match)"
                ) from error
            return True

        return self._bucket.call(name, make, timeout_s)

    def stat(self, name: str) -> Stored:
        path = content_path(check_name(name))
        return Stored(name, self._bucket.call(name, lambda: obstore.head(self._reader, path)["size"]))

    def list(self, prefix: str = "") -> Iterator[Stored]:
        folder = prefix.rpartition("/")[0]
        if folder:
            try:
                folders = [check_name(folder)]
            except UsageError:
                return  # no object can lie there
        else:
            top = self._bucket.call(prefix, lambda: obstore.list_with_delimiter(self._reader))
            for entry in top["objects"]:
                if entry["path"].startswith(prefix):
                    yield Stored(entry["path"], entry["size"])
            folders = [found for found in top["common_prefixes"] if found.startswith(prefix)]
        for found in folders:
            if found.startswith(".") or found.partition("/")[0] == "sha256":
                continue
            for entry in self._bucket.objects(found):
                if entry["path"].startswith(prefix):
                    yield Stored(entry["path"], entry["size"])

    def delete(self, name: str) -> None:
        path = content_path(check_name(name))
        with contextlib.suppress(NotFoundError):
            self._bucket.call(name, lambda: obstore.delete(self._reader, path))

    def close(self) -> None:
        """Nothing to give back: obstore closes idle connections itself."""


class ObjectUpload:
    """An `Upload` into a bucket. Belongs to one thread at a time."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._max_copy_bytes = MAX_COPY_BYTES.get(bucket.scheme)
        self._hash = hashlib.sha256()
        self._size = 0
        path = f".uploads/{secrets.token_hex(16)}"
        self._part = ObjectPart(bucket, path, path)
        """Where a large object goes until its name is known; a small one is not sent before."""
        self._ended = False

    def write(self, data: bytes | memoryview) -> None:
        if self._ended:
            raise upload_ended(self._bucket.uri)
        self._hash.update(data)
        self._size += memoryview(data).nbytes
        if self._max_copy_bytes is not None and self._size > self._max_copy_bytes:
            self.abort()
            limit = f"an object may have at most {self._max_copy_bytes} bytes"
            raise PermanentError(f"{self._bucket.uri}: {limit} here; spread it over more stripes")
        try:
            self._part.write(data)
        except BaseException:
            self.abort()
            raise

    def commit(self, name: str | None = None, *, refs: Sequence[Stored] = (), subject: str | None = None) -> Stored:
        if self._ended:
            raise upload_ended(self._bucket.uri)
        name = name_of_upload(self._bucket.uri, name, self._hash.hexdigest())
        part, target = self._part, content_path(name)
        try:
            if not part.is_sending:
                part.path, part.key = name, target
            part.close()
            if part.is_sending:
                self._bucket.copy(part.key, target)
        finally:
            self.abort()
        return Stored(name, self._size)

    def abort(self) -> None:
        had_ended, self._ended = self._ended, True
        if had_ended:
            return
        part = self._part
        part.abort()
        if part.is_sending:
            # It exists if its upload was completed. If this user may not delete it, the bucket's rule does.
            with contextlib.suppress(BootseerError):
                self._bucket.call("an upload", lambda: obstore.delete(self._bucket.writer, part.key))

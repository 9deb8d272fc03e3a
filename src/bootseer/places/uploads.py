"""Uploads to buckets: new objects, in one request or in parts, and two functions for S3 that obstore lacks.

These are the multipart uploads that killed writers have left, which are billed but not listed as objects, and lists
with keys that obstore refuses. They use Amazon's botocore, which supports all logins.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, Final

import obstore

from bootseer.errors import AccessError, BootseerError, NotFoundError, TransientError, UsageError, needs_extra
from bootseer.places.bucket import CALL_S, ENDPOINTS, LOGIN, WRITE_S, Bucket, allows_http

PART_BYTES = 8 * 1024 * 1024
"""Usual size of a part of a multipart upload. Smaller objects are put in one request."""
_MAX_PARTS = 10_000
"""Limit of one upload."""
_PARTS_AT_ONCE = 4
_MAX_OBJECT_BYTES = 5 << 40


class ObjectPart:
    """A `PartWriter`. A small object is put by one request in `close`; a larger one is uploaded in parts while it is
    written. The object is not visible before `close`, and nothing is left after `abort`."""

    nodes: tuple[str, ...] = ()

    def __init__(self, bucket: Bucket, path: str, key: str, most_bytes: int = 0) -> None:
        self.path = path
        self.key = key
        # An upload has at most `_MAX_PARTS` parts. If the length is unknown, they have the usual size.
        self._part_bytes = max(PART_BYTES, -(-most_bytes // _MAX_PARTS) if most_bytes <= _MAX_OBJECT_BYTES else 0)
        self._bucket = bucket
        self._buffer = bytearray()
        self._upload: Any = None
        """obstore's writer of a large object."""
        self._ended = False

    @property
    def is_sending(self) -> bool:
        """Whether a multipart upload has begun. Until then `key` may be changed."""
        return self._upload is not None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer += data
        while len(self._buffer) > self._part_bytes:
            self._send(bytes(memoryview(self._buffer)[: self._part_bytes]))
            del self._buffer[: self._part_bytes]

    def _send(self, piece: bytes) -> None:
        is_first = self._upload is None
        if is_first:
            self._upload = obstore.open_writer(
                self._bucket.writer, self.key, buffer_size=self._part_bytes, max_concurrency=_PARTS_AT_ONCE
            )
        self._bucket.call(self.path, partial(self._upload.write, piece), WRITE_S, probe=is_first)

    def close(self) -> tuple[str, ...]:
        data = bytes(self._buffer)
        if self._upload is None:
            put = partial(obstore.put, self._bucket.writer, self.key, data, use_multipart=False)
            self._bucket.call(self.path, put, WRITE_S)
        else:
            self._send(data)
            self._bucket.call(self.path, self._upload.close, WRITE_S, probe=False)
        self._ended = True
        return ()

    def abort(self) -> None:
        if self._ended:
            return
        self._ended = True
        if self._upload is not None:
            end = partial(self._upload.__exit__, TransientError, TransientError("aborted"), None)  # removes its parts
            with suppress(BootseerError):
                self._bucket.call(self.path, end, CALL_S, probe=False)


_TIMEOUT_S: Final = 10
_TRIES: Final = 8


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload that was neither completed nor aborted."""

    key: str
    id: str


class Uploads:
    """Multipart uploads below a place in a bucket."""

    def __init__(self, uri: str) -> None:
        """Raises `UsageError` outside S3, and without botocore."""
        scheme, _, rest = uri.rstrip("/").partition("://")
        if scheme != "s3":
            raise UsageError(
                f"{uri}: unfinished uploads can be listed in S3 only",
                hint="Azure removes them after a week; elsewhere, set a lifecycle rule",
            )
        with needs_extra("s3", f"listing the uploads of {uri}"):
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
            from botocore.session import get_session
        name, _, root = rest.partition("/")
        self._bucket, self._prefix = Bucket(f"s3://{name}"), f"{root}/" if root else ""
        self._which = {"Bucket": name}
        # obstore's variables and defaults, where they differ from botocore's
        endpoint = next(filter(None, map(os.environ.get, ENDPOINTS)), None)
        if endpoint and endpoint.startswith("http:") and not allows_http():
            raise UsageError(f"{endpoint}: an endpoint of http needs AWS_ALLOW_HTTP=true")
        config = Config(
            connect_timeout=_TIMEOUT_S, read_timeout=_TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": _TRIES},
            s3={"addressing_style": "path" if endpoint else "auto"},
        )  # fmt: skip
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        try:
            self._client: Any = get_session().create_client(
                "s3", region_name=region or "us-east-1", endpoint_url=endpoint, config=config
            )
        except (BotoCoreError, ValueError) as error:  # an unknown AWS_PROFILE, an invalid endpoint
            raise UsageError(f"{uri}: {error}", hint="check the AWS_ variables") from error

    def left(self, older_than_s: float) -> Iterator[Upload]:
        """Those that began at least so long ago. Raises `BootseerError`."""
        for page in self._pages("uploads", "list_multipart_uploads", Prefix=self._prefix):
            try:
                now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
            except (KeyError, ValueError):
                now = datetime.now(UTC)
            for one in page.get("Uploads", ()):
                if (now - one["Initiated"]).total_seconds() >= older_than_s:
                    yield Upload(one["Key"], one["UploadId"])

    def end(self, upload: Upload) -> None:
        """Abort an upload, which removes its parts. Raises `BootseerError`."""
        end = partial(self._client.abort_multipart_upload, **self._which, Key=upload.key, UploadId=upload.id)
        with suppress(NotFoundError):  # completed or aborted meanwhile
            self._call(upload.key, end)

    def listed(self, prefix: str) -> dict[str, list[Any]]:
        """Like `Bucket.listed`, also with keys that obstore refuses; `prefix` is of the whole bucket."""
        found: dict[str, list[Any]] = {"common_prefixes": [], "objects": []}
        for page in self._pages(prefix, "list_objects_v2", Prefix=prefix, Delimiter="/"):
            found["common_prefixes"] += [one["Prefix"] for one in page.get("CommonPrefixes", ())]
            found["objects"] += [
                {"path": one["Key"], "size": one["Size"], "e_tag": one["ETag"], "last_modified": one["LastModified"]}
                for one in page.get("Contents", ())
            ]
        return found

    def _pages(self, name: str, operation: str, **options: str) -> Iterator[Any]:
        pages = iter(self._client.get_paginator(operation).paginate(**self._which, **options))
        while (page := self._call(name, partial(next, pages, None))) is not None:
            yield page

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        from botocore.exceptions import ClientError, NoCredentialsError

        def ask() -> Any:
            try:
                return call()
            except NoCredentialsError as error:
                raise AccessError(f"{self._bucket.uri}: no credentials; set {LOGIN}") from error
            except ClientError as error:
                code = error.response["Error"]["Code"]
                if code == "NoSuchUpload":
                    raise NotFoundError(f"{self._bucket.uri}: {name}: no such upload") from error
                status = error.response["ResponseMetadata"]["HTTPStatusCode"]
                raise OSError(f"status code: {status}\n<Code>{code}</Code>") from error  # the form that `Bucket` maps

        return self._bucket.call(name, ask)

"""What obstore does not do in S3: uploads in parts that killed writers have left, which no listing shows and which are
paid for, lists with keys that it refuses, and copies in parts. Amazon's own botocore does these, and knows all
ways to log in.
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

from bootseer.errors import AccessError, NotFoundError, UsageError
from bootseer.io.tasks import Tasks
from bootseer.places.bucket import LOGIN, MAX_PARTS, Bucket, allows_http

_TIMEOUT_S: Final = 10
_TRIES: Final = 8
_COPY_BYTES = 128 << 20
_COPIES_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class Upload:
    """One that was neither completed nor ended."""

    key: str
    id: str
    age_s: float
    """By the server's clock."""


class Uploads:
    """Those below a place in a bucket."""

    def __init__(self, uri: str) -> None:
        """Raises `UsageError` for what is not in S3, and without botocore."""
        scheme, _, rest = uri.rstrip("/").partition("://")
        if scheme != "s3":
            raise UsageError(
                f"{uri}: only S3 tells its uploads", hint="Azure ends them after a week; give others a rule that does"
            )
        try:
            from botocore.config import Config
            from botocore.session import get_session
        except ImportError as error:
            raise UsageError(f"{uri}: uploads need botocore", hint="install bootseer[s3]") from error
        name, _, root = rest.partition("/")
        self._bucket, self._prefix = Bucket(f"s3://{name}"), f"{root}/" if root else ""
        self._which = {"Bucket": name}
        # obstore's variables, where they differ from botocore's own, and its defaults
        endpoint = os.environ.get("AWS_ENDPOINT") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint and endpoint.startswith("http:") and not allows_http():
            raise UsageError(f"{endpoint}: an endpoint of http needs AWS_ALLOW_HTTP=true")
        config = Config(
            connect_timeout=_TIMEOUT_S, read_timeout=_TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": _TRIES},
            s3={"addressing_style": "path" if endpoint else "auto"},
        )  # fmt: skip
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        self._client: Any = get_session().create_client(
            "s3", region_name=region or "us-east-1", endpoint_url=endpoint, config=config
        )

    def left(self, older_than_s: float) -> Iterator[Upload]:
        """Those that began so long ago. Raises `BootseerError`."""
        pages = iter(self._client.get_paginator("list_multipart_uploads").paginate(**self._which, Prefix=self._prefix))
        while (page := self._call("uploads", partial(next, pages, None))) is not None:
            try:
                now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
            except (KeyError, ValueError):
                now = datetime.now(UTC)
            for one in page.get("Uploads", ()):
                age_s = (now - one["Initiated"]).total_seconds()
                if age_s >= older_than_s:
                    yield Upload(one["Key"], one["UploadId"], age_s)

    def end(self, upload: Upload) -> None:
        """Have the server forget its parts. Raises `BootseerError`."""
        end = partial(self._client.abort_multipart_upload, **self._which, Key=upload.key, UploadId=upload.id)
        with suppress(NotFoundError):  # it has ended meanwhile
            self._call(upload.key, end)

    def listed(self, prefix: str) -> dict[str, list[Any]]:
        """As `Bucket.listed`, with the keys that obstore refuses; `prefix` from the bucket on."""
        pages = iter(
            self._client.get_paginator("list_objects_v2").paginate(**self._which, Prefix=prefix, Delimiter="/")
        )
        found: dict[str, list[Any]] = {"common_prefixes": [], "objects": []}
        while (page := self._call(prefix, partial(next, pages, None))) is not None:
            found["common_prefixes"] += [one["Prefix"] for one in page.get("CommonPrefixes", ())]
            found["objects"] += [
                {"path": one["Key"], "size": one["Size"], "e_tag": one["ETag"], "last_modified": one["LastModified"]}
                for one in page.get("Contents", ())
            ]
        return found

    def copy(self, key: str, new: str, size_bytes: int, e_tag: str) -> None:
        """Copy an object that is larger than what one request copies, if it is still this one."""
        made = self._call(new, partial(self._client.create_multipart_upload, **self._which, Key=new))
        each: dict[str, Any] = {**self._which, "Key": new, "UploadId": made["UploadId"]}
        source = {"CopySource": {**self._which, "Key": key}, "CopySourceIfMatch": e_tag}
        length = max(_COPY_BYTES, -(-size_bytes // MAX_PARTS))

        def one(start: int) -> dict[str, Any]:
            number, bytes_ = start // length + 1, f"bytes={start}-{min(start + length, size_bytes) - 1}"
            ask = partial(self._client.upload_part_copy, **each, **source, PartNumber=number, CopySourceRange=bytes_)
            return {"ETag": self._call(key, ask)["CopyPartResult"]["ETag"], "PartNumber": number}

        try:
            with Tasks("bootseer-copies", _COPIES_AT_ONCE) as threads:
                parts = list(threads.map(one, range(0, size_bytes, length)))
            self._call(new, partial(self._client.complete_multipart_upload, **each, MultipartUpload={"Parts": parts}))
        except BaseException:
            self.end(Upload(new, made["UploadId"], 0.0))
            raise

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
                raise OSError(f"status code: {status}\n<Code>{code}</Code>") from error  # which `Bucket` understands

        return self._bucket.call(name, ask)

"""Uploads in parts that killed writers have left in an S3 bucket: no listing shows them, and they are paid for.

obstore neither lists nor ends them, so that these requests are signed here (AWS Signature Version 4).
"""

from __future__ import annotations

import hashlib
import hmac
import html
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Final
from urllib.parse import quote, urlsplit

from bootseer.errors import AccessError, NotFoundError, PermanentError, UsageError
from bootseer.places.bucket import Bucket

_TIMEOUT_S: Final = 30.0
_MAX_ANSWER: Final = 16 << 20
_EMPTY: Final = hashlib.sha256(b"").hexdigest()
_REDIRECTS: Final = range(300, 400)


@dataclass(frozen=True, slots=True)
class Upload:
    """One that was neither completed nor ended."""

    key: str
    id: str
    age_s: float
    """By the server's clock."""


class Uploads:
    """Those below a place in a bucket, with the login that the environment variables give."""

    def __init__(self, uri: str, env: Mapping[str, str] = os.environ) -> None:
        """Raises `UsageError` for what is not in S3, `AccessError` without a login."""
        scheme, _, rest = uri.rstrip("/").partition("://")
        if scheme != "s3":
            raise UsageError(
                f"{uri}: only S3 tells its uploads", hint="Azure ends them after a week; give others a rule that does"
            )
        bucket, _, root = rest.partition("/")
        self._bucket, self._prefix = Bucket(f"s3://{bucket}"), f"{root}/" if root else ""
        self._id, self._secret, self._token = (
            env.get(f"AWS_{name}", "") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN")
        )
        self._region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or "us-east-1"
        endpoint = env.get("AWS_ENDPOINT") or env.get("AWS_ENDPOINT_URL") or f"https://s3.{self._region}.amazonaws.com"
        address = urlsplit(endpoint)
        self._host, self._is_tls = address.netloc, address.scheme == "https"
        self._path = f"{address.path.rstrip('/')}/{bucket}"
        if not (self._id and self._secret):
            raise AccessError(f"{uri}: uploads need AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment")
        if not self._is_tls and env.get("AWS_ALLOW_HTTP", "").lower() != "true":
            raise UsageError(f"{endpoint}: an endpoint of http needs AWS_ALLOW_HTTP=true")

    def left(self, older_than_s: float) -> Iterator[Upload]:
        """Those that began so long ago. Raises `BootseerError`."""
        after: dict[str, str] = {}
        while True:
            asked = {"uploads": "", "prefix": self._prefix, **after}
            answer, now = self._bucket.insist("uploads", partial(self._ask, "GET", "", asked))
            for text in re.findall(r"<Upload>(.*?)</Upload>", answer, re.DOTALL):
                said = {name: _element(text, name) for name in ("Key", "UploadId", "Initiated")}
                try:
                    age_s = (now - datetime.fromisoformat(said["Initiated"])).total_seconds()
                except (ValueError, TypeError):
                    continue  # its age is not known
                if age_s >= older_than_s and said["Key"].startswith(self._prefix) and said["UploadId"]:
                    yield Upload(said["Key"], said["UploadId"], age_s)
            next_ = {"key-marker": _element(answer, "NextKeyMarker")}
            next_ |= {"upload-id-marker": _element(answer, "NextUploadIdMarker")}
            if _element(answer, "IsTruncated") != "true" or next_ == after or not next_["key-marker"]:
                return
            after = next_

    def end(self, upload: Upload) -> None:
        """Have the server forget its parts. Raises `BootseerError`."""
        with_id = {"uploadId": upload.id}
        try:
            self._bucket.insist(upload.key, partial(self._ask, "DELETE", f"/{upload.key}", with_id))
        except NotFoundError:
            return  # it has ended meanwhile

    def _ask(self, method: str, key: str, query: Mapping[str, str]) -> tuple[str, datetime]:
        """The answer and the server's time."""
        path = quote(f"{self._path}{key}", safe="/-_.~")
        asked = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in sorted(query.items()))
        link = (HTTPSConnection if self._is_tls else HTTPConnection)(self._host, timeout=_TIMEOUT_S)
        with closing(link):
            try:
                link.request(method, f"{path}?{asked}", headers=self._signed(method, path, asked))
                answer = link.getresponse()
                text = answer.read(_MAX_ANSWER).decode("utf-8", "replace")
            except HTTPException as error:
                raise OSError(f"not an HTTP response: {error!r}") from error
        if answer.status == 404 and "NoSuchUpload" in text:
            raise NotFoundError(f"{self._bucket.uri}{key}: no such upload")
        if answer.status in _REDIRECTS:
            raise PermanentError(f"{self._bucket.uri} lies elsewhere: set AWS_REGION or AWS_ENDPOINT")
        if answer.status >= 300:
            raise OSError(f"status code: {answer.status}\n{text}")  # which `Bucket` understands
        try:
            now = parsedate_to_datetime(answer.getheader("Date", ""))
        except ValueError:
            now = datetime.now(UTC)
        return text, now

    def _signed(self, method: str, path: str, query: str) -> dict[str, str]:
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = {"host": self._host, "x-amz-content-sha256": _EMPTY, "x-amz-date": now}
        headers |= {"x-amz-security-token": self._token} if self._token else {}
        names = ";".join(headers)
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        request = hashlib.sha256(f"{method}\n{path}\n{query}\n{lines}\n{names}\n{_EMPTY}".encode()).hexdigest()
        scope = f"{now[:8]}/{self._region}/s3/aws4_request"
        key = f"AWS4{self._secret}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        mac = hmac.digest(key, f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{request}".encode(), "sha256").hex()
        login = f"AWS4-HMAC-SHA256 Credential={self._id}/{scope}, SignedHeaders={names}, Signature={mac}"
        return {**headers, "authorization": login}


def _element(text: str, name: str) -> str:
    found = re.search(f"<{name}>([^<]*)</{name}>", text)
    return html.unescape(found[1]) if found else ""

"""A bucket of S3, Google Cloud Storage or Azure: obstore's clients, with deadlines and errors of ours.

Credentials and endpoints come from the environment variables of the respective cloud. obstore runs on threads that a
`fork` does not copy: calls in the child would never return, so they are an error. Safe to use from many threads.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import obstore
from obstore.exceptions import PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from bootseer.errors import (
    AccessError,
    BootseerError,
    NoSpaceError,
    NotFoundError,
    PermanentError,
    TransientError,
    UsageError,
)
from bootseer.io.deadline import stream_within, within
from bootseer.io.fork import after_fork
from bootseer.io.retry import retrying
from bootseer.io.tasks import Tasks
from bootseer.logs import logger

_LOG = logger(__name__)
T = TypeVar("T")

PART_BYTES = 8 * 1024 * 1024
"""Size of a part of a multipart upload, and up to which an object is put in one request."""
MAX_PARTS = 10_000
"""Of one upload."""
MAX_COPY_BYTES = {"s3": 5 * 1024**3}
"""What the server copies in one request, by scheme."""
CALL_S = 60.0
WRITE_S = 300.0
"""For one part, and for the copy of a large object."""
_LONG_LIST_S = 600.0
"""For a list that a server which answers other requests does not send in `CALL_S`."""
_PROBE_TIMEOUT_S = 3.0
"""Of the small request that a server which left one without an answer must answer before others are made."""
_PROBE_EVERY_S = 1.0
"""Calls between two probes fail at once."""
_PROBE_KEY = ".attempts-there"
PARTS_AT_ONCE = 4
_CLIENT = {
    # Deadlines of calls are kept by `call`; these end what was left behind.
    "timeout": "3600s",
    "read_timeout": "60s",
    "connect_timeout": "10s",
    "pool_max_idle_per_host": "64",
}
LOGIN = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_ENDPOINTS = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
_AT_ONCE = 1000
"""Objects that are listed or removed by one request."""
_REMOVALS_AT_ONCE = 16
"""Of single objects."""
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>(?:<Message>([ -;=-~]{1,300}))?")
"""The code of an error, and the server's reason, such as the right that is missing."""
_OTHER_RANGE = re.compile(r"non-partial response|Requested \S+, got")
_ABOUT_LOGINS = {
    "ExpiredToken": "the credentials have expired; get new ones",
    "InvalidToken": "the server does not know AWS_SESSION_TOKEN",
    "InvalidAccessKeyId": "the server does not know AWS_ACCESS_KEY_ID",
    "AuthorizationHeaderMalformed": "AWS_REGION is not the bucket's region",
    "SignatureDoesNotMatch": "AWS_SECRET_ACCESS_KEY is wrong",
    "RequestTimeTooSkewed": "the clocks of this machine and of the server differ by more than 15 minutes; set this one",
    "RequestExpired": "the clocks of this machine and of the server differ by more than 15 minutes; set this one",
}


class OtherRangeError(TransientError):
    """The server sends other bytes than it is asked for: it may never do otherwise."""


class InvalidKeyError(PermanentError):
    """A key that another program has made, as `a//b`: obstore lists none of its neighbours."""


class SilentError(TransientError):
    """The server left a request without an answer, and no probe was answered since: the call was not made."""


class _Runtime:
    """Whether obstore's threads were started, by this process or before it was forked. Only ever set."""

    used = False
    lost = False


def _after_fork() -> None:
    _Runtime.lost = _Runtime.used


after_fork(_after_fork)


class Bucket:
    """A prefix of a bucket. `allow_http` permits an endpoint without encryption."""

    def __init__(self, uri: str, *, allow_http: bool = False) -> None:
        self.uri = uri.rstrip("/")
        """As it was given, without a slash at its end."""
        self.scheme, _, rest = self.uri.partition("://")
        if not rest or ".." in rest.split("/"):
            raise UsageError(f"{uri!r} names no bucket", hint="use s3://bucket/prefix")
        for name, value in os.environ.items():  # obstore panics at such values
            is_wrong = value != value.strip() or (name in _ENDPOINTS and not re.match(r"https?://[^/]", value))
            if self.scheme == "s3" and name.startswith("AWS_") and is_wrong:
                raise UsageError(f"{name} is malformed", hint="no white space around it; endpoints begin with https://")
        options: Any = {**_CLIENT, "allow_http": allow_http or allows_http()}
        try:
            self.reader: Any = from_url(self.uri, client_options=options, retry_config={"max_retries": 0})
            """Makes one attempt."""
            self.writer: Any = from_url(self.uri, client_options=options, retry_config={"max_retries": 4})
            """Tries the parts of an upload, which cannot be begun again, more often."""
        except Exception as error:
            hint = f"check the address, {self.scheme}://bucket/prefix, and the variables with the login"
            raise UsageError(f"{self.uri}: {_first_line(error)}", hint=hint) from error
        self._skipped: set[str] = set()
        """Keys that were logged already."""
        self._silent_at_s: float | None = None
        """When a request or a probe last ended without an answer; None while the server answers."""

    def call(self, name: str, call: Callable[[], T], timeout_s: float = CALL_S) -> T:
        """What `call` returns, within a time and with its errors mapped; `name` is what it is about."""
        with self.mapping(name):
            return within(timeout_s, f"{self.uri}: {name}", call)

    def retry(self, name: str, call: Callable[[], T], timeout_s: float = CALL_S) -> T:
        """As `call`, made again after transient errors and when there is no answer: the first attempt gets a twentieth
        of the time, each later one twice as much. For requests that may be made twice."""
        return self._retry(partial(self.call, name, call), timeout_s)

    def _retry(self, ask: Callable[[float], T], timeout_s: float) -> T:
        tries = itertools.count()
        self._probe()
        try:
            return retrying(
                lambda left_s: ask(min(timeout_s / 20 * 2 ** next(tries), left_s)), attempts=None, deadline_s=timeout_s
            )
        except TransientError as error:
            if status_of(error) is None:  # a server that refuses is not silent: it may answer other requests
                self.note_silence()
            raise

    def note_silence(self) -> None:
        """A request had all its time without an answer: from now on calls fail at once, until a probe is answered."""
        self._silent_at_s = time.monotonic()

    def _probe(self) -> None:
        """Raise `SilentError` while the server does not answer. Calls in one folder of a mount wait for each other:
        without this each of them would wait for its whole deadline."""
        silent_at_s = self._silent_at_s
        if silent_at_s is None:
            return
        if time.monotonic() <= silent_at_s + _PROBE_EVERY_S:
            raise SilentError(f"{self.uri}: the server did not answer a moment ago; try again in a second")
        try:
            within(_PROBE_TIMEOUT_S, self.uri, partial(obstore.head, self.reader, _PROBE_KEY))
        except Exception as error:
            failure = error if isinstance(error, BootseerError) else self._mapped(error, _PROBE_KEY)
            if isinstance(failure, TransientError) and status_of(error) is None:
                self.note_silence()
                raise SilentError(f"{self.uri}: the server still does not answer: {failure}") from error
        self._silent_at_s = None  # any answer will do

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects, also those that are not there any more."""
        for first in range(0, len(keys), _AT_ONCE):
            some = list(keys[first : first + _AT_ONCE])
            try:
                self.retry(some[0], partial(obstore.delete, self.reader, some), WRITE_S)
            except NotFoundError:  # in Azure and GCS, where keys after a missing one may not have been removed
                with Tasks("bootseer-removals", _REMOVALS_AT_ONCE) as threads:
                    list(threads.map(self._remove_one, some))

    def _remove_one(self, key: str) -> None:
        with contextlib.suppress(NotFoundError):
            self.retry(key, partial(obstore.delete, self.reader, key), WRITE_S)

    def head(self, key: str) -> Any:
        try:
            return self.retry(key, partial(obstore.head, self.reader, key))
        except PermanentError as error:
            if not isinstance(error, NotFoundError):  # an answer to HEAD has no reason in it, this one does
                self.has_any(f"{key}/")
            raise

    def read_small(self, key: str) -> tuple[str, str | None, int]:
        """What a small object says, its tag (see `tag`), and its time; "" and None where there is none."""

        def read() -> tuple[str, str | None, int]:
            found = obstore.get(self.reader, key)
            return bytes(found.bytes()).decode("utf-8", "replace"), self.tag(found.meta), time_ns(found.meta)

        try:
            return self.retry(key, read)
        except NotFoundError:
            return "", None, 0

    def tag(self, written: Any) -> str | None:
        """What a conditional write names a version by: its entity tag, in Google Cloud its generation."""
        found: str | None = written["version" if self.scheme == "gs" else "e_tag"]
        return found

    def has_any(self, prefix: str) -> bool:
        """Whether any key begins so, up to a slash at the end of `prefix`."""
        try:
            return self.retry(prefix, lambda: any(obstore.list(self.reader, prefix.rstrip("/"), chunk_size=1)))
        except InvalidKeyError:
            return True

    def objects(self, prefix: str) -> list[Any]:
        """All objects whose keys begin so, up to a slash at the end of `prefix`. The time of an attempt is for each
        page, since the length is unknown."""

        def ask(page_s: float) -> list[Any]:
            produce = partial(obstore.list, self.reader, prefix, chunk_size=_AT_ONCE)
            with self.mapping(prefix):
                pages = stream_within(page_s, f"{self.uri}: {prefix}", produce, each=True)
                return [one for page in pages for one in page]

        return self._retry(ask, CALL_S)

    def listed(self, prefix: str) -> Any:
        """What lies right under a prefix: objects, and what the keys of more begin with."""
        ask = partial(obstore.list_with_delimiter, self.reader, prefix.rstrip("/") or None)
        try:
            try:
                return self.retry(prefix, ask, CALL_S)
            except SilentError:
                raise
            except TransientError:  # as for a folder of 100,000 names: obstore has no pages of these
                time.sleep(_PROBE_EVERY_S)
                self._probe()
                return self.call(prefix, ask, _LONG_LIST_S)
        except InvalidKeyError:
            from bootseer.places.uploads import Uploads  # which is above this module

            if self.scheme != "s3":
                raise
            found = Uploads(self.uri).listed(prefix)
            return {kind: [one for one in found[kind] if self._is_name(one, prefix)] for kind in found}

    def _is_name(self, found: Any, prefix: str) -> bool:
        """Whether this is a valid name of a file or folder; others are skipped, and logged once."""
        key = found if isinstance(found, str) else found["path"]
        name = key[len(prefix) :].removesuffix("/" if found is key else "")
        if name.isprintable() and "/" not in name and name not in ("", ".", ".."):
            return True
        if key != prefix and key not in self._skipped:  # which marks a folder
            self._skipped.add(key)
            _LOG.warning("%s: %r is skipped: not a valid name of a file", self.uri, key)
        return False

    def check_process(self) -> None:
        """Raise `PermanentError` in the child of a fork, where nothing that waits for obstore would ever end."""
        if _Runtime.lost:
            raise PermanentError(
                f"{self.uri}: object stores do not work in the child of a fork; start a new process instead"
            )

    @contextlib.contextmanager
    def mapping(self, name: str) -> Iterator[None]:
        """Errors of obstore that pass through here become ours. Refuses the child of a fork."""
        self.check_process()
        _Runtime.used = True
        self._probe()
        try:
            yield
            self._silent_at_s = None
        except BootseerError:
            raise
        except Exception as error:
            raise self._mapped(error, name) from error

    def _mapped(self, error: Exception, name: str) -> BootseerError:  # noqa: PLR0911
        said = f"{self.uri}: {name}: {_first_line(error)}"
        status = status_of(error)
        is_no_bucket = "NoSuchBucket" in str(error)
        if is_no_bucket or isinstance(error, FileNotFoundError):
            return NotFoundError(f"{self.uri}: no such bucket" if is_no_bucket else f"{self.uri} has no object {name}")
        code = (_CODE.findall(str(error)) or [("", "")])[0][0]
        if code in _ABOUT_LOGINS:
            return AccessError(f"{self.uri}: {name}: {code}: {_ABOUT_LOGINS[code]}")
        if code in ("InvalidObjectState", "BlobArchived"):
            return PermanentError(f"{self.uri}: {name}: {code}: it was moved to cold storage; restore it first")
        if code.endswith(("QuotaExceeded", "StorageFull")):  # of Ceph and MinIO
            return NoSpaceError(f"{self.uri}: {name}: {code}: no space; make room and try again")
        if "169.254.169.254" in said:
            # Without any credentials, obstore asks the machine's own cloud for some.
            names = "GOOGLE_SERVICE_ACCOUNT" if self.scheme == "gs" else LOGIN
            return AccessError(f"{self.uri}: no credentials; set {names}")
        if _OTHER_RANGE.search(str(error)):
            return OtherRangeError(f"{said}; the server sends other bytes than requested")
        if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403):
            return AccessError(f"{said}; check the credentials in the environment")
        if "object with invalid path" in said:
            return InvalidKeyError(f"{said}; not a valid name of a file")
        if "builder error" in said:
            return PermanentError(f"{said}; an endpoint of http needs AWS_ALLOW_HTTP=true")
        if "redirect without LOCATION" in said:
            return PermanentError(f"{said}; set AWS_REGION to the bucket's region")
        # S3 answers with 400 if nothing came over the connection for long.
        is_late = code == "RequestTimeout" or status in (408, 409, 416, 425, 429)
        if status is not None and 400 <= status < 500 and not is_late:
            return PermanentError(said)
        return TransientError(said)


def allows_http() -> bool:
    """Whether an endpoint without encryption may be used."""
    return os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"


def time_ns(meta: Any) -> int:
    return int(meta["last_modified"].timestamp() * 1e9)


def status_of(error: Exception) -> int | None:
    """The status that the server answered with, where an error says it."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match is not None else None


def _first_line(error: Exception) -> str:
    """Without what stands behind a question mark in an address: it may be a signature; with the code of the answer."""
    line, code = re.sub(r"\?\S+", "?…", str(error).partition("\n")[0]).partition("<")[0], _CODE.search(str(error))
    return ": ".join(filter(None, (line[:300].rstrip(": "), *(code.groups() if code else ()))))

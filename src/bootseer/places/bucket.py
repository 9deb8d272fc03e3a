"""A bucket of S3, Google Cloud Storage or Azure: obstore's clients with deadlines and BootSeer's errors.

Credentials and endpoints come from the environment variables of the respective cloud. obstore runs on threads that a
`fork` does not copy: calls in the child would never return, so they are an error. Safe to use from many threads.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
import zlib
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

MAX_COPY_BYTES = {"s3": 5 * 1024**3}
"""The largest object that the server copies in one request, by scheme."""
CALL_S = 60.0
WRITE_S = 300.0
"""For one part, and for the copy of a large object."""
_LONG_LIST_S = 600.0
"""For a list that takes longer than `CALL_S` on a server that answers other requests."""
_PROBE_TIMEOUT_S = 3.0
"""Timeout of a probe: the small request that is sent to a silent server before any other."""
_PROBE_EVERY_S = 1.0
"""Calls between two probes fail at once."""
_PROBE_KEY = ".attempts-there"
_CLIENT = {
    # `call` enforces the deadlines; these end abandoned requests.
    "timeout": "3600s",
    "read_timeout": "60s",
    "connect_timeout": "10s",
    "pool_max_idle_per_host": "64",
}
LOGIN = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AWS_ENDPOINT_URL")
"""obstore uses the first one, if it is set."""
_PAGE = 1000
"""Objects that are listed or removed by one request."""
_CONCURRENT_REMOVALS = 16
"""Where objects are removed one by one."""
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>(?:<Message>([ -;=-~]{1,300}))?")
"""The code of an error, and the server's reason, such as the missing permission."""
NOT_IN_KEYS = re.compile("[\x00-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
"""Characters that obstore or the XML of the servers refuse."""
_OTHER_RANGE = re.compile(r"non-partial response|Requested \S+, got")
_LINK = re.compile(r"/[0-9a-f]{8}/(.+)")
_NO_TAG = "a response without ETag, which versions need; does a proxy remove it?"
_ABOUT_LOGINS = {
    "ExpiredToken": "the credentials have expired; get new ones",
    "InvalidToken": "the server does not know AWS_SESSION_TOKEN",
    "InvalidAccessKeyId": "the server does not know AWS_ACCESS_KEY_ID",
    "AuthorizationHeaderMalformed": "AWS_REGION is not the bucket's region",
    "SignatureDoesNotMatch": "AWS_SECRET_ACCESS_KEY is wrong",
    "RequestTimeTooSkewed": "the clocks of this machine and of the server differ by more than 15 minutes; set this one",
    "RequestExpired": "the clocks of this machine and of the server differ by more than 15 minutes; set this one",
}


def link_text(target: str) -> bytes:
    """The text of an object that names another key: a checksum, after a slash, with which no key begins."""
    return f"/{zlib.crc32(target.encode()):08x}/{target}".encode()


class OtherRangeError(TransientError):
    """The server sends another range than requested. It may do so always."""


class InvalidKeyError(PermanentError):
    """A key of another program, such as `a//b`, because of which obstore cannot list a prefix."""


class SilentError(TransientError):
    """The server did not answer an earlier request, nor a probe since. This call was not sent."""


class _Runtime:
    """Whether obstore's threads were started in this process, and whether they were lost in a fork."""

    used = False
    lost = False


def _after_fork() -> None:
    _Runtime.lost = _Runtime.used


after_fork(_after_fork)


class Bucket:
    """A prefix of a bucket. `allow_http` permits an endpoint without encryption."""

    def __init__(self, uri: str, *, allow_http: bool = False) -> None:
        self.uri = uri.rstrip("/")
        """As given, without a slash at the end."""
        self.scheme, _, rest = self.uri.partition("://")
        if not rest or ".." in rest.split("/"):
            raise UsageError(f"{uri!r} names no bucket", hint="use s3://bucket/prefix")
        for name, value in os.environ.items():  # obstore panics at such values
            is_wrong = value != value.strip() or (name in ENDPOINTS and not re.match(r"https?://[^/]", value))
            if self.scheme == "s3" and name.startswith("AWS_") and is_wrong:
                raise UsageError(f"{name} is malformed", hint="no white space around it; endpoints begin with https://")
        options: Any = {**_CLIENT, "allow_http": allow_http or allows_http()}
        try:
            self.reader: Any = from_url(self.uri, client_options=options, retry_config={"max_retries": 0})
            """Makes one attempt."""
            self.writer: Any = from_url(self.uri, client_options=options, retry_config={"max_retries": 4})
            """Retries the parts of an upload, which as a whole cannot be repeated, and the pages of a list, which as a
            whole might fail each time."""
        except Exception as error:
            hint = f"check the address, {self.scheme}://bucket/prefix, and the variables with the login"
            raise UsageError(f"{self.uri}: {_first_line(error)}", hint=hint) from error
        self._skipped: set[str] = set()
        """Keys that have been logged."""
        self._fails_until_s: float | None = None
        """After a request without an answer: until then calls fail at once, and the next one probes the server. None
        while the server answers."""

    def call(self, name: str, call: Callable[[], T], timeout_s: float = CALL_S, *, probe: bool = True) -> T:
        """The result of `call`, with a deadline and with its errors mapped; `name` is used in messages. `probe=False`
        for what continues an upload, which is not given up while the server is silent for others."""
        with self.mapping(name, probe=probe):
            return within(timeout_s, f"{self.uri}: {name}", call)

    def retry(self, name: str, call: Callable[[], T], timeout_s: float = CALL_S) -> T:
        """Like `call`, repeated after transient errors and timeouts: the first attempt gets a twentieth of the time,
        each later one twice as much. For idempotent requests."""
        return self._retry(partial(self.call, name, call), timeout_s)

    def _retry(self, ask: Callable[[float], T], timeout_s: float) -> T:
        tries = itertools.count()
        self._probe()
        try:
            return retrying(
                lambda left_s: ask(min(timeout_s / 20 * 2 ** next(tries), left_s)), attempts=None, deadline_s=timeout_s
            )
        except TransientError as error:
            if status_of(error) is None:  # a server that refuses is not silent
                self.note_silence()
            raise

    def note_silence(self) -> None:
        """A request got no answer before its deadline: the next call probes the server. A server that answers other
        requests, as during a long list, fails none of them."""
        self._fails_until_s = self._fails_until_s or 0.0

    def _probe(self) -> None:
        """Raise `SilentError` while the server does not answer. Calls in one folder of a mount are serialized: without
        this, each would wait for its whole deadline."""
        fails_until_s = self._fails_until_s
        if fails_until_s is None:
            return
        if time.monotonic() < fails_until_s:
            raise SilentError(f"{self.uri}: the server did not answer a moment ago; try again in a second")
        try:
            within(_PROBE_TIMEOUT_S, self.uri, partial(obstore.head, self.reader, _PROBE_KEY))
        except Exception as error:
            failure = error if isinstance(error, BootseerError) else self._mapped(error, _PROBE_KEY)
            if isinstance(failure, TransientError) and status_of(error) is None:
                self._fails_until_s = time.monotonic() + _PROBE_EVERY_S
                raise SilentError(f"{self.uri}: the server still does not answer: {failure}") from error
        self._fails_until_s = None  # any answer counts

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects; missing ones are ignored."""
        for first in range(0, len(keys), _PAGE):
            some = list(keys[first : first + _PAGE])
            try:
                self.retry(some[0], partial(obstore.delete, self.reader, some), WRITE_S)
            except NotFoundError:  # Azure and GCS may stop at a missing key
                with Tasks("bootseer-removals", _CONCURRENT_REMOVALS) as threads:
                    list(threads.map(self._remove_one, some))

    def _remove_one(self, key: str) -> None:
        with contextlib.suppress(NotFoundError):
            self.retry(key, partial(obstore.delete, self.reader, key), WRITE_S)

    def copy(self, key: str, new: str) -> None:
        """Copy an object on the server. Repeated after transient errors; each attempt may take all the time that is
        left, as some GB take a minute."""
        until_s, copy = time.monotonic() + WRITE_S, partial(obstore.copy, self.reader, key, new)
        self._retry(lambda _: self.call(new, copy, max(until_s - time.monotonic(), 0.0)), WRITE_S)

    def head(self, key: str) -> Any:
        try:
            found = self.retry(key, partial(obstore.head, self.reader, key))
        except PermanentError as error:
            if not isinstance(error, NotFoundError):  # unlike the response to HEAD, this one contains the reason
                self.has_any(f"{key}/")
            raise
        self.tag(found)
        return found

    def read_small(self, key: str) -> tuple[str, str | None, int]:
        """The text of a small object, its tag (see `tag`), and its time; "", None and 0 if it does not exist."""

        def read() -> tuple[str, str | None, int]:
            found = obstore.get(self.reader, key)
            return bytes(found.bytes()).decode("utf-8", "replace"), self.tag(found.meta), time_ns(found.meta)

        try:
            return self.retry(key, read)
        except NotFoundError:
            return "", None, 0

    def read_link(self, key: str, *, is_folder: bool = True) -> tuple[str, str | None, int]:
        """`read_small` for what `link_text` made, or an empty object. `is_folder`: it names a prefix, which ends at a
        slash. Raises `TransientError` for a damaged one: it would lead to another folder."""
        text, e_tag, mtime_ns = self.read_small(key)
        is_cut = False
        if e_tag is not None and not text:
            with contextlib.suppress(NotFoundError):
                is_cut = self.head(key)["size"] > 0
            if is_cut:  # or replaced in between
                text, e_tag, mtime_ns = self.read_small(key)
        if checked := _LINK.fullmatch(text):
            is_valid, text = link_text(checked[1]) == text.encode(), checked[1]
        elif text:  # written before links had checksums
            is_valid = text[0] != "/" and text.endswith("/") == is_folder
        else:
            is_valid = e_tag is None or not is_cut
        if not is_valid:
            raise TransientError(f"{self.uri}: the object {key} is damaged, or was damaged on the way; try again")
        return text, e_tag, mtime_ns

    def tag(self, written: Any) -> str:
        """The version for a conditional write: the entity tag, in Google Cloud the generation."""
        found: str | None = written["version" if self.scheme == "gs" else "e_tag"]
        if not found:
            raise PermanentError(f"{self.uri}: {_NO_TAG}")
        return found

    def has_any(self, prefix: str) -> bool:
        """Whether any key has this prefix, which ends at a slash."""
        try:
            return self.retry(prefix, lambda: any(obstore.list(self.reader, prefix.rstrip("/"), chunk_size=1)))
        except InvalidKeyError:
            return True

    def objects(self, prefix: str) -> list[Any]:
        """All objects whose keys have this prefix, which ends at a slash. The timeout applies to each page, because the
        number of pages is unknown."""

        def ask(page_s: float) -> list[Any]:
            produce = partial(obstore.list, self.writer, prefix, chunk_size=_PAGE)
            with self.mapping(prefix):
                pages = stream_within(page_s, f"{self.uri}: {prefix}", produce, each=True)
                return [one for page in pages for one in page]

        return self._retry(ask, CALL_S)

    def listed(self, prefix: str) -> Any:
        """The objects directly under a prefix, and the prefixes of those further below."""
        ask = partial(obstore.list_with_delimiter, self.writer, prefix.rstrip("/") or None)
        try:
            try:
                return self.retry(prefix, ask, CALL_S)
            except SilentError:
                raise
            except TransientError:  # such as a folder of 100,000 names, which obstore returns as a whole
                return self.call(prefix, ask, _LONG_LIST_S)
        except InvalidKeyError:
            from bootseer.places.uploads import Uploads  # imports this module

            if self.scheme != "s3":
                raise
            found = Uploads(self.uri).listed(prefix)
            return {kind: [one for one in found[kind] if self._is_name(one, prefix)] for kind in found}

    def _is_name(self, found: Any, prefix: str) -> bool:
        """Whether this is a valid name of a file or folder. Others are skipped, and logged once."""
        key = found if isinstance(found, str) else found["path"]
        name = key[len(prefix) :].removesuffix("/" if found is key else "")
        if not NOT_IN_KEYS.search(name) and "/" not in name and name not in ("", ".", ".."):
            return True
        if key != prefix and key not in self._skipped:  # the prefix itself is a folder marker
            self._skipped.add(key)
            _LOG.warning("%s: %r is skipped: not a valid name of a file", self.uri, key)
        return False

    def check_process(self) -> None:
        """Raise `PermanentError` in the child of a fork, where calls of obstore would never return."""
        if _Runtime.lost:
            raise PermanentError(
                f"{self.uri}: object stores do not work in the child of a fork; start a new process instead "
                "(a DataLoader: multiprocessing_context='forkserver')"
            )

    @contextlib.contextmanager
    def mapping(self, name: str, *, probe: bool = True) -> Iterator[None]:
        """Convert errors of obstore to BootSeer's. Fails in the child of a fork."""
        self.check_process()
        _Runtime.used = True
        if probe:
            self._probe()
        try:
            yield
            self._fails_until_s = None
        except BootseerError:
            raise
        except Exception as error:
            raise self._mapped(error, name) from error

    def _mapped(self, error: Exception, name: str) -> BootseerError:  # noqa: PLR0911, PLR0912
        said = f"{self.uri}: {name}: {_first_line(error)}"
        status = status_of(error)
        is_no_bucket = "NoSuchBucket" in str(error)
        # Servers other than Amazon's answer so if the request that completes an upload is repeated after a lost answer.
        if "NoSuchUpload" in str(error):
            return TransientError(f"{self.uri}: {name}: the server no longer knows the upload; try again")
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
            # Without credentials, obstore requests some from the metadata service of a cloud machine.
            names = "GOOGLE_SERVICE_ACCOUNT" if self.scheme == "gs" else LOGIN
            return AccessError(f"{self.uri}: no credentials; set {names}")
        if "ETag Header missing" in said:
            return PermanentError(f"{self.uri}: {name}: {_NO_TAG}")
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
        # S3 answers with 400 if a connection was idle for long.
        is_late = code == "RequestTimeout" or status in (408, 409, 416, 425, 429)
        is_panic = str(error).startswith("PanicException")  # as `io.deadline` names it
        if is_panic or (status is not None and 400 <= status < 500 and not is_late):
            return PermanentError(said)
        return TransientError(said)


def allows_http() -> bool:
    """Whether an endpoint without encryption may be used."""
    return os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"


def time_ns(meta: Any) -> int:
    return int(meta["last_modified"].timestamp() * 1e9)


def status_of(error: Exception) -> int | None:
    """The HTTP status in an error, if it has one."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match is not None else None


def _first_line(error: Exception) -> str:
    """The first line of an error, without the queries of addresses, which may contain a signature, and with the code of
    the response."""
    line, code = re.sub(r"\?\S+", "?…", str(error).partition("\n")[0]).partition("<")[0], _CODE.search(str(error))
    return ": ".join(filter(None, (line[:300].rstrip(": "), *(code.groups() if code else ()))))

"""The interface of all object stores: read ranges, write atomically, list, delete.

An object is immutable bytes under a name. *Content names* are `sha256:` and 64 hexadecimal digits: the writer learns
the name at the end, and equal bytes have the same name. All other names are paths (`images/sha256-…`), chosen by the
writer; writing one again replaces the object atomically.

Implemented by the adapters in this package, which `open.open_store` selects by URI. A store makes a single attempt:
retries are up to the caller (`io.retry`, `fetch`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from bootseer.errors import CorruptError, TooShortError, UsageError

_CONTENT = re.compile(r"sha256:[0-9a-f]{64}")
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
MAX_NAME = 512
PIECE_BYTES = 256 * 1024
"""Largest piece that `read` yields: bounds the memory of a slow reader, and is large enough for low overhead."""
MAX_CREATE_BYTES = 1024 * 1024
"""Largest object for `create`: all stores write so much in one request."""


class Stored(NamedTuple):
    """An object in a store."""

    name: str
    size_bytes: int


class Upload(Protocol):
    """An object being written: invisible before `commit`, and gone after `abort`."""

    def write(self, data: bytes | memoryview) -> None:
        """Append to the object."""

    def commit(self, name: str | None = None, *, refs: Sequence[Stored] = (), subject: str | None = None) -> Stored:
        """Make the object visible under `name`, or under its content name; durable when this returns.

        `refs` are objects that this one needs, and `subject` (`sha256:…`) is a manifest in the same store that it
        describes: a registry keeps the former as long as this object, and lists this one as a referrer of the latter.
        Other stores ignore both, and objects with content names cannot have them. After the `NotFoundError` of a
        missing `subject`, the object may be committed without it.

        Raises `CorruptError` if `name` is a content name that does not match the written bytes.
        """

    def abort(self) -> None:
        """Drop what was written. May be called at any time; no effect after `commit`."""


class Store(Protocol):
    """Objects by name. Safe for many threads.

    All methods raise `TransientError` for what may work later (including timeouts), `AccessError` for refusals and
    `NotFoundError` for missing names; messages name the store and the object, never credentials.
    """

    @property
    def uri(self) -> str:
        """Its address without credentials, for `open_store`."""

    def read(
        self, name: str, start: int = 0, length: int | None = None, *, timeout_s: float = 60.0
    ) -> Generator[bytes, None, None]:
        """Bytes `start` to `start + length` (or to the end) of an object, in pieces as they arrive.

        Exactly these bytes or an error: a response that is shorter, longer or of another range is a `TransientError`, a
        range beyond the object a `TooShortError`. The request is made when the first piece is requested; `timeout_s`
        limits the whole read from then on, however slowly bytes arrive. Closing the iterator ends the request.
        """

    def upload(self) -> Upload:
        """Begin to write an object of unknown size."""

    def create(self, name: str, data: bytes, *, refs: Sequence[Stored] = (), timeout_s: float = 60.0) -> bool:
        """Write a small object under a path name unless that exists; returns whether it was written, then durably.

        Atomic where the store supports it: of many writers, one gets True. Elsewhere it is a check, a write and another
        check, and two concurrent writers may both get True: in registries, and in folders on file systems without hard
        links. Object stores without `If-None-Match` refuse it. Readers always see the whole object or none.

        After a `TransientError` it may have been written. At most `MAX_CREATE_BYTES`; `refs` as in `Upload.commit`.
        """

    def stat(self, name: str) -> Stored:
        """The size of an object."""

    def list(self, prefix: str = "") -> Iterator[Stored]:
        """The objects whose path names begin with `prefix`, in any order."""

    def delete(self, name: str) -> None:
        """Delete an object. Nothing happens if it does not exist."""

    def close(self) -> None:
        """Release connections. The store cannot be used afterwards."""


def is_content_name(name: str) -> bool:
    return _CONTENT.fullmatch(name) is not None


def check_name(name: str) -> str:
    """Validate and return a name. Raises `UsageError`: names come from untrusted documents too."""
    # `sha256/` is the folder of content names in stores that are folders.
    fits = len(name) <= MAX_NAME and (is_content_name(name) or _PATH.fullmatch(name))
    if not fits or name.startswith("sha256/"):
        raise UsageError(f"{name[:MAX_NAME]!r} is not a name of an object", hint="use letters, digits, . _ - and /")
    return name


def check_new(name: str, data: bytes) -> None:
    """Raise `UsageError` for arguments that `Store.create` does not accept."""
    if is_content_name(check_name(name)):
        raise UsageError(f"{name} has a content name", hint="upload it: the same bytes may be written again")
    if len(data) > MAX_CREATE_BYTES:
        raise UsageError(f"{name}: {len(data)} bytes, too many to create at once", hint="upload it")


def check_range(start: int, length: int | None) -> None:
    """Raise `UsageError` for an invalid range."""
    if start < 0 or (length is not None and length < 0):
        raise UsageError(f"{length} bytes from {start} on are not a range", hint="use numbers that are not negative")


def range_end(name: str, size_bytes: int, start: int, length: int | None) -> int:
    """The end of the range in an object of this size. Raises `TooShortError` if it is not inside."""
    end = size_bytes if length is None else start + length
    if start > size_bytes or end > size_bytes:
        asked = f"bytes from {start} on" if length is None else f"bytes {start} to {end}"
        raise TooShortError(f"{name} has {size_bytes} bytes; {asked} were asked for")
    return end


def name_of_upload(where: str, name: str | None, digits: str) -> str:
    """The name of an upload with this sha256. Raises `CorruptError` for a content name that does not match."""
    content = f"sha256:{digits}"
    if name is None:
        return content
    if is_content_name(check_name(name)) and name != content:
        raise CorruptError(f"{where}: what was written is {content} and not {name}; nothing was stored")
    return name


def upload_ended(where: str) -> UsageError:
    """The error of using an upload after `commit` or `abort`."""
    return UsageError(f"{where}: this upload has ended", hint="begin another one")


def content_path(name: str) -> str:
    """The path of an object in a store that is a folder tree."""
    if not is_content_name(name):
        return name
    digits = name.removeprefix("sha256:")
    # Two levels: folders with millions of entries are slow on many file systems.
    return f"sha256/{digits[:2]}/{digits}"


def parse_object(data: bytes, label: str, limit: int) -> dict[str, Any]:
    """Parse an untrusted JSON object of at most `limit` bytes. Raises `CorruptError` for anything else."""
    if len(data) > limit:
        raise CorruptError(f"{label}: {len(data)} bytes, more than the {limit} that are read")
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{label}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptError(f"{label}: not a JSON object")
    return value


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a number")

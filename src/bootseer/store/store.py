"""What every place that keeps objects can do: read ranges, write atomically, list, delete.

An object is immutable bytes under a name. Two kinds of names exist. *Content names* are `sha256:` and 64 hexadecimal
digits: the writer learns the name at the end, and the same bytes always have the same name. All other names are paths
(`images/sha256-…`), chosen by the writer; writing one again replaces it in one step.

Implemented by the adapters beside this module, one per kind of place; `open.open_store` finds them by URI. A store
makes one attempt: when to try again and for how long is for the caller to decide (`io.retry`, `fetch`).
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple, Protocol

from bootseer.errors import CorruptError, PermanentError, UsageError

_CONTENT = re.compile(r"sha256:[0-9a-f]{64}")
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
MAX_NAME = 512
PIECE_BYTES = 256 * 1024
"""Largest piece that `read` yields: bounds what a slow reader holds, and is large enough that pieces cost nothing."""
MAX_CREATE_BYTES = 1024 * 1024
"""Largest object that `create` takes: all places write so much in one request."""


class Stored(NamedTuple):
    """An object that lies in a store."""

    name: str
    size_bytes: int


class Upload(Protocol):
    """An object on its way into a store: it is not visible before `commit`, and nothing of it stays after `abort`."""

    def write(self, data: bytes | memoryview) -> None:
        """Append to the object."""

    def commit(self, name: str | None = None, *, refs: Sequence[Stored] = (), subject: str | None = None) -> Stored:
        """Make the object visible under `name`, or under its content name; durable when this returns.

        `refs` are objects that this one needs, and `subject` (`sha256:…`) is the manifest in the same place that it
        is about: a registry keeps the former as long as this object, and lists this one under the latter. Other
        stores ignore both. An object under its content name cannot keep or be about others.

        Raises `CorruptError` when `name` is a content name and not that of what was written.
        """

    def abort(self) -> None:
        """Drop what was written. Safe to call at any time, also after `commit`, when it does nothing."""


class Store(Protocol):
    """Objects by name. Safe to use from many threads.

    All methods raise `TransientError` for what may work later (a timeout too), `AccessError` for refusals and
    `NotFoundError` for names that are not there; messages name the store and the object, never credentials.
    """

    @property
    def uri(self) -> str:
        """Where this is, without credentials; `open_store` takes it."""

    def read(
        self, name: str, start: int = 0, length: int | None = None, *, timeout_s: float = 60.0
    ) -> Generator[bytes, None, None]:
        """Bytes `start` to `start + length` (or to the end) of an object, in pieces as they arrive.

        Exactly these bytes or an error: an answer that is shorter, longer or of another range is a `TransientError`,
        a range that does not lie inside the object a `PermanentError`. The request is made when the first piece is
        asked for; `timeout_s` bounds the whole read from then on, however slowly the bytes drip. Closing the iterator
        early ends the request.
        """

    def upload(self) -> Upload:
        """Begin to write an object of unknown size."""

    def create(self, name: str, data: bytes, *, refs: Sequence[Stored] = (), timeout_s: float = 60.0) -> bool:
        """Write a small object under a path name unless there is one: whether it was written; durable when it was.

        One step where the place can: of many writers, one gets True. Elsewhere it is a look, a write and another look,
        and two writers that meet may both get True: in registries, in object stores that know no `If-None-Match`, and
        in folders of file systems without hard links. Readers see the whole object or none everywhere.

        After a `TransientError` it may have been written. At most `MAX_CREATE_BYTES`; `refs` as in `Upload.commit`.
        """

    def stat(self, name: str) -> Stored:
        """Size of an object."""

    def list(self, prefix: str = "") -> Iterator[Stored]:
        """The objects with path names that begin with `prefix`, in any order."""

    def delete(self, name: str) -> None:
        """Remove an object. Nothing happens when it is not there."""

    def close(self) -> None:
        """Give back connections. The store is not used afterwards."""


def is_content_name(name: str) -> bool:
    """Whether the name is that of its own content."""
    return _CONTENT.fullmatch(name) is not None


def check_name(name: str) -> str:
    """The name itself. Raises `UsageError` for an invalid one: names come from documents of others too."""
    # `sha256/` is where stores that are folders keep what has content names.
    fits = len(name) <= MAX_NAME and (is_content_name(name) or _PATH.fullmatch(name))
    if not fits or name.startswith("sha256/"):
        raise UsageError(f"{name[:MAX_NAME]!r} is not a name of an object", hint="use letters, digits, . _ - and /")
    return name


def check_new(name: str, data: bytes) -> None:
    """Raises `UsageError` for what `Store.create` does not take."""
    if is_content_name(check_name(name)):
        raise UsageError(f"{name} has a content name", hint="upload it: the same bytes may be written again")
    if len(data) > MAX_CREATE_BYTES:
        raise UsageError(f"{name}: {len(data)} bytes, too many to create at once", hint="upload it")


def check_range(start: int, length: int | None) -> None:
    """Raises `UsageError` for a range that no object can have."""
    if start < 0 or (length is not None and length < 0):
        raise UsageError(f"{length} bytes from {start} on are not a range", hint="use numbers that are not negative")


def range_end(name: str, size_bytes: int, start: int, length: int | None) -> int:
    """Where the range ends in an object of this size. Raises `PermanentError` when it does not lie inside."""
    end = size_bytes if length is None else start + length
    if start > size_bytes or end > size_bytes:
        asked = f"bytes from {start} on" if length is None else f"bytes {start} to {end}"
        raise PermanentError(f"{name} has {size_bytes} bytes; {asked} were asked for")
    return end


def name_of_upload(where: str, name: str | None, digits: str) -> str:
    """The name under which an upload becomes visible, given its sha256. Raises `CorruptError` for another's name."""
    content = f"sha256:{digits}"
    if name is None:
        return content
    if is_content_name(check_name(name)) and name != content:
        raise CorruptError(f"{where}: what was written is {content} and not {name}; nothing was stored")
    return name


def upload_ended(where: str) -> UsageError:
    """What an upload raises when it is used after `commit` or `abort`."""
    return UsageError(f"{where}: this upload has ended", hint="begin another one")


def content_path(name: str) -> str:
    """Where a store that is a tree of folders keeps the object of this name."""
    if not is_content_name(name):
        return name
    digits = name.removeprefix("sha256:")
    # Two levels: folders with millions of entries are slow on many file systems.
    return f"sha256/{digits[:2]}/{digits}"

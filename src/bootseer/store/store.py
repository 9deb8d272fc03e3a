"""What every place that keeps objects can do: read ranges, write atomically, list, delete.

An object is immutable bytes under a name. Two kinds of names exist. *Content names* are `sha256:` and 64 hexadecimal
digits: whoever writes such an object learns its name at the end, and the same bytes always have the same name. All
other names are paths (`images/sha256-…`), chosen by the writer; writing one again replaces it in one step.

Implemented by the adapters beside this module, one per kind of place; `open.open_store` finds them by URI. A store
makes one attempt: when to try again and for how long is for the caller to decide (`retry`, `fetch`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from bootseer.errors import UsageError

_CONTENT = re.compile(r"sha256:[0-9a-f]{64}")
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
MAX_NAME = 512


@dataclass(frozen=True, slots=True)
class Stored:
    """An object that lies in a store."""

    name: str
    size_bytes: int


class Upload(Protocol):
    """An object on its way into a store: nobody sees it before `commit`, and nothing of it stays after `abort`."""

    def write(self, data: bytes | memoryview) -> None:
        """Append to the object."""

    def commit(self, name: str | None = None, *, refs: Sequence[Stored] = (), subject: str | None = None) -> Stored:
        """Make the object visible under `name`, or under its content name; durable when this returns.

        `refs` are objects that this one needs, and `subject` (`sha256:…`) is the manifest in the same place that it
        is about: a registry keeps the former as long as this object, and lists this one under the latter. Other
        stores ignore both.
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

    def read(self, name: str, start: int = 0, length: int | None = None, *, timeout_s: float = 60.0) -> Iterator[bytes]:
        """Bytes `start` to `start + length` (or to the end) of an object, in pieces as they arrive.

        Exactly these bytes or an error: an answer that is shorter, longer or of another range is a `TransientError`.
        `timeout_s` bounds the whole read, however slowly the bytes drip. Closing the iterator early ends the request.
        """

    def upload(self) -> Upload:
        """Begin to write an object of unknown size."""

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
    """The name itself. Raises `UsageError` for what is no object's name: names come from documents of others too."""
    if len(name) > MAX_NAME or not (is_content_name(name) or _PATH.fullmatch(name)):
        raise UsageError(f"{name[:MAX_NAME]!r} is not a name of an object", hint="use letters, digits, . _ - and /")
    return name

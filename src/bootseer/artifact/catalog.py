"""The artifacts of one kind in one store: found, published and removed by their keys.

An artifact is a document and the objects that it names. A document that can be read is an artifact that can be used: it
is written last. Between what a publisher writes and what another node deletes at that moment stands a second look on
both sides (`publish`, `prune.prune`): a document whose objects are not there does not stay. Safe to use from many
threads, processes and nodes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

from bootseer.artifact.document import OtherVersionError
from bootseer.artifact.kind import D, Kind, Lookup, Tombstone
from bootseer.artifact.objects import WRITE_S, missing, put, read_all
from bootseer.artifact.progress import Say
from bootseer.artifact.signatures import UNSIGNED, Signatures, stored_limit
from bootseer.errors import (
    BootseerError,
    CorruptError,
    NotFoundError,
    PermanentError,
    SignatureError,
    TransientError,
    UsageError,
)
from bootseer.io.retry import retrying
from bootseer.io.tasks import Tasks
from bootseer.logs import logger
from bootseer.store.store import MAX_CREATE_BYTES, Store

_log = logger(__name__)
FIND_S = 10.0
"""A start waits no longer for an answer: the real setup is waiting."""
_LIST_S = 600.0
_THREADS = 8
MAX_DOCUMENTS = 10_000
_UNREAD = ("unreachable", "other-version")


@dataclass(frozen=True)
class Listing(Generic[D]):
    """All artifacts of a store. One that cannot be read does not hide the others."""

    documents: tuple[D, ...]
    broken: tuple[str, ...]
    """Invalid documents, one line each: no node can use them."""
    unread: tuple[str, ...]
    """Documents that could not be read, or are of another version, one line each: another node may use them."""


class Catalog(Generic[D]):
    """The artifacts of one store. `say` gets one line for what went wrong beside the question."""

    def __init__(
        self, kind: Kind[D], store: Store, say: Say = lambda line: None, signatures: Signatures = UNSIGNED
    ) -> None:
        self.kind = kind
        self.store = store
        self._say = say
        self.signatures = signatures

    def find(self, key: str, *, timeout_s: float = FIND_S) -> D | None:
        """The artifact of a key.

        Raises `TransientError` or `AccessError` when the store does not say, `CorruptError` for what is not a document
        of this key, `SignatureError` for one without a trusted signature, and `OtherVersionError`. `look` answers
        instead.
        """
        found = self._found(key, timeout_s)
        return found and found[0]

    def _found(self, key: str, timeout_s: float) -> tuple[D, bytes] | None:
        """The document, and it as it is stored."""
        self.kind.check_key(key)
        name = self.kind.document_name(key)
        try:
            data = read_all(self.store, name, stored_limit(self.kind.max_bytes), timeout_s)
        except NotFoundError:
            return None
        except (TransientError, CorruptError):
            raise
        except PermanentError as error:
            if type(error) is PermanentError:  # larger than any document
                raise CorruptError(str(error)) from error
            raise
        return self.opened(key, data), data

    def opened(self, key: str, data: bytes) -> D:
        """The document of `key` in what is stored under its name. Raises as `find`."""
        where, name = self.store.uri, self.kind.document_name(key)
        try:
            document = self.kind.parse(self.signatures.open(name, data, where))
        except CorruptError as error:
            raise CorruptError(f"{where}: {name}: {error}") from error
        if self.kind.key(document) != key:
            raise CorruptError(f"{where}: {name} is the document of another {self.kind.noun}")
        return document

    def look(self, key: str, *, timeout_s: float = FIND_S) -> Lookup[D]:
        """`find` without errors."""
        try:
            found = self._found(key, timeout_s)
        except OtherVersionError as error:
            return Lookup("other-version", why=str(error))
        except SignatureError as error:
            return Lookup("unsigned", why=str(error))
        except CorruptError as error:
            return Lookup("broken", why=str(error))
        except UsageError:
            raise
        except BootseerError as error:
            return Lookup("unreachable", why=str(error))
        return Lookup("none") if found is None else Lookup("found", found[0], data=found[1])

    def sealed(self, document: D) -> bytes:
        """The document as it is stored: signed where there is a key. Raises `PermanentError` when it is too large."""
        data = self.signatures.seal(document.name, document.encode())
        if self.kind.max_bytes <= MAX_CREATE_BYTES < len(data):
            name = f"{self.kind.noun} {self.kind.short(self.kind.key(document))}"
            raise PermanentError(f"{name}: its signed document has {len(data)} bytes, too many")
        return data

    def publish(
        self, document: D, *, replace: bool = False, subject: str | None = None, now_s: float | None = None
    ) -> bool:
        """Make an artifact visible whose objects are stored: whether it is there now.

        With another one there, nothing happens and the answer is no, unless it shall be replaced; the objects of the
        one that is not used are left to `prune`. `subject`: see `Upload.commit`. Raises what stores raise, and
        `PermanentError` when objects are missing; then no document stays.
        """
        now_s = time.time() if now_s is None else now_s
        key, data = self.kind.key(document), self.sealed(document)
        if not replace:
            created = retrying(
                lambda left_s: self.store.create(document.name, data, refs=document.objects, timeout_s=left_s),
                deadline_s=WRITE_S,
            )
            # An attempt whose answer was lost may have been ours.
            if not created and self.find(key, timeout_s=WRITE_S) != document:
                self._bury(document, now_s)
                return False
        else:
            _, old = self._present(key)
            if old is not None and old != document:
                self._bury(old, now_s)
            put(self.store, document.name, data, document.objects, subject=subject)
        self._check_objects(document)
        return True

    def all(self) -> Listing[D]:
        """All artifacts, in the order of their keys. Raises what stores raise when they do not list."""
        until = time.monotonic() + _LIST_S
        keys = sorted(self.published_keys())
        if len(keys) > MAX_DOCUMENTS:
            raise PermanentError(
                f"{self.store.uri}: {len(keys)} {self.kind.noun}s, more than the {MAX_DOCUMENTS} one can list"
            )
        with Tasks("bootseer-catalog", min(_THREADS, len(keys) or 1)) as pool:
            answers = pool.map(lambda key: self.look(key, timeout_s=max(until - time.monotonic(), 0.1)), keys)
            found = dict(zip(keys, answers, strict=True))
        return Listing(
            tuple(each.document for each in found.values() if each.document is not None),
            tuple(f"{self.kind.short(key)}: {each.why}" for key, each in found.items() if each.kind == "broken"),
            tuple(f"{self.kind.short(key)}: {each.why}" for key, each in found.items() if each.kind in _UNREAD),
        )

    def published_keys(self) -> set[str]:
        """The keys of which the store has a document."""
        return {key for stored in self.store.list(self.kind.folder) if (key := self.kind.key_in(stored.name))}

    def remove(self, key: str, now_s: float) -> D | None:
        """Make an artifact invisible at once and leave its objects to `prune`; what was removed, None for nothing.

        A document that cannot be read is removed too. May be repeated after it was interrupted.
        """
        is_there, document = self._present(key)
        if document is not None:
            # The tombstone first: interrupted in between, the artifact is still there and nothing of it is deleted.
            self._bury(document, now_s)
        if is_there:
            self.store.delete(self.kind.document_name(key))
            _log.info("removed %s %s from %s", self.kind.noun, self.kind.short(key), self.store.uri)
        return document

    def used_objects(self) -> Iterator[str]:
        """Content names that artifacts of this kind need, those of removed ones too. Raises for what it cannot read."""
        listing = self.all()
        for problem in (*listing.broken, *listing.unread):
            raise PermanentError(f"{self.kind.noun} {problem}")
        for document in listing.documents:
            yield from (stored.name for stored in document.objects)
        for stored in self.store.list(self.kind.trash):
            yield from (needed.name for needed in self.read_tombstone(stored.name).objects)

    def read_tombstone(self, name: str) -> Tombstone:
        """The tombstone of this name. Raises what `read_all` raises, and `CorruptError`."""
        kind = self.kind
        found = Tombstone.parse(read_all(self.store, name, kind.max_bytes), kind.tombstone_schema, kind.max_bytes)
        if kind.trash + found.name != name:
            raise CorruptError(f"{name} is the tombstone of another {kind.noun}")
        kind.check_key(found.key)
        return found

    def write_tombstone(self, tombstone: Tombstone) -> None:
        """Write it, in place of one that may be there."""
        put(self.store, self.kind.trash + tombstone.name, tombstone.encode(self.kind.tombstone_schema))

    def _present(self, key: str) -> tuple[bool, D | None]:
        """Whether there is a document, and it itself if it can be read."""
        try:
            document = self.find(key, timeout_s=WRITE_S)
        except (CorruptError, SignatureError, OtherVersionError) as error:
            self._say(f"what was stored for an {self.kind.noun} that cannot be read stays: {error}")
            return True, None
        return document is not None, document

    def _bury(self, document: D, now_s: float) -> None:
        self.write_tombstone(self.kind.tombstone(document, now_s))

    def _check_objects(self, document: D) -> None:
        absent = missing(self.store, document.objects)
        if not absent:
            return
        self.store.delete(document.name)
        raise PermanentError(
            f"{self.store.uri}: {absent[0].name} of the {self.kind.noun}"
            " is not there, or not as large as it should be; "
            "it was not published"
        )

"""The artifacts of one kind in one store: found, published and removed by key.

An artifact is a document and the objects that it names. The document is written last, so an artifact whose document can
be read is complete. A publisher and a node that prunes may race: both check again afterwards (`publish`,
`prune.prune`), and a document whose objects are missing is removed. Safe for many threads, processes and nodes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

from bootseer.artifact.document import OtherVersionError, decode, encode
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
    UsageError,
)
from bootseer.io.retry import retrying
from bootseer.io.tasks import Tasks
from bootseer.logs import logger
from bootseer.store.store import MAX_CREATE_BYTES, Store

_log = logger(__name__)
FIND_S = 10.0
"""Limit for a lookup during a start: the regular setup is the alternative."""
_LIST_S = 600.0
_THREADS = 8
_UNREAD = ("unreachable", "other-version")


@dataclass(frozen=True)
class Listing(Generic[D]):
    """All artifacts of a store. An unreadable one does not hide the others."""

    documents: tuple[D, ...]
    broken: tuple[str, ...]
    """Invalid documents, one line each: unusable for every node."""
    unread: tuple[str, ...]
    """Documents that could not be read or have another version, one line each: another node may be able to use them."""


class Catalog(Generic[D]):
    """The artifacts of one store. `say` gets a line for each problem that does not fail the call."""

    def __init__(
        self, kind: Kind[D], store: Store, say: Say = lambda line: None, signatures: Signatures = UNSIGNED
    ) -> None:
        self.kind = kind
        self.store = store
        self._say = say
        self.signatures = signatures

    def find(self, key: str, *, timeout_s: float = FIND_S) -> D | None:
        """The artifact with this key; None when there is none. Raises as `read`."""
        try:
            return self.read(key, timeout_s)[0]
        except NotFoundError:
            return None

    def read(self, key: str, timeout_s: float) -> tuple[D, bytes]:
        """The artifact with this key, and its document as stored.

        Raises `NotFoundError`, `TransientError` or `AccessError` when the store cannot tell, `CorruptError` for an
        invalid document, `SignatureError` for one without a trusted signature, and `OtherVersionError`. `look` returns
        these instead.
        """
        self.kind.check_key(key)
        where, name = self.store.uri, self.kind.document_name(key)
        data = read_all(self.store, name, stored_limit(self.kind.max_bytes), timeout_s)
        try:
            document = self.kind.parse(self.signatures.open(name, data, where))
        except CorruptError as error:
            raise CorruptError(f"{where}: {name}: {error}") from error
        if self.kind.key(document) != key:
            raise CorruptError(f"{where}: {name} is the document of another {self.kind.noun}")
        return document, data

    def look(self, key: str, *, timeout_s: float = FIND_S) -> Lookup[D]:
        """`read`, with errors as part of the result."""
        try:
            document, data = self.read(key, timeout_s)
        except NotFoundError:
            return Lookup("none")
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
        return Lookup("found", document, data=data)

    def encode_signed(self, document: D) -> bytes:
        """The bytes to store: signed if there is a key. Raises `PermanentError` when they are too large."""
        data = self.signatures.seal(document.name, document.encode())
        if self.kind.max_bytes <= MAX_CREATE_BYTES < len(data):
            name = f"{self.kind.noun} {self.kind.short(self.kind.key(document))}"
            raise PermanentError(f"{name}: its signed document has {len(data)} bytes, too many")
        return data

    def publish(
        self, document: D, *, replace: bool = False, subject: str | None = None, now_s: float | None = None
    ) -> bool:
        """Make an artifact visible whose objects are stored; returns whether it is the published one now.

        An artifact that is there already stays, and the answer is False, unless `replace`; the objects of the unused
        one are left to `prune`. `subject`: see `Upload.commit`. Raises the store's errors, and `PermanentError` when
        objects are missing; then no document remains.
        """
        now_s = time.time() if now_s is None else now_s
        key, data = self.kind.key(document), self.encode_signed(document)
        if not replace:
            created = retrying(
                lambda left_s: self.store.create(document.name, data, refs=document.objects, timeout_s=left_s),
                deadline_s=WRITE_S,
            )
            # After a lost response the document there may be ours.
            if not created and self.find(key, timeout_s=WRITE_S) != document:
                self.write_tombstone(self.kind.tombstone(document, now_s))
                return False
        else:
            _, old = self._present(key)
            if old is not None and old != document:
                self.write_tombstone(self.kind.tombstone(old, now_s))
            put(self.store, document.name, data, document.objects, subject=subject)
        if absent := missing(self.store, document.objects):
            self.store.delete(document.name)
            raise PermanentError(
                f"{self.store.uri}: {absent[0].name} of the {self.kind.noun} is not there, or not as large as it should"
                " be; it was not published"
            )
        return True

    def all(self) -> Listing[D]:
        """All artifacts in the order of their keys. Raises the store's errors when listing fails."""
        until = time.monotonic() + _LIST_S
        keys = sorted(self.published_keys())

        def look(key: str) -> Lookup[D]:
            return self.look(key, timeout_s=max(min(until - time.monotonic(), WRITE_S), 0.1))

        with Tasks("bootseer-catalog", min(_THREADS, len(keys) or 1)) as pool:
            found = dict(zip(keys, pool.map(look, keys), strict=True))
        return Listing(
            tuple(each.document for each in found.values() if each.document is not None),
            tuple(f"{self.kind.short(key)}: {each.why}" for key, each in found.items() if each.kind == "broken"),
            tuple(f"{self.kind.short(key)}: {each.why}" for key, each in found.items() if each.kind in _UNREAD),
        )

    def published_keys(self) -> set[str]:
        """The keys that have a document in the store."""
        return {key for stored in self.store.list(self.kind.folder) if (key := self.kind.key_in(stored.name))}

    def remove(self, key: str, now_s: float) -> bool:
        """Make an artifact invisible at once, leaving its objects to `prune`; returns whether there was a document.

        Removes unreadable documents too. Safe to repeat after an interruption.
        """
        is_there, document = self._present(key)
        if document is not None:
            # Tombstone first: interrupted in between, the artifact is still complete and nothing of it gets deleted.
            self.write_tombstone(self.kind.tombstone(document, now_s))
        if is_there:
            self.store.delete(self.kind.document_name(key))
            _log.info("removed %s %s from %s", self.kind.noun, self.kind.short(key), self.store.uri)
        return is_there

    def used_objects(self) -> Iterator[str]:
        """Names of the objects that artifacts of this kind use, removed ones included. Raises if any cannot be read."""
        listing = self.all()
        for problem in (*listing.broken, *listing.unread):
            raise PermanentError(f"{self.kind.noun} {problem}")
        for document in listing.documents:
            yield from (stored.name for stored in document.objects)
        for stored in self.store.list(self.kind.trash):
            yield from (needed.name for needed in self.read_tombstone(stored.name).objects)

    def read_tombstone(self, name: str) -> Tombstone:
        """The tombstone of this name. Raises the errors of `read_all`, and `CorruptError`."""
        kind = self.kind
        data = read_all(self.store, name, kind.max_bytes)
        found = decode(
            data, Tombstone, "tombstone", limit=kind.max_bytes, schema=kind.tombstone_schema, other_version=CorruptError
        )
        if kind.trash + found.name != name:
            raise CorruptError(f"{name} is the tombstone of another {kind.noun}")
        kind.check_key(found.key)
        return found

    def write_tombstone(self, tombstone: Tombstone) -> None:
        put(self.store, self.kind.trash + tombstone.name, encode(tombstone, self.kind.tombstone_schema))

    def _present(self, key: str) -> tuple[bool, D | None]:
        """Whether there is a document, and the document if it can be read."""
        try:
            document = self.find(key, timeout_s=WRITE_S)
        except (CorruptError, SignatureError, OtherVersionError) as error:
            self._say(f"the objects of an unreadable {self.kind.noun} document are not deleted: {error}")
            return True, None
        return document is not None, document

"""The snapshots of one store: found, published and removed by their request keys.

    environments/<key>/document         see `env.document`; immutable content, replaced only when somebody wants that
    environments/<key>/lease            who is building it (`lease`)
    environments/<key>/quarantine       why it is suspected (`quarantine`)
    environments/trash/...              removed snapshots whose objects are still there (`tombstone`, `prune`)

A document that can be read is a snapshot that can be used: it is written last. Between what a publisher writes and what
somebody else deletes at that moment stands a second look on both sides (`publish`, `prune.prune`): a document whose
objects are not there does not stay. Safe to use from many
threads, processes and nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bootseer.artifact.objects import WRITE_S, missing, put
from bootseer.artifact.signatures import UNSIGNED, Signatures, stored_limit
from bootseer.env.document import MAX_BYTES, EnvironmentDocument, OtherVersionError, document_name, is_key
from bootseer.env.life.decide import Lookup
from bootseer.env.life.tombstone import Tombstone
from bootseer.errors import (
    BootseerError,
    CorruptError,
    NotFoundError,
    PermanentError,
    SignatureError,
    TransientError,
    UsageError,
)
from bootseer.io.tasks import Tasks
from bootseer.store.retry import read_all, retrying
from bootseer.store.store import MAX_CREATE_BYTES, Store

FOLDER = "environments/"
FIND_S = 10.0
"""A start waits no longer for an answer: the real setup is waiting."""
_LIST_S = 600.0
_THREADS = 8
MAX_DOCUMENTS = 10_000


@dataclass(frozen=True, slots=True)
class Listing:
    """All snapshots of a store. One that cannot be read does not hide the others."""

    documents: tuple[EnvironmentDocument, ...]
    broken: tuple[str, ...]
    """Documents that are none, one line each: nobody can use them."""
    unread: tuple[str, ...]
    """Documents that could not be read, or are of another version, one line each: somebody may use them."""


class Catalog:
    """The snapshots of one store. `say` gets one line for what went wrong beside the question."""

    def __init__(
        self, store: Store, say: Callable[[str], None] = lambda line: None, signatures: Signatures = UNSIGNED
    ) -> None:
        self.store = store
        self._say = say
        self.signatures = signatures

    def find(self, key: str, *, timeout_s: float = FIND_S) -> EnvironmentDocument | None:
        """The snapshot of a request key.

        Raises `TransientError` or `AccessError` when the store does not say, `CorruptError` for what is no document of
        this key, `SignatureError` for one without a signature that counts, and `OtherVersionError`. `look` answers
        instead.
        """
        found = self._found(key, timeout_s)
        return found and found[0]

    def _found(self, key: str, timeout_s: float) -> tuple[EnvironmentDocument, bytes] | None:
        """The document, and it as it is stored."""
        name = document_name(_checked(key))
        try:
            data = read_all(self.store, name, stored_limit(MAX_BYTES), timeout_s)
        except NotFoundError:
            return None
        except (TransientError, CorruptError):
            raise
        except PermanentError as error:
            if type(error) is PermanentError:  # larger than any document
                raise CorruptError(str(error)) from error
            raise
        return _parsed(self.signatures.open(name, data, self.store.uri), self.store.uri, key), data

    def look(self, key: str, *, timeout_s: float = FIND_S) -> Lookup:
        """`find` without errors: what `decide` asks for."""
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

    def sealed(self, document: EnvironmentDocument) -> bytes:
        """The document as it is stored: signed where there is a key. Raises `PermanentError` when it is too large."""
        data = self.signatures.seal(document.name, document.encode())
        if len(data) > MAX_CREATE_BYTES:
            raise PermanentError(
                f"environment {document.key[:12]}: its signed document has {len(data)} bytes, too many"
            )
        return data

    def publish(self, document: EnvironmentDocument, *, replace: bool = False, now_s: float | None = None) -> bool:
        """Make a snapshot visible whose objects are stored: whether it is there now.

        With another one there, nothing happens and the answer is no, unless it shall be replaced; the objects of the
        one that is not used are left to `prune`. Raises what stores raise, and `PermanentError` when objects of the
        snapshot are missing; then no document stays.
        """
        now_s = time.time() if now_s is None else now_s
        data = self.sealed(document)
        if not replace:
            created = retrying(
                lambda left_s: self.store.create(document.name, data, refs=document.objects, timeout_s=left_s),
                deadline_s=WRITE_S,
            )
            # An attempt whose answer was lost may have been ours.
            if not created and self.find(document.key, timeout_s=WRITE_S) != document:
                self._bury(document, now_s)
                return False
        else:
            _, old = self._present(document.key)
            if old is not None and old != document:
                self._bury(old, now_s)
            put(self.store, document.name, data, document.objects)
        self._check_objects(document)
        return True

    def all(self) -> Listing:
        """All snapshots, in the order of their keys. Raises what stores raise when they do not list."""
        until = time.monotonic() + _LIST_S
        keys = sorted(self.keys("document"))
        if len(keys) > MAX_DOCUMENTS:
            raise PermanentError(
                f"{self.store.uri}: {len(keys)} environments, more than the {MAX_DOCUMENTS} one can list"
            )
        with Tasks("bootseer-environments", min(_THREADS, len(keys) or 1)) as pool:
            answers = pool.map(lambda key: self.look(key, timeout_s=max(until - time.monotonic(), 0.1)), keys)
            found = dict(zip(keys, answers, strict=True))
        return Listing(
            tuple(each.document for each in found.values() if each.document is not None),
            tuple(f"{key[:12]}: {each.why}" for key, each in found.items() if each.kind == "broken"),
            tuple(f"{key[:12]}: {each.why}" for key, each in found.items() if each.kind in _UNREAD),
        )

    def keys(self, kind: str) -> set[str]:
        """The request keys of which the store has an object of this kind: `document`, `lease` or `quarantine`."""
        found = set()
        for stored in self.store.list(FOLDER):
            key, _, last = stored.name.removeprefix(FOLDER).partition("/")
            if last == kind and is_key(key):
                found.add(key)
        return found

    def remove(self, key: str, now_s: float) -> EnvironmentDocument | None:
        """Make a snapshot invisible at once and leave its objects to `prune`; what was removed, None for nothing.

        A document that nobody can read is removed too. May be repeated after it was interrupted.
        """
        is_there, document = self._present(key)
        if document is not None:
            # The tombstone first: interrupted in between, the snapshot is still there and nothing of it is deleted.
            self._bury(document, now_s)
        if is_there:
            self.store.delete(document_name(key))
        return document

    def _present(self, key: str) -> tuple[bool, EnvironmentDocument | None]:
        """Whether there is a document, and it itself if it can be read."""
        try:
            document = self.find(key, timeout_s=WRITE_S)
        except (CorruptError, SignatureError, OtherVersionError) as error:
            self._say(f"what was stored for an environment that cannot be read stays: {error}")
            return True, None
        return document is not None, document

    def _bury(self, document: EnvironmentDocument, now_s: float) -> None:
        tombstone = Tombstone.of(document, now_s)
        put(self.store, tombstone.name, tombstone.encode())

    def _check_objects(self, document: EnvironmentDocument) -> None:
        absent = missing(self.store, document.objects)
        if not absent:
            return
        self.store.delete(document.name)
        raise PermanentError(
            f"{self.store.uri}: {absent[0].name} of the environment is not there, or not as large as it should be; "
            "it was not published"
        )


_UNREAD = ("unreachable", "other-version")


def _checked(key: str) -> str:
    if not is_key(key):
        raise UsageError(
            f"{key[:80]!r} is not a request key", hint="a key has 64 hexadecimal digits; see bootseer env list"
        )
    return key


def _parsed(data: bytes, where: str, key: str) -> EnvironmentDocument:
    try:
        document = EnvironmentDocument.parse(data)
    except CorruptError as error:
        raise CorruptError(f"{where}: {document_name(key)}: {error}") from error
    if document.key != key:
        raise CorruptError(f"{where}: {document_name(key)} is the document of another request key")
    return document

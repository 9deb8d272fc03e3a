"""The snapshots of one store, by their request keys, and a node's copies for when the store does not answer.

    environments/<key>/document         see `env.document`; replaced only on purpose
    environments/<key>/lease            the node that builds it (`election`)
    environments/<key>/unsafe           why there is no snapshot (`unsafe`)
    environments/trash/...              removed snapshots whose objects still exist (`artifact.prune`)

The copies have the same names below `<cache>/environments`: documents that were used or built here, and indexes and
manifests as `artifact.objects` keeps them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path

from bootseer.artifact import catalog as artifacts
from bootseer.artifact.kind import Kind
from bootseer.artifact.objects import LocalObjects
from bootseer.artifact.places import environments_folder, own_folder
from bootseer.artifact.progress import Say
from bootseer.artifact.prune import GRACE_S, Pruned
from bootseer.artifact.prune import prune as prune_artifacts
from bootseer.artifact.signatures import UNSIGNED, Signatures
from bootseer.env.document import MAX_BYTES, EnvironmentDocument, document_name, is_key
from bootseer.env.life import unsafe
from bootseer.env.life.decide import Lookup
from bootseer.errors import BootseerError, UsageError
from bootseer.store.store import Store, Stored

FOLDER = "environments/"
TRASH = "environments/trash/"
TOMBSTONE_SCHEMA = "bootseer.environment-tombstone/1"


def _check_key(key: str) -> None:
    if not is_key(key):
        raise UsageError(
            f"{key[:80]!r} is not a request key", hint="a key has 64 hexadecimal digits; see bootseer env list"
        )


def _key_in(name: str, last: str = "document") -> str:
    key, _, found = name.removeprefix(FOLDER).partition("/")
    return key if found == last and is_key(key) else ""


ENVIRONMENTS = Kind(
    noun="environment",
    folder=FOLDER,
    trash=TRASH,
    tombstone_schema=TOMBSTONE_SCHEMA,
    max_bytes=MAX_BYTES,
    check_key=_check_key,
    document_name=document_name,
    key_in=_key_in,
    parse=EnvironmentDocument.parse,
    key=lambda document: document.key,
    identity=lambda document: document.file.identity,
)


class Catalog(artifacts.Catalog[EnvironmentDocument]):
    """The snapshots of one store."""

    def __init__(self, store: Store, say: Say = lambda line: None, signatures: Signatures = UNSIGNED) -> None:
        super().__init__(ENVIRONMENTS, store, say, signatures)

    def has_removed(self, key: str, since_s: float) -> bool:
        """Whether a snapshot of this key was removed or replaced since then, as far as its tombstone is still there."""
        names = [stored.name for stored in self.store.list(f"{TRASH}{key}-")]
        return any(self.read_tombstone(name).removed_s >= since_s for name in names)


def prune(
    catalog: Catalog,
    now_s: float,
    *,
    grace_s: float = GRACE_S,
    in_use: Collection[str] = (),
    also_used: Callable[[], Iterable[str]] = tuple,
) -> Pruned:
    """`artifact.prune.prune`, with expired snapshots.

    `in_use` are identities of block files that are mounted here (`MountState.layers`, `shared_layers.mounted_layers`).
    """

    def is_expired(document: EnvironmentDocument) -> bool:
        # A document from the future is not expired: this node's clock may be wrong.
        return document.max_age_s is not None and now_s - document.built_s > document.max_age_s

    done = prune_artifacts(catalog, now_s, grace_s=grace_s, in_use=in_use, also_used=also_used, expired=is_expired)
    for stored in list(catalog.store.list(FOLDER)):
        if (key := _key_in(stored.name, "unsafe")) and not unsafe.reason(catalog.store, key, now_s):
            done.try_step(key, partial(catalog.store.delete, stored.name))
    return done


MAX_UNUSED_S = 30 * 24 * 3600.0
"""Age since the last use after which a node's copy is deleted."""
_OBJECT_S = 120.0


class NodeCatalog:
    """This node's copies. `say` gets a line for each copy that cannot be written.

    A document's content never changes, so a copy stays valid; the age limit applies to it, too. On a full disk
    only the copy is missing. Safe to use from many threads and processes.
    """

    def __init__(self, cache: Path, say: Callable[[str], None], signatures: Signatures = UNSIGNED) -> None:
        """`cache` is the root of the node's cache. Documents are kept with their signatures and verified again. Raises
        `BootseerError` if the folder does not belong to this user."""
        # Private: snapshots contain files that only their owner may read, in objects with other modes.
        self._folder = own_folder(environments_folder(cache), private=True)
        self._kept = LocalObjects(self._folder, say)
        self._catalog = Catalog(self._kept.store, signatures=signatures)

    def look_up(self, catalog: Catalog, key: str) -> Lookup:
        """Look up in the store, or in this node's copies if it does not answer; updates the copies."""
        found = catalog.look(key)
        if found.kind == "unreachable":
            return Lookup("unreachable", self._catalog.look(key).document, found.why)
        if found.document is not None:
            self.keep(found.document, found.data)
        elif found.kind == "none":
            with contextlib.suppress(BootseerError):  # it was removed on purpose
                self._kept.store.delete(document_name(key))
        return found

    def keep(self, document: EnvironmentDocument, data: bytes) -> None:
        """Keep a copy of a snapshot's document, and delete old ones; `data` is the document as stored."""
        if self._catalog.look(document.key).data == data:
            with contextlib.suppress(OSError):
                os.utime(self._folder / document.name)
            return
        self._kept.keep(document.name, data)
        # Those that were not used for long, documents and objects alike: an object that is needed again is fetched.
        oldest_s = time.time() - MAX_UNUSED_S
        for path in (*self._folder.glob("environments/*/document"), *self._folder.glob("sha256/*/*")):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < oldest_s:
                    path.unlink()

    def object(self, stored: Stored, origin: Store) -> bytes:
        """A small content-addressed object (the manifest), as `LocalObjects.content`."""
        return self._kept.content(stored, origin, timeout_s=_OBJECT_S)

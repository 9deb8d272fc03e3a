"""This node's copies of environment documents, for starts while the store does not answer.

    <cache>/environments/environments/<key>/document    snapshots that were used or built here, named as in stores
    <cache>/environments/environments/<key>/quarantine  quarantines that the store did not accept
    <cache>/environments/sha256/...                     their indexes and manifests (`artifact.objects`)

A document's content never changes, so a copy stays valid; age limit and quarantine apply to it, too. On a full disk
only the copy is missing. Safe to use from many threads and processes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from bootseer.artifact.catalog import FIND_S
from bootseer.artifact.objects import LocalObjects
from bootseer.artifact.places import environments_folder, own_folder
from bootseer.artifact.signatures import UNSIGNED, Signatures
from bootseer.env.document import EnvironmentDocument, document_name
from bootseer.env.life.catalog import Catalog
from bootseer.env.life.decide import Lookup
from bootseer.errors import BootseerError
from bootseer.store.file import FileStore
from bootseer.store.store import Store, Stored

MAX_KNOWN = 200
"""Number of snapshots that a node remembers, by last use."""
_OBJECT_S = 120.0


class NodeCatalog:
    """The copies. `say` gets a line for each copy that cannot be written."""

    def __init__(self, cache: Path, say: Callable[[str], None], signatures: Signatures = UNSIGNED) -> None:
        """`cache` is the root of the node's cache. Documents are kept with their signatures and verified again. Raises
        `BootseerError` if the folder does not belong to this user."""
        # Private: snapshots contain files that only their owner may read, in objects with other modes.
        self._folder = own_folder(environments_folder(cache), private=True)
        self._kept = LocalObjects(self._folder, say)
        self._catalog = Catalog(self.store, signatures=signatures)

    @property
    def store(self) -> FileStore:
        """Also for `quarantine.Quarantine`."""
        return self._kept.store

    def look_up(self, catalog: Catalog, key: str, *, timeout_s: float = FIND_S) -> Lookup:
        """Look up a snapshot in the store, or in this node's copies if the store does not answer; updates the
        copies."""
        found = catalog.look(key, timeout_s=timeout_s)
        if found.kind == "unreachable":
            return Lookup("unreachable", self._catalog.look(key).document, found.why)
        if found.document is not None:
            self.keep(found.document, found.data)
        elif found.kind == "none":
            self.forget(key)  # it was removed on purpose
        return found

    def keep(self, document: EnvironmentDocument, data: bytes) -> None:
        """Keep a copy of a snapshot's document; `data` is the document as stored."""
        if self._catalog.look(document.key).data == data:
            with contextlib.suppress(OSError):
                os.utime(self._folder / document.name)
            return
        self._kept.keep(document.name, data)
        self._prune()

    def forget(self, key: str) -> None:
        with contextlib.suppress(BootseerError):
            self.store.delete(document_name(key))

    def object(self, stored: Stored, origin: Store, *, timeout_s: float = _OBJECT_S) -> bytes:
        """A small content-addressed object (the manifest), as `LocalObjects.content`."""
        return self._kept.content(stored, origin, timeout_s=timeout_s)

    def _prune(self) -> None:
        """Delete the least recently used copies, with objects that only they need."""
        with contextlib.suppress(OSError, BootseerError):
            documents = sorted(self._folder.glob("environments/*/document"), key=lambda path: path.stat().st_mtime)
            excess = documents[:-MAX_KNOWN]
            if not excess:
                return
            all_of_them = Catalog(self.store)  # whether they are signed or not
            gone = [found for path in excess if (found := all_of_them.look(path.parent.name).document) is not None]
            for path in excess:
                path.unlink(missing_ok=True)
            needed = {name for document in all_of_them.all().documents for name in _names(document)}
            for name in {name for document in gone for name in _names(document)} - needed:
                self.store.delete(name)


def _names(document: EnvironmentDocument) -> list[str]:
    names = [document.file.index_name, document.manifest.name]
    return names if document.loose is None else [*names, document.loose.name]

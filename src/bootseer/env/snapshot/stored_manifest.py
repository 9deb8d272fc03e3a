"""Manifests in a store: under their content name, so that nobody can put another one in its place.

Called by `write`, and by whoever restores single files or verifies.
"""

from __future__ import annotations

from bootseer.env.snapshot.manifest import MAX_STORED_BYTES, Manifest
from bootseer.store.retry import read_all, retrying
from bootseer.store.store import Store, Stored

_DEADLINE_S = 300.0


def store_manifest(store: Store, manifest: Manifest) -> Stored:
    """Put a manifest into a store, with retries. Raises what the store raises."""
    data = manifest.encode()

    def once(_left_s: float) -> Stored:
        upload = store.upload()
        try:
            upload.write(data)
            return upload.commit()
        finally:
            upload.abort()

    return retrying(once, deadline_s=_DEADLINE_S)


def load_manifest(store: Store, stored: Stored) -> Manifest:
    """Read a manifest. Raises `CorruptError` for a damaged one, `NotFoundError` and what the store raises."""
    return Manifest.parse(read_all(store, stored.name, min(stored.size_bytes, MAX_STORED_BYTES), _DEADLINE_S))

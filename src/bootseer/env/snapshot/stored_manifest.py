"""Manifests in a store: under their content name, so that nobody can put another one in its place.

Called by `write`. Read again by `life.local`, which keeps them on the node.
"""

from __future__ import annotations

from bootseer.env.snapshot.manifest import Manifest
from bootseer.store.retry import retrying
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

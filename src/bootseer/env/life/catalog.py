"""The snapshots of one store, by their request keys.

environments/<key>/document         see `env.document`; replaced only on purpose
environments/<key>/lease            the node that builds it (`election`)
environments/<key>/quarantine       jobs that failed with it (`quarantine`)
environments/trash/...              removed snapshots whose objects still exist (`artifact.prune`)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial

from bootseer.artifact import catalog as artifacts
from bootseer.artifact.catalog import Listing
from bootseer.artifact.kind import Kind
from bootseer.artifact.lease import look
from bootseer.artifact.progress import Say
from bootseer.artifact.prune import GRACE_S, Pruned
from bootseer.artifact.prune import prune as prune_artifacts
from bootseer.artifact.signatures import UNSIGNED, Signatures
from bootseer.env.document import MAX_BYTES, EnvironmentDocument, document_name, is_key
from bootseer.errors import UsageError
from bootseer.store.store import Store

FOLDER = "environments/"
TRASH = "environments/trash/"
TOMBSTONE_SCHEMA = "bootseer.environment-tombstone/1"
_STALE_LEASE_S = 7 * 24 * 3600.0
"""Age after which a lease is deleted: no setup takes that long."""


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

    def keys_with(self, last: str) -> set[str]:
        """The request keys that have a `lease` or `quarantine` (`last`) in the store."""
        return {key for stored in self.store.list(FOLDER) if (key := _key_in(stored.name, last))}


def prune(
    catalog: Catalog,
    now_s: float,
    *,
    grace_s: float = GRACE_S,
    in_use: Collection[str] = (),
    also_used: Callable[[], Iterable[str]] = tuple,
) -> Pruned:
    """`artifact.prune.prune`, with expired snapshots, quarantines without a snapshot, and old leases.

    `in_use` are identities of block files that are mounted here (`MountState.layers`, `kept.kept`).
    """

    def is_expired(document: EnvironmentDocument) -> bool:
        # A document from the future is not expired: this node's clock may be wrong.
        return document.max_age_s is not None and now_s - document.built_s > document.max_age_s

    def delete_leftovers(listing: Listing[EnvironmentDocument], done: Pruned) -> None:
        leases = catalog.keys_with("lease")
        if not listing.unread:
            with_documents = {document.key for document in listing.documents}
            for key in catalog.keys_with("quarantine") - with_documents - leases:
                done.try_step(key, partial(catalog.store.delete, f"{FOLDER}{key}/quarantine"))
        for key in leases:
            name = f"{FOLDER}{key}/lease"
            record = look(catalog.store, name).record
            if record is not None and now_s - record.since_s > _STALE_LEASE_S:
                done.try_step(key, partial(catalog.store.delete, name))

    return prune_artifacts(
        catalog,
        now_s,
        grace_s=grace_s,
        in_use=in_use,
        also_used=also_used,
        expired=is_expired,
        leftovers=delete_leftovers,
    )

"""Make room in a store: delete the objects of snapshots that were removed a while ago, and snapshots past their age.

An object is deleted when its tombstone is older than the grace, no document and no younger tombstone names it, nobody
else uses it (`also_used`: images live in the same store), and nothing that is mounted on this node is made of it. What
other nodes have mounted is not known here: the grace must be longer than the time they take to fetch a snapshot whole.
Where not everything can be read that may name an object, nothing is deleted.

Somebody may publish the same content while it is deleted here. Both sides look again: a publisher whether his objects
are there, this one for new documents that need what he deleted; such a document goes, and the next start builds anew.
Every step may be interrupted and repeated: a tombstone goes last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

from bootseer.artifact.hotsets import hotset_name
from bootseer.artifact.objects import put
from bootseer.env.document import MAX_BYTES, EnvironmentDocument, document_name
from bootseer.env.life.catalog import Catalog, Listing
from bootseer.env.life.lease import lease_name, look
from bootseer.env.life.quarantine import quarantine_name
from bootseer.env.life.tombstone import TRASH, Tombstone
from bootseer.errors import BootseerError, CorruptError, NotFoundError
from bootseer.store.retry import read_all

GRACE_S = 24 * 3600.0
_STALE_LEASE_S = 7 * 24 * 3600.0
"""No setup takes so long: nobody will ever take this lease over."""
_MAX_TOMBSTONES = 10_000


@dataclass(slots=True)
class Pruned:
    """What was done."""

    expired: list[str] = field(default_factory=list)
    """Request keys of the snapshots that were removed because of their age."""
    num_objects: int = 0
    freed_bytes: int = 0
    num_waiting: int = 0
    """Removed snapshots whose grace is not over."""
    num_in_use: int = 0
    """Removed snapshots of which something is mounted here or used by others."""
    problems: list[str] = field(default_factory=list)
    """What was not done and why, one line each."""


def prune(
    catalog: Catalog,
    now_s: float,
    *,
    grace_s: float = GRACE_S,
    in_use: Collection[str] = (),
    also_used: Callable[[], Iterable[str]] = tuple,
) -> Pruned:
    """Delete what nobody needs any more.

    `in_use` are identities of block files that are mounted here (`MountState.layers`, `kept.kept`), `also_used` yields
    content names that others than snapshots need. Raises what stores raise when they do not list.
    """
    done = Pruned()
    listing = catalog.all()
    for document in listing.documents:
        # A document from the future is not old: perhaps it is our clock that is wrong.
        if document.max_age_s is not None and now_s - document.built_s > document.max_age_s:
            _try(done, document.key, partial(_expire, catalog, done, now_s))
    if done.expired:
        listing = catalog.all()
    graves = _tombstones(catalog, done, now_s)
    mounted = [grave for grave in graves if grave.identity in in_use]
    ripe = [grave for grave in graves if grave not in mounted and now_s - grave.removed_s > grace_s]
    done.num_in_use = len(mounted)
    done.num_waiting = len(graves) - len(ripe) - len(mounted)
    if ripe and listing.unread:
        done.problems.append(f"nothing was deleted, since not all snapshots could be read: {listing.unread[0]}")
    elif ripe:
        try:
            others = set(also_used())
        except BootseerError as error:
            done.problems.append(f"nothing was deleted, since it is not known what else is used: {error}")
        else:
            waiting = [grave for grave in graves if grave not in ripe]
            emptied = _delete_objects(catalog, done, ripe, _objects([*listing.documents, *waiting]), others)
            _delete_tombstones(catalog, done, emptied)
    _delete_leftovers(catalog, listing, done, now_s)
    return done


def _expire(catalog: Catalog, done: Pruned, now_s: float, key: str) -> None:
    if catalog.remove(key, now_s) is not None:
        done.expired.append(key)


def _delete_objects(
    catalog: Catalog, done: Pruned, ripe: Iterable[Tombstone], used: set[str], others: set[str]
) -> list[Tombstone]:
    """Delete what the ripe tombstones name and nobody uses; those that are not needed any more."""
    deleted: set[str] = set()
    emptied = []
    for grave in ripe:
        try:
            for stored in grave.objects:
                if stored.name not in used | others | deleted:
                    catalog.store.delete(stored.name)
                    deleted.add(stored.name)
                    done.num_objects += 1
                    done.freed_bytes += stored.size_bytes
        except BootseerError as error:
            done.problems.append(f"{grave.key[:12]}: {error}")
            continue
        if others.isdisjoint(stored.name for stored in grave.objects):
            emptied.append(grave)
        else:
            done.num_in_use += 1  # the others know nothing of us: the tombstone remembers what was theirs, too
    for document in catalog.all().documents if deleted else ():
        if not deleted.isdisjoint(stored.name for stored in document.objects):
            _try(done, document.key, lambda key: catalog.store.delete(document_name(key)))
    return emptied


def _delete_tombstones(catalog: Catalog, done: Pruned, emptied: Iterable[Tombstone]) -> None:
    listing = catalog.all()
    alive = {document.digest for document in listing.documents}
    for grave in emptied:
        if grave.digest not in alive and not listing.unread:
            _try(done, grave.digest.removeprefix("sha256:"), partial(_delete_hot_sets, catalog))
        _try(done, grave.name, catalog.store.delete)


def _tombstones(catalog: Catalog, done: Pruned, now_s: float) -> list[Tombstone]:
    graves = []
    for number, stored in enumerate(catalog.store.list(TRASH)):
        if number >= _MAX_TOMBSTONES:
            done.problems.append(f"more than {_MAX_TOMBSTONES} removed snapshots: the rest is left to the next time")
            break
        try:
            grave = Tombstone.parse(read_all(catalog.store, stored.name, MAX_BYTES))
            if grave.name != stored.name:
                raise CorruptError(f"{stored.name} is the tombstone of another snapshot")
            if grave.removed_s > now_s + GRACE_S:
                # A clock was wrong. From today on it is counted anew, or it would lie here for years.
                grave = Tombstone(grave.key, grave.digest, grave.identity, now_s, grave.objects)
                put(catalog.store, grave.name, grave.encode())
        except NotFoundError:
            continue  # somebody else prunes
        except BootseerError as error:
            done.problems.append(f"{stored.name}: {error}")
        else:
            graves.append(grave)
    return graves


def _delete_leftovers(catalog: Catalog, listing: Listing, done: Pruned, now_s: float) -> None:
    """Quarantines without a snapshot, and leases of the long dead."""
    if not listing.unread:
        with_documents = {document.key for document in listing.documents}
        for key in catalog.keys("quarantine") - with_documents - catalog.keys("lease"):
            _try(done, key, lambda key: catalog.store.delete(quarantine_name(key)))
    for key in catalog.keys("lease"):
        record = look(catalog.store, lease_name(key)).record
        if record is not None and now_s - record.since_s > _STALE_LEASE_S:
            _try(done, key, lambda key: catalog.store.delete(lease_name(key)))


def _delete_hot_sets(catalog: Catalog, hex_digest: str) -> None:
    for stored in list(catalog.store.list(hotset_name(f"sha256:{hex_digest}", ""))):
        catalog.store.delete(stored.name)


def _objects(all_of: Iterable[EnvironmentDocument | Tombstone]) -> set[str]:
    return {stored.name for one in all_of for stored in one.objects}


def _try(done: Pruned, name: str, step: Callable[[str], object]) -> None:
    try:
        step(name)
    except BootseerError as error:
        done.problems.append(f"{name.removeprefix(TRASH)[:12]}: {error}")

"""Free space in a store: delete objects of artifacts removed a while ago, and artifacts past their age limit.

An object is deleted when its tombstone is older than the grace period, no document and no younger tombstone names it,
nothing else uses it (`also_used`: images and environments share a store), and nothing mounted on this node consists of
it. Mounts of other nodes are unknown here: the grace period must exceed the time they take to fetch a whole artifact.
If a document or tombstone that may name an object cannot be read, nothing is deleted.

Another node may publish the same content while it is deleted here. Both sides check again: a publisher whether its
objects exist, this one for new documents that need what it deleted; such a document is deleted, and the next start
builds anew. Every step may be interrupted and repeated: a tombstone is deleted last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import partial
from typing import Generic

from msgspec import Struct, field

from bootseer.artifact.catalog import Catalog
from bootseer.artifact.kind import D, Tombstone
from bootseer.errors import BootseerError, CorruptError, NotFoundError
from bootseer.io.tasks import Tasks
from bootseer.logs import logger
from bootseer.store.store import Stored

_log = logger(__name__)
GRACE_S = 24 * 3600.0
_AT_ONCE = 8


class Pruned(Struct):
    """The result of `prune`."""

    expired: list[str] = field(default_factory=list)
    """Keys of the artifacts removed because of their age."""
    deleted: set[str] = field(default_factory=set)
    """Names of the deleted objects."""
    freed_bytes: int = 0
    num_waiting: int = 0
    """Removed artifacts within the grace period."""
    num_in_use: int = 0
    """Removed artifacts with objects that are mounted here or used by others."""
    problems: list[str] = field(default_factory=list)
    """What was not done and why, one line each."""

    def try_step(self, name: str, step: Callable[[], object]) -> None:
        """Run a step; its error is recorded as a problem."""
        try:
            step()
        except BootseerError as error:
            self.problems.append(f"{name.removeprefix('sha256:')[:12]}: {error}")


def prune(
    catalog: Catalog[D],
    now_s: float,
    *,
    grace_s: float = GRACE_S,
    in_use: Collection[str] = (),
    also_used: Callable[[], Iterable[str]] = tuple,
    expired: Callable[[D], bool] = lambda document: False,
) -> Pruned:
    """Delete what is no longer needed; returns what was done.

    `in_use`: digests or identities mounted here. `also_used` yields names of objects that artifacts of other kinds
    need. Raises the store's errors when listing fails.
    """
    done = Pruned()
    pruning = _Pruning(catalog, now_s, done)
    listing = catalog.all()
    for document in listing.documents:
        if expired(document):
            key = catalog.kind.key(document)
            done.try_step(key, partial(pruning.expire, key, expired))
    if done.expired:
        listing = catalog.all()
    tombstones = pruning.tombstones()
    mounted = {one.name for one in tombstones if one.identity in in_use or one.digest in in_use}
    due = {one.name: one for one in tombstones if one.name not in mounted and now_s - one.removed_s > grace_s}
    done.num_in_use = len(mounted)
    done.num_waiting = len(tombstones) - len(due) - len(mounted)
    if due and (unread := [*listing.unread, *pruning.unread]):
        done.problems.append(f"nothing was deleted, because not all {catalog.kind.noun}s could be read: {unread[0]}")
    elif due:
        try:
            others = set(also_used())
        except BootseerError as error:
            done.problems.append(f"nothing was deleted, because it is unknown what else is used: {error}")
        else:
            waiting = [tombstone for tombstone in tombstones if tombstone.name not in due]
            used = {stored.name for document in listing.documents for stored in document.objects}
            used |= {stored.name for tombstone in waiting for stored in tombstone.objects}
            pruning.delete(due.values(), used, others)
    _log.info("pruned %s: %d objects, %d bytes", catalog.store.uri, len(done.deleted), done.freed_bytes)
    return done


@dataclass(frozen=True)
class _Pruning(Generic[D]):
    catalog: Catalog[D]
    now_s: float
    done: Pruned
    unread: list[str] = dataclass_field(default_factory=list)
    """Tombstones that could not be read, and perhaps name objects that are still used."""

    def expire(self, key: str, expired: Callable[[D], bool]) -> None:
        document = self.catalog.find(key)  # it may have been replaced since it was listed
        if document is not None and expired(document) and self.catalog.remove(key, self.now_s):
            self.done.expired.append(key)

    def delete(self, due: Iterable[Tombstone], used: set[str], others: set[str]) -> None:
        """Delete unused objects of due tombstones, new documents that need them, and tombstones without objects."""
        catalog, done = self.catalog, self.done
        deleted, needed = done.deleted, used | others
        unneeded = []
        for tombstone in due:
            try:
                for stored in tombstone.objects:
                    if stored.name not in needed and stored.name not in deleted:
                        catalog.store.delete(stored.name)
                        deleted.add(stored.name)
                        done.freed_bytes += stored.size_bytes
            except BootseerError as error:
                done.problems.append(f"{catalog.kind.short(tombstone.key)}: {error}")
                continue
            theirs = tuple(stored for stored in tombstone.objects if stored.name in others)
            if not theirs:
                unneeded.append(tombstone)
                continue
            # Other kinds do not know our tombstones: this one remembers the objects that they use.
            done.num_in_use += 1
            if len(theirs) < len(tombstone.objects):
                done.try_step(tombstone.key, partial(catalog.write_tombstone, replace(tombstone, objects=theirs)))
        listing = catalog.all()
        for document in listing.documents:
            if not deleted.isdisjoint(stored.name for stored in document.objects):
                done.try_step(catalog.kind.key(document), partial(catalog.store.delete, document.name))
        alive = {document.digest for document in listing.documents}
        for tombstone in unneeded:
            if tombstone.digest not in alive and not listing.unread:
                done.try_step(tombstone.digest, partial(self._delete_of_starts, tombstone.digest))
            done.try_step(tombstone.key, partial(catalog.store.delete, catalog.kind.trash + tombstone.name))

    def _delete_of_starts(self, digest: str) -> None:
        """Delete what starts have stored beside the artifact."""
        from bootseer.artifact.hotsets import hotset_name
        from bootseer.artifact.process_snapshots import process_name

        for prefix in (hotset_name(digest, ""), process_name(digest, "")):
            for stored in list(self.catalog.store.list(prefix)):
                self.catalog.store.delete(stored.name)

    def tombstones(self) -> list[Tombstone]:
        def read(stored: Stored) -> Tombstone | None:
            try:
                tombstone = self.catalog.read_tombstone(stored.name)
                if tombstone.removed_s > self.now_s + GRACE_S:
                    # Written with a wrong clock: restart the grace period, or it would stay for years.
                    tombstone = replace(tombstone, removed_s=self.now_s)
                    self.catalog.write_tombstone(tombstone)
                return tombstone
            except NotFoundError:
                return None  # another node prunes too
            except BootseerError as error:
                self.done.problems.append(f"{stored.name}: {error}")
                if not isinstance(error, CorruptError):
                    self.unread.append(stored.name)
                return None

        listed = list(self.catalog.store.list(self.catalog.kind.trash))
        with Tasks("bootseer-tombstones", min(_AT_ONCE, len(listed)) or 1) as threads:
            return [one for one in threads.map(read, listed) if one is not None]

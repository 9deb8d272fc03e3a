"""Hot sets of images and environments: loaded before a start, updated and published after it.

A set is stored in two places: on this node, and in the image's store for all nodes. A start uses the runs of both. A
start works without them, so errors of a store are reported once as a line and never raised. Without write access the
sets stay on the node. Only the store's sets are signed: files on this node were written by this node. How runs are
combined is defined in `fetch.hotset`.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from bootseer.artifact.objects import LocalObjects, put_once, read_all
from bootseer.artifact.places import hotsets_folder, own_folder
from bootseer.artifact.progress import Say
from bootseer.artifact.signatures import UNSIGNED, Signatures, is_signed, stored_limit
from bootseer.errors import AccessError, BootseerError, CorruptError, NotFoundError, SignatureError
from bootseer.fetch.hotset import (
    MAX_IMPORTS,
    MAX_STORED_BYTES,
    HotSet,
    Record,
    encode_hot_set,
    parse_hot_set,
)
from bootseer.io.files import replace_file
from bootseer.store.open import open_store
from bootseer.store.store import Store

if TYPE_CHECKING:
    from bootseer.artifact.materialize import MountOptions

_READ_S = 5.0
"""A start waits no longer for a set: without one it is slower, but correct."""
_UNREAD = "the one there, which may be newer, cannot be read"
MERGED = "kept"
"""A file in a mount's folder: its record was merged into the hot set. It holds the problems of the merge, as JSON."""


def hotset_name(digest: str, workload: str) -> str:
    """The name of a set in a store. `digest` is that of the image's manifest."""
    return f"hotsets/{digest.replace(':', '-')}/{workload}"


class HotSets:
    """The sets of one image. For one thread."""

    def __init__(
        self, cache_root: Path, digest: str, store: Store | None, say: Say, signatures: Signatures = UNSIGNED
    ) -> None:
        """`store` is the image's; None: only this node is used. `say` gets a line for each problem."""
        self._local = LocalObjects(own_folder(hotsets_folder(cache_root), make=False), say)
        self._store = store
        self._stores = [self._local.store, *([store] if store is not None else [])]
        self._signatures = signatures
        self._signed: set[str] = set()  # workloads whose sets in the store are signed
        self._unread: set[tuple[bool, str]] = set()  # of the store or this node: sets that may be newer than ours
        self._digest = digest
        self._say = say

    def load(self, workload: str, *, quiet: bool = False) -> HotSet | None:
        """The runs that this node and the store know, as one set; None without any. `quiet`: says no problems."""
        sets: list[HotSet] = []
        self._unread -= {(True, workload), (False, workload)}
        for store in self._stores:
            try:
                sets.append(self._read(store, workload))
            except NotFoundError:
                continue
            except BootseerError as error:
                if not isinstance(error, CorruptError | SignatureError):
                    self._unread.add((store is self._store, workload))
                if not quiet:
                    self._say(f"no hot set: {error}")
        return functools.reduce(HotSet.union, sets) if sets else None

    def copy_to_node(self, workload: str) -> None:
        """Copy the runs that the store knows to this node."""
        hot_set = self.load(workload)
        if hot_set is not None:
            self._keep(hot_set)

    def add_record(self, workload: str, record: Record, *, publish: bool, imports: str = "") -> None:
        """Merge a start's record and imports into the node's set and, with `publish`, the store's."""
        # The start has loaded the set before and reported the problems.
        known = self.load(workload, quiet=True) or HotSet(self._digest, workload)
        merged = known.merge(record)
        merged = replace(merged, imports=imports or merged.imports)
        self._keep(merged)
        if publish and self._store is not None:
            self.publish(merged)

    def add_set(self, given: HotSet) -> HotSet:
        """Merge an imported set into the one of its workload on this node; returns the merged set."""
        known = self.load(given.workload)
        merged = known.union(given) if known is not None else given
        self._keep(merged)
        return merged

    def workloads(self) -> list[str]:
        prefix = hotset_name(self._digest, "")
        found: set[str] = set()
        for store in self._stores:
            try:
                found |= {stored.name.removeprefix(prefix) for stored in store.list(prefix)}
            except BootseerError as error:
                self._say(f"not all hot sets could be read: {error}")
        return sorted(found)

    def publish(self, hot_set: HotSet) -> bool:
        """Write a set into the store. Returns False, and says why, when that fails."""
        if self._store is None:
            return False
        if (True, hot_set.workload) in self._unread:
            self._say(f"the hot set was not published: {_UNREAD}")
            return False
        # Unsigned, it would replace a set that nodes which require signatures use, and take it away from them.
        signs = bool(self._signatures.signing)
        if not signs and (self._signatures.trusted or hot_set.workload in self._signed):
            self._say("the hot set was not published: it must be signed, and there is no key; it is kept on this node")
            return False
        name = hotset_name(self._digest, hot_set.workload)
        try:
            data = self._signatures.seal(name, encode_hot_set(hot_set))
            try:
                # With the image as its subject, a registry lists the set with the image and deletes it with it.
                put_once(self._store, name, data, subject=self._digest)
            except NotFoundError:  # a store that does not have the image itself still takes the set
                put_once(self._store, name, data)
        except BootseerError as error:
            refused = "; it is kept on this node" if isinstance(error, AccessError) else ""
            self._say(f"the hot set was not published: {error}{refused}")
            return False
        return True

    def _keep(self, hot_set: HotSet) -> None:
        if (False, hot_set.workload) in self._unread:
            self._say(f"the hot set was not kept on this node: {_UNREAD}")
            return
        try:
            self._local.write(hotset_name(self._digest, hot_set.workload), encode_hot_set(hot_set))
        except BootseerError as error:
            self._say(f"the hot set was not kept on this node: {error}")

    def _read(self, store: Store, workload: str) -> HotSet:
        name = hotset_name(self._digest, workload)
        data = read_all(store, name, stored_limit(MAX_STORED_BYTES), _READ_S)
        if store is self._store:
            if is_signed(data):
                self._signed.add(workload)
            data = self._signatures.open(name, data, store.uri, reuse=True)  # its runs become part of what we sign
        found = parse_hot_set(data)
        if (found.image, found.workload) != (self._digest, workload):
            raise CorruptError(f"{store.uri}: {name} is of another image or workload")
        return found


def merge_record(options: MountOptions, digest: str, store_uri: str | None, merged: Path, record: Record) -> None:
    """Merge the record of a start into its hot set. For the daemon, which opens its own stores.

    `store_uri`: the store to publish in; None: the set stays on the node. Problems go into the file `merged`.
    """
    notes: list[str] = []
    try:
        if record.needs:
            store = open_store(store_uri, plain_http=options.plain_http) if store_uri is not None else None
            sets = HotSets(options.cache, digest, store, notes.append, options.signatures)
            sets.add_record(options.workload, record, publish=store is not None, imports=_text_of(options.imports))
    finally:
        replace_file(merged, json.dumps(notes).encode())  # whole: the start waits for it


def _text_of(path: Path | None) -> str:
    """The content of the file; empty when it is missing or too large."""
    try:
        text = path.read_text() if path is not None else ""
    except (OSError, ValueError):
        return ""
    return text if len(text) <= MAX_IMPORTS else ""

"""Hot sets of images and environments: found before a start, kept and published after it.

A set lies in two places: on this node, and in the image's store for all nodes and all time. A start takes the runs of
both. Neither place is needed for a start, so that nothing here raises for what a store does: it says so, once.
A process without write access keeps the sets on the node. Signatures are about the store alone: what lies on this node
was written by it. How runs are combined is said in one place, `fetch.hotset`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bootseer.artifact.objects import put_once, read_all
from bootseer.artifact.places import own_folder
from bootseer.artifact.progress import Say
from bootseer.artifact.signatures import UNSIGNED, Signatures, is_signed, stored_limit
from bootseer.errors import AccessError, BootseerError, CorruptError, NotFoundError
from bootseer.fetch.hotset import (
    MAX_IMPORTS,
    MAX_STORED_BYTES,
    Block,
    HotSet,
    Record,
    coverage,
    encode_hot_set,
    parse_hot_set,
)
from bootseer.fetch.record import read_record
from bootseer.store.file import FileStore
from bootseer.store.open import open_store
from bootseer.store.store import Store

_READ_S = 5.0
"""A start waits no longer for a set: without one it is slower, not wrong."""
KEPT = "kept"
"""The file beside a record that says that it has become part of the hot set; it holds what did not work, as lines."""


def hotset_name(digest: str, workload: str) -> str:
    """What a set is called in a store. `digest` is that of the image's manifest."""
    return f"hotsets/{digest.replace(':', '-')}/{workload}"


class HotSets:
    """The sets of one image. Not shared between threads."""

    def __init__(
        self, cache_root: Path, digest: str, store: Store | None, say: Say, signatures: Signatures = UNSIGNED
    ) -> None:
        """`store` is the image's; None: this node alone is looked at. `say` gets one line for what did not work."""
        self._local = FileStore(own_folder(cache_root / "hotsets", make=False))
        self._store = store
        self._signatures = signatures
        self._signed: set[str] = set()  # workloads whose sets in the store are signed
        self._digest = digest
        self._say = say

    def load(self, workload: str) -> HotSet | None:
        """The set with the runs that this node and the store know; None when there is none."""
        return self._load(workload, self._say)

    def _load(self, workload: str, say: Say) -> HotSet | None:
        sets: list[HotSet] = []
        for store in (self._local, self._store):
            if store is None:
                continue
            try:
                sets.append(self._read(store, workload))
            except NotFoundError:
                continue
            except BootseerError as error:
                say(f"no hot set: {error}")
        return functools.reduce(HotSet.union, sets) if sets else None

    def fetch(self, workload: str) -> None:
        """Keep on this node what the store knows."""
        hot_set = self.load(workload)
        if hot_set is not None:
            self._write(self._local, hot_set, "kept on this node")

    def keep(self, workload: str, record: Record, *, publish: bool, imports: str = "") -> HotSet:
        """Add a start's record to the set, on the node and (with `publish`) in the store, and what it imported; the set
        as it is now."""
        # The start looked for the set before, and said what did not work.
        known = self._load(workload, lambda line: None) or HotSet(self._digest, workload)
        merged = known.merge(record)
        merged = replace(merged, imports=imports or merged.imports)
        self._write(self._local, merged, "kept on this node")
        if publish and self._store is not None:
            self.publish(merged)
        return merged

    def add(self, given: HotSet) -> HotSet:
        """Add the runs of a set from elsewhere to what is known of its workload, on the node; the set as it is now."""
        known = self.load(given.workload)
        merged = known.union(given) if known is not None else given
        self._write(self._local, merged, "kept on this node")
        return merged

    def names(self) -> list[str]:
        """The workloads of which there are sets."""
        prefix = hotset_name(self._digest, "")
        found: set[str] = set()
        for store in (self._local, self._store):
            if store is None:
                continue
            try:
                found |= {stored.name.removeprefix(prefix) for stored in store.list(prefix)}
            except BootseerError as error:
                self._say(f"not all hot sets are known: {error}")
        return sorted(found)

    def publish(self, hot_set: HotSet) -> bool:
        """Write a set into the store; false, and a word to the user, when it does not take it."""
        if self._store is None:
            return False
        signs = bool(self._signatures.signing)
        if not signs and (self._signatures.trusted or hot_set.workload in self._signed):
            self._say("the hot set was not published: it must be signed, and there is no key; it is kept on this node")
            return False
        return self._write(self._store, hot_set, "published")

    def _read(self, store: Store, workload: str) -> HotSet:
        name = hotset_name(self._digest, workload)
        data = read_all(store, name, stored_limit(MAX_STORED_BYTES), _READ_S)
        if store is self._store:
            if is_signed(data):
                self._signed.add(workload)
            data = self._signatures.open(name, data, store.uri, reuse=True)  # its runs are signed with ours
        found = parse_hot_set(data)
        if (found.image, found.workload) != (self._digest, workload):
            raise CorruptError(f"{store.uri}: {name} is of another image or workload")
        return found

    def _write(self, store: Store, hot_set: HotSet, label: str) -> bool:
        # As the image's own the registry lists it beside the image and forgets it with the image; a store that does not
        # have the image itself takes it all the same.
        subjects = (self._digest, None) if store is self._store else (None,)
        name, data = hotset_name(self._digest, hot_set.workload), encode_hot_set(hot_set)
        if store is self._store:
            try:
                data = self._signatures.seal(name, data)
            except BootseerError as error:
                self._say(f"the hot set was not {label}: {error}")
                return False
        for subject in subjects:
            try:
                put_once(store, name, data, subject=subject)
            except NotFoundError as error:
                if subject is None:
                    self._say(f"the hot set was not {label}: {error}")
            except BootseerError as error:
                refused = isinstance(error, AccessError) and store is self._store
                self._say(f"the hot set was not {label}: {error}{'; it is kept on this node' if refused else ''}")
                return False
            else:
                return True
        return False


@dataclass(frozen=True, slots=True)
class HotSetUpdater:
    """Makes the finished record of a start part of the hot set. Runs in the daemon, where stores are opened anew."""

    store: str | None
    """URI of the store that it is published in; None: it stays on the node."""
    plain_http: bool
    cache_root: Path
    digest: str
    workload: str
    signatures: Signatures
    plan: Sequence[Block] | None
    imports: Path | None = None
    """A file of ours with what the start imported."""

    def __call__(self, path: Path) -> None:
        """Read the record at `path` and keep it. Raises nothing that the daemon would not write into its log."""
        notes: list[str] = []
        try:
            record = read_record(path)
            if record.needs:
                if self.plan is not None:
                    record = replace(record, coverage=coverage(self.plan, record))
                store = open_store(self.store, plain_http=self.plain_http) if self.store is not None else None
                sets = HotSets(self.cache_root, self.digest, store, notes.append, self.signatures)
                imports = _text_of(self.imports)
                sets.keep(self.workload, record, publish=store is not None, imports=imports)
        finally:
            path.with_name(KEPT).write_text(json.dumps(notes))


def _text_of(path: Path | None) -> str:
    """What the file has; empty where there is none, or one that is too large."""
    try:
        text = path.read_text() if path is not None else ""
    except (OSError, ValueError):
        return ""
    return text if len(text) <= MAX_IMPORTS else ""

"""Hot sets of images: found before a start, kept and published after it.

A set lies in two places: on this node, and in the image's store for all nodes and all time. A start takes the runs of
both. Neither place is needed for a start, so that nothing here raises for what a store does: it says so, once.
A process without write access keeps the sets on the node. Signatures are about the store alone: what lies on this node
was written by it.
Called by `image.mounting.mount`, `launch.image_stage` and `cli.image_hotset`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bootseer.bring.places import own_folder
from bootseer.bring.signatures import UNSIGNED, Signatures, is_signed, stored_limit
from bootseer.errors import AccessError, BootseerError, CorruptError, NotFoundError
from bootseer.fetch.hotset import MAX_RUNS, MAX_STORED_BYTES, HotSet, Record, encode_hot_set, parse_hot_set
from bootseer.store.file import FileStore
from bootseer.store.retry import read_all
from bootseer.store.store import Store

_READ_S = 5.0
"""A start waits no longer for a set: without one it is slower, not wrong."""

Say = Callable[[str], None]


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
        sets = []
        for store in (self._local, self._store):
            if store is None:
                continue
            try:
                sets.append(self._read(store, workload))
            except NotFoundError:
                continue
            except BootseerError as error:
                say(f"no hot set: {error}")
        return united(sets) if sets else None

    def bring(self, workload: str) -> None:
        """Keep on this node what the store knows."""
        hot_set = self.load(workload)
        if hot_set is not None:
            self._write(self._local, hot_set, "kept on this node")

    def keep(self, workload: str, record: Record, *, publish: bool) -> HotSet:
        """Add a start's record to the set, on the node and (with `publish`) in the store; the set as it is now."""
        # The start looked for the set before, and said what did not work.
        known = self._load(workload, lambda line: None) or HotSet(self._digest, workload)
        merged = known.merge(record)
        self._write(self._local, merged, "kept on this node")
        if publish and self._store is not None:
            self.publish(merged)
        return merged

    def add(self, given: HotSet) -> HotSet:
        """Add the runs of a set from elsewhere to what is known of its workload, on the node; the set as it is now."""
        known = self.load(given.workload)
        merged = united([known, given]) if known is not None else given
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

    def _write(self, store: Store, hot_set: HotSet, what: str) -> bool:
        # As the image's own the registry lists it beside the image and forgets it with the image; a store that does not
        # have the image itself takes it all the same.
        subjects = (self._digest, None) if store is self._store else (None,)
        name, data = hotset_name(self._digest, hot_set.workload), encode_hot_set(hot_set)
        if store is self._store:
            try:
                data = self._signatures.seal(name, data)
            except BootseerError as error:
                self._say(f"the hot set was not {what}: {error}")
                return False
        for subject in subjects:
            try:
                _put(store, name, data, subject)
            except NotFoundError as error:
                if subject is None:
                    self._say(f"the hot set was not {what}: {error}")
            except BootseerError as error:
                refused = isinstance(error, AccessError) and store is self._store
                self._say(f"the hot set was not {what}: {error}{'; it is kept on this node' if refused else ''}")
                return False
            else:
                return True
        return False


def _put(store: Store, name: str, data: bytes, subject: str | None) -> None:
    upload = store.upload()
    try:
        upload.write(data)
        upload.commit(name, subject=subject)
    finally:
        upload.abort()  # after a commit it does nothing


def united(sets: list[HotSet]) -> HotSet:
    """One set with the runs of all, each once, the newest few of them."""
    runs = {(run.started_s, run.duration_ms, len(run.needs)): run for each in sets for run in each.records}
    newest = sorted(runs.values(), key=lambda run: run.started_s)[-MAX_RUNS:]
    return replace(sets[0], records=tuple(newest))

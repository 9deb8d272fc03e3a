"""Bring the block files of a mount to this node: all at once, or by a daemon that fetches what readers need.

Stores are opened again in the daemon; this process has no thread of its own when the daemon is started.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bootseer.artifact.child import breaks_forks
from bootseer.artifact.loading import PULL, CachedLayer, Loading, choose_loading
from bootseer.artifact.places import own_folder
from bootseer.artifact.progress import Say, Show, Stage
from bootseer.artifact.room import Room
from bootseer.artifact.signatures import UNSIGNED, Signatures
from bootseer.cache.cache import Cache
from bootseer.cache.disk import CacheFull
from bootseer.errors import BootseerError, PermanentError, TransientError
from bootseer.logs import logger
from bootseer.mounts.daemon import Daemon, open_peers, start_daemon
from bootseer.store.open import open_store
from bootseer.store.store import Store

if TYPE_CHECKING:
    from bootseer.fetch.hotset import Block
    from bootseer.mounts.fetched import MakeTree

_LOG = logger(__name__)
_MAX_NAMES = 200
RECORD = "record"
"""The file in a mount's folder that tells what its start needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MountOptions:
    """How block files are to come to this node."""

    cache: Path
    """The node's cache."""
    runtime: Path
    """Where the state of mounts lies."""
    plain_http: bool = False
    loading: Loading = "auto"
    workload: str = ""
    """Which hot set; empty: none is used, and none is recorded."""
    publish: bool = True
    """Whether what was recorded goes to the store."""
    signatures: Signatures = UNSIGNED
    imports: Path | None = None
    """A file with what the start imports, which goes to the store and comes from there as the hot set's. Written only
    where it is missing."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Whose block files they are, and where they come from."""

    name: str
    """For people, and in the table of mounts."""
    digest: str
    """Whose hot sets are used and kept."""
    store: Store
    store_uri: str
    options: MountOptions
    is_shared: bool = True
    """Whether other nodes see the store."""
    fallback: str = ""
    """Why this is a fallback already, however the files come."""


@dataclass(slots=True)
class Materializer:
    """The block files of one mount on their way. `mode` and `reason` say how they come, for the report."""

    subject: Subject
    cache: Cache
    folder: Path
    """The mount's own."""
    stack: list[CachedLayer]
    lifeline: bool
    """Whether a daemon ends with this process."""
    stage: Stage
    say: Say
    show: Show
    room: Room
    daemon: Daemon | None = None
    mode: str = ""
    reason: str = ""
    full: CacheFull | None = None
    """Why all of it cannot be here: it is not tried again for another way to show it."""

    def lazily(self) -> None:
        """Have what is missing served as files, for the kernel to mount. What cannot be served is fetched."""
        missing, plan = self._missing_and_plan()
        if missing and self.mode != "pull":
            try:
                with self.stage("daemon"):
                    self.daemon = self._start_daemon(missing, plan)
            except (BootseerError, OSError) as error:
                self.fetch_after(error)
        self._note_conversion()

    def as_tree(self, make_tree: MakeTree, at: Path | None) -> None:
        """Have all layers served as one tree, `at` a folder or below the mount's own. Raises what the daemon raised."""
        _, plan = self._missing_and_plan()
        with self.stage("daemon"):
            self.daemon = self._start_daemon(self.stack, plan, make_tree=make_tree, at=at)
        self._note_conversion()

    def all_of_it(self, reason: str) -> None:
        """Fetch everything, because of `why`."""
        self._trust()
        self.fall_back(reason)
        if not all(layer.file.trusted for layer in self.stack):
            self._pull()

    def fetch_after(self, error: Exception) -> None:
        """Fetch everything, because it could not be served. Raises `TransientError` where its store is to blame."""
        self.check_origin()
        self.stop_daemon()
        self.fall_back(f"it cannot be served lazily: {error}")
        self.say(f"{self.reason}; all of it is fetched first")
        self._pull()

    def check_origin(self) -> None:
        """Raise `TransientError` if the daemon got nothing from its store: then no other way to show it can help."""
        failed = failures(self.daemon).get("first_failure") if self.daemon is not None else None
        if failed:
            raise TransientError(f"{self.subject.name} cannot be read: {failed}")

    def fall_back(self, reason: str) -> None:
        """Note that this is not how it was meant."""
        _LOG.info("fallback: %s", reason)
        self.mode, self.reason = "fallback", reason

    def stop_daemon(self) -> None:
        """End the daemon, if there is one."""
        if self.daemon is not None:
            from bootseer.artifact.hotsets import KEPT

            with contextlib.suppress(BootseerError):
                self.daemon.stop()
            self.daemon = None
            # The next one writes a record of its own.
            for name in (RECORD, KEPT):
                (self.folder / name).unlink(missing_ok=True)

    def _announce(self) -> None:
        """Let the job's other nodes have what is in this node's cache or comes there, an earlier job's layers too."""
        peers = open_peers(self.say)
        if peers is not None:
            for layer in self.stack:
                peers.file(layer.index, self.subject.store_uri, self.subject.options.plain_http, self.cache.root)
            peers.close()

    def _missing_and_plan(self) -> tuple[list[CachedLayer], list[Block] | None]:
        """What is missing, and what starts needed of it. Fetches all of it when that is predicted to be faster."""
        self._announce()
        self._trust()
        missing = [layer for layer in self.stack if not layer.file.trusted]
        if not missing:
            self.mode, self.reason = "local", "all of it is on this node"
            return missing, None
        if self.room.is_short(sum(layer.missing_bytes for layer in missing)):
            self.room.clean_up()
        plan = self._hot_set()
        prediction = choose_loading(self.subject.options.loading, missing, plan)
        self.mode, self.reason = "hot" if plan else "lazy", prediction.reason
        if prediction.mode == PULL:
            self.mode = "pull"
            try:
                self._pull()
            except CacheFull as error:
                self.fall_back(f"not all of it fits on this node: {error}")
                self.say(f"{self.reason}; it is served lazily")
                missing = [layer for layer in self.stack if not layer.file.trusted]
        _LOG.info(
            "%s (%s): %d of %d files are not whole on this node, %d hot blocks",
            self.mode, self.reason, len(missing), len(self.stack), len(plan or ()),
        )  # fmt: skip
        return missing, plan

    def _note_conversion(self) -> None:
        if self.subject.fallback:
            self.fall_back(self.subject.fallback)

    def _trust(self) -> None:
        """Complete layers whose word cannot be taken are compared with their digests once."""
        for layer in self.stack:
            if layer.file.complete and not layer.file.trusted:
                with self.stage("verify"):
                    self._verify(layer)

    def _verify(self, layer: CachedLayer) -> None:
        """On a full disk the layer can be read, but not noted as verified: then it is served by the daemon instead."""
        try:
            layer.file.verify_all(len(os.sched_getaffinity(0)))
        except CacheFull:
            self.room.clean_up()
            with contextlib.suppress(CacheFull):
                layer.file.sync()

    def _hot_set(self) -> list[Block] | None:
        subject, options = self.subject, self.subject.options
        if not options.workload:
            return None
        from bootseer.artifact.hotsets import HotSets

        # A store that must be asked by another process was: what it knew is on this node now.
        store = None if breaks_forks(subject.store_uri) else subject.store
        sets = HotSets(options.cache, subject.digest, store, self.say, options.signatures)
        hot_set = sets.load(options.workload)
        if hot_set is not None and hot_set.imports and options.imports is not None and not options.imports.exists():
            with contextlib.suppress(OSError):  # without it the start is not warm
                own_folder(options.imports.parent)
                new = options.imports.with_suffix(f".{os.getpid()}")
                new.write_text(hot_set.imports)
                new.replace(options.imports)
        if hot_set is None:
            return None
        hot_set = hot_set.of_files([layer.index.identity for layer in self.stack])
        return hot_set.plan() if hot_set.records and not hot_set.stale else None

    def _start_daemon(
        self,
        served: Sequence[CachedLayer],
        plan: Sequence[Block] | None,
        *,
        make_tree: MakeTree | None = None,
        at: Path | None = None,
    ) -> Daemon:
        from bootseer.artifact.hotsets import HotSetUpdater
        from bootseer.mounts.fetched import Fetched, FetchedFile
        from bootseer.mounts.serve import DaemonSpec
        from bootseer.mounts.trees import LazyFiles

        subject, options = self.subject, self.subject.options
        update = HotSetUpdater(
            store=subject.store_uri if options.publish and subject.is_shared else None,
            plain_http=options.plain_http,
            cache_root=options.cache,
            digest=subject.digest,
            workload=options.workload,
            signatures=options.signatures,
            plan=plan,
            imports=options.imports,
        )
        files = [
            FetchedFile(layer.index.identity, layer.index, subject.store_uri, options.plain_http) for layer in served
        ]
        opened = Fetched(
            files=tuple(files),
            cache_root=self.cache.root,
            record=self.folder / RECORD if options.workload else None,
            hand_over=update,
            hot=None if plan is None else lambda: plan,
            make_tree=make_tree or LazyFiles,
        )
        label = f"bootseer:{subject.name}"
        # What the killed one had recorded is lost: half a startup would be taken for all that a startup needs.
        again = replace(opened, record=None)
        return start_daemon(DaemonSpec(self.folder, opened, label, at=at, lifeline=self.lifeline, reopen=again))

    def _pull(self) -> None:
        """Fetch everything that is missing, at full speed. Evicts for it when it does not fit. Raises `CacheFull`."""
        if self.full is not None:
            raise self.full
        try:
            self._fetch_all()
        except CacheFull as error:
            sizes = [(layer, layer.file.missing(0, layer.index.size_bytes)) for layer in self.stack]
            if not self.room.make(sum(len(missing) * layer.index.block_size for layer, missing in sizes)):
                self.full = error
                raise
            self._fetch_all()

    def _fetch_all(self) -> None:
        from bootseer.fetch.fetcher import Fetcher

        with self.stage("pull") as facts:
            facts["reason"] = self.reason
            origin = open_store(self.subject.store_uri, plain_http=self.subject.options.plain_http)
            fetcher = Fetcher(on_problem=self.say)
            peers = open_peers(self.say)
            place = (self.subject.store_uri, self.subject.options.plain_http, self.cache.root)
            try:
                for layer in self.stack:
                    if not layer.file.trusted:
                        nodes = None if peers is None else peers.file(layer.index, *place)
                        fetcher.add(layer.index, origin, layer.file, peers=nodes)
                with self.show(f"fetching {self.subject.name}", "blocks") as on_progress:
                    fetcher.pull_all(on_progress)
            finally:
                facts.update(peer_numbers(asdict(fetcher.stats())))
                fetcher.close()
                if peers is not None:
                    peers.close()
                origin.close()
        self._trust()
        if not all(layer.file.trusted for layer in self.stack):
            raise PermanentError(f"{self.cache.root}: what was fetched does not stay there; is the disk sound?")


def failures(daemon: Daemon) -> Mapping[str, Any]:
    """What a daemon says of its reads: `failed_reads`, `first_failure`, `first_corrupt`. Nothing if it does not
    answer."""
    with contextlib.suppress(BootseerError):
        fetch = daemon.status().get("fetch")
        if isinstance(fetch, dict):
            return fetch
    return {}


def peer_numbers(fetch: Mapping[str, Any]) -> dict[str, object]:
    """What the job's other nodes sent, by the statistics of a fetcher. Nothing where none was asked."""
    peers: Mapping[str, Mapping[str, float]] = fetch.get("peers") or {}
    if not peers:
        return {}
    named = {what: sorted(name for name, sent in peers.items() if sent[what]) for what in ("late", "wrong")}
    return {
        "peer_bytes": fetch.get("peer_bytes", 0),
        "peer_requests": sum(int(sent["requests"]) for sent in peers.values()),
        "late_requests": sum(int(sent["late"]) for sent in peers.values()),
        "late_peers": " ".join(named["late"])[:_MAX_NAMES],
        "wrong_peers": " ".join(named["wrong"])[:_MAX_NAMES],
    }

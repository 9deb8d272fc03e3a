"""Materialize the block files of a mount on this node: completely, or through a daemon that fetches on demand.

The daemon opens its own stores; this process has a single thread when the daemon is forked.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from bootseer.artifact.cache_space import CacheSpace
from bootseer.artifact.child import breaks_forks
from bootseer.artifact.loading import LAZY, PULL, Loading, Prediction, choose_loading
from bootseer.artifact.places import own_folder
from bootseer.artifact.progress import ProgressCallback, Say, Show, Stage
from bootseer.artifact.signatures import UNSIGNED, Signatures
from bootseer.cache.cache import Cache
from bootseer.cache.cached_file import CachedFile
from bootseer.cache.disk import CacheFull
from bootseer.errors import BootseerError, CorruptError, PermanentError, TransientError
from bootseer.io.files import replace_file
from bootseer.logs import logger
from bootseer.mounts.daemon import Daemon, open_peers, start_daemon
from bootseer.store.open import open_store
from bootseer.store.store import Store

if TYPE_CHECKING:
    from bootseer.artifact.process_snapshots import ProcessSnapshot
    from bootseer.fetch.hotset import Block
    from bootseer.mounts.block_files import MakeTree

_LOG = logger(__name__)
_MAX_NAMES = 200


class MountOptions(Struct, frozen=True, kw_only=True):
    """How block files are materialized on this node."""

    cache: Path
    """Root of the node's cache."""
    runtime: Path
    """The runtime folder, with the state of mounts."""
    plain_http: bool = False
    loading: Loading = "auto"
    workload: str = ""
    """The key of the hot set; empty: none is used or recorded."""
    publish: bool = True
    """Whether the record is published to the store."""
    signatures: Signatures = UNSIGNED
    imports: Path | None = None
    """A file for the list of modules that the start imports, shared through the hot set. Only written if missing."""
    process: ProcessSnapshot | None = None
    """The snapshot of a process that has done these imports, shared beside the hot set. Fetched if missing."""


class Subject(Struct, frozen=True, kw_only=True):
    """The image or environment, and the store of its block files."""

    name: str
    """For messages and the mount table."""
    digest: str
    """The digest under which hot sets are stored."""
    store: Store
    store_uri: str
    is_shared: bool = True
    """Whether other nodes can access the store."""
    fallback: str = ""
    """Why this is a fallback in any case, e.g. after a local conversion; empty otherwise."""


@dataclass(kw_only=True)
class Materializer:
    """Materializes the block files of one mount. `mode` and `reason` are for the report."""

    options: MountOptions
    lifeline: bool
    """Whether the daemon ends with this process."""
    stage: Stage
    say: Say
    show: Show
    subject: Subject = field(init=False)
    cache: Cache = field(init=False)
    space: CacheSpace = field(init=False)
    folder: Path = field(init=False)
    """The mount's folder."""
    stack: list[CachedFile] = field(init=False)
    daemon: Daemon | None = field(init=False, default=None)
    mode: str = field(init=False, default="")
    reason: str = field(init=False, default="")
    pulled: Counter[str] = field(init=False, default_factory=Counter)
    """What this process fetched itself: `cold_bytes` and `requests`."""

    def serve_lazily(self) -> None:
        """Serve incomplete layers as files that the kernel can mount; pull them if that is predicted to be faster or
        the daemon cannot be started."""
        missing, plan = self._missing_and_plan()
        if missing and self.mode != "pull":
            try:
                with self.stage("daemon"):
                    self.daemon = self._start_daemon(missing, plan)
            except (BootseerError, OSError) as error:
                self.pull_after_failure(error)
        self._note_fallback()

    def serve_tree(self, make_tree: MakeTree, at: Path | None) -> None:
        """Serve all layers as one tree, mounted at `at` or in the mount's folder. Raises the daemon's errors."""
        _, plan = self._missing_and_plan(needs_daemon=True)
        with self.stage("daemon"):
            self.daemon = self._start_daemon(self.stack, plan, make_tree=make_tree, at=at)
        self._note_fallback()

    def pull_all(self, reason: str) -> None:
        """Fetch everything, as the fallback for `reason`."""
        self._verify_complete()
        self.fall_back(reason)
        if not all(layer.trusted for layer in self.stack):
            self._pull()

    def pull_after_failure(self, error: Exception) -> None:
        """Fetch everything after lazy serving failed. Raises as `check_origin`."""
        self.check_origin()
        self.stop_daemon()
        self.fall_back(f"it cannot be served lazily: {error}")
        self.say(f"{self.reason}; fetching all of it first")
        self._pull()

    def check_origin(self) -> None:
        """Raise `CorruptError` or `TransientError` if the daemon failed to read from its store: another mount method
        cannot help then."""
        found = failures(self.daemon) if self.daemon is not None else {}
        for name, kind in (("first_corrupt", CorruptError), ("first_failure", TransientError)):
            if found.get(name):
                raise kind(f"{self.subject.name} cannot be read: {found[name]}")

    def fall_back(self, reason: str) -> None:
        _LOG.info("fallback: %s", reason)
        self.mode, self.reason = "fallback", reason

    def stop_daemon(self) -> None:
        """End the daemon, if there is one."""
        if self.daemon is not None:
            from bootseer.artifact.hotsets import MERGED

            with contextlib.suppress(BootseerError):
                self.daemon.stop()
            self.daemon = None
            (self.folder / MERGED).unlink(missing_ok=True)  # the next daemon has its own record

    def _missing_and_plan(self, *, needs_daemon: bool = False) -> tuple[list[CachedFile], list[Block] | None]:
        """The incomplete layers, and the hot blocks. Pulls everything if that is predicted to be faster."""
        if (peers := open_peers(self.say)) is not None:
            # Offer all layers in this node's cache to the job's other nodes, also those that an earlier job fetched.
            for layer in self.stack:
                peers.file(layer.index, self.subject.store_uri, self.options.plain_http, self.cache.root)
            peers.close()
        self._verify_complete()
        missing = [layer for layer in self.stack if not layer.trusted]
        if not missing:
            self.mode, self.reason = "local", "all layers are complete on this node"
            return missing, None
        if self.space.is_short(self._missing_size()):
            self.space.evict()
        plan = self._hot_set()
        prediction = choose_loading(self.options.loading, missing, plan)
        daemon_follows = prediction.mode == PULL and (needs_daemon or self.space.is_short(self._missing_size()))
        if daemon_follows and self.options.loading == "auto" and breaks_forks(self.subject.store_uri):
            prediction = Prediction(LAZY, "a daemon could not access its store after a pull by this process")
        lazy_mode = "hot" if plan else "lazy"
        self.mode, self.reason = lazy_mode, prediction.reason
        if prediction.mode == PULL:
            self.mode = "pull"
            try:
                self._pull()
            except CacheFull as error:
                self.mode, self.reason = lazy_mode, f"not all of it fits on this node: {error}"
                self.say(f"{self.reason}; serving it lazily")
                missing = [layer for layer in self.stack if not layer.trusted]
        _LOG.info(
            "%s (%s): %d of %d files are incomplete on this node, %d hot blocks",
            self.mode, self.reason, len(missing), len(self.stack), len(plan or ()),
        )  # fmt: skip
        return missing, plan

    def _note_fallback(self) -> None:
        if self.subject.fallback:
            self.fall_back(self.subject.fallback)

    def _verify_complete(self) -> None:
        """Verify the digests of complete layers that are not trusted yet."""
        for layer in self.stack:
            if layer.complete and not layer.trusted:
                with self.stage("verify"), self.show(f"verifying {self.subject.name}", "blocks") as on_progress:
                    self._verify(layer, on_progress)

    def _verify(self, layer: CachedFile, on_progress: ProgressCallback) -> None:
        """Verify a layer. On a full disk the result cannot be recorded, and the daemon serves the layer instead."""
        try:
            layer.verify_all(len(os.sched_getaffinity(0)), on_progress)
        except CacheFull:
            self.space.evict()
            with contextlib.suppress(CacheFull):
                layer.sync()

    def _hot_set(self) -> list[Block] | None:
        subject, options = self.subject, self.options
        if not options.workload:
            return None
        from bootseer.artifact.hotsets import HotSets

        # A store that requires a child process was asked by one before: its hot set is on this node now.
        store = None if breaks_forks(subject.store_uri) else subject.store
        sets = HotSets(options.cache, subject.digest, store, self.say, options.signatures)
        hot_set = sets.load(options.workload)
        if hot_set is not None and hot_set.imports and options.imports is not None and not options.imports.exists():
            with contextlib.suppress(OSError):  # only affects warm starts
                own_folder(options.imports.parent)
                replace_file(options.imports, hot_set.imports.encode())
        if hot_set is None:
            return None
        hot_set = hot_set.of_files([layer.index.identity for layer in self.stack])
        return hot_set.plan() if hot_set.records else None

    def _start_daemon(
        self,
        served: Sequence[CachedFile],
        plan: Sequence[Block] | None,
        *,
        make_tree: MakeTree | None = None,
        at: Path | None = None,
    ) -> Daemon:
        from bootseer.artifact.hotsets import MERGED, merge_record
        from bootseer.mounts.block_files import BlockFileService
        from bootseer.mounts.serve import DaemonSpec
        from bootseer.mounts.trees import LazyFiles

        subject, options = self.subject, self.options
        publish_in = subject.store_uri if options.publish and subject.is_shared else None
        merged = self.folder / MERGED
        opened = BlockFileService(
            files=tuple(layer.index for layer in served),
            store=subject.store_uri,
            cache_root=self.cache.root,
            plain_http=options.plain_http,
            on_record=partial(merge_record, options, subject.digest, publish_in, merged) if options.workload else None,
            hot_blocks=plan or (),
            make_tree=make_tree or LazyFiles,
            rest=self.space.has_room(self._missing_size()),
        )
        label = f"bootseer:{subject.name}"
        # A restarted daemon does not record: half a startup would be taken for the needs of a whole one.
        again = replace(opened, on_record=None)
        spec = DaemonSpec(self.folder, opened, label, at=at, lifeline=self.lifeline, reopen=again)
        with self.show(f"waiting for the mount daemon of {subject.name}", "") as on_progress:
            return start_daemon(spec, waiting=lambda: on_progress(0, 0))

    def _pull(self) -> None:
        """Fetch all that is missing at full speed, evicting other files if it does not fit. Raises `CacheFull`."""
        try:
            self._fetch_all()
        except CacheFull:
            if not self.space.make_free(self._missing_size()):
                raise
            self._fetch_all()

    def _missing_size(self) -> int:
        """The size of the missing blocks on the disk."""
        sizes = [(layer.index, layer.missing(0, layer.index.size_bytes)) for layer in self.stack]
        return sum(len(missing) * index.block_size for index, missing in sizes)

    def _fetch_all(self) -> None:
        from bootseer.fetch.fetcher import Fetcher

        with self.stage("pull") as facts:
            facts["reason"] = self.reason
            origin = open_store(self.subject.store_uri, plain_http=self.options.plain_http, mirrored=True)
            fetcher = Fetcher(on_problem=self.say)
            peers = open_peers(self.say)
            place = (self.subject.store_uri, self.options.plain_http, self.cache.root)
            try:
                for layer in self.stack:
                    if not layer.trusted:
                        nodes = None if peers is None else peers.file(layer.index, *place)
                        fetcher.add(layer.index, origin, layer, peers=nodes)
                with self.show(f"fetching {self.subject.name}", "blocks") as on_progress:
                    fetcher.pull_all(on_progress)
            finally:
                fetcher.close()
                stats = fetcher.stats()
                self.pulled["cold_bytes"] += sum(stats.bytes_by_purpose.values())
                self.pulled["requests"] += sum(stats.requests_by_purpose.values())
                if peers is not None:
                    facts.update(peer_numbers(asdict(stats) | {"peers": peers.stats()}))
                    peers.close()
                origin.close()
        self._verify_complete()
        if not all(layer.trusted for layer in self.stack):
            raise PermanentError(f"{self.cache.root}: fetched blocks are not retained; check the disk")


def failures(daemon: Daemon) -> Mapping[str, Any]:
    """The daemon's read statistics: `failed_reads`, `first_failure`, `first_corrupt`. Empty if it does not respond."""
    with contextlib.suppress(BootseerError):
        fetch = daemon.status().get("fetch")
        if isinstance(fetch, dict):
            return fetch
    return {}


def peer_numbers(fetch: Mapping[str, Any]) -> dict[str, object]:
    """What the job's other nodes sent, from the statistics of a fetcher. Empty without peers."""
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

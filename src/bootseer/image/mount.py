"""Mount an image: from its name to a tree of files, lazily where that is the faster way.

Layers that are complete on this node are mounted straight from the cache, and stay mounted for the next start. The
others are served by a daemon that fetches what readers need, then what earlier starts needed, then the rest. When that
is not possible or not worth it, everything is fetched first. Where the kernel cannot mount layers or this user may not,
the tree is served file by file, or written out (`ways`). Which way was taken, and why, is in `facts`: a fallback costs
time and is never silent.

Called by `cli.image_mount` and `launch.image_stage`. Fork-safe stores are opened again in the daemon; this process has
no thread of its own when the daemon is started.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bootseer.cache.cache import Cache
from bootseer.errors import BootseerError, PermanentError
from bootseer.fetch.hotset import Block
from bootseer.image import show, ways
from bootseer.image.apart import breaks_forks, do_apart
from bootseer.image.forecast import CachedLayer, forecast
from bootseer.image.found import Found, find
from bootseer.image.hotsets import HotSets
from bootseer.image.mounted import CHANGES, MountedImage
from bootseer.image.places import blocks_folder
from bootseer.image.predict import PULL
from bootseer.image.request import Request
from bootseer.image.show import WayFailed
from bootseer.image.unpacked import UNPACKED, keep_unpacked, release_unpacked, write_tree
from bootseer.mounts import kept, user_namespace
from bootseer.mounts.daemon import FILES, Daemon, DaemonSpec, start_daemon
from bootseer.mounts.fetched import MakeTree
from bootseer.mounts.ladder import Choice, Facts, Way
from bootseer.mounts.lazy import LazyFiles
from bootseer.mounts.merged_tree import MergedTree
from bootseer.mounts.process import ProcessId
from bootseer.mounts.state import MountState, Runtime
from bootseer.store.open import open_store

_IDLE_S = 7 * 86_400.0
"""A layer that no start used for a week is unmounted: until then the next start finds its files in memory."""
_FREE_SHARE = 0.1
"""A disk with less room than this is cleaned up before more is fetched."""

Stage = Callable[[str], AbstractContextManager[dict[str, Any]]]
"""Marks a part of the work; what is put into the dict it gives are facts about it."""
Say = Callable[[str], None]
Progress = Callable[[int, int], None]
"""Blocks that are here, blocks in all."""


def mount_image(
    request: Request,
    target: Path,
    *,
    writable: Path | None = None,
    lifeline: bool = False,
    stage: Stage = lambda name: nullcontext({}),
    say: Say = lambda line: None,
    progress: Progress | None = None,
    facts: Facts | None = None,
) -> MountedImage:
    """Mount the image on `target`, which is made when it is not there.

    With `writable`, a folder that goes with the mount, changes go there; else the tree is read-only. With `lifeline` a
    lazy mount ends with this process; without root it is then in a user namespace, which this process enters for good.
    `facts` says what this machine can do; None: that is found out. Raises `UsageError` where users like this one cannot
    mount, and `BootseerError` where no fallback helps.
    """
    facts = facts or ways.first_look(private=lifeline)
    # Who cannot mount hears it before anything is fetched.
    ways.pick(facts, private=lifeline, writable=writable is not None)
    runtime = Runtime(request.runtime)
    cache = Cache(blocks_folder(request.cache))
    with contextlib.suppress(BootseerError, OSError):
        release(runtime, cache, idle_s=_IDLE_S)
        release_unpacked(request.cache, runtime, idle_s=_IDLE_S)
    if breaks_forks(request.store):
        with stage("store"):
            do_apart(lambda: _learn(request, say))
    found = find(request, stage=stage, say=say)
    folder = runtime.new_folder()
    with contextlib.ExitStack() as opened:
        try:
            stack = []
            for index in found.indexes:
                file = cache.open(index)
                opened.callback(file.close)
                stack.append(CachedLayer(index, file))
            job = _Job(request, found, cache, runtime, folder, stack, target, writable, lifeline, stage, say, progress)
            return job.mount(facts)
        except BaseException:
            with contextlib.suppress(BootseerError, OSError):
                runtime.clear(folder)
            raise


def _learn(request: Request, say: Say) -> None:
    """In a child: get all that must be known before the mount from the store to this node."""
    found = find(request, say=say)
    if request.workload:
        HotSets(request.cache, found.document.digest, found.store, say).bring(request.workload)


def release(runtime: Runtime, cache: Cache, *, idle_s: float) -> list[str]:
    """Unmount layers unused for so long, and forget mounts that killed processes left; returns the layers."""
    runtime.clean()
    return kept.release_idle(runtime, idle_s=idle_s, unpin=lambda identity: cache.unpin(identity, kept.PIN))


@dataclass(slots=True)
class _Job:
    """One mount in the making."""

    request: Request
    found: Found
    cache: Cache
    runtime: Runtime
    folder: Path
    stack: list[CachedLayer]
    target: Path
    writable: Path | None
    lifeline: bool
    stage: Stage
    say: Say
    progress: Progress | None
    daemon: Daemon | None = None
    mode: str = ""
    reason: str = ""
    details: dict[str, str] = field(default_factory=dict)

    def mount(self, what_works: Facts) -> MountedImage:
        """Choose the way, and go it."""
        local_bytes = sum(layer.stored_bytes - layer.missing_bytes for layer in self.stack)
        try:
            choice = self._go(what_works)
            state = self._state()
            self.runtime.write(state)
        except BaseException:
            show.undo(self.folder, self.target)
            self._stop_daemon()
            raise
        facts = {
            "image": str(self.request.reference),
            "digest": self.found.document.digest,
            "workload": self.request.workload,
            "mode": self.mode,
            "reason": self.reason,
            "way": choice.way.value,
            "refused_ways": {way.value: why for way, why in choice.refused},
            "layers": len(self.stack),
            "stored_bytes": self.found.document.stored_bytes,
            "local_bytes": local_bytes,
        }
        return MountedImage(self.target, self.found.document.config, facts, self.runtime, state, self.daemon, self.say)

    def _go(self, facts: Facts) -> Choice:
        """Go the best way; when it turns out to lead nowhere, the next one. Returns the one that led to the mount."""
        while True:
            choice = ways.pick(facts, private=self.lifeline, writable=self.writable is not None)
            if why := ways.told(choice):
                self.say(f"the image is shown {why}")
            try:
                self._bring(choice)
                with self.stage("mount"):
                    self._show(choice.way)
                return choice
            except WayFailed as error:
                show.undo(self.folder, self.target)
                self._stop_daemon()
                facts = ways.after_failure(facts, choice.way, str(error), private=self.lifeline)

    def _state(self) -> MountState:
        details = {"digest": self.found.document.digest, "mode": self.mode, "workload": self.request.workload}
        if self.writable is not None:
            details[CHANGES] = os.path.abspath(self.writable)  # noqa: PTH100 - resolving links could leave the name
        return MountState(
            id=self.folder.name,
            target=os.path.abspath(self.target),  # noqa: PTH100 - as `Runtime.find` compares
            what=str(self.request.reference),
            boot=self.runtime.boot,
            layers=tuple(layer.index.identity for layer in self.stack),
            daemon=self.daemon.process if self.daemon is not None else None,
            owner=ProcessId.of(os.getpid()) if self.lifeline and not user_namespace.is_host() else None,
            made_s=time.time(),
            details={**details, **self.details},
        )

    def _bring(self, choice: Choice) -> None:
        """Get the layers here, or a daemon that does; sets the mode and why."""
        by_tree, lazily = choice.way is Way.FUSE_TREE, choice.way is not Way.UNPACK
        plan = None
        self._trust()
        missing = [layer for layer in self.stack if not layer.file.trusted]
        if not missing:
            self.mode, self.reason = "local", "all of it is on this node"
        else:
            self._make_room(sum(layer.missing_bytes for layer in missing))
            plan = self._hot_set()
            prediction = forecast(self.request.loading, missing, plan)
            self.mode, self.reason = "hot" if plan else "lazy", prediction.reason
            if prediction.mode == PULL or not lazily:
                self.mode = "pull"
                self._pull()
            elif not by_tree:
                self._serve(missing, plan)
        if by_tree:
            self._serve_tree(plan)
        if not lazily:
            self._fall_back(f"it is written out: {ways.told(choice)}")
        if self.found.fallback:
            self._fall_back(self.found.fallback)

    def _serve(self, missing: Sequence[CachedLayer], plan: Sequence[Block] | None) -> None:
        try:
            with self.stage("daemon"):
                self.daemon = self._start_daemon(missing, plan)
        except (BootseerError, OSError) as error:
            self._fetch_first(error)

    def _fetch_first(self, error: Exception) -> None:
        self._stop_daemon()
        self._fall_back(f"it cannot be served lazily: {error}")
        self.say(f"{self.reason}; all of it is fetched first")
        self._pull()

    def _serve_tree(self, plan: Sequence[Block] | None) -> None:
        """Let a daemon show all layers as one tree; without root in a namespace of our own, or by a set-uid program."""
        if self.lifeline:
            user_namespace.enter()
        try:
            with self.stage("daemon"):
                self.target.mkdir(parents=True, exist_ok=True)
                at = None if user_namespace.may_mount() else self.target
                self.daemon = self._start_daemon(self.stack, plan, make_tree=MergedTree, at=at)
        except (BootseerError, OSError) as error:
            raise WayFailed(str(error)) from error

    def _show(self, way: Way) -> None:
        """Make the tree appear."""
        if way is Way.UNPACK:
            self._show_unpacked()
        elif way is Way.FUSE_TREE:
            if user_namespace.may_mount():
                self._try(lambda: show.mount_over(self.folder / FILES, self.target, self.writable))
        else:
            self._show_layers(loop=way is Way.EROFS_LOOP)

    def _show_layers(self, *, loop: bool) -> None:
        def mount() -> None:
            show.mount_tree(self.runtime, self.folder, self.stack, self.target, self.writable, loop=loop)

        if self.daemon is not None:
            try:
                mount()
                return
            except BootseerError as error:
                show.undo(self.folder, self.target)
                self._fetch_first(error)
        self._try(mount)

    def _show_unpacked(self) -> None:
        with self.stage("unpack"):
            tree = keep_unpacked(self.request.cache, self.found.document.digest, self.stack)
        if self.lifeline:
            user_namespace.enter()
        try:
            show.mount_over(tree, self.target, self.writable)
            self.details[UNPACKED] = tree.name
        except BootseerError as error:
            if self.writable is None:
                raise
            self.say(f"no overlay: {error}; this container gets a copy of its own")
            show.undo(self.folder, self.target)
            show.mount_copy(lambda folder: write_tree(self.stack, folder), self.target, self.writable)

    def _try(self, mount: Callable[[], None]) -> None:
        try:
            mount()
        except (BootseerError, OSError) as error:
            self._fall_back(f"it cannot be mounted: {error}")
            raise WayFailed(str(error)) from error

    def _fall_back(self, why: str) -> None:
        self.mode, self.reason = "fallback", why

    def _trust(self) -> None:
        """Complete layers whose word cannot be taken are compared with their digests once."""
        for layer in self.stack:
            if layer.file.complete and not layer.file.trusted:
                with self.stage("verify"):
                    layer.file.verify_all(len(os.sched_getaffinity(0)))

    def _make_room(self, missing_bytes: int) -> None:
        """Evict what was not used for long when the disk gets full; images of other mounts stay."""
        try:
            usage = shutil.disk_usage(self.cache.root)
            if usage.free - missing_bytes < _FREE_SHARE * usage.total:
                self.cache.prune()
        except (BootseerError, OSError) as error:
            self.say(f"no room was made in the cache: {error}")

    def _hot_set(self) -> list[Block] | None:
        if not self.request.workload:
            return None
        # A store that must be asked by another process was: what it knew is on this node now.
        store = None if breaks_forks(self.found.store_uri) else self.found.store
        hot_set = HotSets(self.request.cache, self.found.document.digest, store, self.say).load(self.request.workload)
        return hot_set.plan() if hot_set is not None and not hot_set.stale else None

    def _start_daemon(
        self,
        served: Sequence[CachedLayer],
        plan: Sequence[Block] | None,
        *,
        make_tree: MakeTree = LazyFiles,
        at: Path | None = None,
    ) -> Daemon:
        from bootseer.image.lazy import HandOver, layers_to_serve

        request, found = self.request, self.found
        hand_over = HandOver(
            store=found.store_uri if request.publish and found.is_shared else None,
            plain_http=request.plain_http,
            cache_root=request.cache,
            digest=found.document.digest,
            workload=request.workload,
            plan=plan,
        )
        opened = layers_to_serve(
            [layer.index for layer in served],
            found.store_uri,
            self.cache.root,
            self.folder,
            hand_over,
            plain_http=request.plain_http,
            make_tree=make_tree,
        )
        label = f"bootseer:{request.reference}"
        return start_daemon(DaemonSpec(self.folder, opened, label, at=at, lifeline=self.lifeline))

    def _stop_daemon(self) -> None:
        if self.daemon is not None:
            with contextlib.suppress(BootseerError):
                self.daemon.stop()
            self.daemon = None

    def _pull(self) -> None:
        """Fetch everything that is missing, at full speed."""
        from bootseer.fetch.fetcher import Fetcher

        with self.stage("pull") as facts:
            facts["reason"] = self.reason
            origin = open_store(self.found.store_uri, plain_http=self.request.plain_http)
            fetcher = Fetcher(on_problem=self.say)
            try:
                for layer in self.stack:
                    if not layer.file.trusted:
                        fetcher.add(layer.index, origin, layer.file)
                fetcher.pull_all(self.progress)
            finally:
                fetcher.close()
                origin.close()
        self._trust()
        if not all(layer.file.trusted for layer in self.stack):
            raise PermanentError(f"{self.cache.root}: what was fetched does not stay there; is the disk sound?")

"""Mount an image: from its name to a tree of files, lazily where that is the faster way.

Layers that are complete on this node are mounted straight from the cache, and stay mounted for the next start. The
others are served by a daemon that fetches what readers need, then what earlier starts needed, then the rest. When that
is not possible or not worth it, everything is fetched first. Which way was taken, and why, is in `facts`: a fallback
costs time and is never silent.

Called by `cli.image_mount` and `launch.image_stage`. Fork-safe stores are opened again in the daemon; this process has
no thread of its own when the daemon is started.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bootseer.blocks.index import Index
from bootseer.cache.cache import Cache
from bootseer.cache.file import CachedFile
from bootseer.errors import BootseerError, PermanentError, UsageError
from bootseer.image.found import Found, find
from bootseer.image.hotsets import HotSets
from bootseer.image.mounted import CHANGES, MountedImage
from bootseer.image.places import blocks_folder
from bootseer.image.predict import PULL, Image, Link, Prediction, predict
from bootseer.image.request import Request
from bootseer.mounts import kept, kernel, layers
from bootseer.mounts.daemon import FILES, Daemon, DaemonSpec, start_daemon
from bootseer.mounts.state import MountState, Runtime
from bootseer.store.open import open_store

_IDLE_S = 7 * 86_400.0
"""A layer that no start used for a week is unmounted: until then the next start finds its files in memory."""

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
) -> MountedImage:
    """Mount the image on `target`, which is made when it is not there.

    With `writable`, a folder that goes with the mount, changes go there; else the tree is read-only. With `lifeline` a
    lazy mount ends with this process. Raises `UsageError` without root, and `BootseerError` for what no fallback could help.
    """
    if os.geteuid() != 0:
        raise UsageError("mounting an image needs root", hint="run as root, or give the container CAP_SYS_ADMIN")
    runtime = Runtime(request.runtime)
    cache = Cache(blocks_folder(request.cache))
    with contextlib.suppress(BootseerError, OSError):
        release(runtime, cache, idle_s=_IDLE_S)
    found = find(request, stage=stage, say=say)
    folder = runtime.new_folder()
    opened: list[CachedFile] = []
    try:
        opened += [cache.open(index) for index in found.indexes]
        job = _Job(request, found, cache, runtime, folder, opened, stage, say, progress)
        mounted = job.mount(target, writable, lifeline=lifeline)
    except BaseException:
        with contextlib.suppress(BootseerError, OSError):
            runtime.clear(folder)
        raise
    finally:
        for file in opened:
            file.close()
    return mounted


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
    files: list[CachedFile]
    stage: Stage
    say: Say
    progress: Progress | None
    daemon: Daemon | None = None

    def mount(self, target: Path, writable: Path | None, *, lifeline: bool) -> MountedImage:
        """Choose the way, and go it."""
        found = self.found
        local_bytes = sum(self._share_here(index, file) for index, file in zip(found.indexes, self.files, strict=True))
        mode, reason = self._bring(lifeline=lifeline)
        try:
            with self.stage("mount"):
                lowers = [self._layer(index, file) for index, file in zip(found.indexes, self.files, strict=True)]
                target.mkdir(parents=True, exist_ok=True)
                upper = work = None
                if writable is not None:
                    upper, work = _upper(writable, lowers[-1])
                layers.mount_overlay(lowers, target, upper=upper, work=work)
            changes = {CHANGES: os.path.abspath(writable)} if writable is not None else {}  # noqa: PTH100
            state = MountState(
                id=self.folder.name,
                target=os.path.abspath(target),  # noqa: PTH100 - as `Runtime.find` compares
                what=str(self.request.reference),
                boot=self.runtime.boot,
                layers=tuple(index.identity for index in found.indexes),
                daemon=self.daemon.process if self.daemon is not None else None,
                made_s=time.time(),
                details={"digest": found.document.digest, "mode": mode, "workload": self.request.workload, **changes},
            )
            self.runtime.write(state)
        except BaseException:
            with contextlib.suppress(BootseerError):
                kernel.unmount(target, lazy=True)
            if self.daemon is not None:
                with contextlib.suppress(BootseerError):
                    self.runtime.clear(self.folder)
                    self.daemon.stop()
            raise
        facts = {
            "image": str(self.request.reference),
            "digest": found.document.digest,
            "workload": self.request.workload,
            "mode": mode,
            "reason": reason,
            "layers": len(found.indexes),
            "stored_bytes": found.document.stored_bytes,
            "local_bytes": local_bytes,
        }
        return MountedImage(target, found.document.config, facts, self.runtime, state, self.daemon, self.say)

    def _bring(self, *, lifeline: bool) -> tuple[str, str]:
        """Get the layers here, or a daemon that does; the mode and why."""
        fallback = self.found.fallback
        self._trust()
        missing = [index for index, file in zip(self.found.indexes, self.files, strict=True) if not file.trusted]
        if not missing:
            return ("fallback", fallback) if fallback else ("local", "all of it is on this node")
        plan = self._hot_set()
        forecast = self._forecast(missing, plan)
        why = ""
        if forecast.mode != PULL:
            try:
                with self.stage("daemon"):
                    self.daemon = self._start_daemon(missing, plan, lifeline=lifeline)
            except (BootseerError, OSError) as error:
                why = f"it cannot be served lazily: {error}"
                self.say(f"{why}; all of it is fetched first")
        if self.daemon is None:
            with self.stage("pull") as facts:
                facts["reason"] = why or forecast.reason
                self._pull()
        if fallback or why:
            return "fallback", fallback or why
        if self.daemon is None:
            return "pull", forecast.reason
        return "hot" if plan else "lazy", forecast.reason

    def _trust(self) -> None:
        """Complete layers whose word cannot be taken are compared with their digests once."""
        for file in self.files:
            if file.complete and not file.trusted:
                with self.stage("verify"):
                    file.verify_all(len(os.sched_getaffinity(0)))

    def _hot_set(self) -> list[tuple[str, int]] | None:
        if not self.request.workload:
            return None
        sets = HotSets(self.request.cache, self.found.document.digest, self.found.store, self.say)
        hot_set = sets.load(self.request.workload)
        return hot_set.plan() if hot_set is not None and not hot_set.stale else None

    def _forecast(self, missing: Sequence[Index], plan: Sequence[tuple[str, int]] | None) -> Prediction:
        if self.request.loading == "pull":
            return Prediction(PULL, "asked for")
        if self.request.loading == "lazy":
            return Prediction("lazy", "asked for")
        stored = sum(self._missing_bytes(index, file) for index, file in self._pairs(missing))
        blocks = sum(index.num_blocks - file.num_ready for index, file in self._pairs(missing))
        hot = None
        if plan is not None:
            places = {index.identity: (index, file) for index, file in self._pairs(missing)}
            hot = sum(
                places[identity][0].place(block).length
                for identity, block in plan
                if identity in places
                and block < places[identity][0].num_blocks
                and not places[identity][1].ready(block)
            )
        return predict(Image(stored, blocks, hot), Link())

    def _pairs(self, indexes: Sequence[Index]) -> list[tuple[Index, CachedFile]]:
        files = dict(zip(self.found.indexes, self.files, strict=True))
        return [(index, files[index]) for index in indexes]

    def _share_here(self, index: Index, file: CachedFile) -> int:
        return sum(stripe.size_bytes for stripe in index.stripes) - self._missing_bytes(index, file)

    def _missing_bytes(self, index: Index, file: CachedFile) -> int:
        missing = file.missing(0, index.size_bytes)
        stored = sum(stripe.size_bytes for stripe in index.stripes)
        # Adding up a million places one by one would take longer than it is worth.
        return stored if len(missing) == index.num_blocks else sum(index.place(block).length for block in missing)

    def _start_daemon(
        self, missing: Sequence[Index], plan: Sequence[tuple[str, int]] | None, *, lifeline: bool
    ) -> Daemon:
        from bootseer.image.lazy import HandOver, layers_to_serve

        request = self.request
        publish = request.publish and self.found.is_shared
        hand_over = HandOver(
            store=self.found.store_uri if publish else None,
            plain_http=request.plain_http,
            cache_root=request.cache,
            digest=self.found.document.digest,
            workload=request.workload,
            plan=plan,
        )
        served = layers_to_serve(
            missing, self.found.store_uri, self.cache.root, self.folder, hand_over, plain_http=request.plain_http
        )
        label = f"bootseer:{request.reference}"
        return start_daemon(DaemonSpec(self.folder, served, label=label, lifeline=lifeline))

    def _pull(self) -> None:
        """Fetch everything that is missing, at full speed."""
        from bootseer.fetch.fetcher import Fetcher

        origin = open_store(self.found.store_uri, plain_http=self.request.plain_http)
        fetcher = Fetcher(on_problem=self.say)
        try:
            for index, file in zip(self.found.indexes, self.files, strict=True):
                if not file.trusted:
                    fetcher.add(index, origin, file)
            fetcher.pull_all(self.progress)
        finally:
            fetcher.close()
            origin.close()
        self._trust()
        if not all(file.trusted for file in self.files):
            raise PermanentError(f"{self.cache.root}: what was fetched does not stay there; is the disk sound?")

    def _layer(self, index: Index, file: CachedFile) -> Path:
        """Where a layer is mounted: shared when it is complete, by the daemon's file when not."""
        if file.trusted:
            return kept.keep(self.runtime, index.identity, file.path, lambda: file.pin(kept.PIN))
        point = self.folder / "layers" / index.identity
        point.mkdir(parents=True, exist_ok=True)
        layers.mount_erofs(self.folder / FILES / index.identity, point)
        return point


def _upper(writable: Path, top: Path) -> tuple[Path, Path]:
    """Folders for changes; the root of the tree looks as the image's root does."""
    upper, work = writable / "upper", writable / "work"
    for folder in (upper, work):
        folder.mkdir(parents=True)
    status = top.stat()
    os.chown(upper, status.st_uid, status.st_gid)
    upper.chmod(status.st_mode & 0o7777)
    return upper, work

"""Mount an image: from its name to a tree of files, lazily where that is the faster way.

Layers that are complete on this node are mounted straight from the cache, and stay mounted for the next start. The
others are served by a daemon that fetches what readers need, then what earlier starts needed, then the rest. When that
is not possible or not worth it, everything is fetched first. Where the kernel cannot mount layers or this user may not,
the tree is served file by file, or written out (`ways`). Which way was taken, and why, is in `facts`: a fallback costs
time and is never silent.

"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from bootseer.artifact.child import breaks_forks, run_in_child
from bootseer.artifact.hotsets import HotSets
from bootseer.artifact.loading import CachedLayer
from bootseer.artifact.materialize import Materializer, Subject
from bootseer.artifact.places import blocks_folder
from bootseer.artifact.progress import Say, Show, Stage, no_progress
from bootseer.artifact.room import Room, release_unused
from bootseer.artifact.unpacked import UNPACKED, keep_unpacked
from bootseer.cache.cache import Cache
from bootseer.cache.disk import CacheFull
from bootseer.errors import BootseerError, PermanentError, UsageError
from bootseer.fuse.syscalls import MS_NODEV, MS_NOSUID, number_of
from bootseer.image.mounting import show, ways
from bootseer.image.mounting.found import Found, find
from bootseer.image.mounting.mounted import CHANGES, MountedImage
from bootseer.image.mounting.request import Request
from bootseer.mounts import user_namespace
from bootseer.mounts.daemon import FILES
from bootseer.mounts.ladder import Choice, Facts, Way
from bootseer.mounts.process import ProcessId
from bootseer.mounts.state import MountState, Runtime


def mount_image(
    request: Request,
    target: Path,
    *,
    writable: Path | None = None,
    above: Sequence[Path] = (),
    lifeline: bool = False,
    suid: bool = False,
    stage: Stage = lambda name: nullcontext({}),
    say: Say = lambda line: None,
    show: Show = no_progress,
    facts: Facts | None = None,
) -> MountedImage:
    """Mount the image on `target`, which is made when it is not there.

    With `writable`, a folder that goes with the mount, changes go there; else the tree is read-only. The folders of
    `above` lie on top of the image's layers, the first of them lowest; deletions in them have overlayfs' marks, those
    of both kinds of mounts; where no overlay can be mounted they are an error. With `lifeline` a lazy mount ends with
    this process; without root it is then in a user namespace, which this process enters for good. `suid`: set-uid
    programs of the image have their effect; its device nodes never have.
    `facts` says what this machine can do; None: that is found out. Raises `UsageError` where users like this one cannot
    mount, and `BootseerError` where no fallback helps.
    """
    facts = facts or ways.first_look(private=lifeline)
    # Who cannot mount hears it before anything is fetched.
    ways.pick(facts, private=lifeline, writable=writable is not None)
    if suid and not lifeline and not user_namespace.may_mount():
        raise UsageError("a mount with set-uid programs needs root", hint="leave out --suid")
    attributes = MS_NODEV if suid else MS_NODEV | MS_NOSUID
    runtime = Runtime(request.runtime)
    cache = Cache(blocks_folder(request.cache))
    room = Room(cache, say)
    release_unused(runtime, room, request.cache)
    if breaks_forks(request.store):
        with stage("store"):
            run_in_child(lambda: _learn(request, say))
    found = find(request, stage=stage, say=say, show=show)
    folder = runtime.new_folder()
    with contextlib.ExitStack() as opened:
        try:
            stack = []
            for index in found.indexes:
                file = room.open(index)
                opened.callback(file.close)
                stack.append(CachedLayer(index, file))
            bringing = Materializer(_subject(request, found), cache, folder, stack, lifeline, stage, say, show, room)
            return _Mounting(request, found, bringing, runtime, target, writable, attributes, tuple(above)).mount(facts)
        except BaseException as error:
            with contextlib.suppress(BootseerError, OSError):
                runtime.clear(folder)
            if isinstance(error, OSError):
                raise PermanentError(f"{error.filename or target}: {error.strerror or error}") from error
            raise


def _subject(request: Request, found: Found) -> Subject:
    return Subject(
        name=str(request.reference),
        digest=found.document.digest,
        store=found.store,
        store_uri=found.store_uri,
        is_shared=found.is_shared,
        plain_http=request.plain_http,
        cache=request.cache,
        loading=request.loading,
        workload=request.workload,
        publish=request.publish,
        fallback=found.fallback,
        signatures=request.signatures,
    )


def _learn(request: Request, say: Say) -> None:
    """In a child: get all that must be known before the mount from the store to this node."""
    found = find(request, say=say)
    if request.workload:
        sets = HotSets(request.cache, found.document.digest, found.store, say, request.signatures)
        sets.fetch(request.workload)


@dataclass(slots=True)
class _Mounting:
    """One mount in the making."""

    request: Request
    found: Found
    layers: Materializer
    runtime: Runtime
    target: Path
    writable: Path | None
    attributes: int
    above: tuple[Path, ...]
    details: dict[str, str] = field(default_factory=dict)

    def mount(self, what_works: Facts) -> MountedImage:
        """Choose the way, and go it."""
        layers = self.layers
        request, document = self.request, self.found.document
        local_bytes = sum(layer.stored_bytes - layer.missing_bytes for layer in layers.stack)
        try:
            choice = self._go(what_works)
            state = self._state()
            self.runtime.write(state)
        except BaseException:
            show.undo(layers.folder, self.target)
            layers.stop_daemon()
            raise
        facts = {
            "image": str(request.reference),
            "digest": document.digest,
            "workload": request.workload,
            "mode": layers.mode,
            "reason": layers.reason,
            "way": choice.way.value,
            "refused_ways": "; ".join(f"{way.value}: {why}" for way, why in choice.refused),
            "layers": len(layers.stack),
            "stored_bytes": document.stored_bytes,
            "local_bytes": local_bytes,
        }
        return MountedImage(
            self.target,
            document.config,
            facts,
            self.runtime,
            state,
            layers.daemon,
            layers.say,
            request.cache,
            lifeline=layers.lifeline,
        )

    def _go(self, facts: Facts) -> Choice:
        """Go the best way; when it turns out to lead nowhere, the next one. Returns the one that led to the mount."""
        private = self.layers.lifeline
        while True:
            choice = ways.pick(facts, private=private, writable=self.writable is not None)
            if why := ways.told(choice):
                self.layers.say(f"the image is shown {why}")
            try:
                if choice.way is Way.UNPACK:
                    self._unpack(why)
                elif choice.way is Way.FUSE_TREE:
                    self._show_tree()
                else:
                    self._show_layers(loop=choice.way is Way.EROFS_LOOP)
                return choice
            except _WayFailed as error:
                show.undo(self.layers.folder, self.target)
                self.layers.check_origin()
                self.layers.stop_daemon()
                facts = ways.after_failure(facts, choice.way, str(error), private=private)

    def _show_layers(self, *, loop: bool) -> None:
        """The kernel mounts each layer."""
        layers = self.layers
        layers.lazily()

        def mount() -> None:
            with layers.stage("mount"):
                lowers = show.mount_layers(self.runtime, layers.folder, layers.stack, loop=loop)
                show.mount_tree(lowers, self.above, self.target, self.writable, self.attributes)

        if layers.daemon is not None:
            try:
                mount()
                return
            except BootseerError as error:
                show.undo(layers.folder, self.target)
                if not loop and number_of(error) == errno.ENOTBLK:
                    # No kernel mounts a file of this file system (tmpfs) as it is, wherever its blocks come from.
                    raise _WayFailed(str(error)) from error
                try:
                    layers.fetch_after(error)
                except CacheFull as full:
                    raise _WayFailed(f"{error}; {full}") from full
        with _failing():
            mount()

    def _show_tree(self) -> None:
        """A daemon shows all layers as one tree: in a namespace of our own without root, or by a set-uid program."""
        from bootseer.mounts.trees import MergedTree

        layers = self.layers
        if layers.lifeline:
            user_namespace.enter()
        with _failing():
            if user_namespace.may_mount():
                layers.as_tree(MergedTree, None)
                with layers.stage("mount"):
                    show.mount_over(layers.folder / FILES, self.above, self.target, self.writable, self.attributes)
            else:
                if self.above:
                    raise PermanentError("without the right to mount, nothing can lie on top of the image")
                self.target.mkdir(parents=True, exist_ok=True)
                layers.as_tree(MergedTree, self.target)

    def _unpack(self, why: str) -> None:
        """The files are written out, and shown with an overlay for changes, or as a copy that may be changed."""
        from bootseer.image.unpack import unpack_layers

        layers = self.layers
        layers.all_of_it(f"it is shown {why}")

        def write(folder: Path) -> None:
            unpack_layers(layers.stack, folder)

        with layers.stage("unpack"):
            tree = keep_unpacked(self.request.cache, [layer.index.identity for layer in layers.stack], write)
        if layers.lifeline:
            user_namespace.enter()
        try:
            with layers.stage("mount"):
                show.mount_over(tree, self.above, self.target, self.writable, self.attributes)
            self.details[UNPACKED] = tree.name
        except BootseerError as error:
            if self.writable is None or self.above:
                raise
            layers.say(f"no overlay: {error}; this container gets a copy of its own")
            show.undo(layers.folder, self.target)
            with layers.stage("unpack"):
                show.mount_copy(write, self.target, self.writable, self.attributes)

    def _state(self) -> MountState:
        layers = self.layers
        details = {"digest": self.found.document.digest, "mode": layers.mode, "workload": self.request.workload}
        if self.writable is not None:
            details[CHANGES] = os.path.abspath(self.writable)  # noqa: PTH100 - resolving links could leave the name
        return MountState(
            id=layers.folder.name,
            target=os.path.abspath(self.target),  # noqa: PTH100 - as `Runtime.find` compares
            what=str(self.request.reference),
            boot=self.runtime.boot,
            layers=tuple(layer.index.identity for layer in layers.stack),
            daemon=layers.daemon.process if layers.daemon is not None else None,
            owner=ProcessId.of(os.getpid()) if layers.lifeline and not user_namespace.is_host() else None,
            made_s=time.time(),
            details={**details, **self.details},
        )


class _WayFailed(Exception):  # noqa: N818 - it is no end: the next way is gone
    """A way to show an image does not work here; its text says why."""


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    """What fails in here is taken to be the way's fault: the next one shows whether it was."""
    try:
        yield
    except (BootseerError, OSError) as error:
        raise _WayFailed(str(error)) from error

"""Bring a snapshot to this node and mount its files, read-only, somewhere: what `host` and images lay on top.

What is complete on this node is mounted once for all, and stays mounted for the next start. What is not is served by a
daemon that fetches what readers need, then what earlier starts needed, then the rest. Without root a daemon serves the
tree itself. Where neither can be mounted everything is fetched and written out. Which way was taken, and why, is in the
layer's `facts`.

The mount ends with this process: when it was killed, the next start takes away what it left.
"""

from __future__ import annotations

import contextlib
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bootseer.artifact.child import breaks_forks, run_in_child
from bootseer.artifact.hotsets import HotSets
from bootseer.artifact.loading import CachedLayer, Loading
from bootseer.artifact.materialize import Materializer, Subject
from bootseer.artifact.mount_handle import MountHandle
from bootseer.artifact.objects import LocalObjects
from bootseer.artifact.places import blocks_folder, environments_folder, own_folder
from bootseer.artifact.progress import Say, Show, Stage, no_progress
from bootseer.artifact.room import Room, release_unused
from bootseer.artifact.signatures import UNSIGNED, Signatures
from bootseer.artifact.unpacked import UNPACKED, keep_unpacked
from bootseer.cache.cache import Cache
from bootseer.cache.disk import CacheFull
from bootseer.env.document import EnvironmentDocument
from bootseer.env.restoring.unpack import unpack_layer
from bootseer.erofs.reader import ErofsReader
from bootseer.errors import BootseerError, PermanentError
from bootseer.mounts import kept, kernel, user_namespace
from bootseer.mounts.daemon import FILES, Daemon
from bootseer.mounts.ladder import Way
from bootseer.mounts.layers import mount_erofs
from bootseer.mounts.process import ProcessId
from bootseer.mounts.state import MountState, Runtime
from bootseer.mounts.trees import layer_tree
from bootseer.store.open import open_store
from bootseer.store.store import Store

ENVIRONMENT = "environment"
"""Key of a mount's details: the request key of the snapshot."""
_POINT = "layer"


@dataclass(frozen=True, slots=True)
class Bring:
    """How a snapshot is to come."""

    cache: Path
    """The node's cache."""
    runtime: Path
    """Where the state of mounts lies."""
    workload: str = ""
    """Which hot set; empty: none is used, and none is recorded."""
    publish: bool = True
    """Whether what was recorded goes to the store."""
    plain_http: bool = False
    signatures: Signatures = UNSIGNED
    """About hot sets: who found the document has looked at its signature."""
    loading: Loading = "auto"
    lifeline: bool = True
    """Whether a daemon ends with this process."""
    unpack: bool = False
    """Whether the files are written out without any try to mount them: where nothing can be mounted over them."""


class Layer(MountHandle):
    """A snapshot's files on this node, seen by the process that brought them."""

    def __init__(
        self,
        path: Path,
        facts: dict[str, object],
        runtime: Runtime,
        state: MountState,
        daemon: Daemon | None,
        say: Say,
        *,
        lifeline: bool,
    ) -> None:
        super().__init__("the environment", facts, daemon, say)
        self.path = path
        """The root of its tree: deletions are devices 0/0 in it, as overlayfs wants them."""
        self._runtime = runtime
        self._state = state
        self._lifeline = lifeline
        self._closed = False

    def at(self, path: str) -> Path:
        """Where a path of the snapshot lies."""
        return self.path / path.lstrip("/")

    def close(self) -> None:
        """Let go of it. Other starts may use its mount and its files.

        A daemon that was to outlive this process ends with the last copy of the mount, and a later start takes away
        what is left.
        """
        if self._closed:
            return
        self._closed = True
        if self._daemon is not None:
            # Lazily: a namespace that is just ending may have a copy of the mount.
            kernel.unmount(self._runtime.folder(self._state) / _POINT, lazy=True)
            if self._daemon.process.alive and not self._daemon.leave(force=self._lifeline):
                return
        self._runtime.remove(self._state)


def bring_layer(
    document: EnvironmentDocument,
    store: Store,
    bring: Bring,
    *,
    stage: Stage = lambda name: nullcontext({}),
    say: Say = lambda line: None,
    show: Show = no_progress,
) -> Layer:
    """Bring the snapshot of this document from `store`, which is not asked when everything is here.

    Call it while this process has one thread. Raises `BootseerError` where no way helps.
    """
    own_folder(environments_folder(bring.cache), private=True)
    runtime = Runtime(bring.runtime)
    cache = Cache(blocks_folder(bring.cache))
    room = Room(cache, say)
    release_unused(runtime, room, bring.cache)
    if breaks_forks(store.uri):
        with stage("store"):
            run_in_child(lambda: _learn(document, store.uri, bring, say))
    with stage("index"):
        index = LocalObjects(environments_folder(bring.cache), say).index(document.file, store)
    folder = runtime.new_folder()
    try:
        file = room.open(index)
        with contextlib.closing(file):
            subject = Subject(
                name=f"environment {document.key[:12]}",
                digest=document.digest,
                store=store,
                store_uri=store.uri,
                is_shared=True,
                plain_http=bring.plain_http,
                cache=bring.cache,
                loading=bring.loading,
                workload=bring.workload,
                publish=bring.publish,
                signatures=bring.signatures,
            )
            layers = Materializer(
                subject, cache, folder, [CachedLayer(index, file)], bring.lifeline, stage, say, show, room
            )
            return _Showing(document, layers, runtime, bring).layer()
    except BaseException as error:
        with contextlib.suppress(BootseerError, OSError):
            runtime.clear(folder)
        if isinstance(error, OSError):
            raise PermanentError(f"{error.filename or folder}: {error.strerror or error}") from error
        raise


def _learn(document: EnvironmentDocument, store_uri: str, bring: Bring, say: Say) -> None:
    """In a child: get all that must be known before the mount from the store to this node."""
    store = open_store(store_uri, plain_http=bring.plain_http)
    LocalObjects(environments_folder(bring.cache), say).index(document.file, store)
    if bring.workload:
        HotSets(bring.cache, document.digest, store, say, bring.signatures).fetch(bring.workload)


def _is_root() -> bool:
    """Whether the kernel mounts EROFS for this process."""
    return user_namespace.may_mount() and user_namespace.is_host()


class _Showing:
    """One layer in the making."""

    def __init__(self, document: EnvironmentDocument, layers: Materializer, runtime: Runtime, bring: Bring) -> None:
        self._document = document
        self._layers = layers
        self._runtime = runtime
        self._bring = bring
        self._details: dict[str, str] = {}

    def layer(self) -> Layer:
        """Go the best way that leads to a tree."""
        layers, document = self._layers, self._document
        (one,) = layers.stack
        local_bytes = one.stored_bytes - one.missing_bytes
        try:
            way, path = self._go()
            state = MountState(
                id=layers.folder.name,
                target=str(path),
                what=layers.subject.name,
                boot=self._runtime.boot,
                layers=(one.index.identity,),
                daemon=layers.daemon.process if layers.daemon is not None else None,
                owner=ProcessId.of(os.getpid()),
                made_s=time.time(),
                details={"digest": document.digest, ENVIRONMENT: document.key, "mode": layers.mode, **self._details},
            )
            self._runtime.write(state)
        except BaseException:
            self._undo()
            raise
        facts: dict[str, object] = {
            "key": document.key,
            "digest": document.digest,
            "workload": layers.subject.workload,
            "mode": layers.mode,
            "reason": layers.reason,
            "way": way.value,
            "stored_bytes": one.stored_bytes,
            "local_bytes": local_bytes,
        }
        return Layer(path, facts, self._runtime, state, layers.daemon, layers.say, lifeline=layers.lifeline)

    def _go(self) -> tuple[Way, Path]:
        if self._bring.unpack:
            return self._unpacked("nothing can be mounted over the files of this machine")
        try:
            if _is_root():
                return Way.EROFS_FILE, self._mounted()
            return Way.FUSE_TREE, self._served()
        except (BootseerError, OSError) as error:
            if isinstance(error, CacheFull):
                raise
            self._undo()
            return self._unpacked(str(error))

    def _mounted(self) -> Path:
        """By the kernel, from the cache's file or the daemon's."""
        layers = self._layers
        layers.lazily()
        if layers.daemon is not None:
            try:
                return self._mount()
            except BootseerError as error:
                self._unmount()
                layers.fetch_after(error)
        return self._mount()

    def _mount(self) -> Path:
        layers = self._layers
        (one,) = layers.stack
        with layers.stage("mount"):
            if layers.daemon is None:
                pin = partial(one.file.pin, kept.PIN)
                return kept.keep(self._runtime, one.index.identity, one.file.path, pin)
            point = layers.folder / _POINT
            point.mkdir(exist_ok=True)
            mount_erofs(layers.folder / FILES / one.index.identity, point)
            return point

    def _served(self) -> Path:
        """By a daemon, file by file."""
        self._layers.as_tree(layer_tree, None)
        return self._layers.folder / FILES

    def _unpacked(self, why: str) -> tuple[Way, Path]:
        layers = self._layers
        (one,) = layers.stack
        layers.say(f"the environment is written out: {why}")
        layers.all_of_it(why)

        def write(folder: Path) -> None:
            unpack_layer(ErofsReader(one.file.read), folder, threads=len(os.sched_getaffinity(0)))

        with layers.stage("unpack"):
            tree = keep_unpacked(self._bring.cache, [one.index.identity], write)
        self._details[UNPACKED] = tree.name
        return Way.UNPACK, tree

    def _undo(self) -> None:
        self._unmount()
        self._layers.stop_daemon()

    def _unmount(self) -> None:
        with contextlib.suppress(BootseerError):
            kernel.unmount(self._layers.folder / _POINT, lazy=True)


def in_use(runtime: Runtime) -> set[str]:
    """Keys of the environments that starts on this node use now."""
    found = (state for state in runtime.all() if ENVIRONMENT in state.details)
    return {state.details[ENVIRONMENT] for state in found if runtime.health(state) != "gone"}

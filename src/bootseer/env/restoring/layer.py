"""LayerOptions a snapshot to this node and mount its files, read-only, somewhere: what `host` and images lay on top.

What is complete on this node is mounted once for all, and stays mounted for the next start. What is not is served by a
daemon that fetches what readers need, then what earlier starts needed, then the rest. Without root a daemon serves the
tree itself. Where neither can be mounted everything is fetched and written out. Which way was taken, and why, is in the
layer's `facts`.

The mount ends with this process: when it was killed, the next start takes away what it left.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bootseer.artifact.materialize import MountOptions, Subject
from bootseer.artifact.mounting import LazyMount, MountHandle
from bootseer.artifact.objects import LocalObjects
from bootseer.artifact.places import environments_folder, own_folder
from bootseer.artifact.progress import Say, Show, Stage, no_progress
from bootseer.artifact.unpacked import UNPACKED, unpack_once
from bootseer.blocks.index import Index
from bootseer.cache.disk import CacheFull
from bootseer.env.document import EnvironmentDocument
from bootseer.errors import BootseerError
from bootseer.mounts import kernel, shared_layers, user_namespace
from bootseer.mounts.control import FILES
from bootseer.mounts.daemon import Daemon
from bootseer.mounts.layers import mount_erofs
from bootseer.mounts.method import MountMethod
from bootseer.mounts.process import ProcessId
from bootseer.mounts.state import MountState, Runtime
from bootseer.store.open import open_store
from bootseer.store.store import Store

ENVIRONMENT = "environment"
"""Key of a mount's details: the request key of the snapshot."""
_POINT = "layer"


@dataclass(frozen=True, slots=True)
class LayerOptions(MountOptions):
    """How a snapshot is to come. Signatures are about hot sets: that of the document was verified when it was found."""

    lifeline: bool = True
    """Whether a daemon ends with this process."""
    unpack: bool = False
    """Whether the files are written out without any try to mount them: where nothing can be mounted over them."""


class Layer(MountHandle):
    """A snapshot's files on this node, seen by the process that brought them."""

    def __init__(
        self,
        path: Path,
        facts: Mapping[str, object],
        runtime: Runtime,
        state: MountState,
        daemon: Daemon | None,
        say: Say,
        *,
        lifeline: bool,
    ) -> None:
        super().__init__("the environment", facts, runtime, state, daemon, say, lifeline=lifeline)
        self.path = path
        """The root of its tree: deletions are devices 0/0 in it, as overlayfs wants them."""
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
            if self._daemon.process.alive and not self._daemon.detach(force=self._lifeline):
                return
        self._runtime.remove(self._state)


def mount_layer(
    document: EnvironmentDocument,
    store: Store,
    options: LayerOptions,
    *,
    stage: Stage = lambda name: nullcontext({}),
    say: Say = lambda line: None,
    show: Show = no_progress,
) -> Layer:
    """Mount the snapshot of this document from `store`, which is not asked when everything is here.

    Call it while this process has one thread. Raises `BootseerError` where no way helps.
    """
    own_folder(environments_folder(options.cache), private=True)
    mount = _LayerMount(document, store, options, stage=stage, say=say, show=show)
    state, facts = mount.run(store.uri)
    facts["key"] = document.key
    path = Path(state.target)
    return Layer(path, facts, mount.runtime, state, mount.layers.daemon, say, lifeline=options.lifeline)


def _is_root() -> bool:
    """Whether the kernel mounts EROFS for this process."""
    return user_namespace.may_mount() and user_namespace.is_host()


class _LayerMount(LazyMount):
    """One layer in the making."""

    def __init__(
        self,
        document: EnvironmentDocument,
        store: Store,
        options: LayerOptions,
        *,
        stage: Stage,
        say: Say,
        show: Show,
    ) -> None:
        super().__init__(options, lifeline=options.lifeline, stage=stage, say=say, show=show)
        self._document = document
        self._store = store
        self._unpack = options.unpack
        self.details[ENVIRONMENT] = document.key

    def find(self, *, in_child: bool = False) -> tuple[Subject, Sequence[Index]]:
        document, options = self._document, self.options
        # A child must not use the client of its parent.
        store = open_store(self._store.uri, plain_http=options.plain_http) if in_child else self._store
        with nullcontext({}) if in_child else self.stage("index"):
            index = LocalObjects(environments_folder(options.cache), self.say).index(document.file, store)
        name = f"environment {document.key[:12]}"
        return Subject(name, document.digest, store, store.uri, options), [index]

    def owner(self) -> ProcessId | None:
        return ProcessId.of(os.getpid())

    def mount_files(self) -> tuple[MountMethod, Path]:
        if self._unpack:
            return self._unpacked("nothing can be mounted over the files of this machine")
        try:
            if _is_root():
                return MountMethod.EROFS_FILE, self._mounted()
            return MountMethod.FUSE_TREE, self._served()
        except (BootseerError, OSError) as error:
            if isinstance(error, CacheFull):
                raise
            self.unmount_files()
            self.layers.stop_daemon()
            return self._unpacked(str(error))

    def _mounted(self) -> Path:
        """By the kernel, from the cache's file or the daemon's."""
        layers = self.layers
        layers.serve_lazily()
        if layers.daemon is not None:
            try:
                return self._mount_tree()
            except BootseerError as error:
                self.unmount_files()
                layers.pull_after_failure(error)
        return self._mount_tree()

    def _mount_tree(self) -> Path:
        layers = self.layers
        (one,) = layers.stack
        with layers.stage("mount"):
            if layers.daemon is None:
                pin = partial(one.file.pin, shared_layers.PIN)
                return shared_layers.mount_shared(self.runtime, one.index.identity, one.file.path, pin)
            point = layers.folder / _POINT
            point.mkdir(exist_ok=True)
            mount_erofs(layers.folder / FILES / one.index.identity, point)
            return point

    def _served(self) -> Path:
        """By a daemon, file by file."""
        from bootseer.mounts.trees import layer_tree

        self.layers.serve_tree(layer_tree, None)
        return self.layers.folder / FILES

    def _unpacked(self, reason: str) -> tuple[MountMethod, Path]:
        from bootseer.env.restoring.unpack import unpack_layer
        from bootseer.erofs.reader import ErofsReader

        layers = self.layers
        (one,) = layers.stack
        layers.say(f"the environment is written out: {reason}")
        layers.pull_all(reason)

        def write(folder: Path) -> None:
            unpack_layer(ErofsReader(one.file.read), folder, threads=len(os.sched_getaffinity(0)))

        with layers.stage("unpack"):
            tree = unpack_once(self.options.cache, [one.index.identity], write)
        self.details[UNPACKED] = tree.name
        return MountMethod.UNPACK, tree

    def unmount_files(self) -> None:
        with contextlib.suppress(BootseerError):
            kernel.unmount(self.layers.folder / _POINT, lazy=True)

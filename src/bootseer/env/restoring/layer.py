"""Mount a snapshot's files read-only on this node, as the layer that `host` and images put on top.

A snapshot that is complete on this node is mounted once for all starts and stays mounted. Otherwise a daemon serves it,
which fetches what readers need, then the hot set of earlier starts, then the rest. Without root the daemon serves the
tree by FUSE. If neither can be mounted, everything is fetched and unpacked. The way, and the reason for it, are in the
layer's `facts`.

The mount ends with this process; after a kill the next start cleans up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from bootseer.artifact.materialize import MountOptions, Subject
from bootseer.artifact.mounting import LazyMount, MountHandle
from bootseer.artifact.objects import LocalObjects
from bootseer.artifact.places import environments_folder, own_folder
from bootseer.artifact.progress import Say, Show, Stage, no_progress
from bootseer.artifact.unpacked import UNPACKED, has_all_rights, unpack_once, write_tree
from bootseer.blocks.index import Index
from bootseer.cache.disk import CacheFull
from bootseer.env.document import EnvironmentDocument
from bootseer.errors import BootseerError, CorruptError, TooShortError
from bootseer.mounts import shared_layers
from bootseer.mounts.control import FILES
from bootseer.mounts.layers import MountMethod
from bootseer.mounts.state import MountState
from bootseer.store.open import open_store
from bootseer.store.store import Store

ENVIRONMENT = "environment"
"""Key of a mount's details: the request key of the snapshot."""


class LayerOptions(MountOptions, frozen=True):
    """Options of mounting a snapshot. Signatures are those of hot sets: the document's was verified at the lookup."""

    unpack: bool = False
    """Whether to unpack the files without trying to mount them."""


class Layer(MountHandle):
    """The mounted files of a snapshot."""

    def __init__(self, mount: LazyMount, state: MountState, facts: Mapping[str, object]) -> None:
        super().__init__("the environment", mount, state, facts)
        self.path = Path(state.target)
        """The root of its tree; deletions are devices 0/0 in it, as overlayfs requires."""
        self._closed = False

    def at(self, path: str) -> Path:
        """Where a path of the snapshot can be read."""
        return self.path / path.lstrip("/")

    def close(self) -> None:
        """Unmount it, unless other starts share the mount; files in the cache stay."""
        if self._closed:
            return
        self._closed = True
        if self._daemon is not None:
            # Lazily: a namespace that is just ending may have a copy of the mount.
            shared_layers.unmount_own(self._runtime.folder(self._state))
            if self._daemon.process.alive and not self._daemon.detach(force=True):
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
    """Mount the snapshot of this document; `store` is not used if everything is on this node.

    Forks: call it while this process has one thread. Raises `BootseerError` if no way works.
    """
    own_folder(environments_folder(options.cache), private=True)
    mount = _LayerMount(options=options, lifeline=True, stage=stage, say=say, show=show, document=document, store=store)
    mount.details[ENVIRONMENT] = document.key
    state, facts = mount.run(store.uri)
    facts["key"] = document.key
    return Layer(mount, state, facts)


@dataclass(kw_only=True)
class _LayerMount(LazyMount):
    """Mounts one layer."""

    options: LayerOptions
    document: EnvironmentDocument
    store: Store

    def find(self, *, in_child: bool = False) -> tuple[Subject, Sequence[Index]]:
        document, options = self.document, self.options
        # A child process must not use its parent's client.
        store = open_store(self.store.uri, plain_http=options.plain_http) if in_child else self.store
        with nullcontext({}) if in_child else self.stage("index"):
            index = LocalObjects(environments_folder(options.cache), self.say).index(document.file, store)
        name = f"environment {document.key[:12]}"
        return Subject(name=name, digest=document.digest, store=store, store_uri=store.uri), [index]

    def mount_files(self) -> tuple[MountMethod, Path]:
        if self.options.unpack:
            return self._unpack("nothing can be mounted over the files of this machine")
        try:
            if has_all_rights():  # EROFS cannot be mounted in user namespaces
                return MountMethod.EROFS_FILE, self._mount_erofs()
            from bootseer.mounts.trees import ErofsTree

            self.serve_tree(ErofsTree, None)
            return MountMethod.FUSE_TREE, self.folder / FILES
        except (BootseerError, OSError) as error:
            if isinstance(error, CacheFull | CorruptError | TooShortError):
                raise
            self.unmount_files()
            self.stop_daemon()
            return self._unpack(str(error))

    def _mount_erofs(self) -> Path:
        """Mount EROFS by the kernel, from the cache's file or the daemon's."""
        self.serve_lazily()
        while True:
            try:
                with self.stage("mount"):
                    return shared_layers.mount_layer(self.runtime, self.folder, *self.stack)
            except BootseerError as error:
                if self.daemon is None:
                    raise
                self.unmount_files()
                self.pull_after_failure(error)  # ends the daemon

    def _unpack(self, reason: str) -> tuple[MountMethod, Path]:
        from bootseer.erofs.merged import MARKS, for_user_namespace
        from bootseer.erofs.reader import ErofsReader

        (one,) = self.stack
        self.say(f"the environment is written out: {reason}")
        self.pull_all(reason)

        def write(folder: Path) -> None:
            reader = ErofsReader(one.read)
            files = ((path, reader, inode) for path, inode in reader.walk())
            rename = dict if has_all_rights() else for_user_namespace
            write_tree(files, folder, rename, needed=MARKS)

        with self.stage("unpack"):
            tree = unpack_once(self.options.cache, [one.index.identity], write, self.say)
        self.details[UNPACKED] = tree.name
        return MountMethod.UNPACK, tree

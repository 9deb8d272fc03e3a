"""Mount an image, lazily where that is faster.

Layers that are complete on this node are mounted from the cache, and stay mounted for the next start. The others are
served by a daemon that fetches blocks on demand, then the hot set (blocks that earlier starts needed), then the rest.
If that is impossible or not faster, everything is fetched first. Where layers cannot be mounted, a daemon serves the
merged tree by FUSE, or the image is unpacked (`methods`). The method and the reasons for it are reported in `facts`,
because a fallback costs time.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bootseer.artifact.materialize import Subject
from bootseer.artifact.mounting import LazyMount
from bootseer.artifact.objects import missing
from bootseer.artifact.progress import Say, Show, Stage, no_progress, shown_while
from bootseer.artifact.unpacked import UNPACKED, unpack, unpack_once
from bootseer.blocks.index import Index
from bootseer.cache.disk import CacheFull
from bootseer.errors import BootseerError, PermanentError, UsageError
from bootseer.fuse.syscalls import MS_NODEV, MS_NOSUID, number_of
from bootseer.image.mounting import methods
from bootseer.image.mounting.metadata import Metadata
from bootseer.image.mounting.mounted import CHANGES, MountedImage
from bootseer.image.mounting.request import Request
from bootseer.image.mounting.resolve import resolve_image
from bootseer.io.tasks import Tasks
from bootseer.mounts import kernel, user_namespace
from bootseer.mounts.control import FILES
from bootseer.mounts.layers import MountMethod, copy_attributes, mount_overlay
from bootseer.mounts.process import ProcessId
from bootseer.mounts.shared_layers import mount_layer
from bootseer.store.open import open_store

LayersAbove = Callable[[str], Sequence[Path]]
"""Returns further layers to mount on top of the image of this digest, lowest first."""
_AT_ONCE = 8
_COPY = "copy"


def mount_image(
    request: Request,
    target: Path,
    *,
    writable: Path | None = None,
    above: LayersAbove = lambda digest: (),
    lifeline: bool = False,
    suid: bool = False,
    stage: Stage = lambda name: nullcontext({}),
    say: Say = lambda line: None,
    show: Show = no_progress,
    refused: Mapping[MountMethod, str] | None = None,
) -> MountedImage:
    """Mount the image on `target`, which is created if missing.

    Changes are written to the folder `writable`, which is deleted with the mount; without it the tree is read-only.
    `above` is called once, if possible while the image's hot blocks are already being fetched; whiteouts in its layers
    must have the attributes of both kinds of overlay (`trusted.` and `user.`), and layers are an error if no overlay
    can be mounted. With `lifeline` the mount ends with this process; without root, this process then enters a user
    namespace and stays in it.
    `suid`: set-uid programs of the image take effect; its device nodes never do.
    `refused`: methods that are not to be tried, with the reasons; None: determined here. Raises `UsageError` if this
    user cannot mount, and `BootseerError` if all methods fail.
    """
    found = dict(refused or methods.refused_untried(private=lifeline, writable=writable is not None))
    methods.choose_method(found, private=lifeline)
    if suid and not lifeline and not user_namespace.may_mount():
        raise UsageError("a mount with set-uid programs needs root", hint="leave out --suid")
    attributes = MS_NODEV if suid else MS_NODEV | MS_NOSUID
    mount = _ImageMount(
        options=request,
        lifeline=lifeline,
        stage=stage,
        say=say,
        show=show,
        target=target,
        writable=writable,
        above=above,
        attributes=attributes,
        refused=found,
    )
    state, facts = mount.run(request.store)
    document, better = mount.image.document, methods.better_ones(found, mount.method)
    facts |= {
        "image": mount.subject.name,
        "refused_ways": "; ".join(f"{method.value}: {reason}" for method, reason in better.items()),
        "layers": len(mount.stack),
        "stored_bytes": document.stored_bytes,
    }
    return MountedImage(mount, state, facts, document.config)


@dataclass(kw_only=True)
class _ImageMount(LazyMount):
    """One mount that is being set up."""

    options: Request
    target: Path
    writable: Path | None
    above: LayersAbove
    attributes: int
    refused: methods.Refused
    method: MountMethod = field(init=False)
    _layers_above: Sequence[Path] = ()

    def find(self, *, in_child: bool = False) -> tuple[Subject, Sequence[Index]]:
        request = self.options
        self.image = image = (
            resolve_image(request, say=self.say, in_child=True)
            if in_child
            else resolve_image(request, stage=self.stage, say=self.say, show=self.show, missing=self.missing)
        )
        self.is_cached = image.is_cached
        self.details["workload"] = request.workload
        if self.writable is not None:
            self.details[CHANGES] = os.path.abspath(self.writable)  # noqa: PTH100 - resolving links could leave the name
        return image, image.indexes

    def is_outdated(self) -> bool:
        request, image = self.options, self.image
        with contextlib.closing(open_store(image.store_uri, plain_http=request.plain_http, mirrored=True)) as store:
            if not image.is_shared:
                if is_gone := bool(missing(store, image.document.objects)):  # `delete_idle` kept the document only
                    store.delete(image.document.name)
                return is_gone
            return Metadata(request.cache, self.say).is_outdated(image.document, store, request.signatures)

    def unmount_files(self) -> None:
        with contextlib.suppress(BootseerError):
            if kernel.is_mount(self.target):
                kernel.unmount(self.target, lazy=True)
        super().unmount_files()

    def owner(self) -> ProcessId | None:
        return super().owner() if self.lifeline and not user_namespace.is_host() else None

    def mount_files(self) -> tuple[MountMethod, Path]:
        """Mount with the best method; if it fails, with the next one."""
        while True:
            method = self.method = methods.choose_method(self.refused, private=self.lifeline)
            if method in (MountMethod.EROFS_FILE, MountMethod.EROFS_LOOP):
                self.serve_lazily()
            # While the daemon fetches, or, for the other methods, before a user namespace is entered.
            self._find_layers_above()
            if reason := methods.describe_fallback(self.refused, method):
                self.say(f"the image is mounted {reason}")
            try:
                if method is MountMethod.UNPACK:
                    self._mount_unpacked(reason)
                elif method is MountMethod.FUSE_TREE:
                    self._mount_served_tree()
                else:
                    self._mount_layers(loop=method is MountMethod.EROFS_LOOP)
                return method, self.target
            except _MethodFailed as failed:
                self.unmount_files()
                self.check_origin()
                self.stop_daemon()
                methods.refuse(self.refused, method, failed.error)

    def _find_layers_above(self) -> None:
        self._layers_above = self._layers_above or self.above(self.subject.digest)

    def _pull(self) -> None:
        self._find_layers_above()  # its children cannot use a store that this process has used: `breaks_forks`
        super()._pull()

    def _mount_layers(self, *, loop: bool) -> None:
        """Let the kernel mount each layer, and an overlay of them."""

        def mount() -> None:
            one = partial(mount_layer, self.runtime, self.folder, loop=loop)
            with self.stage("mount"):
                # Mounting a layer reads its first block. In parallel, all together cost one round trip to the store.
                with Tasks("bootseer-mount", min(len(self.stack), _AT_ONCE)) as pool:
                    lowers = list(pool.map(one, self.stack))
                self._mount_over(lowers)

        if self.daemon is not None:
            try:
                mount()
                return
            except BootseerError as error:
                self.unmount_files()
                if methods.why_no_erofs(error) or (not loop and number_of(error) == errno.ENOTBLK):
                    # No EROFS, or none from files of this file system (tmpfs), or too many layers: fetching is no help.
                    raise _MethodFailed(error) from error
                try:
                    self.pull_after_failure(error)
                except CacheFull as full:
                    raise _MethodFailed(CacheFull(f"{error}; {full}")) from full
        with _method_errors():
            mount()

    def _mount_served_tree(self) -> None:
        """Serve all layers as one tree by a daemon, mounted in our own namespace or by a set-uid helper."""
        from bootseer.mounts.trees import MergedTree

        if self.lifeline:
            user_namespace.enter()
        with _method_errors():
            if user_namespace.may_mount():
                self.serve_tree(MergedTree, None)
                with self.stage("mount"):
                    self._mount_over([self.folder / FILES], userxattr=True)
            else:
                if self._layers_above:
                    raise PermanentError("further layers on top of the image need the permission to mount an overlay")
                self.target.mkdir(parents=True, exist_ok=True)
                self.serve_tree(MergedTree, self.target)

    def _mount_unpacked(self, reason: str) -> None:
        """Unpack the layers once for all containers, under an overlay for changes; if that fails, a private copy."""
        from bootseer.erofs.merged import Layer, MergedLayers
        from bootseer.erofs.reader import ErofsReader

        def write(folder: Path) -> None:
            unpack(MergedLayers([Layer(ErofsReader(one.read), one.index.identity) for one in self.stack]), folder)

        if self.lifeline:
            user_namespace.enter()  # first: clients of object stores have threads for as long as this process lives
        self.pull_all(f"it is mounted {reason}")
        with self.stage("unpack"), shown_while(self.show, f"unpacking {self.subject.name}"):
            tree = unpack_once(self.options.cache, [layer.index.identity for layer in self.stack], write, self.say)
        try:
            with self.stage("mount"):
                self._mount_over([tree], userxattr=True)
            self.details[UNPACKED] = tree.name
        except BootseerError as error:
            if self.writable is None or self._layers_above:
                raise
            self.say(f"no overlay: {error}; this container gets a private copy")
            self.unmount_files()
            (self.writable / "upper").rmdir()  # where it exists, it has the changes: `launch.image.setup`
            with self.stage("unpack"):
                write(self.writable / _COPY)
                kernel.attach(kernel.clone_mount(self.writable / _COPY), self.target)
                kernel.restrict(self.target, self.attributes)

    def _mount_over(self, lowers: Sequence[Path], *, userxattr: bool = False) -> None:
        """Mount an overlay of these trees, the lowest first, and the layers above them. The root of changes gets the
        attributes of the image's root. `userxattr`: see `mount_overlay`."""
        self.target.mkdir(parents=True, exist_ok=True)
        upper: Path | None = None
        work: Path | None = None
        if self.writable is not None:
            upper, work = self.writable / "upper", self.writable / "work"
            for folder in (upper, work):
                folder.mkdir(parents=True, exist_ok=True)
            copy_attributes(lowers[-1], upper)
        stack = [*lowers, *self._layers_above]
        mount_overlay(stack, self.target, upper=upper, work=work, attributes=self.attributes, userxattr=userxattr)


class _MethodFailed(Exception):  # noqa: N818 - no error: the next method is tried
    """A mount method failed."""

    def __init__(self, error: BootseerError | OSError) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def _method_errors() -> Iterator[None]:
    """Treat every error as a failure of the method. An error with another cause makes the next method fail, too."""
    try:
        yield
    except (BootseerError, OSError) as error:
        raise _MethodFailed(error) from error

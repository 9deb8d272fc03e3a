"""`bootseer run --image --setup`, `--requirements`: the setup runs in the container once; later its layer is mounted.

Before the image is mounted, the environment is looked up (`layers`): a snapshot's tree becomes one more layer of the
image. Without a snapshot the setup runs in containers of the image. The upper layer with its changes then becomes a
layer below the command's container, as a snapshot would be, and is published beside the command. The image is remounted
for the command in any case, so that the setup's reads are not recorded in the command's hot set.

If anything is wrong with snapshots, the setup runs in the mounted image, and the command runs on its changes.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bootseer.artifact.places import cache_root, containers_folder
from bootseer.env.capturing import exports
from bootseer.env.capturing.capture import container_changes
from bootseer.env.capturing.effects import mentions
from bootseer.env.capturing.exclude import Exclusions, caches_of, credentials_of
from bootseer.env.capturing.leftovers import SCRATCH, left_in_scratch, unaccounted
from bootseer.env.capturing.walk import LeftOut
from bootseer.env.changes import Change
from bootseer.env.document import Export
from bootseer.env.keys.key import RequestKey
from bootseer.env.keys.request_key import Base
from bootseer.env.life.decide import REASONS, Action, Decision, fall_back
from bootseer.errors import BootseerError, PermanentError
from bootseer.image.containers.container import Options as ContainerOptions
from bootseer.image.containers.process import ProcessOptions, process_of
from bootseer.image.containers.runtime_config import Bind
from bootseer.image.mounting.mounted import MountedImage
from bootseer.image.mounting.request import Request
from bootseer.launch.command import Options
from bootseer.launch.environment.capture import trust_of
from bootseer.launch.environment.plain import say_failed
from bootseer.launch.environment.publish import Publication, report_outcome, start_publishing
from bootseer.launch.environment.setup import SetupResult, SetupRun
from bootseer.launch.environment.start import EnvironmentStart
from bootseer.launch.environment.task import EnvironmentOptions, Task
from bootseer.launch.environment.view import PreparedEnvironment
from bootseer.launch.image.setup import (
    ImageSetupHost,
    container_path,
    is_below,
    mounts_of_setup,
    setup_paths,
    setup_variables,
)
from bootseer.launch.interrupt import interruptible
from bootseer.launch.session import Session
from bootseer.launch.supervise import say
from bootseer.mounts import kernel

Mount = Callable[[Path, Sequence[Path], bool], MountedImage]
"""Mount the image with a folder for changes and additional layers; the flag: for the setup, not for the command."""
UPPER = "upper"
"""The upper layer, below a mount's folder for changes (`image.mounting.tree_mounts`)."""
_UNSAFE = "this setup is not snapshot-safe"
_OF_RUNTIME = ("/etc/resolv.conf", "/etc/hosts", "/etc/hostname")
_MAX_LOOKED_AT = 20_000
_CLOCK_S = 0.1
"""Tolerance for file times, which are of the kernel's last tick, or of a server's clock."""


def environment_in_image(
    options: Options,
    environment: EnvironmentOptions,
    command: Sequence[str],
    request: Request,
    container: ContainerOptions,
    env: dict[str, str],
    own_env: Mapping[str, str],
    session: Session | None,
    *,
    own_group: bool,
) -> ImageEnvironment:
    """The environment of a start in an image.

    `env` is the environment of programs on this machine, `own_env` the same without BootSeer's additions.
    """
    cwd = os.getcwd()  # noqa: PTH109 - a name
    found = setup_variables(container.process.env, own_env, environment.variables)
    binds = container.binds
    try:  # the user's mounts that the setup mentions
        binds = mounts_of_setup(options.setup, options.requirements, cwd, found, binds, environment.inputs)
    except Exception as error:  # an error of BootSeer must not fail the job
        say(f"the setup could not be read: {error}")
    environment = replace(environment, place=container_path(cwd, reversed(container.binds)))
    make = partial(
        Task,
        options.setup,
        options.requirements,
        env=env,
        own_env=found,
        session=session,
        own_group=own_group,
        show=options.show,
    )
    try:
        task = make(options=replace(environment, inputs=(*environment.inputs, *(bind.source for bind in binds))))
    except BootseerError as error:
        if environment.mode == "require":
            raise
        say(f"no snapshot of the environment: {error}")
        elsewhere = containers_folder(cache_root(os.environ, os.getuid()))
        task = make(options=replace(environment, mode="bypass", cache=elsewhere))
    return ImageEnvironment(EnvironmentStart(task, command), request, container)


class ImageEnvironment:
    """The environment of one start in an image."""

    def __init__(self, start: EnvironmentStart, request: Request, options: ContainerOptions) -> None:
        self.start = start
        self._request = request
        self._options = options
        self._key: RequestKey | None = None
        self._decision: Decision | None = None
        task = start.task
        files = [path for path in (task.setup, *task.requirements) if path is not None]
        self._places = setup_paths(task.cwd, files, options.binds)
        self._exports: tuple[Export, ...] = ()

    def layers(self) -> tuple[Path, ...]:
        """The layers to mount on top of the image. Raises `UsageError` if a snapshot is required and there is none."""
        task = self.start.task
        began_s = time.monotonic()
        with task.stage() as facts:
            key, decision = self.start.restore(self._base)
            facts["code"] = decision.code
            decision.check()
        self.start.seconds = time.monotonic() - began_s
        self._key, self._decision = key, decision
        prepared = self.start.prepared
        return () if prepared is None or prepared.layer is None else (prepared.layer.path,)

    def _base(self) -> Base:
        """The image, for the key; called in a child process."""
        from bootseer.launch.environment.lookup_process import base_of_image

        return base_of_image(self._request)

    def mount(self, mount: Mount, writable: Path, above: Sequence[Path]) -> MountedImage:
        """Mount the image, with the snapshot on top if possible. Raises `UsageError` as `layers` does."""
        prepared = self.start.prepared
        if prepared is not None and above:
            try:
                return mount(writable, above, False)
            except (BootseerError, OSError) as error:
                self.start.prepared = None
                prepared.undo.close()
                self._decision = fall_back(prepared.decision, "cannot-mount", str(error))
                self._decision.check()
        return mount(writable, (), True)

    def with_exports(self, words: ProcessOptions, mounted: MountedImage, env: Mapping[str, str]) -> ProcessOptions:
        """The command's words, with the setup's exports."""
        prepared = self.start.prepared
        document = prepared.decision.document if prepared is not None else None
        left = document.exports if document is not None else self._exports
        if not left:
            return words
        after = exports.apply(left, process_of(mounted.config, words, mounted.root, env).env)
        names = dict.fromkeys(export.name for export in left)
        changed = (f"{name}={after[name]}" for name in names if name in after)
        return replace(words, env=(*words.env, *changed), unset=tuple(name for name in names if name not in after))

    def set_up(self, mounted: MountedImage, env: dict[str, str], mount: Mount) -> tuple[int, MountedImage]:
        """Run the setup in the mounted image, unless a snapshot is mounted; its exit code, and the image for the
        command.

        Signals must be blocked.
        """
        start, decision, key = self.start, self._decision, self._key
        if start.prepared is not None or decision is None:
            return 0, mounted
        began_s = time.monotonic()
        building = decision.action is Action.BUILD and key is not None
        say(f"the environment is set up {'now' if building else 'without a snapshot'}: {decision.reason}")
        host = ImageSetupHost(start.task, mounted, self._options, self._places, start.task.folder.path, env)
        try:
            with start.task.stage() as facts:
                done = SetupRun(host).run()
                self._exports = done.exports
                if done.code:
                    facts["error"] = f"exit code {done.code}"
                    say_failed(done.what, done.code)
                    return done.code, mounted
                start.prepared = PreparedEnvironment("installed", decision, dict(start.task.env))
                upper_layer = UpperLayer(start, host, mount, decision)
                if building and key is not None:
                    return 0, upper_layer.publish(done, key)
                return 0, upper_layer.remount()
        finally:
            start.seconds += time.monotonic() - began_s
            start.release_lease()


class UpperLayer:
    """The upper layer of a successful setup in an image: made a layer of its own, and published as a snapshot."""

    def __init__(self, start: EnvironmentStart, host: ImageSetupHost, mount: Mount, decision: Decision) -> None:
        self._start = start
        self._task = start.task
        self._host = host
        self._mount = mount
        self._decision = decision
        self._root = host.mounted.root
        self._writable = self._root.parent
        self._left_out = LeftOut(Exclusions())

    def publish(self, done: SetupResult, key: RequestKey) -> MountedImage:
        """Start to publish the layer as a snapshot, if possible; returns the image for the command in any case."""
        task = self._task
        try:
            reasons = [*done.reasons, *self._writes_into_mounts(done)]
            if reasons:
                report_outcome(task, False, f"{_UNSAFE}: {'; '.join(reasons)}")
                return self.remount()
            with interruptible(), task.stage("capture") as facts:
                layer = self._move_to_layer()
                changes = self._changes(layer)
                facts.update(changes=len(changes), way="container")
            if reasons := self._in_scratch(layer, changes, done):
                report_outcome(task, False, f"{_UNSAFE}: {'; '.join(reasons)}")
            else:
                self._start_publishing(done, changes, key)
        except Exception as error:  # an error of BootSeer must not fail the job
            self._check_mounted(error)
            report_outcome(task, False, _in_words(error))
        return self._host.mounted

    def remount(self) -> MountedImage:
        """Remount the image for the command, with the setup's changes, without a snapshot."""
        try:
            if (self._writable / UPPER).is_dir():
                with interruptible():
                    kernel.unmount(self._root)
                    self._remount(())
        except Exception as error:  # it may be busy: then the command runs in the setup's mount
            self._check_mounted(error)
        return self._host.mounted

    def _check_mounted(self, error: Exception) -> None:
        """Raises `PermanentError` if the image is no longer mounted."""
        if not kernel.is_mount(self._root):
            raise PermanentError(f"the image cannot be mounted again: {_in_words(error)}") from error

    def _move_to_layer(self) -> Path:
        """Make the upper layer a layer of its own, and remount the image with an empty upper layer.

        If that fails, the image is remounted as it was.
        """
        upper, layer = self._writable / UPPER, self._task.folder.path / "layer"
        if not upper.is_dir():
            raise PermanentError("without an overlay the setup's changes in the image are not known")
        kernel.unmount(self._root)
        try:
            upper.rename(layer)
        except OSError:
            self._remount(())
            raise
        try:
            self._remount((layer,))
        except Exception:
            shutil.rmtree(self._writable, ignore_errors=True)
            self._writable.mkdir(mode=0o700, exist_ok=True)
            layer.rename(upper)
            self._remount(())
            raise
        return layer

    def _remount(self, above: Sequence[Path]) -> None:
        """Remount the image. The folder for changes is moved aside meanwhile, as closing the old mount deletes it."""
        writable = self._writable
        aside = writable.with_name(f"{writable.name}-aside")
        if writable.exists():
            writable.rename(aside)
        try:
            self._host.mounted.close()
        except (BootseerError, OSError) as error:
            say(f"the image was not unmounted: {error}")
        if aside.exists():
            shutil.rmtree(writable, ignore_errors=True)
            aside.rename(writable)
        self._host.mounted = self._mount(writable, above, False)

    def _changes(self, layer: Path) -> Sequence[Change]:
        env, options = self._host.env, self._task.options
        exclusions = Exclusions(
            homes=["/root", env.get("HOME", "")],
            caches=caches_of(env),
            credentials=credentials_of(env),
            leave_out=options.leave_out,
            keep=options.keep,
        )
        mounted = {bind.target.rstrip("/") for bind in self._host.places.shown} | set(_OF_RUNTIME)
        changes, self._left_out = container_changes(layer, exclusions=exclusions, mounted=mounted)
        for line in self._left_out.warnings:
            say(line)
        return changes

    def _in_scratch(self, layer: Path, changes: Sequence[Change], done: SetupResult) -> list[str]:
        """Files that the setup left in the container's scratch folders and the command needs, as messages."""
        files = [
            f"/{Path(folder, name).relative_to(layer)}"
            for scratch in SCRATCH
            for folder, _, names in os.walk(layer / scratch.lstrip("/"))
            for name in names
        ]
        used = [*self._start.command, *(export.value for export in done.exports), *mentions(changes)]
        return left_in_scratch(files, used)

    def _writes_into_mounts(self, done: SetupResult) -> Iterator[str]:
        """Writes of the setup into mounts, which stay on this machine and are in no snapshot, as messages."""
        task = self._task
        for bind in self._host.places.shown:
            if not bind.read_only and (bind.source in task.options.inputs or is_below(task.cwd, bind.source)):
                path = _changed_since(bind, done.began_s - _CLOCK_S)
                if path:
                    yield f"it wrote {path}, in a mount, which is not captured"

    def _start_publishing(self, done: SetupResult, changes: Sequence[Change], key: RequestKey) -> None:
        task, prepared = self._task, self._start.prepared
        reads = self._host.reads()
        trust, unknown = trust_of(reads, unaccounted(reads.paths, key.accounted, (), host=False))
        if prepared is not None:
            prepared.mode = "captured"
            prepared.facts.update(key=key.digest, builder=task.node, trust=trust, way="container")
        publication = Publication(
            key=key,
            decision=self._decision,
            changes=changes,
            root=self._root,
            division=None,
            done=done,
            trust=trust,
            unaccounted=unknown,
            left_out=self._left_out,
            daemons=(),
            validate=partial(self._host.problems, done),
        )
        self._start.publishing = start_publishing(task, publication)


def _changed_since(bind: Bind, since_s: float) -> str:
    """The first file below a mount that has changed since then; empty if there is none among the first thousands."""
    num_looked_at = 0
    for folder, folders, files in os.walk(bind.source):
        for name in (*files, ""):
            path = Path(folder, name)
            num_looked_at += 1
            try:
                if path.lstat().st_ctime >= since_s:
                    return str(path)
            except OSError:
                continue
        if num_looked_at > _MAX_LOOKED_AT:
            folders.clear()
    return ""


def _in_words(error: BaseException) -> str:
    """An error as text; exceptions that are no `BootseerError` are named as errors of BootSeer."""
    known = isinstance(error, BootseerError)
    return str(error) if known else f"{REASONS['failed']}: {type(error).__name__}: {error}"

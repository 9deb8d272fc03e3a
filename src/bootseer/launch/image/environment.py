"""`bootseer run --image --setup`, `--requirements`: the setup runs in the container, once; later its layer lies on top.

Before the image is mounted, the store is asked (`before`): the snapshot's tree becomes one more layer of the image.
Without one, the setup runs in containers of the image: what it wrote is the upper layer, which then becomes a layer
below the command's container, in the snapshot's place, and is kept beside it. The image is mounted again for the
command whatever becomes of the snapshot: what the setup read is not a hot set of the command's.

Whatever goes wrong with snapshots, the setup runs in the mounted image, and the command runs on what it did.
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
from bootseer.env.life.decide import REASONS, Action, Decision, fell_back
from bootseer.errors import BootseerError, PermanentError
from bootseer.image.containers.container import Options as ContainerOptions
from bootseer.image.containers.process import ProcessOptions, process_of
from bootseer.image.containers.runtime_config import Bind
from bootseer.image.mounting.mounted import MountedImage
from bootseer.image.mounting.request import Request
from bootseer.launch.command import Options
from bootseer.launch.environment.capture import trust_of
from bootseer.launch.environment.plain import say_failed
from bootseer.launch.environment.publish import Publication, start_publishing, tell
from bootseer.launch.environment.setup import SetupResult, SetupRun
from bootseer.launch.environment.start import EnvironmentStart
from bootseer.launch.environment.task import EnvironmentWanted, Task
from bootseer.launch.environment.view import Shown
from bootseer.launch.image.setup import InImage, is_below, named_mounts, place_of, places_of, variables_of
from bootseer.launch.interrupt import interruptible
from bootseer.launch.session import Session
from bootseer.launch.supervise import say
from bootseer.mounts import kernel

Mount = Callable[[Path, Sequence[Path], bool], MountedImage]
"""Mount the image with this folder for changes and these layers on top: for the setup, or for the command."""
UPPER = "upper"
"""Where below a mount's folder for changes they are (`image.mounting.tree_mounts`)."""
_UNSAFE = "this setup is not snapshot-safe"
_OF_RUNTIME = ("/etc/resolv.conf", "/etc/hosts", "/etc/hostname")
_MAX_LOOKED_AT = 20_000
_CLOCK_S = 0.1
"""A file's time is that of the kernel's last tick, and of a server's own clock."""


def environment_in_image(
    options: Options,
    wanted: EnvironmentWanted,
    command: Sequence[str],
    request: Request,
    container: ContainerOptions,
    env: dict[str, str],
    own_env: Mapping[str, str],
    session: Session | None,
    *,
    own_group: bool,
) -> ImageEnvironment:
    """A setup that is to be run in the image, or its snapshot to be laid on top.

    `env` is what programs here get, `own_env` the same without what we add.
    """
    cwd = os.getcwd()  # noqa: PTH109 - a name
    found = variables_of(container.process.env, own_env, wanted.variables)
    binds = container.binds
    try:  # what the user mounts and the setup names
        binds = named_mounts(options.setup, options.requirements, cwd, found, binds, wanted.inputs)
    except Exception as error:  # whatever is wrong with us, the container starts
        say(f"the setup could not be read: {error}")
    wanted = replace(wanted, place=place_of(cwd, reversed(container.binds)))
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
        task = make(wanted=replace(wanted, inputs=(*wanted.inputs, *(bind.source for bind in binds))))
    except BootseerError as error:
        if wanted.mode == "require":
            raise
        say(f"no snapshot of the environment: {error}")
        elsewhere = containers_folder(cache_root(os.environ, os.getuid()))
        task = make(wanted=replace(wanted, mode="bypass", cache=elsewhere))
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
        self._places = places_of(task.cwd, files, options.binds)
        self._left: tuple[Export, ...] = ()

    def before(self) -> tuple[Path, ...]:
        """The layers to lay on top of the image. Raises `UsageError` where a snapshot is required and there is none."""
        task = self.start.task
        began_s = time.monotonic()
        with task.stage() as facts:
            key, decision = self.start.bring(self._base)
            facts["code"] = decision.code
            decision.check()
        self.start.seconds = time.monotonic() - began_s
        self._key, self._decision = key, decision
        shown = self.start.shown
        return () if shown is None or shown.layer is None else (shown.layer.path,)

    def _base(self) -> Base:
        """The image, for the key. In a child."""
        from bootseer.launch.environment.seeker import base_of_image

        return base_of_image(self._request)

    def mount(self, mount: Mount, writable: Path, above: Sequence[Path]) -> MountedImage:
        """Mount the image, with the snapshot on top where that is possible. Raises `UsageError` as `before`."""
        shown = self.start.shown
        if shown is not None and above:
            try:
                return mount(writable, above, False)
            except (BootseerError, OSError) as error:
                self.start.shown = None
                shown.undo.close()
                self._decision = fell_back(shown.decision, "cannot-mount", str(error))
                self._decision.check()
        return mount(writable, (), True)

    def with_exports(self, words: ProcessOptions, mounted: MountedImage, env: Mapping[str, str]) -> ProcessOptions:
        """The command's words, with what the setup left in its environment."""
        shown = self.start.shown
        document = shown.decision.document if shown is not None else None
        left = document.exports if document is not None else self._left
        if not left:
            return words
        after = exports.apply(left, process_of(mounted.config, words, mounted.root, env).env)
        names = dict.fromkeys(export.name for export in left)
        changed = (f"{name}={after[name]}" for name in names if name in after)
        return replace(words, env=(*words.env, *changed), unset=tuple(name for name in names if name not in after))

    def set_up(self, mounted: MountedImage, env: dict[str, str], mount: Mount) -> tuple[int, MountedImage]:
        """Run the setup in the mounted image, if that is still to be done; its exit code, and the image to go on with.

        Signals must be blocked.
        """
        start, decision, key = self.start, self._decision, self._key
        if start.shown is not None or decision is None:
            return 0, mounted
        began_s = time.monotonic()
        building = decision.action is Action.BUILD and key is not None
        say(f"the environment is set up {'now' if building else 'without a snapshot'}: {decision.words}")
        machine = InImage(start.task, mounted, self._options, self._places, start.task.folder.path, env)
        try:
            with start.task.stage() as facts:
                done = SetupRun(machine).run()
                self._left = done.exports
                if done.code:
                    facts["error"] = f"exit code {done.code}"
                    say_failed(done.what, done.code)
                    return done.code, mounted
                start.shown = Shown("installed", decision, dict(start.task.env))
                keeping = Keeping(start, machine, mount, decision)
                if building and key is not None:
                    return 0, keeping.keep(done, key)
                return 0, keeping.go_on()
        finally:
            start.seconds += time.monotonic() - began_s
            start.release()


class Keeping:
    """What follows a setup that ran well in an image: the upper layer becomes a layer of its own, and a snapshot."""

    def __init__(self, start: EnvironmentStart, machine: InImage, mount: Mount, decision: Decision) -> None:
        self._start = start
        self._task = start.task
        self._machine = machine
        self._mount = mount
        self._decision = decision
        self._root = machine.mounted.root
        self._writable = self._root.parent
        self._left_out = LeftOut(Exclusions())

    def keep(self, done: SetupResult, key: RequestKey) -> MountedImage:
        """The image for the command to run in, whatever becomes of the snapshot."""
        task = self._task
        try:
            reasons = [*done.reasons, *self._written(done)]
            if reasons:
                tell(task, False, f"{_UNSAFE}: {'; '.join(reasons)}")
                return self.go_on()
            with interruptible(), task.stage("capture") as facts:
                layer = self._moved()
                changes = self._changes(layer)
                facts.update(changes=len(changes), way="container")
            if reasons := self._in_scratch(layer, changes, done):
                tell(task, False, f"{_UNSAFE}: {'; '.join(reasons)}")
            else:
                self._publish(done, changes, key)
        except Exception as error:  # whatever is wrong with us, the command starts
            self._check(error)
            tell(task, False, _in_words(error))
        return self._machine.mounted

    def go_on(self) -> MountedImage:
        """The image for the command to run in, on what the setup wrote, without a snapshot."""
        try:
            if (self._writable / UPPER).is_dir():
                with interruptible():
                    kernel.unmount(self._root)
                    self._again(())
        except Exception as error:  # it may be in use: then the command runs where the setup did
            self._check(error)
        return self._machine.mounted

    def _check(self, error: Exception) -> None:
        """Raises `PermanentError` when nothing is mounted any more."""
        if not kernel.is_mount(self._root):
            raise PermanentError(f"the image cannot be mounted again: {_in_words(error)}") from error

    def _moved(self) -> Path:
        """Take the upper layer for a layer of its own, and mount the image again with an empty one above it.

        When that fails, the image is mounted as it was before.
        """
        upper, layer = self._writable / UPPER, self._task.folder.path / "layer"
        if not upper.is_dir():
            raise PermanentError("without an overlay it is not known what the setup changed in the image")
        kernel.unmount(self._root)
        try:
            upper.rename(layer)
        except OSError:
            self._again(())
            raise
        try:
            self._again((layer,))
        except Exception:
            shutil.rmtree(self._writable, ignore_errors=True)
            self._writable.mkdir(mode=0o700, exist_ok=True)
            layer.rename(upper)
            self._again(())
            raise
        return layer

    def _again(self, above: Sequence[Path]) -> None:
        """Mount again. What is in the folder for changes stays, though the old mount takes its folder along."""
        writable = self._writable
        aside = writable.with_name(f"{writable.name}-aside")
        if writable.exists():
            writable.rename(aside)
        try:
            self._machine.mounted.close()
        except (BootseerError, OSError) as error:
            say(f"the image was not unmounted: {error}")
        if aside.exists():
            shutil.rmtree(writable, ignore_errors=True)
            aside.rename(writable)
        self._machine.mounted = self._mount(writable, above, False)

    def _changes(self, layer: Path) -> Sequence[Change]:
        env, wanted = self._machine.env, self._task.wanted
        exclusions = Exclusions(
            homes=["/root", env.get("HOME", "")],
            caches=caches_of(env),
            credentials=credentials_of(env),
            leave_out=wanted.leave_out,
            keep=wanted.keep,
        )
        mounted = {bind.target.rstrip("/") for bind in self._machine.places.shown} | set(_OF_RUNTIME)
        changes, self._left_out = container_changes(layer, exclusions=exclusions, mounted=mounted)
        for line in self._left_out.missed:
            say(line)
        return changes

    def _in_scratch(self, layer: Path, changes: Sequence[Change], done: SetupResult) -> list[str]:
        """What the setup left in the container's `/tmp`, where no snapshot keeps it, and the command needs."""
        files = [
            f"/{Path(folder, name).relative_to(layer)}"
            for scratch in SCRATCH
            for folder, _, names in os.walk(layer / scratch.lstrip("/"))
            for name in names
        ]
        used = [*self._start.command, *(export.value for export in done.exports), *mentions(changes)]
        return left_in_scratch(files, used)

    def _written(self, done: SetupResult) -> Iterator[str]:
        """What the setup wrote into mounts: it stays on this machine, and no snapshot has it."""
        task = self._task
        for bind in self._machine.places.shown:
            if not bind.read_only and (bind.source in task.wanted.inputs or is_below(task.cwd, bind.source)):
                path = _changed_since(bind, done.began_s - _CLOCK_S)
                if path:
                    yield f"it wrote {path}, in a mount, which is not kept"

    def _publish(self, done: SetupResult, changes: Sequence[Change], key: RequestKey) -> None:
        task, shown = self._task, self._start.shown
        reads = self._machine.reads()
        trust, unknown = trust_of(reads, unaccounted(reads.paths, key.accounted, (), host=False))
        if shown is not None:
            shown.mode = "captured"
            shown.facts.update(key=key.digest, builder=task.node, trust=trust, way="container")
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
            validate=partial(self._machine.problems, done),
        )
        self._start.publishing = start_publishing(task, publication)


def _changed_since(bind: Bind, since_s: float) -> str:
    """The first file below a mount that was changed since then; empty if there is none among the first thousands."""
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
    """An error for people: ours as it is, any other as one of BootSeer."""
    known = isinstance(error, BootseerError)
    return str(error) if known else f"{REASONS['failed']}: {type(error).__name__}: {error}"

"""Keep what a setup wrote in an image: the container's upper layer becomes a layer below the command's, and a snapshot.

The image is mounted again for the command, on what the setup wrote, whatever becomes of the snapshot: what the setup
read is no hot set of the command's. Called by `image_environment`.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from bootseer.env.capturing import exports
from bootseer.env.capturing.capture import container_changes
from bootseer.env.capturing.exclude import Exclusions, caches_of, credentials_of
from bootseer.env.capturing.leftovers import SCRATCH, left_in_scratch
from bootseer.env.capturing.mentions import mentions
from bootseer.env.capturing.unaccounted import unaccounted
from bootseer.env.capturing.walk import LeftOut
from bootseer.env.changes import Change
from bootseer.env.document import Export
from bootseer.env.keys.key import RequestKey
from bootseer.env.life.decide import REASONS, Action, Decision, fell_back
from bootseer.errors import BootseerError, PermanentError
from bootseer.image.containers.container import Options as ContainerOptions
from bootseer.image.containers.process import Words, process_of
from bootseer.image.containers.runtime_config import Bind
from bootseer.image.mounting.mounted import MountedImage
from bootseer.image.mounting.request import Request
from bootseer.launch.environment.capture import trust_of
from bootseer.launch.environment.publish import Publication, start_publishing, tell
from bootseer.launch.environment.seek import base_of_image
from bootseer.launch.environment.setup import SetUp, say_failed
from bootseer.launch.environment.start import EnvironmentStart
from bootseer.launch.environment.view import Shown
from bootseer.launch.image.setup import ImageSetUp, Places, is_below, places_of
from bootseer.launch.interrupt import interruptible
from bootseer.launch.supervise import say
from bootseer.mounts import kernel


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
            key, decision = self.start.bring(lambda: base_of_image(self._request))
            facts["code"] = decision.code
            decision.check()
        self.start.seconds = time.monotonic() - began_s
        self._key, self._decision = key, decision
        shown = self.start.shown
        return () if shown is None or shown.layer is None else (shown.layer.path,)

    def mount(self, mount: Mount, writable: Path, above: Sequence[Path]) -> MountedImage:
        """Mount the image, with the snapshot on top where that is possible. Raises `UsageError` as `before`."""
        shown = self.start.shown
        if shown is not None and above:
            try:
                return mount(writable, above)
            except (BootseerError, OSError) as error:
                self.start.shown = None
                shown.undo.close()
                self._decision = fell_back(shown.decision, "cannot-mount", str(error))
                self._decision.check()
        return mount(writable, (), setup=True)

    @property
    def exports(self) -> tuple[Export, ...]:
        """What the setup left in its environment."""
        shown = self.start.shown
        document = shown.decision.document if shown is not None else None
        return document.exports if document is not None else self._left

    def with_exports(self, words: Words, mounted: MountedImage, env: Mapping[str, str]) -> Words:
        """The command's words, with what the setup left in its environment."""
        left = self.exports
        if not left:
            return words
        found = process_of(mounted.config, words, mounted.root, env).env
        after = exports.apply(left, found)
        names = dict.fromkeys(export.name for export in left)
        changed = (f"{name}={after[name]}" for name in names if name in after)
        return replace(words, env=(*words.env, *changed), unset=tuple(name for name in names if name not in after))

    def set_up(self, mounted: MountedImage, env: dict[str, str], mount: Mount) -> tuple[int, MountedImage]:
        """Run the setup in the mounted image, if that is still to be done; its exit code, and the image to go on with.

        Signals must be blocked.
        """
        start, decision = self.start, self._decision
        if start.shown is not None or decision is None:
            return 0, mounted
        began_s = time.monotonic()
        building = decision.action is Action.BUILD and self._key is not None
        say(f"the environment is set up {'now' if building else 'without a snapshot'}: {decision.words}")
        setup = ImageSetUp(start.task, mounted, self._options, self._places, start.task.folder.path, env)
        try:
            with start.task.stage() as facts:
                done = setup.run()
                self._left = done.exports
                if done.code:
                    facts["error"] = f"exit code {done.code}"
                    say_failed(done)
                    return done.code, mounted
                start.shown = Shown("installed", decision, dict(start.task.env))
                keeping = Keeping(start, setup, mounted, mount, decision)
                if decision.action is Action.BUILD and self._key is not None:
                    return 0, keeping.keep(done, self._key)
                return 0, keeping.go_on()
        finally:
            start.seconds += time.monotonic() - began_s
            start.release()


UPPER = "upper"
"""Where below a mount's folder for changes they are (`image.mounting.show`)."""
_UNSAFE = "this setup is not snapshot-safe"
_OF_RUNTIME = ("/etc/resolv.conf", "/etc/hosts", "/etc/hostname")
_MAX_LOOKED_AT = 20_000
_CLOCK_S = 0.1
"""A file's time is that of the kernel's last tick, and of a server's own clock."""


class Mount(Protocol):
    """Mount the image with this folder for changes, and these layers on top: for the setup, or for the command."""

    def __call__(self, writable: Path, above: Sequence[Path], *, setup: bool = False) -> MountedImage:
        """The mounted image. Raises `BootseerError`."""


class Keeping:
    """What follows a setup that ran well in a mounted image."""

    def __init__(
        self,
        start: EnvironmentStart,
        setup: ImageSetUp,
        mounted: MountedImage,
        mount: Mount,
        decision: Decision,
    ) -> None:
        self._start = start
        self._task = start.task
        self._setup = setup
        self._mounted = mounted
        self._mount = mount
        self._decision = decision
        self._left_out = LeftOut(Exclusions())

    def keep(self, done: SetUp, key: RequestKey) -> MountedImage:
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
            tell(task, False, in_words(error))
        return self._mounted

    def go_on(self) -> MountedImage:
        """The image for the command to run in, on what the setup wrote, without a snapshot."""
        writable = self._mounted.root.parent
        try:
            if (writable / UPPER).is_dir():
                with interruptible():
                    kernel.unmount(self._mounted.root)
                    self._again(writable, ())
        except Exception as error:  # it may be in use: then the command runs where the setup did
            self._check(error)
        return self._mounted

    def _check(self, error: Exception) -> None:
        """Raises `PermanentError` when nothing is mounted any more."""
        if not kernel.is_mount(self._mounted.root):
            raise PermanentError(f"the image cannot be mounted again: {in_words(error)}") from error

    def _moved(self) -> Path:
        """Take the upper layer for a layer of its own, and mount the image again with an empty one above it.

        When that fails, the image is mounted as it was before.
        """
        writable = self._mounted.root.parent
        layer = self._task.folder.path / "layer"
        if not (writable / UPPER).is_dir():
            raise PermanentError("without an overlay it is not known what the setup changed in the image")
        kernel.unmount(self._mounted.root)
        try:
            (writable / UPPER).rename(layer)
        except OSError:
            self._again(writable, ())
            raise
        try:
            self._again(writable, (layer,))
        except Exception:
            shutil.rmtree(writable, ignore_errors=True)
            writable.mkdir(mode=0o700, exist_ok=True)
            layer.rename(writable / UPPER)
            self._again(writable, ())
            raise
        return layer

    def _again(self, writable: Path, above: Sequence[Path]) -> None:
        """Mount again. What is in `writable` stays, though the old mount takes its folder along."""
        aside = writable.with_name(f"{writable.name}-aside")
        if writable.exists():
            writable.rename(aside)
        try:
            self._mounted.close()
        except (BootseerError, OSError) as error:
            say(f"the image was not unmounted: {error}")
        if aside.exists():
            shutil.rmtree(writable, ignore_errors=True)
            aside.rename(writable)
        self._mounted = self._mount(writable, above)

    def _changes(self, layer: Path) -> Sequence[Change]:
        found_env = self._setup.found_env
        exclusions = Exclusions(
            homes=["/root", found_env.get("HOME", "")],
            caches=caches_of(found_env),
            credentials=credentials_of(found_env),
            leave_out=self._task.wanted.leave_out,
            keep=self._task.wanted.keep,
        )
        changes, self._left_out = container_changes(layer, exclusions=exclusions)
        for line in self._left_out.missed:
            say(line)
        # The runtime makes the places of mounts, where the image has none.
        places = {bind.target.rstrip("/") for bind in self._places.shown} | set(_OF_RUNTIME)
        return [change for change in changes if change.path not in places]

    @property
    def _places(self) -> Places:
        return self._setup.places

    def _in_scratch(self, layer: Path, changes: Sequence[Change], done: SetUp) -> list[str]:
        """What the setup left in the container's `/tmp`, where no snapshot keeps it, and the command needs."""
        files = [
            f"/{Path(folder, name).relative_to(layer)}"
            for scratch in SCRATCH
            for folder, _, names in os.walk(layer / scratch.lstrip("/"))
            for name in names
        ]
        used = [*self._start.command, *(export.value for export in done.exports), *mentions(changes)]
        return left_in_scratch(files, used)

    def _written(self, done: SetUp) -> Iterator[str]:
        """What the setup wrote into mounts: it stays on this machine, and no snapshot has it."""
        task = self._task
        for bind in self._places.shown:
            if not bind.read_only and (bind.source in task.wanted.inputs or is_below(task.cwd, bind.source)):
                path = _changed_since(bind, done.began_s - _CLOCK_S)
                if path:
                    yield f"it wrote {path}, in a mount, which is not kept"

    def _publish(self, done: SetUp, changes: Sequence[Change], key: RequestKey) -> None:
        task, shown = self._task, self._start.shown
        self._setup.mounted = self._mounted
        reads = self._setup.reads()
        trust, unknown = trust_of(reads, unaccounted(reads.paths, key.accounted, (), host=False))
        if shown is not None:
            shown.mode = "captured"
            shown.facts.update(key=key.digest, builder=task.node, trust=trust, way="container")
        publication = Publication(
            key=key,
            decision=self._decision,
            changes=changes,
            root=self._mounted.root,
            division=None,
            done=done,
            trust=trust,
            unaccounted=unknown,
            left_out=self._left_out,
            validate=partial(self._setup.problems, done),
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


def in_words(error: BaseException) -> str:
    """An error for people: ours as it is, any other as one of BootSeer."""
    known = isinstance(error, BootseerError)
    return str(error) if known else f"{REASONS['failed']}: {type(error).__name__}: {error}"

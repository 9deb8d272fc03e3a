"""Keep what a setup wrote in an image: the container's upper layer becomes a layer below the command's, and a snapshot.

The image is mounted again for the command, on what the setup wrote, whatever becomes of the snapshot: what the setup
read is no hot set of the command's. Called by `image_environment`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from bootseer.env.capturing.capture import container_changes
from bootseer.env.capturing.exclude import Exclusions, caches_of, credentials_of
from bootseer.env.capturing.leftovers import SCRATCH, left_in_scratch
from bootseer.env.capturing.mentions import mentions
from bootseer.env.capturing.unaccounted import unaccounted
from bootseer.env.capturing.walk import LeftOut
from bootseer.env.changes import Change
from bootseer.env.keys.key import RequestKey
from bootseer.env.life.decide import REASONS, Decision
from bootseer.errors import BootseerError, PermanentError
from bootseer.image.containers.runtime_config import Bind
from bootseer.image.mounting.mounted import MountedImage
from bootseer.launch import environment_judge as judge
from bootseer.launch.environment_install import SetUp
from bootseer.launch.environment_publish import Publication, start_publishing, tell
from bootseer.launch.environment_stage import EnvironmentStart
from bootseer.launch.image_ask import is_below
from bootseer.launch.image_setup import ImageSetUp, Places
from bootseer.launch.interrupt import interruptible
from bootseer.launch.supervise import say
from bootseer.mounts import kernel

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
        trust, unknown = judge.trust(reads, unaccounted(reads.paths, key.accounted, (), host=False))
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

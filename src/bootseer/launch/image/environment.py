"""`bootseer run --image --setup`, `--requirements`: the setup runs in the container once; later its layer is mounted.

While the image is mounted and its hot blocks are fetched, the environment is looked up (`layers`): a snapshot's tree
becomes one more layer of the image. Without a snapshot the image is mounted again for the setup, which has a hot set of
its own and runs in containers. The upper layer with its changes then becomes a layer below the command's container, as
a snapshot would be, and is published beside the command, for which the image is mounted once more.

If anything is wrong with snapshots, the setup runs in the mounted image, and the command runs on its changes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from bootseer.artifact.places import cache_root, containers_folder
from bootseer.env.document import Export, apply_exports
from bootseer.env.life.decide import Action, Decision, fall_back
from bootseer.errors import BootseerError
from bootseer.image.containers.container import Options as ContainerOptions
from bootseer.image.containers.process import ProcessOptions, process_of
from bootseer.image.mounting.mounted import MountedImage
from bootseer.launch.command import Options
from bootseer.launch.environment.start import EnvironmentStart
from bootseer.launch.environment.task import EnvironmentOptions, Task
from bootseer.launch.image.setup_paths import container_path, mounts_of_setup, setup_paths, setup_variables
from bootseer.launch.session import Session
from bootseer.launch.supervise import say

if TYPE_CHECKING:
    from bootseer.env.keys.key import RequestKey
    from bootseer.image.mounting.mount import LayersAbove
    from bootseer.launch.image.setup import Mount


def environment_in_image(
    options: Options,
    environment: EnvironmentOptions,
    command: Sequence[str],
    container: ContainerOptions,
    env: dict[str, str],
    own_env: Mapping[str, str],
    session: Session,
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
        Task, options.setup, options.requirements, env=env, own_env=found, session=session, show=options.show
    )
    try:
        task = make(options=replace(environment, inputs=(*environment.inputs, *(bind.source for bind in binds))))
    except BootseerError as error:
        if environment.mode == "require":
            raise
        say(f"no snapshot of the environment: {error}")
        elsewhere = containers_folder(cache_root())
        task = make(options=replace(environment, mode="bypass", cache=elsewhere))
    return ImageEnvironment(EnvironmentStart(task, command), container)


class _NoSnapshotError(Exception):
    """The image must be mounted for the setup."""


class ImageEnvironment:
    """The environment of one start in an image."""

    def __init__(self, start: EnvironmentStart, options: ContainerOptions) -> None:
        self.start = start
        self._options = options
        self._key: RequestKey | None = None
        self._decision: Decision | None = None
        task = start.task
        files = [path for path in (task.setup, *task.requirements) if path is not None]
        self._places = setup_paths(task.cwd, files, options.binds)
        self._exports: tuple[Export, ...] = ()

    def layers(self, digest: str) -> Sequence[Path]:
        """The snapshot's layer, to mount on top of the image of this digest. Raises `_NoSnapshotError` if there is
        none, and `UsageError` if one is required."""
        task = self.start.task
        began_s = time.monotonic()
        try:
            with task.stage() as facts:
                self._key, self._decision = self.start.restore(digest)
                facts["code"] = self._decision.code
                self._decision.check()
        finally:
            self.start.seconds = time.monotonic() - began_s
        prepared = self.start.prepared
        if prepared is None or prepared.layer is None:
            raise _NoSnapshotError
        return [prepared.layer.path]

    def mount(self, mount: Mount, writable: Path, layers: LayersAbove) -> MountedImage:
        """Mount the image, with the snapshot on top if possible; `layers` calls the method of this name.

        Raises `UsageError` if a snapshot is required and there is none.
        """
        with suppress(_NoSnapshotError):
            try:
                return mount(writable, layers, False)
            except (BootseerError, OSError) as error:
                prepared, self.start.prepared = self.start.prepared, None
                if prepared is None:
                    raise
                prepared.undo.close()
                self._decision = fall_back(prepared.decision, "cannot-mount", str(error))
                self._decision.check()
        return mount(writable, lambda digest: (), True)

    def with_exports(self, words: ProcessOptions, mounted: MountedImage, env: Mapping[str, str]) -> ProcessOptions:
        """The command's words, with the setup's exports."""
        prepared = self.start.prepared
        document = prepared.decision.document if prepared is not None else None
        left = document.exports if document is not None else self._exports
        if not left:
            return words
        after = apply_exports(left, process_of(mounted.config, words, mounted.root, env).env)
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
        # Imported here: most starts restore a snapshot.
        from bootseer.launch.environment.plain import say_failed
        from bootseer.launch.environment.setup import SetupRun
        from bootseer.launch.environment.view import PreparedEnvironment
        from bootseer.launch.image.setup import ImageSetupHost, UpperLayer

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

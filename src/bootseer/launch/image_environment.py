"""`bootseer run --image --setup`, `--requirements`: the setup runs in the container, once; later its layer lies on top.

Before the image is mounted, the store is asked (`before`): the snapshot's tree becomes one more layer of the image.
Without one, the setup runs in containers of the image (`image_setup`): what it wrote is the upper layer, which then
takes the snapshot's place under the command's container, and is kept beside it.

Whatever goes wrong with snapshots, the setup runs in the mounted image, and the command runs on what it did.
Called by `image_stage`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bootseer.env.capturing import exports
from bootseer.env.document import Export
from bootseer.env.keys.key import RequestKey
from bootseer.env.life.decide import Action, Decision, fell_back
from bootseer.errors import BootseerError
from bootseer.image.containers.container import Options as ContainerOptions
from bootseer.image.containers.process import Words, process_of
from bootseer.image.mounting.mounted import MountedImage
from bootseer.image.mounting.request import Request
from bootseer.launch.environment_ask import base_of_image
from bootseer.launch.environment_install import say_failed
from bootseer.launch.environment_shown import Shown
from bootseer.launch.environment_stage import EnvironmentStart
from bootseer.launch.image_keep import Keeping, Mount
from bootseer.launch.image_setup import ImageSetUp, places_of
from bootseer.launch.supervise import say


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

"""`bootseer run --image --setup`, `--requirements`: the setup runs in the container, once; later its layer lies on top.

Before the image is mounted, the store is asked (`before`): the snapshot's tree becomes one more layer of the image.
Without one, the setup runs in a container of the image (`set_up`): what it wrote is the upper layer, which then takes
the snapshot's place under the command's container, and is kept beside it. Nobody watches what it reads.

    /run/bootseer/setup      the working folder of `bootseer run`, read-only: where setups find their files
    /run/bootseer/script     the setup script's folder, where that lies elsewhere

Called by `image_stage`.
"""

from __future__ import annotations

import os
import posixpath
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bootseer.env.capturing import exports
from bootseer.env.capturing.capture import container_changes
from bootseer.env.document import Export
from bootseer.env.keys.key import RequestKey
from bootseer.env.life.decide import Action, Decision, fell_back
from bootseer.errors import BootseerError
from bootseer.image.containers.container import Container
from bootseer.image.containers.container import Options as ContainerOptions
from bootseer.image.containers.process import Words, process_of
from bootseer.image.containers.runtime_config import Bind
from bootseer.image.mounting.mounted import MountedImage
from bootseer.image.mounting.request import Request
from bootseer.launch import supervise
from bootseer.launch.environment_ask import base_of_image
from bootseer.launch.environment_install import SetUp, say_failed
from bootseer.launch.environment_publish import Publication, start_publishing, tell
from bootseer.launch.environment_restore import restore
from bootseer.launch.environment_shown import NotShown, Shown
from bootseer.launch.environment_stage import EnvironmentStart
from bootseer.launch.interrupt import interruptible
from bootseer.launch.supervise import CannotStart, say
from bootseer.mounts import kernel

_SETUP = "/run/bootseer/setup"
_SCRIPT = "/run/bootseer/script"
_EXPORTS = "/run/bootseer/exports"
_SHELL_PATH = "/usr/local/bin:/usr/bin:/bin"
_PIP = (
    'for p in python3 python; do command -v $p >/dev/null 2>&1 && exec $p -m pip install "$@"; done; '
    'echo "there is no Python in the image" >&2; exit 127'
)
_IMPORT = 'for p in python3 python; do command -v $p >/dev/null 2>&1 && exec $p -c "import $1"; done; exit 127'
_SETTINGS = ("PIP_", "UV_")
UPPER = "upper"
"""Where below a mount's folder for changes they are (`image.mounting.show`)."""

Mount = Callable[[Path, Sequence[Path]], MountedImage]
"""Mount the image with this folder for changes, and these layers on top."""


@dataclass(frozen=True, slots=True)
class _Step:
    name: str
    """Of its stage."""
    file: str
    argv: Sequence[str]
    env: Sequence[str] = ()


class ImageEnvironment:
    """The environment of one start in an image."""

    def __init__(self, start: EnvironmentStart, request: Request, options: ContainerOptions, folder: Path) -> None:
        self.start = start
        self._request = request
        self._options = options
        self._folder = folder
        self._key: RequestKey | None = None
        self._decision: Decision | None = None
        self._binds = self._bound()
        self._left: tuple[Export, ...] = ()
        self._found_env: dict[str, str] = {}
        """What the last step found."""

    def before(self) -> tuple[Path, ...]:
        """The layers to lay on top of the image. Raises `UsageError` where a snapshot is required and there is none."""
        task = self.start.task
        began_s = time.monotonic()
        with task.stage() as facts:
            key, decision = self.start.look(lambda: base_of_image(self._request))
            if decision.action is Action.RESTORE:
                try:
                    with interruptible():
                        self.start.shown = restore(task, decision, self.start.command, on_host=False)
                except NotShown as error:
                    decision = fell_back(decision, error.code, str(error))
            decision.check()
            facts["code"] = decision.code
        self.start.seconds = time.monotonic() - began_s
        self._key, self._decision = key, decision
        shown = self.start.shown
        return () if shown is None or shown.layer is None else (shown.layer.path,)

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
        return replace(words, env=(*words.env, *(f"{name}={after[name]}" for name in names if name in after)))

    def set_up(self, mounted: MountedImage, env: dict[str, str], mount: Mount) -> tuple[int, MountedImage]:
        """Run the setup in the mounted image, if that is still to be done; its exit code, and the image to go on with.

        Signals must be blocked.
        """
        if self.start.shown is not None or self._decision is None:
            return 0, mounted
        began_s = time.monotonic()
        try:
            with self.start.task.stage():
                done = self._run(mounted, env)
                if done.code:
                    say_failed(done)
                    return done.code, mounted
                return 0, self._go_on(done, mounted, mount, env)
        finally:
            self.start.seconds += time.monotonic() - began_s
            self.start.release()

    def _run(self, mounted: MountedImage, env: dict[str, str]) -> SetUp:
        """All steps, until one fails."""
        done = SetUp(began_s=time.time())
        task = self.start.task
        folder = self._folder / "exports"
        folder.mkdir(mode=0o777, exist_ok=True)
        folder.chmod(0o777)  # whoever the image's user is
        steps = self._steps(mounted, folder)
        for step in steps:
            with task.stage(step.name) as facts:
                facts["file"] = step.file
                code = self._in_container(mounted, env, step, folder)
                if code:
                    facts["error"] = f"exit code {code}"
                    return replace(done, code=code, what=step.file)
            if step.name == "script":
                left = exports.read(folder, self._found_env, node_words=[task.node])
                done = replace(done, exports=left.exports, reasons=left.unsafe)
        self._left = done.exports
        return replace(done, ended_s=time.time())

    def _steps(self, mounted: MountedImage, folder: Path) -> list[_Step]:
        task = self.start.task
        found = []
        if task.setup is not None:
            bash = next(
                (f"{place}/bash" for place in _SHELL_PATH.split(":") if _is_there(mounted, f"{place}/bash")), ""
            )
            # Without bash on that path the script is given to sh, and told otherwise how to say what it exports.
            argv, more = exports.command(task.setup, folder, {"PATH": _SHELL_PATH if bash else ""})
            argv = [self._inside(word, folder) for word in argv]
            argv[0] = bash if argv[0].endswith("/bash") else argv[0]
            env = [f"{name}={self._inside(value, folder)}" for name, value in more.items()]
            hook = folder / "hook.bash"
            if hook.exists():
                hook.write_text(
                    hook.read_text(errors="surrogateescape").replace(str(folder), _EXPORTS), errors="surrogateescape"
                )
            found.append(_Step("script", Path(task.setup).name, argv, env))
        if task.requirements:
            files = [word for path in task.requirements for word in ("-r", self._inside(path, folder))]
            what = ", ".join(task.requirements)
            found.append(_Step("install", what, ("/bin/sh", "-c", _PIP, "sh", *files)))
        return found

    def _in_container(self, mounted: MountedImage, env: dict[str, str], step: _Step, folder: Path) -> int:
        """One step; its exit code."""
        task = self.start.task
        passed = [name for name in env if name.startswith(_SETTINGS) or name in task.wanted.variables]
        words = replace(
            self._options.words,
            command=tuple(step.argv),
            entrypoint="",
            workdir=_SETUP,
            env=(*passed, *self._options.words.env, *step.env),
        )
        binds = (*self._binds, Bind(str(folder), _EXPORTS), *self._options.binds)
        options = replace(self._options, words=words, binds=binds)
        container = Container(self._folder / f"setup-{step.name}", mounted.root, mounted.config, options, env)
        self._found_env = dict(container.process.env)
        try:
            container.start_guard([mounted.undo_command()])
            tracer = task.session.tracer if task.session is not None else None
            own = {**os.environ, **(tracer.environment() if tracer is not None else {})}
            pid = supervise.spawn(container.command, own, own_group=task.own_group, stdout=2)
            return supervise.wait(pid, own_group=task.own_group)
        except CannotStart as error:
            say(str(error))
            return error.code
        finally:
            container.close()
            container.dismiss_guard()

    def _go_on(self, done: SetUp, mounted: MountedImage, mount: Mount, env: dict[str, str]) -> MountedImage:
        """What the setup wrote becomes a layer, and is kept; the command gets an upper layer of its own."""
        task, decision, key = self.start.task, self._decision, self._key
        writable = mounted.root.parent
        upper = writable / UPPER
        shown = Shown("installed", decision or Decision(Action.INSTALL, "failed", ""), dict(task.env))
        self.start.shown = shown
        if decision is None or decision.action is not Action.BUILD or key is None or not upper.is_dir():
            if decision is not None:
                say(f"the environment is set up without a snapshot: {decision.words}")
            return mounted
        reasons = [*done.reasons, *self._failed_imports(mounted, env)]
        with interruptible(), task.stage("capture") as facts:
            kernel.unmount(mounted.root)
            layer = upper.rename(self._folder / "layer")
            mounted.close()
            writable.mkdir(mode=0o700, exist_ok=True)  # it went with the mount
            again = mount(writable, [layer])
            changes, left_out = container_changes(layer)
            facts.update(changes=len(changes), way="container")
        for line in left_out.missed:
            say(line)
        shown.mode = "captured"
        shown.facts.update(key=key.digest, builder=task.node, trust="unobserved", way="container")
        if reasons:
            tell(task, False, f"this setup is not snapshot-safe: {'; '.join(reasons)}")
            return again
        publication = Publication(
            key=key,
            decision=decision,
            changes=changes,
            root=again.root,
            division=None,
            done=done,
            trust="unobserved",
            unaccounted=(),
            validate=list,
        )
        try:
            self.start.publishing = start_publishing(task, publication)
        except BootseerError as error:
            tell(task, False, str(error))
        return again

    def _failed_imports(self, mounted: MountedImage, env: dict[str, str]) -> Iterator[str]:
        for module in self.start.task.wanted.imports:
            step = _Step("import", module, ("/bin/sh", "-c", _IMPORT, "sh", module))
            if self._in_container(mounted, env, step, self._folder / "exports"):
                yield f"import {module} fails"

    def _bound(self) -> tuple[Bind, ...]:
        task = self.start.task
        binds = [Bind(task.cwd, _SETUP, read_only=True)]
        if task.setup is not None and not _below(self._absolute(task.setup), task.cwd):
            binds.append(Bind(posixpath.dirname(self._absolute(task.setup)), _SCRIPT, read_only=True))
        return tuple(binds)

    def _absolute(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.start.task.cwd, path))

    def _inside(self, word: str, folder: Path) -> str:
        """A word of a command line in the container's own names."""
        if str(folder) in word:
            return word.replace(str(folder), _EXPORTS)
        for bind in self._binds:
            path = self._absolute(word)
            if word and _below(path, bind.source) and Path(path).is_file():
                return posixpath.join(bind.target, posixpath.relpath(path, bind.source))
        return word


def _below(path: str, folder: str) -> bool:
    return path.startswith(f"{folder.rstrip('/')}/")


def _is_there(mounted: MountedImage, path: str) -> bool:
    return os.path.lexists(str(mounted.root) + path)

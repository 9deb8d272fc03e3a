"""Run a setup in containers of a mounted image: the script, the installation, bytecode, questions, one after the other.

All of it happens with the image's own programs: its shell, its Python, uv only where the image has it. Each step is a
container of its own on the same tree, so that what one wrote the next one finds. What a step leaves running ends with
its container.

    /run/bootseer/setup      the working folder of `bootseer run`, read-only: where setups find their files
    /run/bootseer/files-N    the folder of the script or of a requirements file that lies elsewhere, read-only

Where the user has mounted the working folder into the container, the setup runs there, and may write there if the user
said so. Called by `image_environment`.
"""

from __future__ import annotations

import os
import posixpath
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bootseer.env.capturing import exports
from bootseer.env.installing import interpreter
from bootseer.env.installing.bytecode_compile import by_interpreter, compile_command
from bootseer.env.installing.choose import Installation, choose
from bootseer.env.installing.interpreter import Interpreter
from bootseer.env.installing.packages import Installed, installed, new_distributions, new_packages
from bootseer.env.installing.running import CANNOT_START, Ran, runner
from bootseer.env.installing.validate import conflicts, validate
from bootseer.errors import BootseerError, UsageError
from bootseer.image.containers.container import Container
from bootseer.image.containers.container import Options as ContainerOptions
from bootseer.image.containers.inroot import is_executable
from bootseer.image.containers.runtime_config import Bind
from bootseer.image.mounting.mounted import MountedImage
from bootseer.launch import supervise
from bootseer.launch.environment_install import SetUp
from bootseer.launch.environment_task import Task
from bootseer.launch.image_ask import is_below, passed_settings
from bootseer.launch.interrupt import interruptible
from bootseer.launch.supervise import CannotStart, say

_SETUP = "/run/bootseer/setup"
_FILES = "/run/bootseer/files"
_EXPORTS = "/run/bootseer/exports"
_SHELL_PATH = "/usr/local/bin:/usr/bin:/bin"
_MAX_WORKERS = 16


@dataclass(frozen=True, slots=True)
class Places:
    """Where the setup finds its files in the container."""

    folder: str
    """Where it runs."""
    own: tuple[Bind, ...]
    """What is mounted for that."""
    shown: tuple[Bind, ...]
    """All mounts through which it sees this machine, the user's too."""

    def inside(self, path: str) -> str:
        """A path of this machine in the container's names; itself where the container does not show it."""
        for bind in self.shown:
            if is_below(path, bind.source):
                return posixpath.normpath(posixpath.join(bind.target, posixpath.relpath(path, bind.source)))
        return path

    def outside(self, path: str) -> str:
        """A path of the container in this machine's names; empty where it is none of a mount."""
        for bind in self.shown:
            if is_below(path, bind.target):
                return posixpath.normpath(posixpath.join(bind.source, posixpath.relpath(path, bind.target)))
        return ""


def place_of(cwd: str, binds: Sequence[Bind]) -> str:
    """Where the user's mounts show the working folder in the container; empty when none does."""
    for bind in reversed(binds):
        if is_below(cwd, bind.source):
            return posixpath.normpath(posixpath.join(bind.target, posixpath.relpath(cwd, bind.source)))
    return ""


def places_of(cwd: str, files: Sequence[str], binds: Sequence[Bind]) -> Places:
    """Where a setup with these files (relative to `cwd`) runs in a container with these mounts of the user."""
    folder = place_of(cwd, binds)
    own = [] if folder or cwd == "/" else [Bind(cwd, _SETUP, read_only=True)]
    folder = folder or (_SETUP if own else "/")
    shown = [*own, *reversed(binds)]
    for file in files:
        path = posixpath.normpath(posixpath.join(cwd, file))
        if not any(is_below(path, bind.source) for bind in shown):
            bind = Bind(posixpath.dirname(path), f"{_FILES}-{len(own)}", read_only=True)
            own.append(bind)
            shown.append(bind)
    return Places(folder, tuple(own), tuple(shown))


@dataclass(slots=True)
class ImageSetUp:
    """The setup of one start in a mounted image. `env` is the environment that containers take from this machine."""

    task: Task
    mounted: MountedImage
    options: ContainerOptions
    places: Places
    folder: Path
    env: Mapping[str, str]
    found_env: dict[str, str] = field(default_factory=dict)
    """What the last step found."""
    _python: Interpreter | None = None
    _before: Installed = field(default_factory=Installed)
    _num: int = 0

    def run(self) -> SetUp:
        """All steps, until one fails. Signals must be blocked."""
        task = self.task
        began_s = time.time()
        with interruptible():
            self._python = self._asked()
            self._before = self._installed()
        done = SetUp(python=self._python, before=self._before, began_s=began_s)
        if task.setup is not None:
            done = self._script(task.setup, done)
        if task.requirements and not done.code:
            done = self._requirements(done)
        if not done.code:
            after = self._installed()
            new = new_distributions(self._before, after)
            done = replace(done, packages=new_packages(self._before, after), new=new)
            self._compile(done)
        return done.ended_now()

    def problems(self, done: SetUp) -> list[str]:
        """Why what it made should not be kept for others.

        For a process beside the command: it looks into the command's own tree, where little is changed at its start.
        """
        wanted, python = self.task.wanted, self._python
        if python is None:
            return [f"import {module} fails: there is no Python in the image" for module in wanted.imports]
        if not done.new and not wanted.imports:
            return []
        env = {**self._settings(), "PYTHONDONTWRITEBYTECODE": "1"}
        found = validate(python, self._before, env, self._ask, imports=wanted.imports)
        if wanted.conflicts == "refuse":
            found += conflicts(python, self._before, env, self._ask)
        return found

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _script(self, script: str, done: SetUp) -> SetUp:
        task = self.task
        folder = self.folder / "exports"
        argv, more, tells = self._script_command(script, folder)
        code = self._step("script", Path(script).name, argv, more, Bind(str(folder), _EXPORTS) if tells else None)
        if code:
            return replace(done, code=code, what=script)
        if not tells:
            return done
        left = exports.read(folder, self.found_env, node_words=[task.node])
        return replace(done, exports=left.exports, reasons=left.unsafe)

    def _script_command(self, script: str, folder: Path) -> tuple[list[str], dict[str, str], bool]:
        """The command, further variables, and whether the script will tell what it exports."""
        bash = next((path for place in _SHELL_PATH.split(":") if self._has(path := f"{place}/bash")), "")
        path = self.places.inside(self._absolute(script))
        try:
            folder.mkdir(mode=0o777, exist_ok=True)
            folder.chmod(0o777)  # whoever the image's user is
            # Without bash on that path the script is given to sh, and told otherwise how to say what it exports.
            argv, more = exports.command(script, folder, {"PATH": _SHELL_PATH if bash else ""})
            hook = folder / "hook.bash"
            if hook.exists():
                text = hook.read_text(errors="surrogateescape").replace(str(folder), _EXPORTS)
                hook.write_text(text, errors="surrogateescape")
        except OSError as error:
            say(f"what the setup exports is not passed on: {error.strerror}")
            return ([path] if os.access(script, os.X_OK) else [bash or "/bin/sh", path]), {}, False
        argv = [self._inside(word, folder) for word in argv]
        argv[0] = bash if argv[0].endswith("/bash") else argv[0]
        return argv, {name: self._inside(value, folder) for name, value in more.items()}, True

    def _inside(self, word: str, folder: Path) -> str:
        """A word of a command line in the container's own names."""
        if str(folder) in word:
            return word.replace(str(folder), _EXPORTS)
        path = self._absolute(word)
        return self.places.inside(path) if word and Path(path).is_file() else word

    def _requirements(self, done: SetUp) -> SetUp:
        task, python = self.task, self._python
        what = ", ".join(task.requirements)
        if python is None:
            say("there is no Python in the image")
            return replace(done, code=CANNOT_START, what=what)
        way = self._chosen(python)
        code = 1
        for number, command in enumerate(way.commands):
            if number:
                say(f"{way.commands[number - 1].installer} failed (exit code {code}); {command.installer} tries")
            more = dict(command.env)
            if "PIP_CACHE_DIR" not in self.found_env:
                more["PIP_NO_CACHE_DIR"] = "1"  # nobody would read what it keeps in the container
            code = self._step("install", what, command.argv, more, installer=command.installer)
            if not code:
                return replace(done, installer=command.installer)
        return replace(done, code=code, what=what)

    def _chosen(self, python: Interpreter) -> Installation:
        places = self.places
        files = [places.inside(self._absolute(path)) for path in self.task.requirements]
        root = self.mounted.root

        def at(path: str) -> Path:
            outside = places.outside(path)
            return Path(outside) if outside else root / path.lstrip("/")

        with interruptible():
            way = choose(files, self.found_env, python, self._ask, cwd=places.folder, root=str(root), at=at)
        if way.why_pip and way.why_pip != "there is no uv":
            say(f"installing with pip, not with uv: {way.why_pip}")
        return way

    def _compile(self, done: SetUp) -> None:
        """Bytecode of new distributions. Nothing that fails here matters: Python compiles what is not there."""
        python = self._python
        if python is None or not done.new:
            return
        workers = min(len(os.sched_getaffinity(0)), _MAX_WORKERS)
        for program, group in by_interpreter(done.new, python.executable, python.folders).items():
            self._step("compile", "", compile_command(program, group, workers), {}, packages=len(group))

    def _asked(self) -> Interpreter | None:
        for python in ("python3", "python"):
            try:
                return interpreter.ask(python, self._settings(), self._ask)
            except BootseerError:
                continue
        return None

    def _installed(self) -> Installed:
        folders = self._python.folders if self._python is not None else ()
        return installed(folders, root=str(self.mounted.root))

    # -- containers ----------------------------------------------------------------------------------------------------

    def _step(
        self,
        stage: str,
        file: str,
        argv: Sequence[str],
        more: Mapping[str, str],
        bind: Bind | None = None,
        **facts: object,
    ) -> int:
        """A step as a stage; its exit code."""
        task = self.task
        with task.stage(stage) as attrs:
            attrs.update({"file": file} if file else {}, **facts)
            code = self._spawned(argv, {**self._settings(), **more}, bind)
            if code:
                attrs["error"] = f"exit code {code}"
        return code

    def _spawned(self, argv: Sequence[str], env: Mapping[str, str], bind: Bind | None) -> int:
        task = self.task
        try:
            container = self._container(argv, env, bind)
        except UsageError as error:  # the image has no such program
            say(str(error))
            return error.exit_code
        try:
            container.start_guard([self.mounted.undo_command()])
            tracer = task.session.tracer if task.session is not None else None
            own = {**os.environ, **(tracer.environment() if tracer is not None else {})}
            pid = supervise.spawn(container.command, own, own_group=task.own_group, stdout=2)
            return supervise.wait(pid, own_group=task.own_group, tracer=tracer)
        except CannotStart as error:
            say(str(error))
            return error.code
        finally:
            container.close()
            container.dismiss_guard()

    def _ask(self, argv: Sequence[str], env: Mapping[str, str], *, deadline_s: float) -> Ran:
        """A short question of ours, in a container: `installing.running.Run`."""
        program = argv[0]
        if program.startswith("/") and not self._has(program):
            return Ran(CANNOT_START, "", f"{program}: not in the image")
        try:
            container = self._container(argv, env, None)
        except UsageError as error:
            return Ran(error.exit_code, "", str(error))
        try:
            container.start_guard([self.mounted.undo_command()])
            return runner()(container.command, os.environ, deadline_s=deadline_s)
        finally:
            container.close()
            container.dismiss_guard()

    def _settings(self) -> dict[str, str]:
        """What the setup gets from this machine beyond what every program in a container gets."""
        names = passed_settings(self.env, self.task.wanted.variables)
        return {name: self.env[name] for name in names}

    def _container(self, argv: Sequence[str], env: Mapping[str, str], bind: Bind | None) -> Container:
        options = self.options
        words = replace(
            options.words,
            command=tuple(argv),
            entrypoint="",
            workdir=self.places.folder,
            env=(*(f"{name}={value}" for name, value in env.items()), *options.words.env),
        )
        more = (*self.places.own, *([bind] if bind is not None else []))
        limits = replace(options.limits, read_only=False)  # that is for the command
        options = replace(options, words=words, limits=limits, binds=(*more, *options.binds))
        self._num += 1
        container = Container(
            self.folder / f"setup-{self._num}", self.mounted.root, self.mounted.config, options, self.env
        )
        self.found_env = dict(container.process.env)
        return container

    def _absolute(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.task.cwd, path))

    def _has(self, program: str) -> bool:
        return bool(is_executable(self.mounted.root, program))

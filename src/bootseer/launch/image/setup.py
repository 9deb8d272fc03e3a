"""Run a setup in containers of a mounted image: the script, the installation, bytecode, questions, one after the other.

All of it happens with the image's own programs: its shell, its Python, uv only where the image has it. Each step is a
container of its own on the same tree, so that what one wrote the next one finds. What a step leaves running ends with
its container.

    /run/bootseer/setup      the working folder of `bootseer run`, read-only: where setups find their files
    /run/bootseer/files-N    the folder of the script or of a requirements file that lies elsewhere, read-only

Where the user has mounted the working folder into the container, the setup runs there, and may write there if the user
said so.

The request key of such a setup depends on the container's variables and mounts, too. A mount that the setup names, by
its place in the container, in its files or its variables, is an input by content; other mounts are not: data sets and
checkpoints are not what an environment is made of.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bootseer.env.capturing.exports import Left
from bootseer.env.capturing.fanotify import Group
from bootseer.env.capturing.watch import Reads, Watch, unobserved
from bootseer.env.installing.interpreter import CANNOT_START, Ran, runner
from bootseer.env.installing.validate import conflicts, validate
from bootseer.env.keys.files import Facts, NodeFiles
from bootseer.env.keys.script import gather
from bootseer.env.keys.settings import is_irrelevant
from bootseer.errors import BootseerError, UsageError
from bootseer.fuse.syscalls import check, libc
from bootseer.image.containers.container import Container
from bootseer.image.containers.container import Options as ContainerOptions
from bootseer.image.containers.process import passed_variables
from bootseer.image.containers.rootfs import is_executable
from bootseer.image.containers.runtime_config import Bind
from bootseer.image.mounting.mounted import MountedImage
from bootseer.launch.environment.plain import ScriptRun, script_run
from bootseer.launch.environment.setup import EXPORTS, Machine, SetupResult
from bootseer.launch.environment.task import Task
from bootseer.launch.supervise import say

_SETTINGS = ("PIP_", "UV_")
_PLACE = re.compile(r"(^|[\s=,])(/|~|file:)")


def passed_settings(env: Mapping[str, str], declared: Sequence[str]) -> tuple[str, ...]:
    """Names of this machine's variables that a setup gets in a container besides those that every program gets.

    Settings of installers, but none that names a place: the image has other files there. And what the user declares.
    """
    settings = (name for name, value in env.items() if name.startswith(_SETTINGS) and not _PLACE.search(value))
    return tuple(dict.fromkeys([*settings, *(name for name in declared if name in env)]))


def variables_of(words: Sequence[str], env: Mapping[str, str], declared: Sequence[str]) -> dict[str, str]:
    """What a setup finds in its environment on top of the image's own variables, which belong to the image's digest.

    `words` are the user's, `NAME=VALUE` or `NAME`.
    """
    found = passed_variables(env) | {name: env[name] for name in passed_settings(env, declared)}
    for word in words:
        name, sign, value = word.partition("=")
        if sign or name in env:
            found[name] = value if sign else env[name]
    return found


def named_mounts(
    setup: str | None,
    requirements: Sequence[str],
    cwd: str,
    env: Mapping[str, str],
    binds: Sequence[Bind],
    declared: Sequence[str] = (),
) -> tuple[Bind, ...]:
    """The mounts that the setup names. Left out are those of which the user has declared a part: that is what counts.

    `env` is the setup's environment in the container.
    """
    parts = [posixpath.normpath(posixpath.join(cwd, path)) for path in declared]
    left = [bind for bind in binds if not any(is_below(part, bind.source) for part in parts)]
    if not left:
        return ()
    texts = list(_texts(setup, requirements, cwd, env))
    return tuple(bind for bind in left if any(_names(text, bind.target) for text in texts))


def is_below(path: str, folder: str) -> bool:
    """Whether the path is the folder or in it; both absolute and normal."""
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _texts(setup: str | None, requirements: Sequence[str], cwd: str, env: Mapping[str, str]) -> Iterator[str]:
    """All that says what the setup does."""
    # BOOTSEER_CHECKPOINT and others tell the command of folders that are new in each start.
    yield from (value for name, value in env.items() if not is_irrelevant(name))
    files = NodeFiles(Facts(None))
    inputs = gather(setup, requirements, cwd, env, files)
    for path in dict.fromkeys([*inputs.files, *inputs.requirement_files, *inputs.requirements.files]):
        try:
            yield files.read(path).decode("utf-8", "replace")
        except BootseerError:
            continue  # the key says what is wrong with it


def _names(text: str, place: str) -> bool:
    place = place.rstrip("/")
    return bool(place) and re.search(rf"(?<![\w-]){re.escape(place)}(?![\w-])", text) is not None


_SETUP = "/run/bootseer/setup"
_FILES = "/run/bootseer/files"
_EXPORTS = "/run/bootseer/exports"
_UV = "/run/bootseer/uv"
_HOOK = """timeout 20 sh -c 'cat > "$A" && read -r _ < "$B"' || :"""
_NEWNS = 0x0002_0000
_SHELL_PATH = "/usr/local/bin:/usr/bin:/bin"


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
        return place_of(path, self.shown) or path

    def outside(self, path: str) -> str:
        """A path of the container in this machine's names; empty where it is none of a mount."""
        return _moved(path, [(bind.target, bind.source) for bind in self.shown])


def place_of(path: str, binds: Iterable[Bind]) -> str:
    """Where the first of the mounts that shows this path has it in the container; empty when none does."""
    return _moved(path, [(bind.source, bind.target) for bind in binds])


def _moved(path: str, folders: Sequence[tuple[str, str]]) -> str:
    for folder, other in folders:
        if is_below(path, folder):
            return posixpath.normpath(posixpath.join(other, posixpath.relpath(path, folder)))
    return ""


def places_of(cwd: str, files: Sequence[str], binds: Sequence[Bind]) -> Places:
    """Where a setup with these files (relative to `cwd`) runs in a container with these mounts of the user."""
    folder = place_of(cwd, reversed(binds))
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


class InImage(Machine):
    """Containers of a mounted image. `env` is the environment that they take from this machine."""

    where = "the image"

    def __init__(
        self,
        task: Task,
        mounted: MountedImage,
        options: ContainerOptions,
        places: Places,
        folder: Path,
        env: Mapping[str, str],
    ) -> None:
        super().__init__(task, root=str(mounted.root))
        self.folder = places.folder
        self.mounted = mounted
        self.places = places
        self.env = {}  # what the last container found
        self._options = options
        self._own = folder
        self._taken = dict(env)
        self._tells = False
        """Whether the next container shows where the script tells what it exports."""
        self._seen: list[Reads] = []
        self._num = 0

    def problems(self, done: SetupResult) -> list[str]:
        """Why what it made should not be kept for others.

        For a process beside the command: it looks into the command's own tree, where little is changed at its start.
        """
        wanted, python = self.task.wanted, done.python
        if python is None:
            return [f"import {module} fails: there is no Python in the image" for module in wanted.imports]
        if not done.new and not wanted.imports:
            return []
        env = {"PYTHONDONTWRITEBYTECODE": "1"}
        found = validate(python, done.before, env, self.ask, imports=wanted.imports)
        if wanted.conflicts == "refuse":
            found += conflicts(python, done.before, env, self.ask)
        return found

    def pythons(self) -> Sequence[str]:
        return ("python3", "python")

    def inside(self, path: str) -> str:
        return self.places.inside(self._absolute(path))

    def at(self, path: str) -> Path:
        outside = self.places.outside(path)
        return Path(outside) if outside else super().at(path)

    def script_run(self, script: str) -> ScriptRun:
        """The command in the container's own names."""
        bash = next((path for place in _SHELL_PATH.split(":") if self._has(path := f"{place}/bash")), "")
        path = self.inside(script)
        as_it_is = [path] if os.access(script, os.X_OK) else [bash or "/bin/sh", path]
        folder = self._own / EXPORTS
        # Without bash on that path the script is given to sh, which reports its exports in another way.
        asked = script_run(script, as_it_is, folder, {"PATH": _SHELL_PATH if bash else ""})
        if asked.folder is None:
            return replace(asked, env={})
        folder.chmod(0o777)  # for any user of the image
        hook = folder / "hook.bash"
        if hook.exists():
            text = hook.read_text(errors="surrogateescape").replace(str(folder), _EXPORTS)
            hook.write_text(text, errors="surrogateescape")
        argv = [self._word(word, folder) for word in asked.argv]
        argv[0] = bash if argv[0].endswith("/bash") else argv[0]
        self._tells = True
        more = {name: self._word(value, folder) for name, value in asked.env.items() if name != "PATH"}
        return replace(asked, argv=argv, env=more)

    def exports(self, asked: ScriptRun) -> Left:
        return replace(asked, env=self.env).left(self.task.node)

    @property
    def own_uv(self) -> str:
        return _UV if super().own_uv else ""

    @property
    def installer_env(self) -> Mapping[str, str]:  # type: ignore[override]
        # Nothing would read what pip keeps in the container.
        return {} if "PIP_CACHE_DIR" in self.env else {"PIP_NO_CACHE_DIR": "1"}

    def _word(self, word: str, folder: Path) -> str:
        if str(folder) in word:
            return word.replace(str(folder), _EXPORTS)
        return self.inside(word) if word and Path(self._absolute(word)).is_file() else word

    # -- containers ----------------------------------------------------------------------------------------------------

    def reads(self) -> Reads:
        """What the setup read and wrote through mounts, as paths of this machine."""
        paths = {outside for reads in self._seen for path in reads.paths if (outside := self.places.outside(path))}
        reason = next((reads.why for reads in self._seen if not reads.complete), "")
        return Reads(frozenset(paths), (), complete=not reason, why=reason)

    def spawn(self, argv: Sequence[str], more: Mapping[str, str]) -> int:
        bind = [Bind(str(self._own / EXPORTS), _EXPORTS)] if self._tells else []
        self._tells = False
        try:
            with self._container(argv, more, bind) as container:
                try:
                    watch, reason = self._watched(self._own / f"setup-{self._num}"), ""
                except (BootseerError, OSError) as error:
                    watch, reason = None, str(error)
                try:
                    return self.run_here(container.command, os.environ)
                finally:  # it holds the container's mounts
                    self._seen.append(watch.end() if watch is not None else unobserved(reason))
        except UsageError as error:  # the image has no such program
            say(str(error))
            return error.exit_code

    def _watched(self, folder: Path) -> Watch:
        """Watch what the container whose folder this is reads through its mounts. What the image itself holds is in
        the key. The runtime calls a hook when the mounts are made, and goes on when the watch has begun."""
        state, go = folder / "state.pipe", folder / "go.pipe"

        def enter() -> None:
            with state.open() as pipe, Path(f"/proc/{json.load(pipe)['pid']}/ns/mnt").open() as namespace:
                check(libc.setns(namespace.fileno(), _NEWNS), "enter the container's mount namespace")

        os.close(Group().fileno())  # a container must not wait for a watch that may not be
        os.mkfifo(state)
        os.mkfifo(go)
        root = os.path.realpath(self.mounted.root)
        watch = Watch.begin((), enter=enter, below=root, ready=lambda: go.write_text("\n"))
        path = folder / "config.json"
        config = json.loads(path.read_text())
        hook = {"path": "/bin/sh", "args": ["sh", "-c", _HOOK], "env": [f"PATH={_SHELL_PATH}", f"A={state}", f"B={go}"]}
        config["hooks"].setdefault("createRuntime", []).append(hook)
        path.write_text(json.dumps(config))
        return watch

    def ask(self, argv: Sequence[str], env: Mapping[str, str], *, deadline_s: float) -> Ran:
        program = argv[0]
        if program.startswith("/") and not self._has(program):
            return Ran(CANNOT_START, "", f"{program}: not in the image")
        try:
            with self._container(argv, env, []) as container:
                return runner()(container.command, os.environ, deadline_s=deadline_s)
        except UsageError as error:
            return Ran(error.exit_code, "", str(error))

    @contextlib.contextmanager
    def _container(self, argv: Sequence[str], more: Mapping[str, str], binds: Sequence[Bind]) -> Iterator[Container]:
        """One with the setup's settings from this machine, and `more`."""
        options = self._options
        names = passed_settings(self._taken, self.task.wanted.variables)
        env = {**{name: self._taken[name] for name in names}, **more}
        words = replace(
            options.process,
            command=tuple(argv),
            entrypoint="",
            workdir=self.folder,
            env=(*(f"{name}={value}" for name, value in env.items()), *options.process.env),
        )
        own = super().own_uv if self.task.requirements else ""
        uv = [Bind(own, _UV, read_only=True)] if own else []
        limits = replace(options.limits, read_only=False)  # that is for the command
        options = replace(options, process=words, limits=limits, binds=(*self.places.own, *binds, *uv, *options.binds))
        self._num += 1
        container = Container(
            self._own / f"setup-{self._num}", self.mounted.root, self.mounted.config, options, self._taken
        )
        self.env = dict(container.process.env)
        try:
            container.start_guard([self.mounted.undo_command()])
            yield container
        finally:
            container.close()
            container.dismiss_guard()

    def _absolute(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.task.cwd, path))

    def _has(self, program: str) -> bool:
        return bool(is_executable(self.mounted.root, program))

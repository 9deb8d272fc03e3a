"""Run a setup in containers of a mounted image: script, installation, bytecode and queries, one after the other.

The image's own programs are used: its shell and its Python. Each step is a container of its own on the same writable
tree. Processes that a step leaves running end with its container.

    /run/bootseer/setup      the working folder of `bootseer run`, read-only: where setups find their files
    /run/bootseer/files-N    the folder of the script or of a requirements file that lies elsewhere, read-only

If the user has mounted the working folder into the container, the setup runs there, and may write there if that mount
is writable.

The request key of such a setup depends on the container's variables and mounts, too. A mount whose path in the
container is mentioned in the setup's files or variables is an input by content. Other mounts are not: data sets and
checkpoints do not belong to an environment.
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

from bootseer.env.capturing.exports import ExportDiff
from bootseer.env.capturing.fanotify import Group
from bootseer.env.capturing.watch import Reads, Watch, not_watched
from bootseer.env.installing.interpreter import CANNOT_START, Ran, runner
from bootseer.env.keys.files import FactCache, NodeFiles
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
from bootseer.launch.environment.plain import ScriptRun, prepare_script
from bootseer.launch.environment.setup import EXPORTS, SetupHost, SetupResult, setup_problems
from bootseer.launch.environment.task import Task
from bootseer.launch.supervise import say

_SETTINGS = ("PIP_", "UV_")
_PLACE = re.compile(r"(^|[\s=,])(/|~|file:)")


def passed_settings(env: Mapping[str, str], declared: Sequence[str]) -> tuple[str, ...]:
    """Names of this machine's variables that are passed to a setup in a container, besides those for every program.

    These are settings of installers without paths, as the image has other files there, and variables that the user
    declares.
    """
    settings = (name for name, value in env.items() if name.startswith(_SETTINGS) and not _PLACE.search(value))
    return tuple(dict.fromkeys([*settings, *(name for name in declared if name in env)]))


def setup_variables(words: Sequence[str], env: Mapping[str, str], declared: Sequence[str]) -> dict[str, str]:
    """Variables of a setup besides the image's own, which are covered by the image's digest.

    `words` are the user's, `NAME=VALUE` or `NAME`.
    """
    found = passed_variables(env) | {name: env[name] for name in passed_settings(env, declared)}
    for word in words:
        name, sign, value = word.partition("=")
        if sign or name in env:
            found[name] = value if sign else env[name]
    return found


def mounts_of_setup(
    setup: str | None,
    requirements: Sequence[str],
    cwd: str,
    env: Mapping[str, str],
    binds: Sequence[Bind],
    declared: Sequence[str] = (),
) -> tuple[Bind, ...]:
    """The mounts that the setup mentions, without those of which the user has declared a part as input.

    `env` is the setup's environment in the container.
    """
    parts = [posixpath.normpath(posixpath.join(cwd, path)) for path in declared]
    left = [bind for bind in binds if not any(is_below(part, bind.source) for part in parts)]
    if not left:
        return ()
    texts = list(_texts(setup, requirements, cwd, env))
    return tuple(bind for bind in left if any(_mentions(text, bind.target) for text in texts))


def is_below(path: str, folder: str) -> bool:
    """Whether a path is the folder or lies in it; both absolute and normalised."""
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def _texts(setup: str | None, requirements: Sequence[str], cwd: str, env: Mapping[str, str]) -> Iterator[str]:
    # Without BOOTSEER_CHECKPOINT and the like, whose folders differ in each start.
    yield from (value for name, value in env.items() if not is_irrelevant(name))
    files = NodeFiles(FactCache(None))
    inputs = gather(setup, requirements, cwd, env, files)
    for path in dict.fromkeys([*inputs.files, *inputs.requirement_files, *inputs.requirements.files]):
        try:
            yield files.read(path).decode("utf-8", "replace")
        except BootseerError:
            continue  # reported with the key


def _mentions(text: str, place: str) -> bool:
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
class SetupPaths:
    """The setup's folders in the container."""

    folder: str
    """Its working folder."""
    own: tuple[Bind, ...]
    """Additional mounts for the setup's files."""
    shown: tuple[Bind, ...]
    """All mounts of this machine's folders, with the user's."""

    def inside(self, path: str) -> str:
        """A path of this machine as the container's path; unchanged if it is not mounted."""
        return container_path(path, self.shown) or path

    def outside(self, path: str) -> str:
        """A path of the container as this machine's path; empty if it lies in no mount."""
        return _translate(path, [(bind.target, bind.source) for bind in self.shown])


def container_path(path: str, binds: Iterable[Bind]) -> str:
    """The container's path of a path of this machine, by the first mount that contains it; empty if none does."""
    return _translate(path, [(bind.source, bind.target) for bind in binds])


def _translate(path: str, folders: Sequence[tuple[str, str]]) -> str:
    for folder, other in folders:
        if is_below(path, folder):
            return posixpath.normpath(posixpath.join(other, posixpath.relpath(path, folder)))
    return ""


def setup_paths(cwd: str, files: Sequence[str], binds: Sequence[Bind]) -> SetupPaths:
    """The folders of a setup with these files (relative to `cwd`) in a container with the user's mounts."""
    folder = container_path(cwd, reversed(binds))
    own = [] if folder or cwd == "/" else [Bind(cwd, _SETUP, read_only=True)]
    folder = folder or (_SETUP if own else "/")
    shown = [*own, *reversed(binds)]
    for file in files:
        path = posixpath.normpath(posixpath.join(cwd, file))
        if not any(is_below(path, bind.source) for bind in shown):
            bind = Bind(posixpath.dirname(path), f"{_FILES}-{len(own)}", read_only=True)
            own.append(bind)
            shown.append(bind)
    return SetupPaths(folder, tuple(own), tuple(shown))


class ImageSetupHost(SetupHost):
    """Containers of a mounted image. `env` is this machine's environment for them."""

    where = "the image"

    def __init__(
        self,
        task: Task,
        mounted: MountedImage,
        options: ContainerOptions,
        places: SetupPaths,
        folder: Path,
        env: Mapping[str, str],
    ) -> None:
        super().__init__(task, root=str(mounted.root))
        self.folder = places.folder
        self.mounted = mounted
        self.places = places
        self.env = {}  # of the last container
        self._options = options
        self._folder = folder
        self._host_env = dict(env)
        self._mounts_exports = False
        """Whether the next container mounts the folder for exports."""
        self._reads: list[Reads] = []
        self._num = 0

    def problems(self, done: SetupResult) -> list[str]:
        """Defects of the environment. Called in a process beside the command, in whose tree it looks."""
        options = self.task.options
        if done.python is not None and not done.new and not options.imports:
            return []
        return setup_problems(done, options, {"PYTHONDONTWRITEBYTECODE": "1"}, self.ask)

    def pythons(self) -> Sequence[str]:
        return ("python3", "python")

    def inside(self, path: str) -> str:
        return self.places.inside(self._absolute(path))

    def at(self, path: str) -> Path:
        outside = self.places.outside(path)
        return Path(outside) if outside else super().at(path)

    def prepare_script(self, script: str) -> ScriptRun:
        """The command of the script, with the container's paths."""
        bash = next((path for place in _SHELL_PATH.split(":") if self._has_program(path := f"{place}/bash")), "")
        path = self.inside(script)
        as_it_is = [path] if os.access(script, os.X_OK) else [bash or "/bin/sh", path]
        folder = self._folder / EXPORTS
        # Without bash the script is run by sh, with another hook.
        run = prepare_script(script, as_it_is, folder, {"PATH": _SHELL_PATH if bash else ""})
        if run.folder is None:
            return replace(run, env={})
        folder.chmod(0o777)  # for any user of the image
        hook = folder / "hook.bash"
        if hook.exists():
            text = hook.read_text(errors="surrogateescape").replace(str(folder), _EXPORTS)
            hook.write_text(text, errors="surrogateescape")
        argv = [self._in_container(word, folder) for word in run.argv]
        argv[0] = bash if argv[0].endswith("/bash") else argv[0]
        self._mounts_exports = True
        more = {name: self._in_container(value, folder) for name, value in run.env.items() if name != "PATH"}
        return replace(run, argv=argv, env=more)

    def exports(self, run: ScriptRun) -> ExportDiff:
        return replace(run, env=self.env).exports(self.task.node)

    @property
    def own_uv(self) -> str:
        return _UV if super().own_uv else ""

    @property
    def installer_env(self) -> Mapping[str, str]:  # type: ignore[override]
        # pip's cache in the container would never be used.
        return {} if "PIP_CACHE_DIR" in self.env else {"PIP_NO_CACHE_DIR": "1"}

    def _in_container(self, word: str, folder: Path) -> str:
        if str(folder) in word:
            return word.replace(str(folder), _EXPORTS)
        return self.inside(word) if word and Path(self._absolute(word)).is_file() else word

    # -- containers ----------------------------------------------------------------------------------------------------

    def reads(self) -> Reads:
        """The setup's reads through mounts, as paths of this machine."""
        paths = {outside for reads in self._reads for path in reads.paths if (outside := self.places.outside(path))}
        reason = next((reads.why for reads in self._reads if not reads.complete), "")
        return Reads(frozenset(paths), (), complete=not reason, why=reason)

    def spawn(self, argv: Sequence[str], more: Mapping[str, str]) -> int:
        bind = [Bind(str(self._folder / EXPORTS), _EXPORTS)] if self._mounts_exports else []
        self._mounts_exports = False
        try:
            with self._container(argv, more, bind) as container:
                try:
                    watch, reason = self._start_watch(self._folder / f"setup-{self._num}"), ""
                except (BootseerError, OSError) as error:
                    watch, reason = None, str(error)
                try:
                    return self.run_here(container.command, os.environ)
                finally:  # the watch holds the container's mounts
                    self._reads.append(watch.end() if watch is not None else not_watched(reason))
        except UsageError as error:  # the image has no such program
            say(str(error))
            return error.exit_code

    def _start_watch(self, folder: Path) -> Watch:
        """Watch the reads of a container through its mounts; the image itself is covered by the key. `folder` is the
        container's.

        The watch must begin after the runtime has made the mounts and before the setup runs. So the configuration gets
        a `createRuntime` hook, which is called at that time: it writes the container's state into one named pipe, from
        which the watch learns the mount namespace to enter, and waits for the other until the watch has begun.
        """
        state, go = folder / "state.pipe", folder / "go.pipe"

        def enter() -> None:
            with state.open() as pipe, Path(f"/proc/{json.load(pipe)['pid']}/ns/mnt").open() as namespace:
                check(libc.setns(namespace.fileno(), _NEWNS), "enter the container's mount namespace")

        os.close(Group().fileno())  # fail early without the privilege: the container would wait for the watch
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
        if program.startswith("/") and not self._has_program(program):
            return Ran(CANNOT_START, "", f"{program}: not in the image")
        try:
            with self._container(argv, env, []) as container:
                return runner()(container.command, os.environ, deadline_s=deadline_s)
        except UsageError as error:
            return Ran(error.exit_code, "", str(error))

    @contextlib.contextmanager
    def _container(self, argv: Sequence[str], more: Mapping[str, str], binds: Sequence[Bind]) -> Iterator[Container]:
        """A container with the setup's settings from this machine, and `more`."""
        options = self._options
        names = passed_settings(self._host_env, self.task.options.variables)
        env = {**{name: self._host_env[name] for name in names}, **more}
        words = replace(
            options.process,
            command=tuple(argv),
            entrypoint="",
            workdir=self.folder,
            env=(*(f"{name}={value}" for name, value in env.items()), *options.process.env),
        )
        own = super().own_uv if self.task.requirements else ""
        uv = [Bind(own, _UV, read_only=True)] if own else []
        limits = replace(options.limits, read_only=False)  # a read-only root is for the command
        options = replace(options, process=words, limits=limits, binds=(*self.places.own, *binds, *uv, *options.binds))
        self._num += 1
        container = Container(
            self._folder / f"setup-{self._num}", self.mounted.root, self.mounted.config, options, self._host_env
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

    def _has_program(self, program: str) -> bool:
        return bool(is_executable(self.mounted.root, program))

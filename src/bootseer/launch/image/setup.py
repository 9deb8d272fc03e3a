"""Run a setup in containers of a mounted image: script, installation, bytecode and queries, one after the other.

The image's own programs are used: its shell and its Python. Each step is a container of its own on the same writable
tree. Processes that a step leaves running end with its container.

The setup's changes are the upper layer of that tree. `UpperLayer` moves them into a layer of their own, below the
command's container, and publishes that as a snapshot.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from bootseer.env.capturing.capture import container_changes
from bootseer.env.capturing.effects import mentions
from bootseer.env.capturing.exclude import Exclusions, caches_of, credentials_of
from bootseer.env.capturing.exports import ExportDiff
from bootseer.env.capturing.fanotify import Group
from bootseer.env.capturing.leftovers import SCRATCH, left_in_scratch, unaccounted
from bootseer.env.capturing.reads import Reads, not_watched
from bootseer.env.capturing.walk import LeftOut
from bootseer.env.changes import Change
from bootseer.env.document import Trust
from bootseer.env.installing.interpreter import runner
from bootseer.env.keys.key import RequestKey
from bootseer.env.life.decide import REASONS, Decision
from bootseer.errors import BootseerError, PermanentError, UsageError
from bootseer.fuse.syscalls import check, libc
from bootseer.image.containers.container import Container
from bootseer.image.containers.container import Options as ContainerOptions
from bootseer.image.containers.rootfs import program_at
from bootseer.image.containers.runtime_config import Bind
from bootseer.image.mounting.mount import LayersAbove
from bootseer.image.mounting.mounted import MountedImage
from bootseer.launch.environment.capture import input_changes, trust_of, unknown_reads
from bootseer.launch.environment.plain import ScriptRun, prepare_script
from bootseer.launch.environment.publish import Publication, report_outcome, report_unsafe, start_publishing
from bootseer.launch.environment.setup import EXPORTS, SetupHost, SetupResult, check_environment
from bootseer.launch.environment.start import EnvironmentStart
from bootseer.launch.environment.task import Task
from bootseer.launch.environment.watch import Watch
from bootseer.launch.image.setup_paths import SetupPaths, is_below, passed_settings
from bootseer.launch.interrupt import interruptible
from bootseer.launch.supervise import say
from bootseer.machine.child import Outcome
from bootseer.mounts import kernel

Mount = Callable[[Path, LayersAbove, bool], MountedImage]
"""Mount the image with a folder for changes and additional layers; the flag: for the setup, not for the command."""
UPPER = "upper"
"""The upper layer, below a mount's folder for changes (`image.mounting.mount`)."""
_MAX_LOOKED_AT = 20_000
_CLOCK_S = 0.1
"""Tolerance for file times, which are of the kernel's last tick, or of a server's clock."""
_EXPORTS = "/run/bootseer/exports"
_UV = "/run/bootseer/uv"
_HOOK = """timeout 20 sh -c 'cat > "$A" && read -r _ < "$B"' || :"""
_NEWNS = 0x0002_0000
_SHELL_PATH = "/usr/local/bin:/usr/bin:/bin"


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
        self.mount_points: set[str] = set()
        """Of all containers: where the runtime made files and folders to mount on."""
        self._options = options
        self._folder = folder
        self._host_env = dict(env)
        self._mounts_exports = False
        """Whether the next container mounts the folder for exports."""
        self._reads: list[Reads] = []
        self._num = 0

    def validate(self, done: SetupResult) -> None:
        """`check_environment`. Called in a process beside the command, in whose tree it looks."""
        options = self.task.options
        if done.python is None or done.new or options.imports:
            check_environment(done, options, {"PYTHONDONTWRITEBYTECODE": "1"}, self.ask)

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
        for one in (folder, *folder.iterdir()):
            one.chmod(0o777)  # for any user of the image
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
        """The setup's reads through mounts, as real paths of this machine."""
        outside = (self.places.outside(path) for reads in self._reads for path in reads.paths)
        paths = map(os.path.realpath, filter(None, outside))
        reason = next((reads.why for reads in self._reads if not reads.complete), "")
        return Reads(frozenset(paths), (), reason)

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
        except UsageError as error:  # as for a user that the image does not have
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
        log = folder / "reads.log"
        watch = Watch.begin((), enter=enter, below=root, ready=lambda: go.write_text("\n"), log=log)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        hook = {"path": "/bin/sh", "args": ["sh", "-c", _HOOK], "env": [f"PATH={_SHELL_PATH}", f"A={state}", f"B={go}"]}
        config["hooks"].setdefault("createRuntime", []).append(hook)
        path.write_text(json.dumps(config))
        return watch

    def ask(self, argv: Sequence[str], *, env: Mapping[str, str], deadline_s: float) -> Outcome:
        program = argv[0]
        if program.startswith("/") and not self._has_program(program):
            return Outcome(None, "", error=f"{program}: not in the image", started=False)
        try:
            with self._container(argv, env, []) as container:
                return runner()(container.command, env=os.environ, deadline_s=deadline_s)
        except UsageError as error:
            return Outcome(error.exit_code, "", str(error))

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
        self.mount_points |= container.mount_points
        try:
            container.start_guard([self.mounted.undo_command()])
            yield container
        finally:
            container.close()
            container.dismiss_guard()

    def _absolute(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.task.cwd, path))

    def _has_program(self, program: str) -> bool:
        return bool(program_at(self.mounted.root, program))


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
            with interruptible():
                reads = self._host.reads()
                accounted = map(os.path.realpath, key.accounted)
                unknown = unaccounted(reads.paths, accounted, (), host=False) if reads.complete else ()
                reasons = [*done.reasons, *unknown_reads(unknown)]
                # In a mount another program may have written.
                this_time = [*done.unknown, *self._writes_into_mounts(done), *input_changes(task, key)]
            if reasons or this_time:
                report_unsafe(task, reasons, this_time)
                return self.remount()
            with interruptible(), task.stage("capture") as facts:
                layer = self._move_to_layer()
                changes = self._changes(layer)
                facts.update(changes=len(changes), way="container")
            if reasons := self._in_scratch(layer, changes, done, self._start.command):
                lasting = reasons if self._in_scratch(layer, changes, done, ()) else []  # for any command
                report_unsafe(task, lasting, [] if lasting else reasons)
            else:
                self._start_publishing(done, changes, key, trust_of(reads, ()))
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
            layer.rename(upper)  # in place of an empty one
            self._remount(())
            raise
        return layer

    def _remount(self, above: Sequence[Path]) -> None:
        """Remount the image with the same folder for changes."""
        try:
            self._host.mounted.close(keep_changes=True)
        except (BootseerError, OSError) as error:
            say(f"the image was not unmounted: {error}")
        self._host.mounted = self._mount(self._writable, lambda digest: above, False)

    def _changes(self, layer: Path) -> Sequence[Change]:
        env, options = self._host.env, self._task.options
        here = self._task.env  # its credentials may have been copied from a mount
        exclusions = Exclusions(
            homes=["/root", env.get("HOME", ""), here.get("HOME", "")],
            caches=caches_of(env),
            credentials=(*credentials_of(env), *credentials_of(here)),
            leave_out=options.leave_out,
            keep=options.keep,
        )
        changes, self._left_out = container_changes(layer, exclusions=exclusions, mounted=self._host.mount_points)
        for line in self._left_out.warnings:
            say(line)
        return changes

    def _in_scratch(
        self, layer: Path, changes: Sequence[Change], done: SetupResult, command: Sequence[str]
    ) -> list[str]:
        """Files that the setup left in the container's scratch folders and the command needs, as messages."""
        tops = [layer / scratch.lstrip("/") for scratch in SCRATCH]
        files = [
            f"/{Path(folder, name).relative_to(layer)}"
            for top in tops
            if top.resolve() == layer.resolve() / top.relative_to(layer)  # a link would lead to this machine's files
            for folder, _, names in os.walk(top)
            for name in names
        ]
        used = [*command, *(export.value for export in done.exports), *mentions(changes)]
        return left_in_scratch(files, used)

    def _writes_into_mounts(self, done: SetupResult) -> Iterator[str]:
        """Writes of the setup into mounts, which stay on this machine and are in no snapshot, as messages."""
        task = self._task
        for bind in self._host.places.shown:
            if not bind.read_only and (bind.source in task.options.inputs or is_below(task.cwd, bind.source)):
                path = _changed_since(bind, done.began_s - _CLOCK_S)
                if path:
                    yield f"it wrote {path}, in a mount, which is not captured"

    def _start_publishing(self, done: SetupResult, changes: Sequence[Change], key: RequestKey, trust: Trust) -> None:
        task, prepared = self._task, self._start.prepared
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
            left_out=self._left_out,
            daemons=(),
            validate=partial(self._host.validate, done),
        )
        self._start.publishing = start_publishing(task, publication)


def _changed_since(bind: Bind, since_s: float) -> str:
    """The first file below a mount that has changed since then; empty if there is none among the first thousands."""
    num_looked_at = 0
    for folder, folders, files in os.walk(bind.source):
        for name in ("", *files[:_MAX_LOOKED_AT]):  # a new file changes the folder, too: a data set may have millions
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

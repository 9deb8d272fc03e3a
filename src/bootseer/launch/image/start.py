"""`bootseer run --image`: the image as a measured stage, the command inside it, and what its start cost.

    image_loading                 from the reference to a container that can be started
    image_loading.resolve         reference to digest, the document of the converted image
    image_loading.index           block indexes and the hot set
    image_loading.fallback        the image was not converted: why, and what is done instead
    image_loading.pull            everything is fetched first
    image_loading.mount           daemon, layers, overlay
    image_loading.container       user, devices, configuration
    image_start                   the moment when training began (or the command ended): what was fetched until then

The command runs under `launch.run` and `launch.supervise` as any other. Beside it the spool is watched for the hook's
`training_began`: then the record of the start is complete. Imported by `launch.run` only for images.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bootseer
from bootseer.artifact.hotsets import publishes
from bootseer.artifact.places import CACHE, cache_root, containers_folder, own_folder
from bootseer.artifact.progress import Show
from bootseer.artifact.workload import workload_key
from bootseer.errors import BootseerError, Interrupted, PermanentError
from bootseer.image.containers.container import Container
from bootseer.image.containers.container import Options as ContainerOptions
from bootseer.image.containers.process import Words
from bootseer.image.containers.runtime_config import Bind
from bootseer.image.mounting.request import Request
from bootseer.launch.command import Options, run_command
from bootseer.launch.interrupt import interruptible
from bootseer.launch.observers import ENDED, StartEnd, harmless
from bootseer.launch.session import Session
from bootseer.launch.supervise import say
from bootseer.mounts.user_namespace import num_owners
from bootseer.trace.event import INSTANT
from bootseer.trace.tracer import new_span, spool_word

if TYPE_CHECKING:
    from bootseer.image.mounting.mounted import MountedImage
    from bootseer.launch.image.environment import ImageEnvironment

STAGE = "image_loading"
_IN_CONTAINER = "/run/bootseer"
_HOOK = f"{_IN_CONTAINER}/package"
_SPOOL = f"{_IN_CONTAINER}/spool"
_OF_SETUP = "-setup"
_MAX_WORKLOAD = 94


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user said about the image and the container."""

    request: Request
    """Without the workload, which the command tells."""
    container: ContainerOptions
    """Without the command."""


def run_in_image(
    wanted: Wanted,
    command: Sequence[str],
    options: Options,
    env: Mapping[str, str],
    session: Session | None,
    where: Mapping[str, str],
    *,
    own_group: bool,
) -> int:
    """Run the command in the image; returns the exit code. Signals must be blocked.

    `where` are variables that name folders of checkpoints. Raises `BootseerError` before the command was started.
    """
    wanted = replace(wanted, container=_with_checkpoint(wanted.container, where))
    child_env = session.child_env(env, hook=False) if session is not None else dict(env)
    start = _ImageStart(wanted, command, session, env, options.show)
    code = 1
    try:
        span = new_span()
        if session is not None:
            child_env.update(session.tracer.environment(span))
        if options.environment is not None:
            start.has_environment(options, child_env, env, own_group=own_group, measured=session is not None)
        words = start.prepare(child_env, hook=options.hook and session is not None and env.get("BOOTSEER_HOOK") != "0")
        code = start.setup_code
        if not code:
            if session is not None:
                session.also_beside(start.end.watch)
            began_s = time.monotonic()
            code = run_command(
                words, options, child_env, session, own_group=own_group, program=start.program, span=span
            )
            start.ended(code, time.monotonic() - began_s)
    except (BootseerError, Interrupted) as error:
        code = error.exit_code
        raise
    finally:
        start.close(code)
    return code


def _with_checkpoint(container: ContainerOptions, where: Mapping[str, str]) -> ContainerOptions:
    """The container with the checkpoints' folder in it, at the same place as here, and the variable that names it."""
    binds = tuple(Bind(folder, folder) for folder in where.values())
    words = replace(container.words, env=(*container.words.env, *(f"{name}={value}" for name, value in where.items())))
    return replace(container, words=words, binds=(*binds, *container.binds))


class _ImageStart:
    """One image start on this node. `end.watch` runs in a thread; all else in the main one, before or after it."""

    def __init__(
        self, wanted: Wanted, command: Sequence[str], session: Session | None, env: Mapping[str, str], show: Show
    ) -> None:
        request = wanted.request
        if not request.workload:
            request = replace(request, workload=workload_key(command, role=env.get("ROLE_NAME", "")))
        if session is not None:
            who = session.tracer.identity
            request = replace(request, publish=publishes(who.node, who.num_nodes))
        self._request = request
        self._options = wanted.container
        self._command = tuple(command)
        self._session = session
        self._show = show
        self._folder: Path | None = None
        self._mounted: MountedImage | None = None
        self._container: Container | None = None
        self.end = StartEnd(session, self._record)
        self._seconds = 0.0
        self._environment: ImageEnvironment | None = None
        self.program = command[0] if command else ""
        self.setup_code = 0
        """Exit code of a setup that failed: then there is no command to run."""

    def has_environment(
        self, options: Options, env: dict[str, str], own_env: Mapping[str, str], *, own_group: bool, measured: bool
    ) -> None:
        """There is a setup to be run in the image, or its snapshot to be laid on top."""
        from bootseer.launch.environment.start import EnvironmentStart
        from bootseer.launch.environment.task import Task
        from bootseer.launch.image.environment import ImageEnvironment
        from bootseer.launch.image.setup import place_of, variables_of

        wanted = options.environment
        if wanted is None:
            return
        if not measured:
            wanted = replace(wanted, mode="bypass")
        found = variables_of(self._options.words.env, own_env, wanted.variables)
        named = self._named_mounts(options, found, wanted.inputs)
        wanted = replace(wanted, place=place_of(os.getcwd(), self._options.binds))  # noqa: PTH109
        make = partial(
            Task.made,
            options.setup,
            options.requirements,
            env=env,
            own_env=found,
            session=self._session,
            own_group=own_group,
            show=self._show,
        )
        try:
            task = make(wanted=replace(wanted, inputs=(*wanted.inputs, *named)))
        except BootseerError as error:
            if wanted.mode == "require":
                raise
            say(f"no snapshot of the environment: {error}")
            elsewhere = containers_folder(cache_root(os.environ, os.getuid()))
            task = make(wanted=replace(wanted, mode="bypass", cache=elsewhere))
        self._environment = ImageEnvironment(EnvironmentStart(task, self._command), self._request, self._options)

    def _named_mounts(self, options: Options, env: Mapping[str, str], declared: Sequence[str]) -> list[str]:
        """What the user mounts and the setup names; everything where nobody can tell."""
        from bootseer.launch.image.setup import named_mounts

        binds = self._options.binds
        try:
            binds = named_mounts(options.setup, options.requirements, os.getcwd(), env, binds, declared)  # noqa: PTH109
        except Exception as error:  # whatever is wrong with us, the container starts
            say(f"the setup could not be read: {error}")
        return [bind.source for bind in binds]

    def prepare(self, env: Mapping[str, str], *, hook: bool) -> tuple[str, ...]:
        """Mount the image and prepare the container; returns the command line that starts it.

        Nothing to start when the setup failed (`setup_code`).
        """
        environment = self._environment
        above = environment.before() if environment is not None else ()
        began_s = time.monotonic()
        with interruptible(), self._stage(STAGE) as span:
            root = own_folder(containers_folder(cache_root(os.environ, os.getuid())))
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="run-", dir=root))
            except OSError as error:
                raise PermanentError(f"{root}: {error.strerror}; set {CACHE} to another folder") from error
            if environment is None:
                mounted = self._mount(self._folder, ())
            else:
                mounted = environment.mount(self._mount, self._folder, above)
            self._mounted = mounted
            span.update(mounted.facts)
            self._seconds = time.monotonic() - began_s
            if environment is None:
                return self._started(mounted, env, hook=hook)
        self.setup_code, mounted = environment.set_up(mounted, dict(env), self._mount)
        self._mounted = mounted
        if self.setup_code:
            return ()
        with interruptible(), self._stage(STAGE):
            return self._started(mounted, env, hook=hook)

    def _mount(self, writable: Path, above: Sequence[Path], *, setup: bool = False) -> MountedImage:
        # Its imports take longer than all else where the image is here, and belong to the stage.
        from bootseer.image.mounting.mount import mount_image

        request = self._request
        if setup:  # its hot set is another
            request = replace(request, workload=f"{request.workload[:_MAX_WORKLOAD]}{_OF_SETUP}")
        return mount_image(
            request,
            writable / "root",
            writable=writable,
            above=above,
            lifeline=True,
            suid=True,
            stage=lambda name: self._stage(f"{STAGE}.{name}"),
            say=say,
            show=self._show,
        )

    def _started(self, mounted: MountedImage, env: Mapping[str, str], *, hook: bool) -> tuple[str, ...]:
        """The container for the command, and what starts it."""
        with self._stage(f"{STAGE}.container"):
            folder = self._folder or mounted.root
            container = self._container = self._make_container(folder / "container", mounted, env, hook=hook)
            self.program = container.process.args[0]
            container.start_guard([mounted.undo_command()])
        return container.command

    @contextmanager
    def _stage(self, name: str) -> Iterator[dict[str, Any]]:
        """A stage of the session; the facts that are put into what it yields go into its end."""
        span = self._session.tracer.span(name) if self._session is not None else None
        if span is None:
            yield {}
            return
        with span:
            yield span.attrs

    def _make_container(self, folder: Path, mounted: MountedImage, env: Mapping[str, str], *, hook: bool) -> Container:
        session, options = self._session, self._options
        binds, env, prepend = [], dict(env), {}
        if hook:
            binds.append(Bind(str(Path(bootseer.__file__).parent), _HOOK, read_only=True))
            prepend["PYTHONPATH"] = f"{_HOOK}/hook/path"
        if session is not None and "spool" in session.sinks:
            binds.append(Bind(session.folder, _SPOOL))
            env["BOOTSEER_TRACE"] = session.sinks.replace(spool_word(session.folder), spool_word(_SPOOL))
        words: Words = replace(options.words, command=self._command)
        if self._environment is not None:
            words = self._environment.with_exports(words, mounted, env)
        words = replace(words, prepend=prepend)
        options = replace(options, words=words, binds=(*binds, *options.binds))
        container = Container(folder, mounted.root, mounted.config, options, env)
        user = container.process.user
        if session is not None and 0 < user.uid < num_owners() and user.gid < num_owners():
            _give(session.folder, user.uid)
        return container

    def ended(self, code: int, seconds: float) -> None:
        """The command is over, after so many seconds: what nobody told yet is told now."""
        self.end.tell(ENDED)
        with harmless("the image's last words are lost"):
            if self._mounted is not None:
                self._mounted.tell_problems()
        with harmless("the environment's last words are lost"):
            if self._environment is not None:
                self._environment.start.ended(code, seconds)

    def _record(self, until: str) -> None:
        """The start is over: say what it cost, and keep its record."""
        session, mounted = self._session, self._mounted
        if mounted is None:
            return
        if self._environment is not None:
            self._environment.start.tell(until)
        numbers = mounted.began()
        if session is not None:
            facts = {**mounted.facts, **numbers, "seconds": round(self._seconds, 3), "until": until}
            session.tracer.emit("image_start", INSTANT, parent=session.span, attrs=facts)
        mounted.keep_record()

    def close(self, code: int) -> None:
        """The command has ended so: remove container, mounts and folders."""
        start = self._environment.start if self._environment is not None else None
        with harmless("the environment's snapshot was given up"):
            if start is not None:
                start.end(code)
        with harmless("the image was not unmounted"):
            self._take_away()
        with harmless("the environment was not taken away"):
            if start is not None:
                start.close()

    def _take_away(self) -> None:
        if self._container is not None:
            self._container.close()
        if self._mounted is not None:
            self._mounted.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._container is not None:
            self._container.dismiss_guard()


def _give(spool: str, uid: int) -> None:
    """Let the program in the container write events into the attempt's folder too, and us read what it writes."""
    folder = os.open(spool, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(folder).st_uid == os.geteuid():  # another node may have given it away before
            os.fchown(folder, uid, -1)
            os.fchmod(folder, 0o2750)  # so that files in it belong to our group, which may read them
    finally:
        os.close(folder)

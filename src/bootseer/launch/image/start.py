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
`training_began`: then the record of the start is complete.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import bootseer
from bootseer.artifact.places import CACHE, cache_root, containers_folder, own_folder
from bootseer.artifact.workload import is_publisher, workload_key
from bootseer.errors import BootseerError, Interrupted, PermanentError
from bootseer.image.containers.container import Container
from bootseer.image.containers.container import Options as ContainerOptions
from bootseer.image.containers.process import ProcessOptions
from bootseer.image.containers.runtime_config import Bind
from bootseer.image.mounting.request import Request
from bootseer.launch.command import Options, run_command
from bootseer.launch.interrupt import interruptible
from bootseer.launch.observers import ENDED, StartEnd, harmless
from bootseer.launch.session import Session, staged
from bootseer.launch.supervise import say
from bootseer.mounts.user_namespace import num_owners
from bootseer.trace.event import INSTANT
from bootseer.trace.identity import RESTART
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
    start = _ImageStart(wanted, command, options, session, env, where)
    code = 1
    try:
        code = start.run(own_group=own_group)
    except (BootseerError, Interrupted) as error:
        code = error.exit_code
        raise
    finally:
        start.close(code)
    return code


class _ImageStart:
    """One image start on this node. `_end.watch` runs in a thread; all else in the main one, before or after it."""

    def __init__(
        self,
        wanted: Wanted,
        command: Sequence[str],
        options: Options,
        session: Session | None,
        env: Mapping[str, str],
        where: Mapping[str, str],
    ) -> None:
        request = wanted.request
        if not request.workload:
            request = replace(request, workload=workload_key(command, role=env.get("ROLE_NAME", "")))
        if session is not None:
            identity = session.tracer.identity
            request = replace(request, publish=is_publisher(identity.node, identity.num_nodes))
            if session.warm is not None:
                request = replace(request, imports=session.warm.shared_path)
        self._request = request
        # Checkpoints are at the same place as here.
        binds = tuple(Bind(folder, folder) for folder in where.values())
        if options.peers is not None:
            from bootseer.peers.names import SYSTEM, hosts_for

            hosts = hosts_for({**env, **where})
            binds += (Bind(str(hosts), str(SYSTEM)),) if hosts is not None and hosts.exists() else ()
        words = wanted.container.process
        words = replace(words, env=(*words.env, *(f"{name}={value}" for name, value in where.items())))
        self._container_options = replace(wanted.container, process=words, binds=(*binds, *wanted.container.binds))
        self._options = options
        self._command = tuple(command)
        self._session = session
        self._env = env
        self._folder: Path | None = None
        self._mounted: MountedImage | None = None
        self._container: Container | None = None
        self._end = StartEnd(session, self._record)
        self._seconds = 0.0
        self._environment: ImageEnvironment | None = None

    def run(self, *, own_group: bool) -> int:
        """Mount the image, run the setup in it if there is one, and the command; the exit code."""
        session, span = self._session, new_span()
        env = {**self._env}
        if session is not None:
            env = {**session.child_env(self._env, hook=False), **session.tracer.environment(span)}
        if self._options.environment is not None:
            from bootseer.launch.image.environment import environment_in_image

            self._environment = environment_in_image(
                self._options,
                self._options.environment if session is not None else replace(self._options.environment, mode="bypass"),
                self._command,
                self._request,
                self._container_options,
                env,
                self._env,
                session,
                own_group=own_group,
            )
        code, container = self._prepare(env)
        if container is None:
            return code
        if session is not None:
            session.also_beside(self._end.watch)
        began_s = time.monotonic()
        code = run_command(
            container.command,
            self._options,
            env,
            session,
            own_group=own_group,
            program=container.process.args,
            span=span,
            renew=container.renew,
        )
        self._ended(code, time.monotonic() - began_s)
        return code

    def _prepare(self, env: dict[str, str]) -> tuple[int, Container | None]:
        """The image's container, ready to start; none when the setup failed, with the setup's exit code."""
        environment = self._environment
        above = environment.before() if environment is not None else ()
        began_s = time.monotonic()
        with interruptible(), staged(self._session, STAGE) as facts:
            root = own_folder(containers_folder(cache_root(os.environ, os.getuid())))
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="run-", dir=root))
            except OSError as error:
                raise PermanentError(f"{root}: {error.strerror}; set {CACHE} to another folder") from error
            if environment is None:
                self._mounted = self._mount(self._folder)
            else:
                self._mounted = environment.mount(self._mount, self._folder, above)
            facts.update(self._mounted.facts)
            self._seconds = time.monotonic() - began_s
            if environment is None:
                return 0, self._started(self._folder, self._mounted, env)
        code, self._mounted = environment.set_up(self._mounted, dict(env), self._mount)
        if code:
            return code, None
        with interruptible(), staged(self._session, STAGE):
            return 0, self._started(self._folder, self._mounted, env)

    def _mount(self, writable: Path, above: Sequence[Path] = (), setup: bool = False) -> MountedImage:
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
            stage=lambda name: staged(self._session, f"{STAGE}.{name}"),
            say=say,
            show=self._options.show,
        )

    def _started(self, folder: Path, mounted: MountedImage, env: Mapping[str, str]) -> Container:
        """The container for the command, with the process that cleans up behind it."""
        with staged(self._session, f"{STAGE}.container"):
            container = self._container = self._make_container(folder / "container", mounted, env)
            container.start_guard([mounted.undo_command()])
        return container

    def _make_container(self, folder: Path, mounted: MountedImage, env: Mapping[str, str]) -> Container:
        session, options = self._session, self._container_options
        binds, env, prepend = [], dict(env), {}
        if self._options.hook and session is not None and self._env.get("BOOTSEER_HOOK") != "0":
            binds.append(Bind(str(Path(bootseer.__file__).parent), _HOOK, read_only=True))
            prepend["PYTHONPATH"] = f"{_HOOK}/hook/path"
        if session is not None and "spool" in session.sinks:
            binds.append(Bind(session.folder, _SPOOL))
            env["BOOTSEER_TRACE"] = session.sinks.replace(spool_word(session.folder), spool_word(_SPOOL))
            if self._options.warm != "off":
                env["BOOTSEER_WARM"] = _SPOOL
        if self._options.restarts:
            env[RESTART] = str(session.tracer.identity.restart if session is not None else 0)
        words: ProcessOptions = replace(options.process, command=self._command)
        if self._environment is not None:
            words = self._environment.with_exports(words, mounted, env)
        words = replace(words, prepend=prepend)
        options = replace(options, process=words, binds=(*binds, *options.binds))
        container = Container(folder, mounted.root, mounted.config, options, env)
        user = container.process.user
        if session is not None and 0 < user.uid < num_owners() and user.gid < num_owners():
            _give(session.folder, user.uid)
        return container

    def _ended(self, code: int, seconds: float) -> None:
        """The command is over, after so many seconds: what was not reported yet is reported now."""
        self._end.tell(ENDED)
        with harmless("the image's last words are lost"):
            if self._mounted is not None:
                self._mounted.report_problems()
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
        if session is not None and session.warm is not None:
            session.warm.record(until)
        numbers = mounted.end_startup()
        if session is not None:
            facts = {**mounted.facts, **numbers, "seconds": round(self._seconds, 3), "until": until}
            session.tracer.emit("image_start", INSTANT, parent=session.span, attrs=facts)
        mounted.wait_for_record()

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

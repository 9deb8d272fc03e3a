"""`bootseer run --image`: mount the image as a measured stage, run the command in it, and record the cost of the start.

The stages are listed in docs/formats/event.md. The record of reads is complete when the hook's `training_began` event
is found in the spool.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

import bootseer
from bootseer.artifact.owned_folder import OwnedFolder
from bootseer.artifact.places import cache_root, containers_folder
from bootseer.artifact.workload import is_publisher, workload_key
from bootseer.errors import BootseerError, Interrupted
from bootseer.image.containers.container import Container
from bootseer.image.containers.container import Options as ContainerOptions
from bootseer.image.containers.process import ProcessOptions
from bootseer.image.containers.runtime_config import Bind
from bootseer.image.mounting.request import Request
from bootseer.launch.command import Options, run_command
from bootseer.launch.interrupt import interruptible
from bootseer.launch.observers import COMMAND_ENDED, StartReport, reporting_errors
from bootseer.launch.restart import RUN_ID
from bootseer.launch.session import Session, session_stage
from bootseer.launch.supervise import say
from bootseer.mounts.user_namespace import num_owners
from bootseer.trace.event import INSTANT
from bootseer.trace.identity import RESTART
from bootseer.trace.tracer import new_span, spool_word

if TYPE_CHECKING:
    from bootseer.image.mounting.mount import LayersAbove
    from bootseer.image.mounting.mounted import MountedImage
    from bootseer.launch.image.environment import ImageEnvironment

STAGE = "image_loading"
_IN_CONTAINER = "/run/bootseer"
_HOOK = f"{_IN_CONTAINER}/bootseer"
_SPOOL = f"{_IN_CONTAINER}/spool"
_PROCESS = f"{_IN_CONTAINER}/process"
_OF_SETUP = "-setup"
_PREFIX = "start-"
"""Of folders of containers. Earlier versions called them `run-`, and locked none."""
_MAX_WORKLOAD = 94


class ImageOptions(Struct, frozen=True):
    """The options of the image and the container."""

    request: Request
    """Without a workload, unless the user named one."""
    container: ContainerOptions
    """Without the command."""


def run_in_image(
    image: ImageOptions,
    command: Sequence[str],
    options: Options,
    env: Mapping[str, str],
    session: Session,
    extra_env: Mapping[str, str],
) -> int:
    """Run the command in the image; returns the exit code. Signals must be blocked.

    `extra_env` are variables that name folders to mount. Raises `BootseerError` before the command was started.
    """
    start = _ImageStart(image, command, options, session, env, extra_env)
    code = 1
    try:
        code = start.run()
    except (BootseerError, Interrupted) as error:
        code = error.exit_code
        raise
    finally:
        start.close(code)
    return code


class _ImageStart:
    """One image start on this node. `_record` may run in a thread; all else in the main one."""

    def __init__(
        self,
        image: ImageOptions,
        command: Sequence[str],
        options: Options,
        session: Session,
        env: Mapping[str, str],
        extra_env: Mapping[str, str],
    ) -> None:
        request = image.request
        if not request.workload:
            request = replace(request, workload=workload_key(command, role=env.get("ROLE_NAME", "")))
        identity = session.tracer.identity
        request = replace(request, publish=is_publisher(identity.node, identity.num_nodes))
        if session.warm is not None:
            request = replace(request, imports=session.warm.shared_path, process=session.warm.process)
        self._request = request
        # Checkpoints are at the same place as here.
        binds = tuple(Bind(folder, folder) for folder in extra_env.values())
        if options.peers is not None:
            from bootseer.peers.names import SYSTEM, hosts_for

            hosts = hosts_for({**env, **extra_env})
            binds += (Bind(str(hosts), str(SYSTEM)),) if hosts is not None and hosts.exists() else ()
        words = image.container.process
        words = replace(words, env=(*words.env, *(f"{name}={value}" for name, value in extra_env.items())))
        self._container_options = replace(image.container, process=words, binds=(*binds, *image.container.binds))
        self._options = options
        self._command = tuple(command)
        self._session = session
        self._env = env
        self._folder: OwnedFolder | None = None
        self._mounted: MountedImage | None = None
        self._container: Container | None = None
        self._report = StartReport(session, self._record)
        self._seconds = 0.0
        self._environment: ImageEnvironment | None = None

    def run(self) -> int:
        """Mount the image, run the setup (if any) and the command in it; the exit code."""
        options, session, span = self._options, self._session, new_span()
        env = {**session.child_env(self._env, hook=False), **session.tracer.environment(span)}
        if options.environment is not None:
            from bootseer.launch.image.environment import environment_in_image

            self._environment = environment_in_image(
                options, options.environment, self._command, self._container_options, env, self._env, session
            )
        code, container = self._prepare(env)
        if container is None:
            return code
        began_s = time.monotonic()
        code = run_command(
            container.command,
            options._replace(restarts=None) if container.has_parent else options,
            env,
            session,
            program=container.process.args,
            span=span,
            renew=container.renew,
        )
        self._command_ended(code, time.monotonic() - began_s)
        return code

    def _prepare(self, env: dict[str, str]) -> tuple[int, Container | None]:
        """The container, ready to start; or the setup's exit code and None if the setup failed."""
        environment = self._environment
        began_s = time.monotonic()
        with interruptible(), ExitStack() as stage:
            facts = stage.enter_context(session_stage(self._session, STAGE))
            containers = containers_folder(cache_root())
            self._folder = OwnedFolder.made(containers, _PREFIX, self._unmount_left)
            folder = self._folder.path
            if environment is None:
                self._mounted = self._mount(folder)
            else:

                def layers(digest: str) -> Sequence[Path]:
                    """The environment's layers: their stage lies between two parts of the image's."""
                    nonlocal facts
                    stage.close()
                    found = environment.layers(digest)
                    facts = stage.enter_context(session_stage(self._session, STAGE))
                    return found

                self._mounted = environment.mount(self._mount, folder, layers)
            facts.update(self._mounted.facts)
            self._seconds = time.monotonic() - began_s
            if environment is None:
                return 0, self._start_container(folder, self._mounted, env)
            self._seconds -= environment.start.seconds
        code, self._mounted = environment.set_up(self._mounted, dict(env), self._mount)
        if code:
            return code, None
        with interruptible(), session_stage(self._session, STAGE):
            return 0, self._start_container(folder, self._mounted, env)

    def _unmount_left(self, folder: Path) -> None:
        """Unmount an image of a run that was killed together with its guard, as by Slurm's proctrack/cgroup."""
        from bootseer.image.mounting.mounted import find_mount, unmount
        from bootseer.mounts.state import Runtime

        with suppress(BootseerError):
            runtime = Runtime(self._request.runtime)
            unmount(runtime, find_mount(runtime, folder / "root"), force=True)

    def _mount(self, writable: Path, above: LayersAbove = lambda digest: (), setup: bool = False) -> MountedImage:
        # Imported here, so that the imports are part of the measured stage.
        from bootseer.image.mounting.mount import mount_image

        request = self._request
        if setup:  # a workload of its own, with its own hot set
            request = replace(request, workload=f"{request.workload[:_MAX_WORKLOAD]}{_OF_SETUP}")
        return mount_image(
            request,
            writable / "root",
            writable=writable,
            above=above,
            lifeline=True,
            suid=True,
            stage=lambda name: session_stage(self._session, f"{STAGE}.{name}"),
            say=say,
            show=self._options.show,
        )

    def _start_container(self, folder: Path, mounted: MountedImage, env: Mapping[str, str]) -> Container:
        with session_stage(self._session, f"{STAGE}.container"):
            container = self._container = self._make_container(folder / "container", mounted, env)
            container.start_guard([mounted.undo_command()])
        return container

    def _make_container(self, folder: Path, mounted: MountedImage, env: Mapping[str, str]) -> Container:
        session, options = self._session, self._container_options
        binds, env, prepend = [], dict(env), {}
        parent: tuple[str, ...] = ()
        if self._options.hook and session.is_measured and self._env.get("BOOTSEER_HOOK") != "0":
            binds.append(Bind(str(Path(bootseer.__file__).parent), _HOOK, read_only=True))
            prepend["PYTHONPATH"] = f"{_HOOK}/hook/path"
        if "spool" in session.sinks:
            binds.append(Bind(session.folder, _SPOOL))
            env["BOOTSEER_TRACE"] = session.sinks.replace(spool_word(session.folder), spool_word(_SPOOL))
            if session.warm is not None:
                env["BOOTSEER_WARM"] = f"{_SPOOL}/{Path(session.warm_folder).name}"
                # A pattern is searched for outside of the container, once for each start of a command there.
                if self._options.restarts is not None and prepend and self._options.began_pattern is None:
                    numbers = (str(self._options.restarts), str(self._options.restart_delay))
                    process = session.warm.process_folder and _PROCESS
                    parent = (f"{_HOOK}/launch/inside.py", *numbers, session.span, _SPOOL, process)
                    if process:
                        binds.append(Bind(session.warm.process_folder, _PROCESS))
        if self._options.restarts is not None:
            env[RESTART] = str(session.tracer.identity.restart)
            env[RUN_ID] = session.span
        words: ProcessOptions = replace(options.process, command=self._command)
        if self._environment is not None:
            words = self._environment.with_exports(words, mounted, env)
        words = replace(words, prepend=prepend)
        options = replace(options, process=words, binds=(*binds, *options.binds), parent=parent)
        container = Container(folder, mounted.root, mounted.config, options, env)
        if parent and not container.has_parent and (self._options.warm == "on" or parent[-1]):
            what = "no process snapshot is used" if parent[-1] else "a restart creates the container again"
            say(f"{what}: the image's PATH has no python3 of version 3.11 or later")
        user = container.process.user
        if "spool" in session.sinks and 0 < user.uid < num_owners() and user.gid < num_owners():
            with reporting_errors("the container cannot write events"):
                _give_folder(session.folder, user.uid)
                if session.warm is not None:
                    _give_folder(session.warm_folder, user.uid)
                    if session.warm.process_folder:
                        _give_folder(session.warm.process_folder, user.uid)
        return container

    def _command_ended(self, code: int, seconds: float) -> None:
        self._report.send(COMMAND_ENDED)
        with reporting_errors("problems of the image's mount are not known"):
            if self._mounted is not None:
                self._mounted.report_problems()
        with reporting_errors("problems of the environment's mount are not known"):
            if self._environment is not None:
                self._environment.start.command_ended(code, seconds)

    def _record(self, until: str) -> None:
        session, mounted = self._session, self._mounted
        if mounted is None:
            return
        if self._environment is not None:
            self._environment.start.report.send(until)
        if session.warm is not None:
            session.warm.report.send(until)
        numbers = mounted.end_startup()
        facts = {**mounted.facts, **numbers, "seconds": round(self._seconds, 3), "until": until}
        session.tracer.emit("image_start", INSTANT, parent=session.span, attrs=facts)
        mounted.wait_for_record()

    def close(self, code: int) -> None:
        """After the command: remove container, mounts and folders."""
        start = self._environment.start if self._environment is not None else None
        with reporting_errors("the environment's snapshot was cancelled"):
            if start is not None:
                start.finish_publishing(code)
        with reporting_errors("the image was not unmounted"):
            self._clean_up()
        with reporting_errors("the environment was not removed"):
            if start is not None:
                start.close()

    def _clean_up(self) -> None:
        if self._container is not None:
            self._container.close()
        if self._mounted is not None:
            self._mounted.close()
        if self._folder is not None:
            self._folder.remove()
        if self._container is not None:
            self._container.dismiss_guard()


def _give_folder(path: str, uid: int) -> None:
    """Let the container's user write into a folder of the spool, readable by this process's group."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(folder).st_uid == os.geteuid():  # unless another node has done this already
            os.fchown(folder, uid, -1)
            os.fchmod(folder, 0o2750)  # set-group-ID: files in it belong to this group
    finally:
        os.close(folder)

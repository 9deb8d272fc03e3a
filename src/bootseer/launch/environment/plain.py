"""The environment setup before the command, as a measured stage: a script, a requirements file, or both.

Here it runs on this machine itself, by pip, as it would without BootSeer; with snapshots `environment.setup` runs it.
What the setup writes to standard output goes to standard error, so that the job's own output stays clean.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bootseer.errors import PermanentError, UsageError
from bootseer.launch.command import Options, run_command, run_program
from bootseer.launch.session import Session, staged
from bootseer.launch.supervise import say
from bootseer.trace.event import INSTANT

if TYPE_CHECKING:
    from bootseer.env.capturing.exports import Left
    from bootseer.env.keys.requirement import FileKind

STAGE = "environment_setup"
_CANNOT_START = 127


def check_files(script: str | None, requirements: Sequence[str]) -> None:
    """Raises `UsageError` for files that are not there, or cannot be installed."""
    for path in ([script] if script else []) + list(requirements):
        if not os.path.isfile(path):  # noqa: PTH113 - pathlib raises for a folder that may not be searched
            raise UsageError(f"{path}: no such file", hint="give --setup and --requirements a file that exists")
        if not os.access(path, os.R_OK):
            raise UsageError(f"{path}: may not be read", hint="make it readable for the user that runs the job")
    if requirements:
        groups_of(requirements)


def groups_of(requirements: Sequence[str]) -> list[tuple[FileKind, list[str]]]:
    """The files of `--requirements`, as they are installed. Raises `UsageError` for those that cannot be."""
    from bootseer.env.keys.requirement import MAX_BYTES, grouped

    found = []
    for path in requirements:
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - a step before each job
                found.append((path, file.read(MAX_BYTES)))
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}", hint="give a file that can be read") from error
    return grouped(found)


def script_command(script: str) -> list[str]:
    """What runs a setup script: itself, if it is executable and so names its own interpreter, else a shell."""
    return [str(Path(script).absolute())] if os.access(script, os.X_OK) else [shutil.which("bash") or "sh", script]


def install_command(
    kind: FileKind, files: Sequence[str], env: Mapping[str, str]
) -> tuple[Sequence[str], Mapping[str, str]]:
    """What installs files of one kind on this machine, and its further variables. Raises `PermanentError`."""
    # The job's Python is the one on PATH, not the one that BootSeer runs on.
    python = shutil.which("python3") or shutil.which("python") or sys.executable
    if kind != "requirements":
        from bootseer.env.installing.choose import plain_command

        way = plain_command(kind, files, python, env)
        return way.argv, way.env
    from bootseer.env.installing.interpreter import module_command

    return module_command(python, "pip", "install", *(word for path in files for word in ("-r", path))), {}


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """How to run a setup script so that it tells what it exports."""

    argv: Sequence[str]
    env: Mapping[str, str]
    """The script's whole environment."""
    folder: Path | None
    """Where it tells; None: it cannot."""

    def left(self, node: str) -> Left:
        """What the script left in its environment, once it has ended. `node` is what this machine is called."""
        from bootseer.env.capturing import exports

        if self.folder is None:
            return exports.Left((), ("what it exports is not known",))
        return exports.read(self.folder, self.env, node_words=[node])


def script_run(script: str, argv: Sequence[str], folder: Path, env: Mapping[str, str]) -> ScriptRun:
    """The script with `env`. `argv` runs it as it is, which is done too where nothing can be written to `folder`."""
    from bootseer.env.capturing import exports

    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        words, more = exports.command(script, folder, env)
    except OSError as error:
        say(f"what {script} exports does not reach the command: {folder}: {error.strerror}")
        return ScriptRun(argv, env, None)
    return ScriptRun(words, {**env, **more}, folder)


def say_failed(label: str, code: int) -> None:
    """Tell the user that the setup failed."""
    say(f"the environment setup failed ({label}, exit code {code}); the command was not started")


def run_after_setup(
    command: Sequence[str],
    options: Options,
    env: Mapping[str, str],
    session: Session | None,
    *,
    own_group: bool,
    came: Mapping[str, object],
) -> int:
    """Run the setup on this machine itself, then the command; returns the exit code. Signals must be blocked.

    `came` is what the event `environment_start` says of how the environment came.
    """
    code, found = run_setup(options, env, session, own_group=own_group)
    if code:
        return code
    if session is not None:
        session.tracer.emit("environment_start", INSTANT, attrs=came)
    return run_command(command, options, dict(found), session, own_group=own_group)


def run_setup(
    options: Options, env: Mapping[str, str], session: Session | None, *, own_group: bool, exports: bool = True
) -> tuple[int, Mapping[str, str]]:
    """Run script and installation until one fails: the exit code, and the environment for the command.

    `exports`: whether the command gets what the script exports.
    Signals must be blocked. A signal that arrives meanwhile goes to the step and ends the setup with it.
    """

    found = env

    def run(argv: Sequence[str], env: Mapping[str, str]) -> int:
        tracer = session.tracer if session is not None else None
        return run_program(argv, env, tracer, own_group=own_group, stdout=2)

    def step(name: str, label: str, work: Callable[[], int]) -> int:
        with staged(session, f"{STAGE}.{name}", {"file": Path(label).name}) as facts:
            code = work()
            if code:
                facts["error"] = f"exit code {code}"
                say_failed(label, code)
        return code

    def script(path: str) -> int:
        nonlocal found
        asked = ScriptRun(script_command(path), env, None)
        with ExitStack() as opened:
            if exports:
                try:
                    folder = tempfile.TemporaryDirectory(prefix="bootseer-", ignore_cleanup_errors=True)
                    asked = script_run(path, asked.argv, Path(opened.enter_context(folder)), env)
                except OSError as error:
                    say(f"what {path} exports does not reach the command: {error}")
            code = run(asked.argv, asked.env)
            if asked.folder is not None:
                from bootseer.env.capturing.exports import apply

                node = session.tracer.identity.node if session is not None else os.uname().nodename
                found = apply(asked.left(node).exports, env)
        return code

    def install(kind: FileKind, files: Sequence[str]) -> int:
        try:
            argv, more = install_command(kind, files, env)
        except PermanentError as error:
            say(str(error))
            return _CANNOT_START
        return run(argv, {**env, **more})

    with staged(session, STAGE) as facts:
        code = step("script", options.setup, partial(script, options.setup)) if options.setup else 0
        for kind, files in groups_of(options.requirements) if options.requirements else ():
            code = code or step("install", ", ".join(files), partial(install, kind, files))
        if code:
            facts["error"] = f"exit code {code}"
    return code, found

"""The environment setup before the command, as a measured stage: a script, a requirements file, or both.

It runs on this machine itself, by pip; with snapshots `environment.setup` does it. What the setup writes to standard
output goes to standard error, so that the job's own output stays clean.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bootseer.errors import PermanentError, UsageError
from bootseer.launch.command import Options, run_command
from bootseer.launch.session import Session
from bootseer.launch.supervise import CannotStart, say, spawn, wait
from bootseer.trace.event import INSTANT
from bootseer.trace.tracer import Tracer

if TYPE_CHECKING:
    from bootseer.env.capturing.exports import Left
    from bootseer.env.keys.requirement import FileKind

STAGE = "environment_setup"
_CANNOT_START = 127


@dataclass(frozen=True, slots=True)
class Step:
    """One command of the setup."""

    stage: str
    command: Sequence[str]
    what: str
    """For the user: the file it came from."""
    script: str = ""
    """The setup script, if it is one."""
    kind: FileKind = "requirements"
    """Of the files: for others than pip's, how to install is still to be found."""
    files: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """How the setup ended."""

    code: int
    """Of the step that failed; else 0."""
    what: str
    """What failed."""
    env: Mapping[str, str]
    """The command's environment: what the setup was given, and what its script exported."""


def steps(script: str | None, requirements: Sequence[str]) -> list[Step]:
    """The commands that a setup consists of. Raises `UsageError` for files that are not there."""
    found = []
    for path in ([script] if script else []) + list(requirements):
        if not os.path.isfile(path):  # noqa: PTH113 - pathlib raises for a folder that may not be searched
            raise UsageError(f"{path}: no such file", hint="give --setup and --requirements a file that exists")
        if not os.access(path, os.R_OK):
            raise UsageError(f"{path}: may not be read", hint="make it readable for the user that runs the job")
    if script:
        # An executable script names its own interpreter.
        command = (
            [str(Path(script).absolute())] if os.access(script, os.X_OK) else [shutil.which("bash") or "sh", script]
        )
        found.append(Step(f"{STAGE}.script", command, script, script))
    # The job's Python is the one on PATH, not the one that BootSeer runs on.
    python = shutil.which("python3") or shutil.which("python") or sys.executable
    for kind, files in groups_of(requirements) if requirements else ():
        from bootseer.env.installing.interpreter import module_command

        words = module_command(python, "pip", "install", *(word for path in files for word in ("-r", path)))
        found.append(Step(f"{STAGE}.install", words, ", ".join(files), kind=kind, files=files))
    return found


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
    tracer = session.tracer if session is not None else None
    ended = run_setup(options, env, tracer, own_group=own_group)
    if ended.code:
        return ended.code
    if tracer is not None:
        tracer.emit("environment_start", INSTANT, attrs=came)
    return run_command(command, options, dict(ended.env), session, own_group=own_group)


def run_setup(
    options: Options, env: Mapping[str, str], tracer: Tracer | None, *, own_group: bool, exports: bool = True
) -> Ended:
    """Run the steps until one fails. `exports`: whether the command gets what the script exports.

    Signals must be blocked. A signal that arrives meanwhile goes to the step and ends the setup with it.
    """

    def all_steps() -> Ended:
        found = env
        for step in steps(options.setup, options.requirements):
            work = partial(_run_telling if step.script and exports else _run, step, env, tracer, own_group)
            ended = _staged(tracer, step.stage, {"file": Path(step.what).name}, work)
            if ended.code:
                return ended
            found = ended.env if step.script else found
        return Ended(0, "", found)

    ended = _staged(tracer, STAGE, {}, all_steps)
    if ended.code:
        say(f"the environment setup failed ({ended.what}, exit code {ended.code}); the command was not started")
    return ended


def _staged(tracer: Tracer | None, stage: str, attrs: Mapping[str, object], work: Callable[[], Ended]) -> Ended:
    """Do the work as a stage, when there is a tracer; an exit code other than 0 makes it a failed one."""
    if tracer is None:
        return work()
    with tracer.span(stage, attrs) as span:
        ended = work()
        if ended.code:
            span.fail(f"exit code {ended.code}")
    return ended


def _run_telling(step: Step, env: Mapping[str, str], tracer: Tracer | None, own_group: bool) -> Ended:
    """Run the script so that it tells what it exports."""
    from bootseer.env.capturing import exports

    try:
        folder = tempfile.TemporaryDirectory(prefix="bootseer-", ignore_cleanup_errors=True)
    except OSError as error:
        say(f"what {step.script} exports does not reach the command: {error}")
        return _run(step, env, tracer, own_group)
    with folder:
        asked = telling(step.script, step.command, Path(folder.name), env)
        ended = _run(replace(step, command=asked.argv), asked.env, tracer, own_group)
        node = tracer.identity.node if tracer is not None else os.uname().nodename
        return replace(ended, env=exports.apply(asked.left(node).exports, env))


def _run(step: Step, env: Mapping[str, str], tracer: Tracer | None, own_group: bool) -> Ended:
    child_env = {**env, **tracer.environment()} if tracer is not None else env
    command = step.command
    try:
        if step.kind != "requirements":
            from bootseer.env.installing.choose import plain_command

            way = plain_command(step.kind, step.files, command[0], env)
            command, child_env = way.argv, {**child_env, **way.env}
        pid = spawn(command, child_env, own_group=own_group, stdout=2)
    except PermanentError as error:
        say(str(error))
        return Ended(_CANNOT_START, step.what, env)
    except CannotStart as error:
        return Ended(error.code, str(error), env)
    return Ended(wait(pid, own_group=own_group, tracer=tracer), step.what, env)


@dataclass(frozen=True, slots=True)
class Telling:
    """How to run the script."""

    argv: Sequence[str]
    env: Mapping[str, str]
    """The script's whole environment."""
    folder: Path | None
    """Where it tells; None: it cannot."""

    def left(self, node: str) -> Left:
        """What the script left behind, once it has ended. `node` is what this machine is called."""
        from bootseer.env.capturing import exports

        if self.folder is None:
            return exports.Left((), ("what it exports is not known",))
        return exports.read(self.folder, self.env, node_words=[node])


def telling(script: str, argv: Sequence[str], folder: Path, env: Mapping[str, str]) -> Telling:
    """The script with `env`. `argv` runs it as it is; `folder` is made if it is not there."""
    from bootseer.env.capturing import exports

    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        words, more = exports.command(script, folder, env)
    except OSError as error:
        say(f"what {script} exports does not reach the command: {folder}: {error.strerror}")
        return Telling(argv, env, None)
    return Telling(words, {**env, **more}, folder)

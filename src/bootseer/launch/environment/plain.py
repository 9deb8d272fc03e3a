"""Run the setup (a script, requirement files, or both) without snapshots, on this machine itself, as measured stages.

With snapshots `environment.setup` runs it. The setup's standard output goes to standard error, so that the job's own
output stays clean.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from bootseer.errors import PermanentError, UsageError, os_errors_as
from bootseer.launch.command import Options, run_command, run_program
from bootseer.launch.session import Session, session_stage
from bootseer.launch.supervise import NOT_FOUND, say
from bootseer.trace.event import INSTANT

if TYPE_CHECKING:
    from bootseer.env.capturing.exports import ExportDiff
    from bootseer.env.keys.requirement import FileKind

STAGE = "environment_setup"


def check_files(script: str | None, requirements: Sequence[str]) -> None:
    """Raises `UsageError` for files that do not exist, are unreadable, or cannot be installed."""
    for path in ([script] if script else []) + list(requirements):
        if not os.path.isfile(path):  # noqa: PTH113 - pathlib raises for a folder that may not be searched
            raise UsageError(f"{path}: no such file", hint="give --setup and --requirements a file that exists")
        if not os.access(path, os.R_OK):
            raise UsageError(f"{path}: may not be read", hint="make it readable for the user that runs the job")
    if requirements:
        groups_of(requirements)


def groups_of(requirements: Sequence[str]) -> list[tuple[FileKind, list[str]]]:
    """The files of `--requirements` in groups that are installed together. Raises `UsageError`."""
    from bootseer.env.keys.requirement import MAX_BYTES, grouped

    found = []
    for path in requirements:
        with os_errors_as(UsageError, path, hint="give a file that can be read"), open(path, "rb") as file:  # noqa: PTH123
            found.append((path, file.read(MAX_BYTES)))
    return grouped(found)


def script_command(script: str) -> list[str]:
    """The command for a setup script: the script itself if it is executable, else a shell."""
    return [str(Path(script).absolute())] if os.access(script, os.X_OK) else [shutil.which("bash") or "sh", script]


def install_command(
    kind: FileKind, files: Sequence[str], env: Mapping[str, str]
) -> tuple[Sequence[str], Mapping[str, str]]:
    """The command that installs files of one kind on this machine, and variables for it. Raises `PermanentError`."""
    # The job's Python is the one on PATH, not BootSeer's.
    python = shutil.which("python3") or shutil.which("python") or sys.executable
    from bootseer.env.installing.interpreter import ask, module_command, runner

    if kind == "requirements":
        return module_command(python, "pip", "install", *(word for path in files for word in ("-r", path))), {}
    from bootseer.env.installing.choose import choose
    from bootseer.env.keys.lock import own_uv

    run = runner()
    way = choose(files, env, ask(python, env, run), run, cwd=str(Path.cwd()), kind=kind, own_uv=own_uv() or "")
    if not way.commands:
        raise PermanentError(way.why_not_uv)
    return way.commands[0].argv, way.commands[0].env


class ScriptRun(Struct, frozen=True):
    """The command of a setup script, with a hook that records its exports."""

    argv: Sequence[str]
    env: Mapping[str, str]
    """The script's whole environment."""
    folder: Path | None
    """Where exports are recorded; None: they are not."""

    def exports(self, node: str) -> ExportDiff:
        """The exports, once the script has ended. `node` is the name of this machine."""
        from bootseer.env.capturing import exports

        if self.folder is None:
            return exports.ExportDiff((), ("its exports are not known",))
        return exports.read_exports(self.folder, self.env, node_words=[node])


def prepare_script(script: str, argv: Sequence[str], folder: Path, env: Mapping[str, str]) -> ScriptRun:
    """The script with a hook in `folder`; without one (`argv` as it is) if the folder is not writable."""
    from bootseer.env.capturing import exports

    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        words, more = exports.capture_command(script, folder, env)
    except OSError as error:
        say(f"exports of {script} do not reach the command: {folder}: {error.strerror}")
        return ScriptRun(argv, env, None)
    return ScriptRun(words, {**env, **more}, folder)


def say_failed(label: str, code: int) -> None:
    say(f"the environment setup failed ({label}, exit code {code}); the command was not started")


def run_after_setup(
    command: Sequence[str],
    options: Options,
    env: Mapping[str, str],
    session: Session,
    *,
    start_attrs: Mapping[str, object],
) -> int:
    """Run the setup on this machine itself, then the command; returns the exit code. Signals must be blocked.

    `start_attrs` are the attributes of the event `environment_start`.
    """
    code, found = run_setup(options, env, session)
    if code:
        return code
    session.tracer.emit("environment_start", INSTANT, attrs=start_attrs)
    return run_command(command, options, dict(found), session)


def run_setup(
    options: Options, env: Mapping[str, str], session: Session, *, exports: bool = True
) -> tuple[int, Mapping[str, str]]:
    """Run script and installation until one fails; the exit code, and the environment for the command.

    `exports`: whether the command gets the script's exports. Signals must be blocked: they are forwarded to the running
    step, and end the setup with it.
    """
    command_env, code = env, 0
    with session_stage(session, STAGE) as facts, ExitStack() as opened:
        if options.setup:
            script = ScriptRun(script_command(options.setup), env, None)
            if exports:
                try:
                    folder = tempfile.TemporaryDirectory(prefix="bootseer-", ignore_cleanup_errors=True)
                    script = prepare_script(options.setup, script.argv, Path(opened.enter_context(folder)), env)
                except OSError as error:
                    say(f"exports of {options.setup} do not reach the command: {error}")
            code = _step("script", options.setup, script.argv, script.env, session)
            if script.folder is not None:
                from bootseer.env.document import apply_exports

                command_env = apply_exports(script.exports(session.tracer.identity.node).exports, env)
        for kind, files in groups_of(options.requirements) if options.requirements and not code else ():
            label = ", ".join(files)
            try:
                argv, more = install_command(kind, files, env)
                code = _step("install", label, argv, {**env, **more}, session)
            except PermanentError as error:
                code = NOT_FOUND
                say(str(error))
                say_failed(label, code)
            if code:
                break
        if code:
            facts["error"] = f"exit code {code}"
    return code, command_env


def _step(name: str, label: str, argv: Sequence[str], env: Mapping[str, str], session: Session) -> int:
    with session_stage(session, f"{STAGE}.{name}", {"file": Path(label).name}) as facts:
        code = run_program(argv, env, session.tracer, of_setup=True)
        if code:
            facts["error"] = f"exit code {code}"
            say_failed(label, code)
    return code

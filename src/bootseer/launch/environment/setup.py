"""Run a setup for a snapshot: with the fastest installer, bytecode compiled once, and a record of what it installed.

`SetupRun` has the steps; a `SetupHost` is where they run. The setup's standard output goes to standard error, so that
the job's own output stays clean. With the mode `bypass` pip alone installs, as without BootSeer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from msgspec import structs

from bootseer.env.capturing.exports import ExportDiff
from bootseer.env.document import Export, apply_exports
from bootseer.env.installing import interpreter
from bootseer.env.installing.bytecode_compile import by_interpreter, compile_command
from bootseer.env.installing.choose import Command, Installation, choose
from bootseer.env.installing.interpreter import Run, module_command, runner
from bootseer.env.installing.packages import (
    Distribution,
    Installed,
    installed,
    new_distributions,
    new_packages,
    path_in_root,
)
from bootseer.env.installing.validate import conflicts, validate
from bootseer.env.keys.lock import own_uv
from bootseer.env.keys.node import Interpreter, find_python
from bootseer.env.keys.requirement import FileKind
from bootseer.env.life.unsafe import UnsafeError
from bootseer.errors import BootseerError, Interrupted, PermanentError
from bootseer.launch.command import Options, run_program
from bootseer.launch.environment.plain import (
    STAGE,
    ScriptRun,
    groups_of,
    prepare_script,
    say_failed,
    script_command,
)
from bootseer.launch.environment.task import EnvironmentOptions, Task
from bootseer.launch.interrupt import interruptible
from bootseer.launch.session import Session, session_stage
from bootseer.launch.supervise import ENDING, NOT_FOUND, say
from bootseer.logs import logger
from bootseer.machine.child import Outcome
from bootseer.units import listed

_MAX_WORKERS = 16
_log = logger(__name__)
EXPORTS = "exports"
"""Folder for a script's exports, below the start's own folder."""


@dataclass(frozen=True, slots=True)
class SetupResult:
    """The result of a setup."""

    code: int = 0
    """Exit code of the failed step."""
    what: str = ""
    """The file of the failed step."""
    python: Interpreter | None = None
    """The job's Python, if there is one."""
    before: Installed = field(default_factory=Installed)
    """Packages installed before the setup."""
    packages: tuple[str, ...] = ()
    new: tuple[Distribution, ...] = ()
    """Distributions that were installed for the job's Python."""
    exports: tuple[Export, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why the setup cannot be published."""
    unknown: tuple[str, ...] = ()
    """What could not be found out about it, so that it is not published this time."""
    began_s: float = 0.0
    """Seconds since 1970."""
    ended_s: float = 0.0

    def ending_now(self) -> SetupResult:
        """A copy with the current time as its end."""
        return replace(self, ended_s=time.time())

    @property
    def seconds(self) -> float:
        """Its duration, bytecode included."""
        return max(self.ended_s - self.began_s, 0.0)


def check_environment(
    done: SetupResult, options: EnvironmentOptions, env: Mapping[str, str], run: Run, *, changes_metadata: bool = True
) -> None:
    """Raises `PermanentError` for defects of the environment that a setup made, for which it must not be shared, and
    `UnsafeError` for conflicts of versions. `run` runs programs in it.

    `pip check` takes half a second, so it runs only if the setup changed the metadata of a distribution.
    """
    if done.python is None:
        problems = [f"import {module} fails: there is no Python" for module in options.imports]
    else:
        problems = validate(done.python, done.new, env, run, imports=options.imports)
    if problems:
        raise PermanentError("; ".join(problems))
    if done.python is None or not changes_metadata or options.conflicts == "accept":
        return
    if against := conflicts(done.python, done.before, env, run):
        hint = "--env-conflicts accept publishes a snapshot anyway"
        raise UnsafeError(f"{listed(against)} ({hint})", conflicts=True)


class SetupHost:
    """Where a setup runs: this machine itself, or a capture that `enter` enters. `image.setup` has containers."""

    where = "this machine"
    installer_env: Mapping[str, str] = MappingProxyType({})
    """Additional variables for installers."""

    def __init__(
        self,
        task: Task,
        *,
        enter: Callable[[], None] | None = None,
        root: str = "/",
        more_env: Mapping[str, str] = MappingProxyType({}),
        exports: bool = True,
    ) -> None:
        """`root` is where the setup's `/` can be read, `more_env` are additional variables for its processes;
        `exports`: whether those of a script are recorded."""
        self.task = task
        self._records_exports = exports
        self.folder = task.cwd
        """Its working folder, as the setup sees it."""
        self.root = root
        # Hard links to uv's cache cannot be made out of a capture, of which uv would warn.
        private = {"UV_LINK_MODE": "copy"} if root != "/" else {}
        self.env: Mapping[str, str] = {**private, **task.env, **more_env}
        """The environment of its processes."""
        self._enter = enter

    def ask(self, argv: Sequence[str], *, env: Mapping[str, str], deadline_s: float) -> Outcome:
        """Run a short query in the setup's view: an `installing.interpreter.Run`."""
        return runner(self._enter)(argv, env=env, deadline_s=deadline_s)

    def spawn(self, argv: Sequence[str], more: Mapping[str, str]) -> int:
        """Run a program of the setup, with `more` variables; its exit code."""
        return self.run_here(argv, {**self.env, **more}, self._enter)

    def run_here(self, argv: Sequence[str], env: Mapping[str, str], enter: Callable[[], None] | None = None) -> int:
        """Run a program of this machine for the setup; its exit code."""
        return run_program(argv, env, self.task.session.tracer, of_setup=True, enter=enter)

    def inside(self, path: str) -> str:
        """The setup's path of a file of this machine."""
        return path

    def at(self, path: str) -> Path:
        """Where a path of the setup can be read."""
        return path_in_root(self.root, path)

    @property
    def own_uv(self) -> str:
        """The setup's path of the uv that is installed with BootSeer; empty if there is none."""
        return own_uv() or ""

    def prepare_script(self, script: str) -> ScriptRun:
        """The command of the script, with the hook that records its exports."""
        argv = script_command(script)
        if not self._records_exports:
            return ScriptRun(argv, self.env, None)
        return prepare_script(script, argv, self.task.folder.path / EXPORTS, self.env)

    def exports(self, run: ScriptRun) -> ExportDiff:
        """The exports of a script that has ended."""
        return run.exports(self.task.node)

    def pythons(self) -> Sequence[str]:
        """Candidates for the job's Python, the best first."""
        return (find_python(self.env) or sys.executable,)


class SetupRun:
    """The steps of one setup: script, installation of requirements, bytecode.

    If a step fails, the command must not be started (`plain.say_failed`). Signals must be blocked: they are forwarded
    to the running step, and end the setup with it.
    """

    def __init__(self, host: SetupHost) -> None:
        self._host = host
        self._task = host.task
        self._with_pip_alone = host.task.options.mode == "bypass"

    def run(self) -> SetupResult:
        task = self._task
        began_s = time.time()
        with interruptible():
            python = self._find_python()
            before = Installed() if self._with_pip_alone else self._installed(python)
            done = SetupResult(python=python, before=before, began_s=began_s)
        if task.setup is not None:
            done = self._script(task.setup, done)
        if task.requirements and not done.code:
            done = self._requirements(done)
        if not done.code and not self._with_pip_alone:
            try:
                after = self._installed(done.python)
                new = new_distributions(done.before, after)
                if done.python is not None:
                    self.compile(done.python, new)
                done = replace(done, packages=new_packages(done.before, after), new=new)
            except Exception as error:  # the setup itself has succeeded
                unknown = f"its installed packages are not known: {type(error).__name__}: {error}"
                done = replace(done, unknown=(unknown,))
        return done.ending_now()

    def _script(self, script: str, done: SetupResult) -> SetupResult:
        run = self._host.prepare_script(script)
        code = self._step("script", script, run.argv, run.env)
        if code:
            return replace(done, code=code, what=script)
        left = self._host.exports(run)
        return replace(done, exports=left.exports, reasons=left.unsafe)

    def _requirements(self, done: SetupResult) -> SetupResult:
        if done.python is None:
            say(f"there is no working Python in {self._host.where}")
            return replace(done, code=NOT_FOUND, what=", ".join(self._task.requirements))
        for kind, files in groups_of(self._task.requirements):
            done = self._install(done, done.python, kind, files)
            if done.code:
                return done
            if kind == "conda":  # it may have installed another Python
                done = replace(done, python=self._find_python() or done.python)
        return done

    def _install(self, done: SetupResult, python: Interpreter, kind: FileKind, files: Sequence[str]) -> SetupResult:
        label = ", ".join(files)
        way = self._choose_installer(python, kind, files)
        code, more = NOT_FOUND, self._host.installer_env
        for number, command in enumerate(way.commands):
            if number:
                say(f"{way.commands[number - 1].installer} failed (exit code {code}); {command.installer} tries")
            _log.info("%s installs %s: %s", command.installer, label, " ".join(command.argv))
            code = self._step("install", label, command.argv, {**command.env, **more}, installer=command.installer)
            if not code:
                return done
            if code - 128 in ENDING:  # a signal that ends the whole setup
                break
        return replace(done, code=code, what=label)

    def _choose_installer(self, python: Interpreter, kind: FileKind, requirements: Sequence[str]) -> Installation:
        host = self._host
        files = [host.inside(path) for path in requirements]
        pip = ("pip", "install", *(word for path in files for word in ("-r", path)))
        with_pip = Installation((Command("pip", module_command(python.executable, *pip), {}),))
        if kind == "requirements" and self._with_pip_alone:
            return with_pip
        try:
            with interruptible():
                way = choose(
                    files,
                    host.env,
                    python,
                    host.ask,
                    cwd=host.folder,
                    root=host.root,
                    at=host.at,
                    kind=kind,
                    own_uv=host.own_uv,
                )
        except Exception as error:  # an error of BootSeer: fall back to pip
            if kind != "requirements":
                say(f"{', '.join(files)}: {type(error).__name__}: {error}")
                return Installation(())
            say(f"installing with pip, as the choice of an installer failed: {type(error).__name__}: {error}")
            return with_pip
        if not way.commands:
            say(way.why_not_uv)
        elif way.why_not_uv and way.why_not_uv != "there is no uv":
            say(f"installing with pip, not with uv: {way.why_not_uv}")
        return way

    def compile(self, python: Interpreter, new: Sequence[Distribution]) -> None:
        """Compile bytecode of new distributions. Failures do not matter: Python compiles missing bytecode itself.

        Raises `Interrupted` after a signal.
        """
        if not new:
            return
        workers = min(len(os.sched_getaffinity(0)), _MAX_WORKERS)
        with self._task.stage("compile") as facts:
            facts["packages"] = len(new)
            for program, group in by_interpreter(new, python.executable, python.folders).items():
                number = self._host.spawn(compile_command(program, group, workers), {}) - 128
                if number in ENDING:
                    raise Interrupted(number, signal.Signals(number).name)

    def _step(self, stage: str, label: str, argv: Sequence[str], more: Mapping[str, str], **attrs: str) -> int:
        with self._task.stage(stage) as facts:
            facts.update(file=Path(label).name, **attrs)
            code = self._host.spawn(argv, more)
            if code:
                facts["error"] = f"exit code {code}"
        return code

    def _find_python(self) -> Interpreter | None:
        for python in self._host.pythons():
            with contextlib.suppress(BootseerError, OSError):
                return interpreter.ask(python, self._host.env, self._host.ask)
        return None

    def _installed(self, python: Interpreter | None) -> Installed:
        return installed(python.folders if python is not None else (), root=self._host.root)


def run_setup(
    options: Options, env: Mapping[str, str], session: Session, *, exports: bool = True
) -> tuple[int, Mapping[str, str]]:
    """Run the setup on this machine itself, with pip alone and without the node's cache, which may be unusable. Returns
    its exit code, and the environment for the command.

    `exports`: whether the command gets the script's exports. Signals must be blocked.
    """
    assert options.environment is not None  # noqa: S101 - for the type checker: there is a setup
    own = tempfile.TemporaryDirectory(prefix="bootseer-", ignore_cleanup_errors=True)
    with own as folder, session_stage(session, STAGE) as facts:
        environment = structs.replace(options.environment, mode="bypass", cache=Path(folder))
        task = Task(options.setup, options.requirements, environment, env, session=session)
        try:
            done = SetupRun(SetupHost(task, exports=exports)).run()
        finally:
            task.folder.remove()
        if done.code:
            facts["error"] = f"exit code {done.code}"
            say_failed(done.what, done.code)
    return done.code, apply_exports(done.exports, env)

"""Run a setup as snapshots need it: with the quickest installer, bytecode once, and a record of what it installed.

`SetupRun` has the steps; a `Machine` is where they run. What the setup writes to standard output goes to standard
error.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from bootseer.env.capturing.exports import Left
from bootseer.env.document import Export
from bootseer.env.installing import interpreter
from bootseer.env.installing.bytecode_compile import by_interpreter, compile_command
from bootseer.env.installing.choose import Command, Installation, choose
from bootseer.env.installing.interpreter import CANNOT_START, Interpreter, Ran, module_command, runner
from bootseer.env.installing.packages import Distribution, Installed, installed, new_distributions, new_packages
from bootseer.env.keys.lock import own_uv
from bootseer.env.keys.requirement import FileKind
from bootseer.errors import BootseerError
from bootseer.launch.command import run_program
from bootseer.launch.environment.plain import ScriptRun, groups_of, script_command, script_run
from bootseer.launch.environment.task import Task
from bootseer.launch.interrupt import interruptible
from bootseer.launch.supervise import say
from bootseer.logs import logger

_MAX_WORKERS = 16
_log = logger(__name__)
EXPORTS = "exports"
"""Below a start's own folder: where a script tells what it exports."""


@dataclass(frozen=True, slots=True)
class SetupResult:
    """A setup that has run."""

    code: int = 0
    """Of the step that failed."""
    what: str = ""
    """The file that it came from."""
    python: Interpreter | None = None
    """The job's; None where there is none."""
    before: Installed = field(default_factory=Installed)
    """What was installed before."""
    packages: tuple[str, ...] = ()
    new: tuple[Distribution, ...] = ()
    """What was installed for the job's Python."""
    exports: tuple[Export, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why its exports cannot be kept."""
    installer: str = ""
    began_s: float = 0.0
    """Seconds since 1970."""
    ended_s: float = 0.0

    def ended_now(self) -> SetupResult:
        """The same, with more done for it."""
        return replace(self, ended_s=time.time())

    @property
    def seconds(self) -> float:
        """How long it took, bytecode included."""
        return max(self.ended_s - self.began_s, 0.0)


class Machine:
    """Where a setup runs: this machine itself, or a capture, which `enter` leads into. `image.setup` has containers."""

    where = "this machine"
    installer_env: Mapping[str, str] = MappingProxyType({})
    """Further variables of installers."""

    def __init__(
        self,
        task: Task,
        *,
        enter: Callable[[], None] | None = None,
        root: str = "/",
        marks: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`root` is where the setup's `/` can be read, `marks` are further variables for its processes."""
        self.task = task
        self.folder = task.cwd
        """Where it runs, by the names that it sees."""
        self.root = root
        self.env: Mapping[str, str] = {**task.env, **marks}
        """What its processes find in their environment."""
        self._enter = enter

    def ask(self, argv: Sequence[str], env: Mapping[str, str], *, deadline_s: float) -> Ran:
        """A short question to a program of the setup's: `installing.interpreter.Run`."""
        return runner(self._enter)(argv, env, deadline_s=deadline_s)

    def spawn(self, argv: Sequence[str], more: Mapping[str, str]) -> int:
        """Run a program of the setup to its end, with these variables besides its own; its exit code."""
        return self.run_here(argv, {**self.env, **more}, self._enter)

    def run_here(self, argv: Sequence[str], env: Mapping[str, str], enter: Callable[[], None] | None = None) -> int:
        """Run a program of this machine for the setup; its exit code."""
        task = self.task
        tracer = task.session.tracer if task.session is not None else None
        return run_program(argv, env, tracer, own_group=task.own_group, stdout=2, enter=enter)

    def inside(self, path: str) -> str:
        """A file of this machine as the setup calls it."""
        return path

    def at(self, path: str) -> Path:
        """Where a path of the setup's can be read."""
        return Path(self.root) / path.lstrip("/")

    @property
    def own_uv(self) -> str:
        """The uv that BootSeer depends on, as the setup would call it; empty when there is none."""
        return own_uv() or ""

    def script_run(self, script: str) -> ScriptRun:
        """How to run the script so that it tells what it exports."""
        return script_run(script, script_command(script), self.task.folder.path / EXPORTS, self.env)

    def exports(self, asked: ScriptRun) -> Left:
        """What it exports, once it has ended."""
        return asked.left(self.task.node)

    def pythons(self) -> Sequence[str]:
        """Where the job's Python may be, the best first."""
        path = self.env.get("PATH")
        return (shutil.which("python3", path=path) or shutil.which("python", path=path) or sys.executable,)


class SetupRun:
    """The steps of one setup: the script, the installation of requirements by the quickest installer, bytecode, once.

    When a step fails, the command must not be started (`plain.say_failed`). Signals must be blocked: one that arrives
    meanwhile goes to the step and ends the setup with it.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._task = machine.task
        self._python: Interpreter | None = None
        self._before = Installed()

    def run(self) -> SetupResult:
        """All steps, until one fails."""
        task = self._task
        began_s = time.time()
        with interruptible():
            self._python = self._asked()
            self._before = self._installed()
        done = SetupResult(python=self._python, before=self._before, began_s=began_s)
        if task.setup is not None:
            done = self._script(task.setup, done)
        if task.requirements and not done.code:
            done = self._requirements(done)
        if not done.code:
            try:
                done = self._new(done)
            except Exception as error:  # the setup itself went well
                unknown = f"what it installed is not known: {type(error).__name__}: {error}"
                done = replace(done, reasons=(*done.reasons, unknown))
        return done.ended_now()

    def _script(self, script: str, done: SetupResult) -> SetupResult:
        asked = self._machine.script_run(script)
        code = self._step("script", script, asked.argv, asked.env)
        if code:
            return replace(done, code=code, what=script)
        left = self._machine.exports(asked)
        return replace(done, exports=left.exports, reasons=left.unsafe)

    def _requirements(self, done: SetupResult) -> SetupResult:
        if self._python is None:
            say(f"there is no Python in {self._machine.where} that answers")
            return replace(done, code=CANNOT_START, what=", ".join(self._task.requirements))
        for kind, files in groups_of(self._task.requirements):
            done = self._installing(done, self._python, kind, files)
            if done.code:
                return done
            if kind == "conda":  # it may have brought another Python
                self._python = self._asked() or self._python
                done = replace(done, python=self._python)
        return done

    def _installing(self, done: SetupResult, python: Interpreter, kind: FileKind, files: Sequence[str]) -> SetupResult:
        label = ", ".join(files)
        way = self._chosen(python, kind, files)
        code, more = CANNOT_START, self._machine.installer_env
        for number, command in enumerate(way.commands):
            if number:
                say(f"{way.commands[number - 1].installer} failed (exit code {code}); {command.installer} tries")
            _log.info("%s installs %s: %s", command.installer, label, " ".join(command.argv))
            code = self._step("install", label, command.argv, {**command.env, **more}, installer=command.installer)
            if not code:
                return replace(done, installer=command.installer)
        return replace(done, code=code, what=label)

    def _chosen(self, python: Interpreter, kind: FileKind, requirements: Sequence[str]) -> Installation:
        machine = self._machine
        files = [machine.inside(path) for path in requirements]
        try:
            with interruptible():
                way = choose(
                    files,
                    machine.env,
                    python,
                    machine.ask,
                    cwd=machine.folder,
                    root=machine.root,
                    at=machine.at,
                    kind=kind,
                    own_uv=machine.own_uv,
                )
        except Exception as error:  # whatever is wrong with our choice, pip installs
            if kind != "requirements":
                say(f"{', '.join(files)}: {type(error).__name__}: {error}")
                return Installation(())
            say(f"installing with pip, as no other way was found: {type(error).__name__}: {error}")
            words = [word for path in files for word in ("-r", path)]
            return Installation((Command("pip", module_command(python.executable, "pip", "install", *words), {}),))
        if not way.commands:
            say(way.why_pip)
        elif way.why_pip and way.why_pip != "there is no uv":
            say(f"installing with pip, not with uv: {way.why_pip}")
        return way

    def _new(self, done: SetupResult) -> SetupResult:
        """What there is now that was not there before, with its bytecode."""
        after = self._installed()
        new = new_distributions(self._before, after)
        if self._python is not None:
            self.compile(self._python, new)
        return replace(done, packages=new_packages(self._before, after), new=new)

    def compile(self, python: Interpreter, new: Sequence[Distribution]) -> None:
        """Bytecode of new distributions. Nothing that fails here matters: Python compiles what is not there."""
        if not new:
            return
        workers = min(len(os.sched_getaffinity(0)), _MAX_WORKERS)
        with self._task.stage("compile") as facts:
            facts["packages"] = len(new)
            for program, group in by_interpreter(new, python.executable, python.folders).items():
                self._machine.spawn(compile_command(program, group, workers), {})

    def _step(self, stage: str, label: str, argv: Sequence[str], more: Mapping[str, str], **attrs: str) -> int:
        """A step as a stage; its exit code."""
        with self._task.stage(stage) as facts:
            facts.update(file=Path(label).name, **attrs)
            code = self._machine.spawn(argv, more)
            if code:
                facts["error"] = f"exit code {code}"
        return code

    def _asked(self) -> Interpreter | None:
        for python in self._machine.pythons():
            with contextlib.suppress(BootseerError, OSError):
                return interpreter.ask(python, self._machine.env, self._machine.ask)
        return None

    def _installed(self) -> Installed:
        return installed(self._python.folders if self._python is not None else (), root=self._machine.root)

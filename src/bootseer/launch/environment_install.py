"""Run the setup: the script, then the installation of requirements by the quickest installer, then bytecode, once.

The same on this machine itself and in a capture, which `enter` leads into. What the setup writes to standard output
goes to standard error. Signals must be blocked: one that arrives meanwhile goes to the step and ends the setup with it.
Called by `environment_stage`, `environment_capture`, `environment_private` and `environment_look`.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bootseer.env.document import Export
from bootseer.env.installing import interpreter
from bootseer.env.installing.bytecode_compile import by_interpreter, compile_command
from bootseer.env.installing.choose import Command, Installation, choose
from bootseer.env.installing.interpreter import Interpreter
from bootseer.env.installing.packages import Distribution, Installed, installed, new_distributions, new_packages
from bootseer.env.installing.running import Run, runner
from bootseer.errors import BootseerError
from bootseer.launch import supervise
from bootseer.launch.environment_script import telling
from bootseer.launch.environment_setup import Step, steps
from bootseer.launch.environment_task import Task
from bootseer.launch.supervise import CannotStart, say

_MAX_WORKERS = 16
_EXPORTS = "exports"


@dataclass(frozen=True, slots=True)
class SetUp:
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

    def ended_now(self) -> SetUp:
        """The same, with more done for it."""
        return replace(self, ended_s=time.time())

    @property
    def seconds(self) -> float:
        """How long it took, bytecode included."""
        return max(self.ended_s - self.began_s, 0.0)


def set_up(
    task: Task,
    *,
    enter: Callable[[], None] | None = None,
    root: str = "/",
    marks: Mapping[str, str] | None = None,
) -> SetUp:
    """Run it. `root` is where the setup's `/` can be read, `marks` are further variables for its processes.

    When a step fails, the command must not be started (`say_failed`).
    """
    return _SettingUp(task, enter, root, marks or {}).run()


def say_failed(done: SetUp) -> None:
    """Tell the user that the setup failed."""
    say(f"the environment setup failed ({done.what}, exit code {done.code}); the command was not started")


class _SettingUp:
    def __init__(self, task: Task, enter: Callable[[], None] | None, root: str, marks: Mapping[str, str]) -> None:
        self._task = task
        self._enter = enter
        self._root = root
        self._env = {**task.env, **marks}
        self._run: Run = runner(enter)
        self._python = self._asked()
        self._before = self._installed()

    def run(self) -> SetUp:
        task = self._task
        began_s = time.time()
        done = SetUp(python=self._python, before=self._before, began_s=began_s)
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
        return replace(done, ended_s=time.time())

    def _new(self, done: SetUp) -> SetUp:
        """What there is now that was not there before, with its bytecode."""
        after = self._installed()
        new = new_distributions(self._before, after)
        if self._python is not None:
            compile_new(self._task, self._python, new, enter=self._enter)
        return replace(done, packages=new_packages(self._before, after), new=new)

    def _script(self, script: str, done: SetUp) -> SetUp:
        task = self._task
        (step,) = steps(script, ())
        asked = telling(script, step.command, task.folder.path / _EXPORTS, self._env)
        code = self._spawn(step.stage, Path(script).name, asked.argv, asked.env)
        if code:
            return self._failed(done, script, code)
        left = asked.left(task.node)
        return replace(done, exports=left.exports, reasons=left.unsafe)

    def _requirements(self, done: SetUp) -> SetUp:
        task = self._task
        (step,) = steps(None, task.requirements)
        if self._python is None:
            code = self._spawn(step.stage, Path(step.what).name, step.command, self._env)
            return self._failed(done, step.what, code) if code else done
        way = self._chosen(self._python, step)
        code = 1
        for number, command in enumerate(way.commands):
            if number:
                say(f"{way.commands[number - 1].installer} failed (exit code {code}); {command.installer} tries")
            code = self._spawn(
                step.stage,
                Path(step.what).name,
                command.argv,
                {**self._env, **command.env},
                installer=command.installer,
            )
            if not code:
                return replace(done, installer=command.installer)
        return self._failed(done, step.what, code)

    def _chosen(self, python: Interpreter, step: Step) -> Installation:
        task = self._task
        try:
            way = choose(task.requirements, self._env, python, self._run, cwd=task.cwd, root=self._root)
        except Exception as error:  # whatever is wrong with our choice, pip installs
            say(f"installing with pip, as no other way was found: {type(error).__name__}: {error}")
            return Installation((Command("pip", tuple(step.command), {}),))
        if way.why_pip and way.why_pip != "there is no uv":
            say(f"installing with pip, not with uv: {way.why_pip}")
        return way

    def _failed(self, done: SetUp, what: str, code: int) -> SetUp:
        return replace(done, code=code, what=what)

    def _spawn(self, stage: str, file: str, argv: Sequence[str], env: Mapping[str, str], **attrs: str) -> int:
        name = stage.rpartition(".")[2]
        with self._task.stage(name) as facts:
            facts.update(file=file, **attrs)
            tracer = self._task.session.tracer if self._task.session is not None else None
            env = {**env, **tracer.environment()} if tracer is not None else env
            code = _spawned(self._task, argv, env, self._enter)
            if code:
                facts["error"] = f"exit code {code}"
        return code

    def _asked(self) -> Interpreter | None:
        path = self._task.env.get("PATH")
        python = shutil.which("python3", path=path) or shutil.which("python", path=path) or sys.executable
        try:
            return interpreter.ask(python, self._env, self._run)
        except (BootseerError, OSError):  # pip says why it does not run
            return None

    def _installed(self) -> Installed:
        return installed(self._python.folders if self._python is not None else (), root=self._root)


def compile_new(
    task: Task, python: Interpreter, new: Sequence[Distribution], *, enter: Callable[[], None] | None
) -> None:
    """Bytecode of new distributions. Nothing that fails here matters: Python compiles what is not there."""
    if not new:
        return
    workers = min(len(os.sched_getaffinity(0)), _MAX_WORKERS)
    with task.stage("compile") as facts:
        facts["packages"] = len(new)
        for program, group in by_interpreter(new, python.executable, python.folders).items():
            _spawned(task, compile_command(program, group, workers), task.env, enter)


def _spawned(task: Task, argv: Sequence[str], env: Mapping[str, str], enter: Callable[[], None] | None) -> int:
    """Run a program to its end; its exit code."""
    try:
        pid = supervise.spawn(argv, env, own_group=task.own_group, stdout=2, enter=enter)
    except CannotStart as error:
        say(str(error))
        return error.code
    tracer = task.session.tracer if task.session is not None else None
    return supervise.wait(pid, own_group=task.own_group, tracer=tracer)

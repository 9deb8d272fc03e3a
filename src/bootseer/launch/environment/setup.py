"""Run the setup: the script, then the installation of requirements by the quickest installer, then bytecode, once.

The same on this machine itself and in a capture, which `enter` leads into; `image_setup` says what is different in
containers. What the setup writes to standard output goes to standard error. Signals must be blocked: one that arrives
meanwhile goes to the step and ends the setup with it.
Called by `environment_stage`, `environment_capture`, `environment_private` and `environment_look`.
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
from bootseer.env.installing.interpreter import Interpreter, module_command
from bootseer.env.installing.packages import Distribution, Installed, installed, new_distributions, new_packages
from bootseer.env.installing.running import CANNOT_START, Run, runner
from bootseer.env.keys.lock import own_uv
from bootseer.env.keys.requirement import FileKind
from bootseer.errors import BootseerError
from bootseer.launch import supervise
from bootseer.launch.environment.plain import Telling, groups_of, steps, telling
from bootseer.launch.environment.task import Task
from bootseer.launch.interrupt import interruptible
from bootseer.launch.supervise import CannotStart, say

_MAX_WORKERS = 16
EXPORTS = "exports"
"""Below a start's own folder: where a script tells what it exports."""


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
    return SettingUp(task, enter=enter, root=root, marks=marks or {}).run()


def say_failed(done: SetUp) -> None:
    """Tell the user that the setup failed."""
    say(f"the environment setup failed ({done.what}, exit code {done.code}); the command was not started")


class SettingUp:
    """The steps of one setup. What is said of this machine here is said of a container by `ImageSetUp`."""

    where = "this machine"

    def __init__(
        self,
        task: Task,
        *,
        enter: Callable[[], None] | None = None,
        root: str = "/",
        marks: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.task = task
        self.folder = task.cwd
        """Where it runs, by the names that it sees."""
        self._root = root
        self._enter = enter
        self._env = {**task.env, **marks}
        self._python: Interpreter | None = None
        self._before = Installed()

    def run(self) -> SetUp:
        """All steps, until one fails."""
        task = self.task
        began_s = time.time()
        with interruptible():
            self._python = self._asked()
            self._before = self._installed()
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
        return done.ended_now()

    # -- what is different in a container ------------------------------------------------------------------------------

    @property
    def root(self) -> str:
        """Where the setup's `/` can be read."""
        return self._root

    @property
    def env(self) -> Mapping[str, str]:
        """What its processes find in their environment."""
        return self._env

    @property
    def ask(self) -> Run:
        """Asks programs where the setup runs."""
        return runner(self._enter)

    def spawn(self, argv: Sequence[str], more: Mapping[str, str]) -> int:
        """Run a program of the setup to its end, with these variables besides its own; its exit code."""
        return self._started(argv, {**self.env, **more}, self._enter)

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

    def telling(self, script: str) -> Telling:
        """How to run the script so that it tells what it exports."""
        (step,) = steps(script, ())
        return telling(script, step.command, self.task.folder.path / EXPORTS, self.env)

    def exports(self, asked: Telling) -> Left:
        """What it exports, once it has ended."""
        return asked.left(self.task.node)

    def pythons(self) -> Sequence[str]:
        """Where the job's Python may be, the best first."""
        path = self.env.get("PATH")
        return (shutil.which("python3", path=path) or shutil.which("python", path=path) or sys.executable,)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _script(self, script: str, done: SetUp) -> SetUp:
        asked = self.telling(script)
        code = self._step("script", script, asked.argv, asked.env)
        if code:
            return replace(done, code=code, what=script)
        left = self.exports(asked)
        return replace(done, exports=left.exports, reasons=left.unsafe)

    def _requirements(self, done: SetUp) -> SetUp:
        if self._python is None:
            say(f"there is no Python in {self.where} that answers")
            return replace(done, code=CANNOT_START, what=", ".join(self.task.requirements))
        for kind, files in groups_of(self.task.requirements):
            done = self._installing(done, self._python, kind, files)
            if done.code:
                return done
            if kind == "conda":  # it may have brought another Python
                self._python = self._asked() or self._python
                done = replace(done, python=self._python)
        return done

    def _installing(self, done: SetUp, python: Interpreter, kind: FileKind, files: Sequence[str]) -> SetUp:
        what = ", ".join(files)
        way = self._chosen(python, kind, files)
        code = CANNOT_START
        for number, command in enumerate(way.commands):
            if number:
                say(f"{way.commands[number - 1].installer} failed (exit code {code}); {command.installer} tries")
            code = self._step("install", what, command.argv, command.env, installer=command.installer)
            if not code:
                return replace(done, installer=command.installer)
        return replace(done, code=code, what=what)

    def _chosen(self, python: Interpreter, kind: FileKind, requirements: Sequence[str]) -> Installation:
        files = [self.inside(path) for path in requirements]
        try:
            with interruptible():
                way = choose(
                    files,
                    self.env,
                    python,
                    self.ask,
                    cwd=self.folder,
                    root=self.root,
                    at=self.at,
                    kind=kind,
                    own_uv=self.own_uv,
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

    def _new(self, done: SetUp) -> SetUp:
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
        with self.task.stage("compile") as facts:
            facts["packages"] = len(new)
            for program, group in by_interpreter(new, python.executable, python.folders).items():
                self.spawn(compile_command(program, group, workers), {})

    def _step(self, stage: str, what: str, argv: Sequence[str], more: Mapping[str, str], **attrs: str) -> int:
        """A step as a stage; its exit code."""
        with self.task.stage(stage) as facts:
            facts.update(file=Path(what).name, **attrs)
            code = self.spawn(argv, more)
            if code:
                facts["error"] = f"exit code {code}"
        return code

    def _started(self, argv: Sequence[str], env: Mapping[str, str], enter: Callable[[], None] | None) -> int:
        task = self.task
        tracer = task.session.tracer if task.session is not None else None
        env = {**env, **tracer.environment()} if tracer is not None else env
        try:
            pid = supervise.spawn(argv, env, own_group=task.own_group, stdout=2, enter=enter)
        except CannotStart as error:
            say(str(error))
            return error.code
        return supervise.wait(pid, own_group=task.own_group, tracer=tracer)

    def _asked(self) -> Interpreter | None:
        for python in self.pythons():
            with contextlib.suppress(BootseerError, OSError):
                return interpreter.ask(python, self.env, self.ask)
        return None

    def _installed(self) -> Installed:
        return installed(self._python.folders if self._python is not None else (), root=self.root)

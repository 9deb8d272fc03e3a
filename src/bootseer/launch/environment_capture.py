"""Run the setup where its changes are caught, show them to the command, and keep them as a snapshot: the miss path.

The setup runs in a private view of the machine (`environment_view`); the command then finds its changes as a restored
start would. What the setup leaves that no snapshot can repeat is no harm to this first command, and keeps the snapshot
from being made (`environment_judge`). Called by `environment_stage` and `environment_make`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bootseer.env.capturing import exports
from bootseer.env.capturing.any_capture import Capture
from bootseer.env.capturing.effects import Effects
from bootseer.env.capturing.watch import Reads, Watch, unobserved
from bootseer.env.changes import Change
from bootseer.env.installing.interpreter import Interpreter
from bootseer.env.installing.packages import (
    Distribution,
    installed,
    library_folders,
    new_distributions,
    new_packages,
)
from bootseer.env.keys.key import RequestKey
from bootseer.env.life.decide import Decision
from bootseer.env.restoring.roots import is_system
from bootseer.errors import BootseerError
from bootseer.launch import environment_judge as judge
from bootseer.launch.environment_install import SettingUp, SetUp, set_up
from bootseer.launch.environment_publish import Publication, Publishing, start_publishing, tell
from bootseer.launch.environment_shown import Shown
from bootseer.launch.environment_task import Task
from bootseer.launch.environment_view import check_ended, divided, enter_of, open_view, show
from bootseer.launch.interrupt import interruptible


@dataclass(frozen=True, slots=True)
class Captured:
    """A setup that ran in a capture."""

    code: int
    """Its exit code; other than 0, and the machine is as it was."""
    setup_s: float = 0.0
    """How long it took."""
    shown: Shown | None = None
    publishing: Publishing | None = None


@dataclass(frozen=True, slots=True)
class _Own:
    python: Interpreter
    new: tuple[Distribution, ...]
    done: SetUp
    """With these packages."""


def capture(task: Task, key: RequestKey, decision: Decision, command: Sequence[str]) -> Captured:
    """Run the setup. Signals must be blocked. Raises `NotShown`, with nothing left behind."""
    with contextlib.ExitStack() as opened:
        return _Capturing(task, key, decision, command, opened).run()


class _Capturing:
    def __init__(
        self, task: Task, key: RequestKey, decision: Decision, command: Sequence[str], opened: contextlib.ExitStack
    ) -> None:
        self._task = task
        self._key = key
        self._decision = decision
        self._command = command
        self._opened = opened
        """Undone at the end, unless the command needs it."""
        self._reads: Reads | None = None

    def run(self) -> Captured:
        task = self._task
        with interruptible(), task.stage("capture") as facts:
            view = open_view(task, self._opened, scan=True)
            watch = self._watch(view)
            effects = Effects.before(enter_of(view))
            facts["way"] = view.way
        done = set_up(task, enter=enter_of(view), root=str(view.root), marks=effects.environment)
        check_ended(view, done)
        if done.code:
            return Captured(done.code, done.seconds)
        with interruptible(), task.stage("capture") as facts:
            reads = self._end(watch)
            changes = self._changes(view, reads, done)
            facts["changes"] = len(changes)
        own = self._own_environments(view, changes, done)
        if own:  # environments that the setup made itself get their bytecode, too
            SettingUp(task, enter=enter_of(view)).compile(own.python, own.new)
            done = own.done.ended_now()
        with interruptible():
            return self._after(view, effects, reads, self._changes(view, reads, done) if own else changes, done)

    def _watch(self, view: Capture) -> Watch | None:
        enter = enter_of(view)
        if enter is None:
            return None
        watch = Watch.begin(view.points, real=view.real, enter=enter)
        self._opened.callback(self._end, watch)
        return watch

    def _end(self, watch: Watch | None) -> Reads:
        """What the watch saw; it is ended once."""
        if self._reads is None:
            self._reads = watch.end() if watch is not None else unobserved("the setup could not be watched")
        return self._reads

    def _after(self, view: Capture, effects: Effects, reads: Reads, changes: Sequence[Change], done: SetUp) -> Captured:
        """The setup ran well: judge what it did, and show it to the command."""
        task = self._task
        with task.stage("capture") as facts:
            division = divided(view, changes)
            reasons = judge.unsafe(task, self._command, view, effects, reads, changes, done)
            shown = Shown("captured", self._decision, exports.apply(done.exports, task.env))
            shown.undo.push(self._opened.pop_all())  # from here on the command needs what was opened
            show(task, view, changes, division, shown)
            facts.update(roots=len(division.roots), loose=len(division.loose))
        unknown = judge.unknown(task, self._key, view, reads, changes, done) if reads.complete else ()
        trust, unaccounted = judge.trust(reads, unknown)
        shown.facts.update(
            key=self._key.digest,
            builder=task.node,
            trust=trust,
            way=view.way,
            roots=len(division.roots),
            loose=len(division.loose),
        )
        publication = Publication(
            key=self._key,
            decision=self._decision,
            changes=changes,
            root=view.root,
            division=division,
            done=done,
            trust=trust,
            unaccounted=unaccounted,
            left_out=view.left_out,
            validate=lambda: judge.problems(task, view, division, done),
        )
        return Captured(0, done.seconds, shown, self._publishing(publication, reasons))

    def _changes(self, view: Capture, reads: Reads, done: SetUp) -> list[Change]:
        """What the setup changed, and what it wrote once more as it was already."""
        unknown = judge.unknown(self._task, self._key, view, reads, (), done)
        return view.changes(again=frozenset(path for path in unknown if not is_system(path)))

    def _own_environments(self, view: Capture, changes: Sequence[Change], done: SetUp) -> _Own | None:
        """What the setup installed into environments of its own."""
        if done.python is None:
            return None
        folders = sorted(library_folders(change.path for change in changes) - set(done.python.folders))
        found = installed(folders, root=str(view.root))
        new = new_distributions(done.before, found)
        if not new:
            return None
        packages = tuple(sorted({*done.packages, *new_packages(replace(done.before, system=None), found)}))
        return _Own(done.python, new, replace(done, packages=packages))

    def _publishing(self, publication: Publication, reasons: Sequence[str]) -> Publishing | None:
        if reasons:
            tell(self._task, False, f"this setup is not snapshot-safe: {'; '.join(reasons)}")
            return None
        try:
            return start_publishing(self._task, publication)
        except BootseerError as error:
            tell(self._task, False, str(error))
            return None

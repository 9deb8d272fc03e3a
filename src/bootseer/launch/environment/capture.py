"""Run the setup where its changes are caught, show them to the command, and keep them as a snapshot: the miss path.

The setup runs in a private view of the machine (`environment_view`); the command then finds its changes as a restored
start would. What the setup leaves that no snapshot can repeat is no harm to this first command, and keeps the snapshot
from being made (`environment_judge`). Called by `environment_stage` and `environment_make`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import bootseer
from bootseer.env.capturing import exports
from bootseer.env.capturing.any_capture import Capture
from bootseer.env.capturing.effects import Effects
from bootseer.env.capturing.mentions import mentions
from bootseer.env.capturing.unaccounted import unaccounted
from bootseer.env.capturing.watch import Reads, Watch, unobserved
from bootseer.env.changes import Change
from bootseer.env.document import Trust
from bootseer.env.installing.interpreter import Interpreter
from bootseer.env.installing.packages import (
    Distribution,
    installed,
    library_folders,
    new_distributions,
    new_packages,
)
from bootseer.env.installing.running import runner
from bootseer.env.installing.validate import conflicts, validate
from bootseer.env.keys.key import RequestKey
from bootseer.env.keys.lock import own_uv
from bootseer.env.life.decide import Decision
from bootseer.env.restoring.host import show_on_host
from bootseer.env.restoring.roots import Division, is_system
from bootseer.errors import BootseerError
from bootseer.launch.environment.publish import Publication, Publishing, start_publishing, tell
from bootseer.launch.environment.setup import SettingUp, SetUp, say_failed, set_up
from bootseer.launch.environment.task import Task
from bootseer.launch.environment.view import Shown, check_ended, divided, enter_of, open_view, show
from bootseer.launch.interrupt import interruptible
from bootseer.launch.supervise import say


def set_up_privately(task: Task, decision: Decision) -> tuple[int, Shown | None]:
    """The setup's exit code, and what the command needs. Signals must be blocked.

    Raises `NotShown` where there is no such view, with nothing left behind.
    """
    with contextlib.ExitStack() as opened:
        with interruptible(), task.stage("capture") as facts:
            view = open_view(task, opened, scan=False)
            facts["way"] = view.way
        done = set_up(task, enter=enter_of(view), root=str(view.root))
        check_ended(view, done)
        if done.code:
            return done.code, None
        shown = Shown("installed", decision, exports.apply(done.exports, task.env), facts={"way": view.way})
        with interruptible(), task.stage("capture") as facts:
            changes = view.changes()
            division = divided(view, changes)
            facts.update(changes=len(changes), roots=len(division.roots), loose=len(division.loose))
            shown.undo.push(opened.pop_all())  # from here on the command needs what was opened
            show(task, view, changes, division, shown)
    return 0, shown


def set_up_here(task: Task, decision: Decision) -> tuple[int, Shown | None]:
    """The same on this machine itself, as without BootSeer."""
    done = set_up(task)
    if done.code:
        say_failed(done)
        return done.code, None
    return 0, Shown("installed", decision, exports.apply(done.exports, task.env))


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
            reasons = _unsafe(task, self._command, view, effects, reads, changes, done)
            shown = Shown("captured", self._decision, exports.apply(done.exports, task.env))
            shown.undo.push(self._opened.pop_all())  # from here on the command needs what was opened
            show(task, view, changes, division, shown)
            facts.update(roots=len(division.roots), loose=len(division.loose))
        unknown = unaccounted_reads(task, self._key, view, reads, changes, done) if reads.complete else ()
        trust, unaccounted = trust_of(reads, unknown)
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
            validate=lambda: _problems(task, view, division, done),
        )
        return Captured(0, done.seconds, shown, self._publishing(publication, reasons))

    def _changes(self, view: Capture, reads: Reads, done: SetUp) -> list[Change]:
        """What the setup changed, and what it wrote once more as it was already."""
        unknown = unaccounted_reads(self._task, self._key, view, reads, (), done)
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


_MAX_NAMED = 3
_INSTALLERS = ("uv", "uvx", "conda", "mamba", "micromamba", "pixi", "poetry", "pdm")


def unaccounted_reads(
    task: Task, key: RequestKey, view: Capture, reads: Reads, changes: Sequence[Change], done: SetUp
) -> tuple[str, ...]:
    """What the setup read and nobody accounts for."""
    python = done.python
    base = [str(Path(bootseer.__file__).parent), str(task.wanted.cache)]
    base += [python.prefix, python.base_prefix] if python is not None else []
    base += _installers(task.env.get("PATH"))
    homes = [home for home in (task.env.get("HOME"),) if home]
    made = {*(change.path for change in changes), *view.left_out.withheld}
    return unaccounted(reads.paths, key.accounted, made, base=base, homes=homes, inside=view.points)


def trust_of(reads: Reads, found: tuple[str, ...]) -> tuple[Trust, tuple[str, ...]]:
    """How far the key tells all that the setup depends on, and what it does not tell (`found`: `unaccounted_reads`)."""
    if not reads.complete:
        return "unobserved", ()
    if not found:
        return "observed", ()
    say(f"the setup read files that its key does not know: {_named(found)}; name them with --env-input for a snapshot")
    return "untrusted", found


def _unsafe(
    task: Task,
    command: Sequence[str],
    view: Capture,
    effects: Effects,
    reads: Reads,
    changes: Sequence[Change],
    done: SetUp,
) -> list[str]:
    """Why a restart of the files alone would not do."""
    used = [*command, task.cwd, *(export.value for export in done.exports), *mentions(changes)]
    found = effects.after(reads, mentions=used)
    for note in found.notes:
        say(f"the setup: {note}")
    for line in view.left_out.missed:
        say(line)
    return [*done.reasons, *found.unsafe, *_not_kept(view, changes, done)]


def _problems(task: Task, view: Capture, division: Division, done: SetUp) -> list[str]:
    """What is wrong with the environment, seen as a restored start would see it."""
    python = done.python
    if python is None:
        return []
    env = exports.apply(done.exports, task.env)
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    with contextlib.ExitStack() as opened:
        enter = None
        if view.way != "scan" and division.roots:
            seen = show_on_host(view.source_of, division.roots, changes=task.changes, user=view.way == "user")
            opened.callback(seen.close)
            enter = seen.enter
        run = runner(enter)
        found = validate(python, done.before, env, run, imports=task.wanted.imports)
        against = conflicts(python, done.before, env, run) if task.wanted.conflicts == "refuse" else []
    if against:
        found.append(f"{_named(against)} (--env-conflicts accept keeps a snapshot all the same)")
    return found


def _not_kept(view: Capture, changes: Sequence[Change], done: SetUp) -> Iterator[str]:
    """Packages that went where no capture keeps them: a Python below /tmp, on another kind of disk."""
    known = {change.path for change in changes}
    for folder, group in groupby(done.new, key=lambda one: one.record.rpartition("/")[0]):
        lost = [one.name for one in group if one.record not in known and os.path.realpath(one.record) not in known]
        if lost and view.way != "scan":
            yield f"it installed {', '.join(lost[:_MAX_NAMED])} into {folder}, which is not kept"


def _installers(path: str | None) -> list[str]:
    """The programs that install for others, wherever the user has them: their versions are in the key."""
    found = [own_uv(), *(shutil.which(name, path=path) for name in _INSTALLERS)]
    return [os.path.realpath(program) for program in found if program is not None]


def _named(found: Sequence[str]) -> str:
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return f"{', '.join(found[:_MAX_NAMED])}{more}"

"""Run the setup where its changes are caught, show them to the command, and keep them as a snapshot: the miss path.

The setup runs in a private view of the machine (`capturing`); the command then finds its changes as a restored start
would. What the setup leaves that no snapshot can repeat is no harm to this first command, and keeps the snapshot from
being made. Called by `environment_stage`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import bootseer
from bootseer.env.capturing import exports
from bootseer.env.capturing.any_capture import Capture
from bootseer.env.capturing.before import found_at, state_of
from bootseer.env.capturing.capture import open_capture
from bootseer.env.capturing.effects import Effects
from bootseer.env.capturing.unaccounted import unaccounted
from bootseer.env.capturing.watch import Reads, Watch, unobserved
from bootseer.env.changes import Action, Change
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
from bootseer.env.installing.validate import validate
from bootseer.env.keys.key import RequestKey
from bootseer.env.life.decide import Decision
from bootseer.env.restoring import loose, place
from bootseer.env.restoring.folders import FoldersBelow
from bootseer.env.restoring.host import show_on_host
from bootseer.env.restoring.roots import Division, divide, is_system
from bootseer.errors import BootseerError
from bootseer.launch.environment_entries import loose_entries
from bootseer.launch.environment_install import SetUp, compile_new, say_failed, set_up
from bootseer.launch.environment_publish import Publication, Publishing, start_publishing, tell
from bootseer.launch.environment_shown import NotShown, Shown
from bootseer.launch.environment_task import Task
from bootseer.launch.interrupt import interruptible
from bootseer.launch.supervise import say

_MAX_NAMED = 3
_INSTALLERS = ("uv", "uvx", "conda", "mamba", "micromamba", "pixi", "poetry", "pdm")


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
            view, watch, effects = self._open()
            facts["way"] = view.way
        done = set_up(task, enter=_enter(view), root=str(view.root), marks=effects.environment)
        if done.code:
            if trouble := view.trouble():
                raise NotShown("failed", f"the setup failed in its private view (exit code {done.code}): {trouble}")
            say_failed(done)
            if view.way != "scan":
                say("what it did was private to it: this machine is as it was")
            return Captured(done.code, done.seconds)
        with interruptible(), task.stage("capture") as facts:
            reads = self._end(watch)
            changes = self._changes(view, reads, done)
            facts["changes"] = len(changes)
        own = self._own_environments(view, changes, done)
        if own:  # environments that the setup made itself get their bytecode, too
            compile_new(task, own.python, own.new, enter=_enter(view))
            done = own.done.ended_now()
        with interruptible():
            return self._after(view, effects, reads, self._changes(view, reads, done) if own else changes, done)

    def _open(self) -> tuple[Capture, Watch | None, Effects]:
        task = self._task
        wanted = task.wanted
        own: list[Path | str] = [
            wanted.cache,
            wanted.runtime,
            *([task.session.folder] if task.session is not None else []),
        ]
        try:
            view = open_capture(task.folder.path / "capture", say=say, env=task.env, own=own, folders=[task.cwd])
        except (BootseerError, OSError) as error:
            raise NotShown("not-root", str(error)) from error
        self._opened.callback(view.close)
        enter = _enter(view)
        watch = None
        if enter is not None:
            watch = Watch.begin(view.points, real=view.real, enter=enter)
            self._opened.callback(self._end, watch)
        return view, watch, Effects.before(enter)

    def _end(self, watch: Watch | None) -> Reads:
        """What the watch saw; it is ended once."""
        if self._reads is None:
            self._reads = watch.end() if watch is not None else unobserved("the setup could not be watched")
        return self._reads

    def _after(self, view: Capture, effects: Effects, reads: Reads, changes: Sequence[Change], done: SetUp) -> Captured:
        """The setup ran well: judge what it did, and show it to the command."""
        task = self._task
        with task.stage("capture") as facts:
            division = divide(changes, FoldersBelow(str(view.root)))
            reasons = [*done.reasons, *self._unsafe(view, effects, reads, changes, done)]
            shown = Shown("captured", self._decision, exports.apply(done.exports, task.env))
            try:
                self._show(view, changes, division, shown)
            except (BootseerError, OSError) as error:
                shown.undo.close()
                raise NotShown("failed", f"what the setup did cannot be shown: {error}") from error
            except BaseException:
                shown.undo.close()
                raise
            facts.update(roots=len(division.roots), loose=len(division.loose))
        # From here on the command needs what was opened.
        shown.undo.push(self._opened.pop_all())
        trust, unknown = self._trust(view, reads, changes, done)
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
            unaccounted=unknown,
            validate=lambda: _problems(task, view, division, done),
        )
        return Captured(0, done.seconds, shown, self._publishing(publication, reasons))

    def _changes(self, view: Capture, reads: Reads, done: SetUp) -> list[Change]:
        """What the setup changed, and what it wrote once more as it was already."""
        changes = view.changes()
        unknown = self._unknown(view, reads, changes, done)
        again = [found for path in unknown if not is_system(path) and (found := _rewritten(view, path))]
        return sorted([*changes, *again], key=lambda change: os.fsencode(change.path))

    def _unknown(self, view: Capture, reads: Reads, changes: Sequence[Change], done: SetUp) -> tuple[str, ...]:
        """What the setup read and nobody accounts for."""
        task, python = self._task, done.python
        base = [str(Path(bootseer.__file__).parent), str(task.wanted.cache)]
        base += [python.prefix, python.base_prefix] if python is not None else []
        base += _installers(task.env.get("PATH"))
        homes = [home for home in (task.env.get("HOME"),) if home]
        made = {change.path for change in changes}
        return unaccounted(reads.paths, self._key.accounted, made, base=base, homes=homes, inside=view.points)

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

    def _unsafe(
        self, view: Capture, effects: Effects, reads: Reads, changes: Sequence[Change], done: SetUp
    ) -> Sequence[str]:
        """Why a restart of the files alone would not do."""
        mentions = [*self._command, self._task.cwd, *(export.value for export in done.exports)]
        mentions += [str(Path(change.source).readlink()) for change in changes if Path(change.source).is_symlink()]
        found = effects.after(reads, mentions=mentions)
        for note in found.notes:
            say(f"the setup: {note}")
        for line in view.left_out.missed:
            say(line)
        return [*found.unsafe, *_not_kept(view, changes, done)]

    def _show(self, view: Capture, changes: Sequence[Change], division: Division, shown: Shown) -> None:
        """As a restored start would see it. A scanned setup changed the machine itself."""
        if view.way == "scan":
            return
        loose_ones = [change for change in changes if division.is_loose(change.path)]
        if loose_ones:
            place.apply(loose.plan(loose_entries(loose_ones), view.source_of, captured=True), view.source_of)
        if division.roots:
            user = view.way == "user"
            shown_view = show_on_host(view.source_of, division.roots, changes=self._task.changes, user=user, say=say)
            shown.undo.callback(shown_view.close)
            shown.enter = shown_view.enter

    def _trust(
        self, view: Capture, reads: Reads, changes: Sequence[Change], done: SetUp
    ) -> tuple[Trust, tuple[str, ...]]:
        if not reads.complete:
            return "unobserved", ()
        found = self._unknown(view, reads, changes, done)
        if not found:
            return "observed", ()
        named = ", ".join(found[:_MAX_NAMED]) + (
            f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
        )
        say(f"the setup read files that its key does not know: {named}; name them with --env-input for a snapshot")
        return "untrusted", found

    def _publishing(self, publication: Publication, reasons: Sequence[str]) -> Publishing | None:
        if reasons:
            tell(self._task, False, f"this setup is not snapshot-safe: {'; '.join(reasons)}")
            return None
        try:
            return start_publishing(self._task, publication)
        except BootseerError as error:
            tell(self._task, False, str(error))
            return None


def _not_kept(view: Capture, changes: Sequence[Change], done: SetUp) -> Iterator[str]:
    """Packages that went where no capture keeps them: a Python below /tmp, on another kind of disk."""
    known = {change.path for change in changes}
    for folder, group in groupby(done.new, key=lambda one: one.record.rpartition("/")[0]):
        lost = [one.name for one in group if one.record not in known and os.path.realpath(one.record) not in known]
        if lost and view.way != "scan":
            yield f"it installed {', '.join(lost[:_MAX_NAMED])} into {folder}, which is not kept"


def _problems(task: Task, view: Capture, division: Division, done: SetUp) -> Sequence[str]:
    """What is wrong with the environment, seen as a restored start would see it."""
    if done.python is None:
        return []
    env = exports.apply(done.exports, task.env)
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    with contextlib.ExitStack() as opened:
        enter = None
        if view.way != "scan" and division.roots:
            seen = show_on_host(view.source_of, division.roots, changes=task.changes, user=view.way == "user")
            opened.callback(seen.close)
            enter = seen.enter
        return validate(done.python, done.before, env, runner(enter), imports=task.wanted.imports)


def _installers(path: str | None) -> list[str]:
    """The programs that install for others, wherever the user has them: their versions are in the key."""
    found = (shutil.which(name, path=path) for name in _INSTALLERS)
    return [os.path.realpath(program) for program in found if program is not None]


def _rewritten(view: Capture, path: str) -> Change | None:
    """A file that is in an upper layer with the content that it had before.

    Another start may find nothing there: the snapshot must say that it belongs to the environment.
    """
    source = str(view.source_of(path))
    if view.way == "scan" or source == path or not os.path.lexists(source):
        return None
    found = found_at(source, "")
    return Change(path, Action.MODIFIED, source, before=state_of(found)) if found and found.kind == "file" else None


def _enter(view: Capture) -> Callable[[], None] | None:
    return None if view.way == "scan" else view.enter

"""Run the setup where its changes are caught, show them to the command, and keep them as a snapshot.

The setup runs in a private view of the machine; the command then finds its changes as a restored start would. What the
setup leaves that no snapshot can repeat is no harm to this first command, and keeps the snapshot from being made.

Where no snapshot will come of it the setup runs in such a view all the same, if there is one: the machine's own Python
stays what it was. A setup on the machine itself would change that, and with it the request key: no later start on this
node would find a snapshot.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import bootseer
from bootseer.env.capturing import exports
from bootseer.env.capturing.any_capture import Capture
from bootseer.env.capturing.daemons import Setup
from bootseer.env.capturing.effects import Effects, mentions
from bootseer.env.capturing.leftovers import unaccounted
from bootseer.env.capturing.watch import Reads, Watch, unobserved
from bootseer.env.changes import Change
from bootseer.env.document import Daemon, Trust
from bootseer.env.installing.interpreter import runner
from bootseer.env.installing.packages import installed, library_folders, new_distributions, new_packages
from bootseer.env.installing.validate import conflicts, validate
from bootseer.env.keys.key import RequestKey
from bootseer.env.keys.lock import own_uv
from bootseer.env.life.decide import Decision
from bootseer.env.restoring.host import show_on_host
from bootseer.env.restoring.roots import Division, is_system
from bootseer.errors import BootseerError
from bootseer.launch.environment.daemons import SocketWatch, clean, end_processes, mark, pids_of
from bootseer.launch.environment.plain import say_failed
from bootseer.launch.environment.publish import Publication, Publishing, start_publishing, tell
from bootseer.launch.environment.setup import Machine, SetupResult, SetupRun
from bootseer.launch.environment.task import Task
from bootseer.launch.environment.view import Shown, check_ended, divided, enter_of, open_view, show
from bootseer.launch.interrupt import interruptible
from bootseer.launch.observers import harmless
from bootseer.launch.supervise import say

_MAX_NAMED = 3
_INSTALLERS = ("uv", "uvx", "conda", "mamba", "micromamba", "pixi", "poetry", "pdm")


def set_up_privately(task: Task, decision: Decision) -> tuple[int, Shown | None]:
    """Without a snapshot: the setup's exit code, and what the command needs. Signals must be blocked.

    Raises `NotShown` where there is no such view, with nothing left behind.
    """
    with contextlib.ExitStack() as opened:
        with interruptible(), task.stage("capture") as facts:
            view = open_view(task, opened, scan=False)
            facts["way"] = view.way
        done = SetupRun(Machine(task, enter=enter_of(view), root=str(view.root))).run()
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
    done = SetupRun(Machine(task)).run()
    if done.code:
        say_failed(done.what, done.code)
        return done.code, None
    return 0, Shown("installed", decision, exports.apply(done.exports, task.env))


@dataclass(frozen=True, slots=True)
class Captured:
    """A setup that ran in a capture."""

    code: int
    """Its exit code; other than 0, and the machine is as it was."""
    setup_s: float
    """How long it took."""
    shown: Shown | None = None
    publishing: Publishing | None = None


def capture(task: Task, key: RequestKey, decision: Decision, command: Sequence[str]) -> Captured:
    """Run the setup. Signals must be blocked. Raises `NotShown`, with nothing left behind."""
    with contextlib.ExitStack() as opened:
        with interruptible(), task.stage("capture") as facts:
            view = open_view(task, opened, scan=True)
            # Before the watch: it would hold the pipe whose end stops that.
            ports = SocketWatch() if task.wanted.daemons == "relaunch" else None
            if ports is not None:
                opened.callback(ports.end)
            watch = _Watching(view, opened)
            effects = Effects.before(enter_of(view))
            facts["way"] = view.way
        machine = Machine(task, enter=enter_of(view), root=str(view.root), marks=effects.environment)
        done = SetupRun(machine).run()
        check_ended(view, done)
        if done.code:
            return Captured(done.code, done.seconds)
        judge = _Judge(task, key, view, effects, done)
        with interruptible(), task.stage("capture") as facts:
            judge.reads = watch.end()
            if ports is not None:
                judge.left_by = Setup(
                    env=machine.env,
                    mark=next(iter(effects.environment.items())),
                    scripts=tuple(os.path.realpath(path) for path in (task.setup,) if path is not None),
                    node=task.node,
                    seen=ports.end(),
                    ended_s=time.monotonic(),
                )
            judge.find_changes()
            facts["changes"] = len(judge.changes)
        if judge.compile_own_environments(machine):
            with interruptible():
                judge.find_changes()
        with interruptible():
            with task.stage("capture") as facts:
                division = divided(view, judge.changes)
                reasons = judge.unsafe(command)
                shown = Shown("captured", decision, exports.apply(judge.done.exports, task.env))
                shown.undo.push(opened.pop_all())  # from here on the command needs what was opened
                if judge.daemons and not reasons:
                    shown.undo.callback(_end_daemons, effects, judge.daemons, pids_of(judge.daemons))
                show(task, view, judge.changes, division, shown)
                facts.update(roots=len(division.roots), loose=len(division.loose))
            publication = judge.publication(decision, division)
            shown.facts.update(
                key=key.digest,
                builder=task.node,
                trust=publication.trust,
                way=view.way,
                roots=len(division.roots),
                loose=len(division.loose),
            )
            return Captured(0, judge.done.seconds, shown, _publishing(task, publication, reasons))


def _publishing(task: Task, publication: Publication, reasons: Sequence[str]) -> Publishing | None:
    if reasons:
        tell(task, False, f"this setup is not snapshot-safe: {'; '.join(reasons)}")
        return None
    try:
        return start_publishing(task, publication)
    except BootseerError as error:
        tell(task, False, str(error))
        return None


def _end_daemons(effects: Effects, daemons: Sequence[Daemon], made: Mapping[str, int]) -> None:
    """What the setup left running ends with the run, as it does in a restored start: the next one starts it again."""
    with harmless("what the setup left running was not ended"):
        end_processes(lambda: {*effects.running()})
        clean(daemons, made)


class _Watching:
    """What the setup reads, if that can be watched."""

    def __init__(self, view: Capture, opened: contextlib.ExitStack) -> None:
        self._watch: Watch | None = None
        self._reads: Reads | None = None
        if (enter := enter_of(view)) is not None:
            self._watch = Watch.begin(view.points, real=view.real, enter=enter)
            opened.callback(self.end)

    def end(self) -> Reads:
        """What the watch saw; it is ended once."""
        if self._reads is None:
            self._reads = self._watch.end() if self._watch is not None else unobserved("the setup could not be watched")
        return self._reads


class _Judge:
    """May what a setup did be kept for others? What it read, what it left that no snapshot can repeat, what is broken.

    Asked when the setup ran well: `reads` first, then `find_changes`.
    """

    reads: Reads
    changes: Sequence[Change]
    left_by: Setup | None = None
    """What is known of processes that are left, where they may be started again."""
    daemons: tuple[Daemon, ...] = ()
    """Those that can be."""

    def __init__(self, task: Task, key: RequestKey, view: Capture, effects: Effects, done: SetupResult) -> None:
        self._task = task
        self._key = key
        self._view = view
        self._effects = effects
        self.done = done

    def find_changes(self) -> None:
        """What the setup changed, and what it wrote once more as it was already."""
        unknown = self._unaccounted(())
        self.changes = self._view.changes(again=frozenset(path for path in unknown if not is_system(path)))

    def compile_own_environments(self, machine: Machine) -> bool:
        """Bytecode for what the setup installed into environments that it made itself; whether there is any."""
        done, root = self.done, str(self._view.root)
        if done.python is None:
            return False
        folders = sorted(library_folders(change.path for change in self.changes) - set(done.python.folders))
        found = installed(folders, root=root)
        new = new_distributions(done.before, found)
        if not new:
            return False
        packages = tuple(sorted({*done.packages, *new_packages(replace(done.before, system=None), found)}))
        SetupRun(machine).compile(done.python, new)
        self.done = replace(done, packages=packages).ended_now()
        return True

    def unsafe(self, command: Sequence[str]) -> list[str]:
        """Why a restart of the files alone would not do."""
        done = self.done
        used = [*command, self._task.cwd, *(export.value for export in done.exports), *mentions(self.changes)]
        pid_files = tuple(path for path in self._view.left_out.reasons if path.endswith(".pid"))
        setup = replace(self.left_by, paths=pid_files) if self.left_by is not None else None
        found = self._effects.after(self.reads, mentions=used, relaunch=setup)
        self.daemons = tuple(one.daemon for one in found.daemons)
        for one in found.daemons:
            mark(self._task, one.daemon, one.began_s, one.began_s + one.daemon.ready_s)
        for note in found.notes:
            say(f"the setup: {note}")
        for line in self._view.left_out.missed:
            say(line)
        return [*done.reasons, *found.unsafe, *self._not_kept()]

    def publication(self, decision: Decision, division: Division) -> Publication:
        """The snapshot that is to be made of it."""
        unknown = self._unaccounted(self.changes) if self.reads.complete else ()
        # What daemons write at each start: it would be in the next restore's way.
        theirs = {path for daemon in self.daemons for path in (*daemon.pid_files, daemon.output)}
        trust, unaccounted_for = trust_of(self.reads, unknown)
        return Publication(
            key=self._key,
            decision=decision,
            changes=[change for change in self.changes if change.path not in theirs],
            root=self._view.root,
            division=division,
            done=self.done,
            trust=trust,
            unaccounted=unaccounted_for,
            left_out=self._view.left_out,
            daemons=self.daemons,
            validate=partial(self._problems, division),
        )

    def _unaccounted(self, changes: Sequence[Change]) -> tuple[str, ...]:
        """What the setup read and the key does not know."""
        task, python, view = self._task, self.done.python, self._view
        base = [str(Path(bootseer.__file__).parent), str(task.wanted.cache)]
        base += [python.prefix, python.base_prefix] if python is not None else []
        base += _installers(task.env.get("PATH"))
        homes = [home for home in (task.env.get("HOME"),) if home]
        made = {*(change.path for change in changes), *view.left_out.withheld}
        accounted = self._key.accounted
        return unaccounted(self.reads.paths, accounted, made, base=base, homes=homes, inside=view.points)

    def _not_kept(self) -> Iterator[str]:
        """Packages that went where no capture keeps them: a Python below /tmp, on another kind of disk."""
        known = {change.path for change in self.changes}
        for folder, group in groupby(self.done.new, key=lambda one: one.record.rpartition("/")[0]):
            lost = [one.name for one in group if one.record not in known and os.path.realpath(one.record) not in known]
            if lost and self._view.way != "scan":
                yield f"it installed {', '.join(lost[:_MAX_NAMED])} into {folder}, which is not kept"

    def _problems(self, division: Division) -> list[str]:
        """What is wrong with the environment, seen as a restored start would see it."""
        task, view, done = self._task, self._view, self.done
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
            run = runner(enter)
            found = validate(done.python, done.before, env, run, imports=task.wanted.imports)
            # `pip check` takes half a second: only a setup that changed what distributions say of themselves needs it.
            is_checked = task.wanted.conflicts == "refuse" and any("-info" in one.path for one in self.changes)
            against = conflicts(done.python, done.before, env, run) if is_checked else []
        if against:
            found.append(f"{_named(against)} (--env-conflicts accept keeps a snapshot all the same)")
        return found


def trust_of(reads: Reads, found: tuple[str, ...]) -> tuple[Trust, tuple[str, ...]]:
    """How far the key tells all that the setup depends on, and what it does not tell (`found`: `unaccounted_reads`)."""
    if not reads.complete:
        return "unobserved", ()
    if not found:
        return "observed", ()
    say(f"the setup read files that its key does not know: {_named(found)}; name them with --env-input for a snapshot")
    return "untrusted", found


def _installers(path: str | None) -> list[str]:
    """The programs that install for others, wherever the user has them: their versions are in the key."""
    found = [own_uv(), *(shutil.which(name, path=path) for name in _INSTALLERS)]
    return [os.path.realpath(program) for program in found if program is not None]


def _named(found: Sequence[str]) -> str:
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return f"{', '.join(found[:_MAX_NAMED])}{more}"

"""Run the setup in a capture, show its changes to the command, and publish them as a snapshot.

The setup runs in a private view of the machine; the command sees its changes as in a restored start. Side effects that
a snapshot cannot repeat do not affect this command, but prevent the snapshot.

A setup runs in a private view, if possible, even if no snapshot is made: on the machine itself it would change the
installed packages, and with them the request key, so that no later start on this node would find a snapshot.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path

import bootseer
from bootseer.env.capturing.capture_base import Capture
from bootseer.env.capturing.daemons import SetupContext
from bootseer.env.capturing.effects import Baseline, files_of_node, mentions
from bootseer.env.capturing.exports import node_patterns
from bootseer.env.capturing.leftovers import AT_HOME, CREDENTIALS_AT_HOME, unaccounted
from bootseer.env.capturing.reads import Reads
from bootseer.env.changes import Change, lies_in
from bootseer.env.document import Daemon, Trust, apply_exports
from bootseer.env.installing.interpreter import runner
from bootseer.env.installing.packages import installed, library_folders, new_distributions, new_packages
from bootseer.env.keys.key import RequestKey
from bootseer.env.keys.lock import own_uv
from bootseer.env.keys.request_key import changed_inputs, facts_folder_of
from bootseer.env.life.decide import Decision
from bootseer.env.processes import processes
from bootseer.env.restoring.host import show_on_host
from bootseer.env.restoring.roots import Division, divide, is_system
from bootseer.env.restoring.safe_tree import TreeFolders
from bootseer.errors import BootseerError
from bootseer.launch.environment.lookup_process import key_request_of
from bootseer.launch.environment.plain import say_failed
from bootseer.launch.environment.publish import Publication, Publishing, report_outcome, report_unsafe, start_publishing
from bootseer.launch.environment.relaunch import read_pid_files, remove_stale_files, report_start
from bootseer.launch.environment.setup import SetupHost, SetupResult, SetupRun, check_environment
from bootseer.launch.environment.task import Task
from bootseer.launch.environment.view import (
    PreparedEnvironment,
    check_setup,
    open_view,
    own_folders,
    show_changes,
)
from bootseer.launch.environment.watch import Watch
from bootseer.launch.interrupt import interruptible
from bootseer.launch.observers import reporting_errors
from bootseer.launch.restart import end_processes
from bootseer.launch.supervise import say
from bootseer.units import listed

_GRACE_S, _POLL_S = 1.0, 0.02
_INSTALLERS = ("uv", "uvx", "conda", "mamba", "micromamba", "pixi", "poetry", "pdm")


def set_up_in_view(task: Task, decision: Decision) -> tuple[int, PreparedEnvironment | None]:
    """Run the setup in a private view, without publishing; its exit code, and the prepared environment.

    Signals must be blocked. Raises `EnvironmentUnavailable` if there is no such view, with nothing left behind.
    """
    with contextlib.ExitStack() as opened:
        with interruptible(), task.stage("capture") as facts:
            view = open_view(task, opened, scan=False)
            facts["way"] = view.way
        done = SetupRun(SetupHost(task, enter=view.enter, root=str(view.root))).run()
        check_setup(view, done)
        if done.code:
            return done.code, None
        prepared = PreparedEnvironment(
            "installed", decision, apply_exports(done.exports, task.env), facts={"way": view.way}
        )
        with interruptible(), task.stage("capture") as facts:
            changes = view.changes()
            division = divide(changes, TreeFolders(str(view.root)))
            facts.update(changes=len(changes), roots=len(division.roots), loose=len(division.loose))
            prepared.undo.push(opened.pop_all())  # from here on the command needs what was opened
            show_changes(task, view, changes, division, prepared)
    return 0, prepared


def set_up_on_host(task: Task, decision: Decision) -> tuple[int, PreparedEnvironment | None]:
    """Run the setup on this machine itself, as without BootSeer."""
    done = SetupRun(SetupHost(task)).run()
    if done.code:
        say_failed(done.what, done.code)
        return done.code, None
    return 0, PreparedEnvironment("installed", decision, apply_exports(done.exports, task.env))


def capture(
    task: Task, key: RequestKey, decision: Decision, command: Sequence[str]
) -> tuple[SetupResult, PreparedEnvironment | None, Publishing | None]:
    """Run the setup in a capture; if it failed, its changes are discarded. Signals must be blocked.

    Raises `EnvironmentUnavailable`, with nothing left behind.
    """
    with contextlib.ExitStack() as opened:
        with interruptible(), task.stage("capture") as facts:
            view = open_view(task, opened, scan=True)
            log = task.folder.path / "reads.log"
            watch = Watch.begin(view.points, passthrough=view.passthrough, enter=view.enter, log=log)
            opened.callback(watch.end)
            baseline = Baseline.take(view.enter)
            facts["way"] = view.way
        host = SetupHost(task, enter=view.enter, root=str(view.root), more_env=baseline.environment)
        done = SetupRun(host).run()
        check_setup(view, done)
        if done.code:
            return done, None, None
        captured = _CapturedSetup(host, key, view, baseline, done)
        with interruptible(), task.stage("capture") as facts:
            captured.wait_for_processes(watch.background.pid)
            captured.reads = watch.end()
            captured.find_changes()
            facts["changes"] = len(captured.changes)
        if captured.compile_own_environments():
            with interruptible():
                captured.find_changes()
        with interruptible():
            with task.stage("capture") as facts:
                division = divide(captured.changes, TreeFolders(str(view.root)))
                reasons, this_time = captured.unsafe_reasons(command, division)
                prepared = PreparedEnvironment("captured", decision, apply_exports(captured.done.exports, task.env))
                prepared.undo.push(opened.pop_all())  # from here on the command needs what was opened
                if captured.daemons and not reasons and not this_time:
                    prepared.undo.callback(_end_daemons, baseline, captured.daemons, read_pid_files(captured.daemons))
                show_changes(task, view, captured.changes, division, prepared)
                facts.update(roots=len(division.roots), loose=len(division.loose))
            publication = captured.publication(decision, division)
            prepared.facts.update(
                key=key.digest,
                builder=task.node,
                trust=publication.trust,
                way=view.way,
                roots=len(division.roots),
                loose=len(division.loose),
            )
            return captured.done, prepared, _publishing(task, publication, reasons, this_time)


def _publishing(
    task: Task, publication: Publication, reasons: Sequence[str], this_time: Sequence[str]
) -> Publishing | None:
    if reasons or this_time:
        report_unsafe(task, reasons, this_time)
        return None
    try:
        return start_publishing(task, publication)
    except BootseerError as error:
        report_outcome(task, False, str(error))
        return None


def _end_daemons(baseline: Baseline, daemons: Sequence[Daemon], made: Mapping[str, int]) -> None:
    """End the processes that the setup left, with the run as in a restored start."""
    with reporting_errors("what the setup left running was not ended"):
        end_processes(lambda: {*baseline.running()})
        remove_stale_files(daemons, made)


class _CapturedSetup:
    """A successful setup in a capture, and whether it can be published: its reads, side effects and defects.

    `wait_for_processes` is called first, then `reads` is set and `find_changes` called.
    """

    reads: Reads
    changes: Sequence[Change]
    daemons: tuple[Daemon, ...] = ()
    """Processes that can be started again."""
    unknown: tuple[str, ...] = ()
    """Files that it read and the key does not cover, once `unsafe_reasons` has looked."""

    def __init__(self, host: SetupHost, key: RequestKey, view: Capture, baseline: Baseline, done: SetupResult) -> None:
        self._host = host
        self._task = host.task
        self._ended_s = time.monotonic()
        self._key = key
        self._view = view
        self._baseline = baseline
        self.done = done

    def wait_for_processes(self, watcher: int) -> None:
        """Wait for processes that are about to end, but the `watcher`: what they do belongs to the setup."""
        until_s = time.monotonic() + _GRACE_S
        while (left := self._baseline.running().keys() - {watcher}) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        table = processes()
        self._left = {pid for pid in left if pid in table and table[pid].parent not in left}
        if not left:
            self.done = self.done.ending_now()

    def find_changes(self) -> None:
        """Find the changes of the setup, with files that it read and rewrote unchanged."""
        unknown = self._unaccounted(())
        self.changes = self._view.changes(always_changed=frozenset(path for path in unknown if not is_system(path)))

    def compile_own_environments(self) -> bool:
        """Compile bytecode of packages in environments that the setup has made; whether there are any."""
        done, root = self.done, str(self._view.root)
        if done.python is None:
            return False
        folders = sorted(library_folders(change.path for change in self.changes) - set(done.python.folders))
        found = installed(folders, root=root)
        new = new_distributions(done.before, found)
        if not new:
            return False
        packages = tuple(sorted({*done.packages, *new_packages(replace(done.before, system=None), found)}))
        SetupRun(self._host).compile(done.python, new)
        self.done = replace(done, packages=packages).ending_now()
        return True

    def unsafe_reasons(self, command: Sequence[str], division: Division) -> tuple[list[str], list[str]]:
        """Reasons why restoring the files alone would not be enough: what the setup does, and what happened this
        time."""
        done, task = self.done, self._task
        used = [task.cwd, *(export.value for export in done.exports), *mentions(self.changes)]
        setup = None
        if task.options.daemons == "relaunch":
            setup = SetupContext(
                env=self._host.env,
                mark=next(iter(self._baseline.environment.items())),
                scripts=() if task.setup is None else (os.path.realpath(task.setup),),
                paths=tuple(path for path in self._view.left_out.reasons if path.endswith(".pid")),
                node=task.node,
                ended_s=self._ended_s,
                report=partial(report_start, task),
            )
        unsafe, this_time, daemons = self._baseline.side_effects(
            self.reads, mentions=used, command=command, relaunch=setup
        )
        self.daemons = tuple(daemons)
        if self._left - self._baseline.running().keys():
            this_time.append("it left a process that ended while its changes were looked for: let it wait for that one")
        for line in self._view.left_out.warnings:
            say(line)
        # Build logs contain the node's name, too: only setups that name such variables are searched.
        named = re.findall(r"\w+", " ".join(self._key.details.get("variables left out", ())))
        patterns = node_patterns(task.node, named, {"HOSTNAME": os.uname().nodename, **task.env})
        if lists := files_of_node([one for one in self.changes if division.is_loose(one.path)], patterns):
            unsafe.append(f"it wrote names of this node or job to {listed(lists)}: let the command write such files")
        left_out = chain(self._view.left_out.withheld, *self._view.left_out.paths.values())
        own = (*(change.path for change in self.changes), *left_out) if self._view.way == "scan" else ()
        self.unknown = self._unaccounted(self.changes) if self.reads.complete else ()
        reasons = [*done.reasons, *unsafe, *self._packages_outside(), *unknown_reads(self.unknown)]
        return reasons, [*done.unknown, *this_time, *input_changes(task, self._key, own)]

    def publication(self, decision: Decision, division: Division) -> Publication:
        # Written by daemons at each start: restored, they would be in the way.
        runtime_files = {path for daemon in self.daemons for path in (*daemon.pid_files, daemon.output)}
        return Publication(
            key=self._key,
            decision=decision,
            changes=[change for change in self.changes if change.path not in runtime_files],
            root=self._view.root,
            division=division,
            done=self.done,
            trust=trust_of(self.reads, self.unknown),
            left_out=self._view.left_out,
            daemons=self.daemons,
            validate=partial(self._validate, division),
        )

    def _unaccounted(self, changes: Sequence[Change]) -> tuple[str, ...]:
        """Files that the setup read and the key does not cover."""
        task, python, view, real = self._task, self.done.python, self._view, os.path.realpath  # reads have real paths
        base = [str(Path(bootseer.__file__).parent), *own_folders(task)]
        # Installers, wherever the user has them: their versions are in the key.
        installers = (shutil.which(name, path=task.env.get("PATH")) for name in _INSTALLERS)
        base += filter(None, (own_uv(), *installers))
        base += [python.prefix, python.base_prefix] if python is not None else []
        for name in (*AT_HOME, *CREDENTIALS_AT_HOME) if task.env.get("HOME") else ():
            path = real(f"{task.env['HOME']}/{name}")
            # A link to a folder of another name may lead to a disk with other files.
            if Path(name).name.lstrip(".") in Path(path).name or not os.path.isdir(path):  # noqa: PTH112
                base.append(path)
        made = {*(change.path for change in changes), *view.left_out.withheld}
        # What the setup made and the rules left out (the lock file of `uv venv`, conda's packages) is no input either.
        accounted = [*map(real, self._key.accounted), *chain.from_iterable(view.left_out.paths.values())]
        return unaccounted(self.reads.paths, accounted, made, map(real, base), view.points, project=task.cwd)

    def _packages_outside(self) -> Iterator[str]:
        """Packages in places that are not captured: a Python below /tmp, or on a network disk."""
        # With their folders: those that were replaced are no changes of their own in a scan.
        known = {path for change in self.changes for path in (change.path, change.path.rpartition("/")[0])}
        for folder, group in groupby(self.done.new, key=lambda one: one.record.rpartition("/")[0]):
            if lost := [one.name for one in group if known.isdisjoint((one.record, os.path.realpath(one.record)))]:
                yield f"it installed {listed(lost)} into {folder}, which is not captured"

    def _validate(self, division: Division) -> None:
        """`check_environment`, seen as a restored start would see it."""
        task, view, done = self._task, self._view, self.done
        env = apply_exports(done.exports, task.env)
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        with contextlib.ExitStack() as opened:
            enter = None
            if view.way != "scan" and division.roots:
                seen = show_on_host(view.source_of, division.roots, changes=task.changes, user=view.way == "user")
                opened.callback(seen.close)
                enter = seen.enter
            changes_metadata = any("-info" in one.path for one in self.changes)
            check_environment(done, task.options, env, runner(enter), changes_metadata=changes_metadata)


def input_changes(task: Task, key: RequestKey, own: Sequence[str] = ()) -> list[str]:
    """The inputs that were changed while the setup ran, as a reason: it may have used the new ones.

    The setup's own changes do not count: in a capture they are not visible here, until the command gets them; after a
    scan they are `own`, and a restore compares the files. On network disks they cannot be distinguished, and count.
    """
    ask = key_request_of(task, key.components.get("base", "").removeprefix("image "))
    foreign = []
    for path, words in changed_inputs(ask, key, facts_folder=facts_folder_of(task.options.cache)).items():
        real = os.path.realpath(path)
        if not any(lies_in(one, [real]) for one in own):
            foreign.append(f"{path} ({words})")
    return [f"inputs of it changed while it ran: {listed(foreign)}"] if foreign else []


def trust_of(reads: Reads, found: Sequence[str]) -> Trust:
    """How far the key covers the setup's reads; `found` is the result of `unaccounted`."""
    return "unobserved" if not reads.complete else "untrusted" if found else "observed"


def unknown_reads(found: Sequence[str]) -> list[str]:
    """The reads that the key does not cover, as a reason: changes of these files would go unnoticed."""
    words = f"it read files that its key does not cover: {listed(found)} (declare them by --env-input)"
    return [words] if found else []

"""Snapshots without a job (`bootseer env`): make, copy, verify, compare, run a command on one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from bootseer.artifact.places import runtime_root
from bootseer.artifact.signatures import UNSIGNED, Signatures
from bootseer.env.capturing.capture import open_capture
from bootseer.env.capturing.capture_base import Way
from bootseer.env.capturing.effects import Baseline
from bootseer.env.changes import parents
from bootseer.env.document import EnvironmentDocument
from bootseer.env.life.catalog import NodeCatalog
from bootseer.env.life.decide import Action, Decision
from bootseer.env.restoring import loose, placement
from bootseer.env.restoring.layer import Layer, LayerOptions, mount_layer
from bootseer.env.snapshot import verify
from bootseer.env.snapshot.manifest import Entry, Manifest
from bootseer.env.snapshot.oracle import fresh_install_differs
from bootseer.env.snapshot.verify import Comparison
from bootseer.errors import Interrupted, PermanentError
from bootseer.launch import supervise
from bootseer.launch.command import run_program
from bootseer.launch.environment.capture import capture
from bootseer.launch.environment.restore import restore
from bootseer.launch.environment.setup import SetupHost, SetupRun
from bootseer.launch.environment.start import EnvironmentStart
from bootseer.launch.environment.task import EnvironmentOptions, Task
from bootseer.launch.environment.view import EnvironmentUnavailable, own_folders
from bootseer.launch.interrupt import interruptible
from bootseer.launch.observers import reporting_errors
from bootseer.launch.restart import end_processes
from bootseer.launch.supervise import say
from bootseer.store.open import open_store


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """The result of making a snapshot."""

    key: str
    published: bool = False
    was_there: bool = False
    """A usable snapshot existed already."""
    code: int = 0
    """Exit code of the setup; 130 and the like after an interrupt."""
    why_not: str = ""
    seconds: float = 0.0
    """Of the setup and the publication."""
    num_files: int = 0
    size_bytes: int = 0


def make_snapshot(
    setup: str | None, requirements: Sequence[str], options: EnvironmentOptions, env: Mapping[str, str]
) -> SnapshotResult:
    """Run the setup in a capture and publish its snapshot, unless there is one."""
    supervise.block_signals()
    task = Task(setup, requirements, options, env)
    start = EnvironmentStart(task, ())
    code = 1
    try:
        made = _make(task, start)
        code = made.code
        return made
    except Interrupted as interrupted:
        say(f"interrupted by {interrupted}; no snapshot was published")
        return SnapshotResult("", code=interrupted.exit_code, why_not="interrupted")
    finally:
        start.finish_publishing(code)
        start.close()
        supervise.unblock_signals()


def _make(task: Task, start: EnvironmentStart) -> SnapshotResult:
    key, decision = start.look_up()
    digest = key.digest if key is not None else ""
    if decision.action is Action.RESTORE:
        return SnapshotResult(digest, was_there=True, why_not=f"nothing was done: {decision.reason}")
    if decision.action is not Action.BUILD or key is None:
        return SnapshotResult(digest, why_not=decision.reason)
    try:
        done, start.prepared, start.publishing = capture(task, key, decision, ())
    except EnvironmentUnavailable as error:
        return SnapshotResult(digest, why_not=str(error))
    start.finish_publishing(0)
    outcome = task.outcome
    return SnapshotResult(
        digest,
        published=bool(outcome.get("published")),
        code=done.code,
        why_not=str(outcome.get("why_not") or ("the setup failed" if done.code else "")),
        seconds=float(outcome.get("seconds", 0.0)) + done.seconds,
        num_files=int(outcome.get("num_files", 0)),
        size_bytes=int(outcome.get("size_bytes", 0)),
    )


@dataclass(frozen=True, slots=True)
class SavedSnapshot:
    """A snapshot in a store, to be used on this node without its setup."""

    document: EnvironmentDocument
    uri: str
    """Of its store."""
    cache: Path
    env: Mapping[str, str]
    plain_http: bool = False
    signatures: Signatures = UNSIGNED

    def copy_to(self, folder: Path) -> int:
        """Write all its files below a folder, which is created; returns the number of paths."""
        with interruptible(), self._mounted() as (layer, entries):
            folder.mkdir(parents=True, exist_ok=True)
            # In a new folder there is nothing of what the setup had found.
            copied = [replace(entry, before="") for entry in _with_parents(entries, layer) if entry.kind != "deleted"]
            planned = loose.plan(copied, layer.at, root=str(folder.absolute()), captured=True)
            placement.apply_plan(planned, layer.at)
        return len(copied)

    def check(self, tier: Literal["quick", "full"], progress: Callable[[int, int], None]) -> Comparison:
        """Compare its mounted files with its manifest."""
        with interruptible(), self._mounted() as (layer, entries):
            owners = os.geteuid() == 0
            found = verify.verify(str(layer.path), entries, tier, layer=True, owners=owners, progress=progress)
        return Comparison(tuple(found), len(entries))

    def compare_with_fresh(self, setup: str | None, requirements: Sequence[str]) -> Comparison:
        """Run the setup again, in a capture, and compare its changes with the snapshot."""

        def install(more: Mapping[str, str]) -> int:
            baseline = Baseline.take(view.enter)
            more_env = {**more, **baseline.environment}
            supervise.block_signals()
            try:
                return SetupRun(SetupHost(task, enter=view.enter, root=str(view.root), more_env=more_env)).run().code
            finally:
                end_processes(lambda: {*baseline.running()})
                supervise.unblock_signals()

        with self._task(setup, requirements) as task, interruptible(), self._mounted() as (layer, entries):
            packages, env, folder, own = self.document.packages, self.env, task.folder.path, own_folders(task)
            left_out = {one.path for one in self.document.left_out}
            left_out.update(path for one in self.document.daemons for path in (*one.pid_files, one.output))
            ways: tuple[Way, ...] = ("overlay", "user")  # a scan would change this machine itself
            with open_capture(folder / "capture", ways, say=say, env=env, own=own, folders=[task.cwd]) as view:
                return fresh_install_differs(
                    packages, entries, layer.path, view, install, folder=folder, env=env, left_out=left_out
                )

    def run(self, command: Sequence[str]) -> int:
        """Run a command with the snapshot's files in their places; its exit code.

        Raises `PermanentError` when they cannot be prepared.
        """
        decision = Decision(Action.RESTORE, "hit", "its key was given", self.document)
        with self._task(None, ()) as task:
            try:
                with interruptible():
                    prepared = restore(task, decision, command)
            except EnvironmentUnavailable as error:
                raise PermanentError(f"environment {self.document.key[:12]}: {error}") from error
            except Interrupted as interrupted:
                return interrupted.exit_code
            try:
                return run_program(command, prepared.env, task.session.tracer, enter=prepared.enter)
            finally:
                with reporting_errors("the environment was not removed"):
                    prepared.undo.close()

    @contextmanager
    def _task(self, setup: str | None, requirements: Sequence[str]) -> Iterator[Task]:
        supervise.block_signals()
        runtime = runtime_root(self.env)
        options = EnvironmentOptions(
            self.cache, runtime, store=self.uri, plain_http=self.plain_http, signatures=self.signatures
        )
        task = Task(setup, requirements, options, self.env)
        try:
            yield task
        finally:
            task.folder.remove()
            supervise.unblock_signals()

    @contextmanager
    def _mounted(self) -> Iterator[tuple[Layer, Sequence[Entry]]]:
        with ExitStack() as opened:
            store = open_store(self.uri, plain_http=self.plain_http)
            opened.callback(store.close)
            runtime = runtime_root(self.env)
            layer_options = LayerOptions(cache=self.cache, runtime=runtime, plain_http=self.plain_http, publish=False)
            layer = mount_layer(self.document, store, layer_options, say=say)
            opened.callback(layer.close)
            yield layer, Manifest.parse(NodeCatalog(self.cache, say).object(self.document.manifest, store)).entries


def _with_parents(entries: Sequence[Entry], layer: Layer) -> list[Entry]:
    """The entries, and all their parent folders, which do not exist below another folder."""
    known = {entry.path for entry in entries}
    found = []
    for above in {above for entry in entries for above in parents(entry.path)} - known:
        status = layer.at(above).stat()
        found.append(Entry(above, "directory", mode=status.st_mode & 0o7777, uid=status.st_uid, gid=status.st_gid))
    return sorted([*entries, *found], key=lambda entry: os.fsencode(entry.path))

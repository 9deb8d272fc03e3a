"""A snapshot without a job: make it, copy it, run a command on it, verify it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bootseer.artifact.places import runtime_root
from bootseer.artifact.signatures import UNSIGNED, Signatures
from bootseer.env.capturing.any_capture import Capture
from bootseer.env.document import EnvironmentDocument
from bootseer.env.life.decide import Action, Decision
from bootseer.env.life.local import Local
from bootseer.env.restoring import loose, place
from bootseer.env.restoring.layer import Layer, LayerOptions, mount_layer
from bootseer.env.snapshot import verify
from bootseer.env.snapshot.manifest import Entry, Manifest
from bootseer.env.snapshot.oracle import fresh_install_differs
from bootseer.errors import Interrupted, PermanentError
from bootseer.launch import supervise
from bootseer.launch.command import run_program
from bootseer.launch.environment.capture import capture
from bootseer.launch.environment.restore import restore
from bootseer.launch.environment.setup import Machine, SetupRun
from bootseer.launch.environment.start import EnvironmentStart
from bootseer.launch.environment.task import EnvironmentWanted, Task
from bootseer.launch.environment.view import NotShown
from bootseer.launch.interrupt import interruptible
from bootseer.launch.observers import harmless
from bootseer.launch.supervise import say
from bootseer.store.open import open_store


@dataclass(frozen=True, slots=True)
class Made:
    """What became of it."""

    key: str
    published: bool = False
    was_there: bool = False
    """A snapshot that can be used was there already."""
    code: int = 0
    """Of the setup; 130 and the like when it was interrupted."""
    why_not: str = ""
    seconds: float = 0.0
    """Of the setup, and of keeping its snapshot."""
    num_files: int = 0
    size_bytes: int = 0


def make_snapshot(
    setup: str | None, requirements: Sequence[str], wanted: EnvironmentWanted, env: Mapping[str, str]
) -> Made:
    """Run the setup in a capture and keep what it did; nothing happens when there is a snapshot."""
    supervise.block_signals()
    task = Task(setup, requirements, wanted, env)
    start = EnvironmentStart(task, ())
    code = 1
    try:
        made = _make(task, start)
        code = made.code
        return made
    except Interrupted as interrupted:
        say(f"interrupted by {interrupted}; no snapshot was kept")
        return Made("", code=interrupted.exit_code, why_not="interrupted")
    finally:
        start.end(code)
        start.close()
        supervise.unblock_signals()


def _make(task: Task, start: EnvironmentStart) -> Made:
    key, decision = start.look()
    digest = key.digest if key is not None else ""
    if decision.action is Action.RESTORE:
        return Made(digest, was_there=True, why_not=f"nothing was done: {decision.words}")
    if decision.action is not Action.BUILD or key is None:
        return Made(digest, why_not=decision.words)
    try:
        captured = capture(task, key, decision, ())
    except NotShown as error:
        return Made(digest, why_not=str(error))
    start.shown = captured.shown
    if captured.publishing is not None:
        start.finish(captured.publishing)
    outcome = task.outcome
    return Made(
        digest,
        published=bool(outcome.get("published")),
        code=captured.code,
        why_not=str(outcome.get("why_not") or ("the setup failed" if captured.code else "")),
        seconds=float(outcome.get("seconds", 0.0)) + captured.setup_s,
        num_files=int(outcome.get("num_files", 0)),
        size_bytes=int(outcome.get("size_bytes", 0)),
    )


@dataclass(frozen=True, slots=True)
class Compared:
    """What a comparison found."""

    differences: tuple[tuple[str, str], ...]
    """Path and words."""
    num_paths: int

    def as_json(self) -> dict[str, Any]:
        """For other programs."""
        rows = [{"path": path, "words": words} for path, words in self.differences]
        return {"paths": self.num_paths, "differences": rows}


@dataclass(frozen=True, slots=True)
class SavedSnapshot:
    """One in a store, to be used on this node without its setup."""

    document: EnvironmentDocument
    uri: str
    """The store that has it."""
    cache: Path
    env: Mapping[str, str]
    plain_http: bool = False
    signatures: Signatures = UNSIGNED

    def copy_to(self, folder: Path) -> int:
        """Write all its files below a folder, which is made; returns how many paths that were."""
        with self._brought() as (layer, entries):
            folder.mkdir(parents=True, exist_ok=True)
            wanted = [entry for entry in _with_parents(entries, layer) if entry.kind != "deleted"]
            planned = loose.plan(wanted, layer.at, root=str(folder.absolute()), captured=True)
            place.apply(planned, layer.at, threads=len(os.sched_getaffinity(0)))
        return len(wanted)

    def check(self, tier: Literal["quick", "full"], progress: Callable[[int, int], None]) -> Compared:
        """Compare its files, as they are mounted, with its manifest."""
        with self._brought() as (layer, entries):
            owners = os.geteuid() == 0
            found = verify.verify(str(layer.path), entries, tier, layer=True, owners=owners, progress=progress)
        return Compared(tuple((one.path, one.words) for one in found), len(entries))

    def compare_with_fresh(self, setup: str | None, requirements: Sequence[str]) -> Compared:
        """Run the setup once more, in a capture, and compare what it does with the snapshot."""

        def install(view: Capture, more: Mapping[str, str]) -> int:
            return SetupRun(Machine(task, enter=view.enter, root=str(view.root), marks=more)).run().code

        with self._task(setup, requirements) as task, self._brought() as (layer, entries):
            found = fresh_install_differs(
                self.document.packages,
                entries,
                layer.path,
                install,
                folder=task.folder.path,
                env=self.env,
                own=[self.cache, task.wanted.runtime],
                folders=[task.cwd],
                say=say,
            )
        return Compared(tuple((one.path, one.words) for one in found.differences), found.num_compared)

    def run(self, command: Sequence[str]) -> int:
        """Run a command with the snapshot's files in their places; its exit code.

        Raises `PermanentError` when they cannot be shown.
        """
        decision = Decision(Action.RESTORE, "hit", "its key was given", self.document)
        with self._task(None, ()) as task:
            try:
                with interruptible():
                    shown = restore(task, decision, command)
            except NotShown as error:
                raise PermanentError(f"environment {self.document.key[:12]}: {error}") from error
            except Interrupted as interrupted:
                return interrupted.exit_code
            try:
                return run_program(command, shown.env, None, own_group=task.own_group, enter=shown.enter)
            finally:
                with harmless("the environment was not taken away"):
                    shown.undo.close()

    @contextmanager
    def _task(self, setup: str | None, requirements: Sequence[str]) -> Iterator[Task]:
        supervise.block_signals()
        runtime = runtime_root(self.env, os.getuid())
        wanted = EnvironmentWanted(
            self.cache, runtime, store=self.uri, plain_http=self.plain_http, signatures=self.signatures
        )
        task = Task(setup, requirements, wanted, self.env)
        try:
            yield task
        finally:
            task.folder.remove()
            supervise.unblock_signals()

    @contextmanager
    def _brought(self) -> Iterator[tuple[Layer, Sequence[Entry]]]:
        """Its files on this node, and the list of them."""
        with ExitStack() as opened:
            store = open_store(self.uri, plain_http=self.plain_http)
            opened.callback(store.close)
            runtime = runtime_root(self.env, os.getuid())
            bring = LayerOptions(cache=self.cache, runtime=runtime, plain_http=self.plain_http, publish=False)
            layer = mount_layer(self.document, store, bring, say=say)
            opened.callback(layer.close)
            yield layer, Manifest.parse(Local(self.cache, say).object(self.document.manifest, store)).entries


def _with_parents(entries: Sequence[Entry], layer: Layer) -> list[Entry]:
    """The entries and all folders on the way to them: below another folder they are not there."""
    known = {entry.path for entry in entries}
    found = {}
    for entry in entries:
        above = entry.path.rpartition("/")[0]
        while above and above not in known and above not in found:
            status = layer.at(above).stat()
            found[above] = Entry(above, "directory", mode=status.st_mode & 0o7777, uid=status.st_uid, gid=status.st_gid)
            above = above.rpartition("/")[0]
    return sorted([*entries, *found.values()], key=lambda entry: os.fsencode(entry.path))

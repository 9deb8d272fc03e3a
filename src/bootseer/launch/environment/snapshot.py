"""A snapshot by its key, without the setup that it stands for: copy it, run a command on it, verify it.

Called by `cli.env_restore` and `cli.env_verify`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from bootseer.artifact.places import runtime_root
from bootseer.artifact.signatures import UNSIGNED, Signatures
from bootseer.env.capturing.any_capture import Capture
from bootseer.env.document import EnvironmentDocument
from bootseer.env.life.decide import Action, Decision
from bootseer.env.life.local import Local
from bootseer.env.restoring import loose, place
from bootseer.env.restoring.layer import Bring, Layer, bring_layer
from bootseer.env.snapshot import verify
from bootseer.env.snapshot.entry import Entry
from bootseer.env.snapshot.manifest import Manifest
from bootseer.env.verifying.oracle import fresh_install_differs
from bootseer.errors import Interrupted, PermanentError
from bootseer.launch import supervise
from bootseer.launch.environment.capture import capture
from bootseer.launch.environment.restore import restore
from bootseer.launch.environment.setup import set_up
from bootseer.launch.environment.start import EnvironmentStart
from bootseer.launch.environment.task import EnvironmentWanted, Task
from bootseer.launch.environment.view import NotShown
from bootseer.launch.interrupt import interruptible
from bootseer.launch.observers import harmless
from bootseer.launch.supervise import CannotStart, say
from bootseer.store.open import open_store


@dataclass(frozen=True, slots=True)
class Made:
    """What became of it."""

    key: str
    published: bool
    was_there: bool
    """A snapshot that can be used was there already."""
    code: int = 0
    """Of the setup; 130 and the like when it was interrupted."""
    why_not: str = ""
    seconds: float = 0.0
    """Of the setup, and of keeping its snapshot."""
    num_files: int = 0
    size_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """For other programs."""
        return asdict(self)


def make_snapshot(
    setup: str | None, requirements: Sequence[str], wanted: EnvironmentWanted, env: Mapping[str, str]
) -> Made:
    """Run the setup in a capture and keep what it did; nothing happens when there is a snapshot."""
    supervise.block_signals()
    task = Task.made(setup, requirements, wanted, env)
    start = EnvironmentStart(task, ())
    code = 1
    try:
        made = _make(task, start)
        code = made.code
        return made
    except Interrupted as interrupted:
        say(f"interrupted by {interrupted}; no snapshot was kept")
        return Made("", published=False, was_there=False, code=interrupted.exit_code, why_not="interrupted")
    finally:
        start.end(code)
        start.close()
        supervise.unblock_signals()


def _make(task: Task, start: EnvironmentStart) -> Made:
    key, decision = start.look()
    digest = key.digest if key is not None else ""
    if decision.action is Action.RESTORE:
        return Made(digest, published=False, was_there=True, why_not=f"nothing was done: {decision.words}")
    if decision.action is not Action.BUILD or key is None:
        return Made(digest, published=False, was_there=False, why_not=decision.words)
    try:
        captured = capture(task, key, decision, ())
    except NotShown as error:
        return Made(digest, published=False, was_there=False, why_not=str(error))
    start.shown = captured.shown
    if captured.publishing is not None:
        start.finish(captured.publishing)
    outcome = task.outcome
    return Made(
        digest,
        published=bool(outcome.get("published")),
        was_there=False,
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


def copy_snapshot(
    document: EnvironmentDocument, uri: str, folder: Path, *, cache: Path, plain_http: bool, env: Mapping[str, str]
) -> int:
    """Write all files of the snapshot below a folder, which is made; returns how many paths that were."""
    with _brought(document, uri, cache, plain_http, env) as (layer, entries):
        folder.mkdir(parents=True, exist_ok=True)
        wanted = [entry for entry in _with_parents(entries, layer) if entry.kind != "deleted"]
        planned = loose.plan(wanted, layer.at, root=str(folder.absolute()), captured=True)
        place.apply(planned, layer.at, threads=len(os.sched_getaffinity(0)))
    return len(wanted)


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


def check_snapshot(
    document: EnvironmentDocument,
    uri: str,
    tier: Literal["quick", "full"],
    *,
    cache: Path,
    plain_http: bool,
    env: Mapping[str, str],
    progress: Callable[[int, int], None],
) -> Compared:
    """Compare the snapshot's files, as they are mounted, with its manifest."""
    with _brought(document, uri, cache, plain_http, env) as (layer, entries):
        found = verify.verify(str(layer.path), entries, tier, layer=True, owners=os.geteuid() == 0, progress=progress)
    return Compared(tuple((one.path, one.words) for one in found), len(entries))


def compare_with_fresh(
    document: EnvironmentDocument,
    uri: str,
    setup: str | None,
    requirements: Sequence[str],
    *,
    cache: Path,
    plain_http: bool,
    env: Mapping[str, str],
) -> Compared:
    """Run the setup once more, in a capture, and compare what it does with the snapshot."""
    supervise.block_signals()
    task = _task(setup, requirements, uri, cache, plain_http, env)

    def install(view: Capture, more: Mapping[str, str]) -> int:
        return set_up(task, enter=view.enter, root=str(view.root), marks=more).code

    try:
        with _brought(document, uri, cache, plain_http, env) as (layer, entries):
            found = fresh_install_differs(
                document.packages,
                entries,
                layer.path,
                install,
                folder=task.folder.path,
                env=env,
                own=[cache, task.wanted.runtime],
                folders=[task.cwd],
                say=say,
            )
    finally:
        task.folder.remove()
        supervise.unblock_signals()
    return Compared(tuple((one.path, one.words) for one in found.differences), found.num_compared)


def run_on_snapshot(
    document: EnvironmentDocument,
    uri: str,
    command: Sequence[str],
    *,
    cache: Path,
    plain_http: bool,
    env: Mapping[str, str],
    signatures: Signatures = UNSIGNED,
) -> int:
    """Run a command with the snapshot's files in their places; its exit code.

    Raises `PermanentError` when they cannot be shown.
    """
    supervise.block_signals()
    task = _task(None, (), uri, cache, plain_http, env, signatures)
    shown = None
    try:
        with interruptible():
            shown = restore(task, Decision(Action.RESTORE, "hit", "its key was given", document), command)
        pid = supervise.spawn(command, shown.env, own_group=task.own_group, enter=shown.enter)
        return supervise.wait(pid, own_group=task.own_group)
    except CannotStart as error:
        say(str(error))
        return error.code
    except NotShown as error:
        raise PermanentError(f"environment {document.key[:12]}: {error}") from error
    except Interrupted as interrupted:
        return interrupted.exit_code
    finally:
        with harmless("the environment was not taken away"):
            if shown is not None:
                shown.undo.close()
        task.folder.remove()
        supervise.unblock_signals()


def _task(
    setup: str | None,
    requirements: Sequence[str],
    uri: str,
    cache: Path,
    plain_http: bool,
    env: Mapping[str, str],
    signatures: Signatures = UNSIGNED,
) -> Task:
    runtime = runtime_root(env, os.getuid())
    wanted = EnvironmentWanted(cache, runtime, store=uri, plain_http=plain_http, signatures=signatures)
    return Task.made(setup, requirements, wanted, env)


@contextmanager
def _brought(
    document: EnvironmentDocument, uri: str, cache: Path, plain_http: bool, env: Mapping[str, str]
) -> Iterator[tuple[Layer, Sequence[Entry]]]:
    """The snapshot's files on this node, and the list of them."""
    store = open_store(uri, plain_http=plain_http)
    bring = Bring(cache, runtime_root(env, os.getuid()), plain_http=plain_http, publish=False)
    layer = bring_layer(document, store, bring, say=say)
    try:
        yield layer, Manifest.parse(Local(cache, say).object(document.manifest, store)).entries
    finally:
        layer.close()
        store.close()

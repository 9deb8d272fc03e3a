"""The private view of the machine in which a setup runs, and the prepared environment of the command."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from bootseer.artifact.places import folders_of
from bootseer.env.changes import Change
from bootseer.env.life.decide import REASONS, Decision, fall_back
from bootseer.env.restoring import loose, placement
from bootseer.env.restoring.host import show_on_host
from bootseer.env.restoring.roots import Division, is_system
from bootseer.env.snapshot.manifest import Entry
from bootseer.errors import BootseerError
from bootseer.launch.environment.plain import say_failed
from bootseer.launch.environment.task import Task
from bootseer.launch.supervise import say
from bootseer.mounts.user_namespace import may_mount

if TYPE_CHECKING:
    from bootseer.env.capturing.capture_base import Capture, Way
    from bootseer.env.restoring.layer import Layer
    from bootseer.launch.environment.setup import SetupResult


_SIGNALLED = 128
_NO_MOUNTS = "nothing can be mounted here"
Mode = Literal["restored", "captured", "installed"]


class PreparedEnvironment(Struct):
    """The environment of the command, ready to run it; `undo` is closed when the command has ended."""

    mode: Mode
    decision: Decision
    """Why it was prepared this way."""
    env: dict[str, str]
    """The command's environment variables."""
    facts: dict[str, object] = field(default_factory=dict)
    """Attributes for the report."""
    enter: Callable[[], None] | None = None
    """Called in the command's process before exec; None: nothing to enter."""
    layer: Layer | None = None
    """The mounted snapshot."""
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


class EnvironmentUnavailable(Exception):  # noqa: N818 - the setup runs on the machine itself
    """The snapshot cannot be used, or the setup cannot be captured; `code` is one of `decide.FALLBACKS`."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words)
        self.code = code


def fallback_for(decision: Decision, error: Exception) -> Decision:
    """The decision after a snapshot could not be used, or the setup could not be captured."""
    if isinstance(error, EnvironmentUnavailable):
        return fall_back(decision, error.code, str(error))
    return fall_back(decision, "failed", f"{REASONS['failed']}: {type(error).__name__}: {error}")


def loose_entries(changes: Iterable[Change]) -> list[Entry]:
    """The changes as manifest entries without digests, for files that are still where the setup left them."""
    from bootseer.env.snapshot.contents import inspect_changes

    items, _ = inspect_changes(changes, None)
    first: dict[tuple[int, int], str] = {}
    found = []
    for item in items:
        link = first.setdefault(item.inode, item.path) if item.inode != (0, 0) else ""
        found.append(replace(item.entry, link=link if link != item.path else ""))
    return found


def must_copy_files() -> bool:
    """Whether this is root without the right to mount, as in a container: then files are copied, not mounted.

    A user namespace is no alternative there: it would take away privileges that the container still has, such as
    locking memory for RDMA.
    """
    return os.geteuid() == 0 and not may_mount()


def private_capture_ways() -> tuple[Way, ...]:
    """The capture ways that leave this machine unchanged, the best first."""
    return () if must_copy_files() else ("overlay", "user")


def own_folders(task: Task) -> list[str]:
    """BootSeer's own folders, into which this start and others write while a setup runs."""
    options, session = task.options, task.session
    found = [options.runtime, *folders_of(cache=options.cache, stores=task.store_folder), session.folder]
    return [str(folder) for folder in found if folder]


def open_view(task: Task, opened: contextlib.ExitStack, *, scan: bool) -> Capture:
    """Open a capture, closed by `opened`. With `scan` it may be one of the machine itself, as a last resort.

    Raises `EnvironmentUnavailable`.
    """
    from bootseer.env.capturing.capture import open_capture

    options = task.options
    ways = private_capture_ways()
    if scan:
        if not ways:
            say(f"{_NO_MOUNTS}: changes of the setup are found by scanning the disks before and after")
        ways = (*ways, "scan")
    try:
        view = open_capture(
            task.folder.path / "capture",
            ways,
            say=say,
            env=task.env,
            own=own_folders(task),
            folders=[task.cwd],
            leave_out=options.leave_out,
            keep=options.keep,
        )
    except BootseerError as error:
        raise EnvironmentUnavailable("not-root", str(error) or _NO_MOUNTS) from error
    opened.callback(view.close)
    return view


def check_setup(view: Capture, done: SetupResult) -> None:
    """Report a failed setup. Raises `EnvironmentUnavailable` if the view may be the cause: then it runs without."""
    if not done.code:
        return
    hint = view.failure_hint()
    if not hint and view.way == "user":
        hint = "without root only folders of this user can be changed there"
    if hint and done.code < _SIGNALLED:
        raise EnvironmentUnavailable("failed", f"the setup failed in its private view (exit code {done.code}): {hint}")
    say_failed(done.what, done.code)
    if view.way != "scan":
        say("its changes are discarded, except in scratch folders, logs and package caches")


def show_changes(
    task: Task, view: Capture, changes: Sequence[Change], division: Division, prepared: PreparedEnvironment
) -> None:
    """Show the setup's changes to the command, as in a restored start; nothing to do after a scan.

    Raises `EnvironmentUnavailable`, with nothing left behind.
    """
    if view.way == "scan":
        return
    try:
        if division.roots:
            user = view.way == "user"
            seen = show_on_host(view.source_of, division.roots, changes=task.changes, user=user, say=say)
            prepared.undo.callback(seen.close)
            prepared.enter = seen.enter
        # Last, as these files stay: in the way of the setup, if it had to run again. With secrets, which are in no
        # snapshot: this command gets them, as without BootSeer.
        withheld = [change for change in view.left_out.withheld.values() if not is_system(change.path)]
        loose_ones = [change for change in (*changes, *withheld) if division.is_loose(change.path)]
        if loose_ones:
            planned = loose.plan(loose_entries(loose_ones), view.source_of, roots=division.roots, captured=True)
            placement.apply_plan(planned, view.source_of)
    except BaseException as error:
        prepared.undo.close()
        if isinstance(error, BootseerError | OSError):
            raise EnvironmentUnavailable("failed", f"what the setup did cannot be prepared: {error}") from error
        raise

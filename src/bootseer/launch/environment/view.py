"""The private view of the machine in which a setup runs, and the environment as the command finds it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bootseer.env.changes import Change
from bootseer.env.life.decide import REASONS, Decision, fell_back
from bootseer.env.restoring import loose, place
from bootseer.env.restoring.host import show_on_host
from bootseer.env.restoring.inside import FoldersBelow
from bootseer.env.restoring.roots import Division, divide, is_system
from bootseer.env.snapshot.manifest import Entry
from bootseer.errors import BootseerError
from bootseer.launch.environment.plain import say_failed
from bootseer.launch.environment.task import Task
from bootseer.launch.supervise import say
from bootseer.mounts.user_namespace import may_mount

if TYPE_CHECKING:
    from bootseer.env.capturing.any_capture import Capture, Way
    from bootseer.env.restoring.layer import Layer
    from bootseer.launch.environment.setup import SetupResult


_SIGNALLED = 128
Mode = Literal["restored", "captured", "installed"]


@dataclass(slots=True)
class Shown:
    """Close it when the command has ended."""

    mode: Mode
    decision: Decision
    """Why it came this way."""
    env: dict[str, str]
    """The command's environment."""
    facts: dict[str, object] = field(default_factory=dict)
    """For the report."""
    enter: Callable[[], None] | None = None
    """For the command's process, before it becomes the command; None: it needs nothing."""
    layer: Layer | None = None
    """What is served while the command runs."""
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


class NotShown(Exception):  # noqa: N818 - the setup runs on the machine itself
    """The snapshot cannot be used, or the setup not be captured; `code` is one of `decide.FALLBACKS`."""

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words)
        self.code = code


def given_up(decision: Decision, error: Exception) -> Decision:
    """What follows when a snapshot could not be used after all, or the setup not be captured."""
    if isinstance(error, NotShown):
        return fell_back(decision, error.code, str(error))
    return fell_back(decision, "failed", f"{REASONS['failed']}: {type(error).__name__}: {error}")


def loose_entries(changes: Iterable[Change]) -> list[Entry]:
    """The changes as entries, for files that are still where the setup left them: without digests."""
    from bootseer.env.snapshot.contents import entry_of, look

    items, _ = look(changes, None)
    first: dict[tuple[int, int], str] = {}
    found = []
    for item in items:
        link = first.setdefault(item.inode, item.change.path) if item.inode != (0, 0) else ""
        link = link if link != item.change.path else ""
        found.append(entry_of(item, size=item.size, link=link, loose=True))
    return found


def writes_out() -> bool:
    """Whether nothing is to be mounted here although this is root: in a container without the right to mount.

    A user namespace would take away what the container still has, as the right to lock memory that RDMA needs.
    """
    return os.geteuid() == 0 and not may_mount()


def private_ways() -> tuple[Way, ...]:
    """The ways to capture here that leave the machine as it is, the best first."""
    return () if writes_out() else ("overlay", "user")


def open_view(task: Task, opened: contextlib.ExitStack, *, scan: bool) -> Capture:
    """Begin to catch changes; `opened` ends it. `scan`: on the machine itself, where there is no better way.

    Raises `NotShown`.
    """
    from bootseer.env.capturing.capture import open_capture

    wanted = task.wanted
    own: list[Path | str] = [wanted.cache, wanted.runtime, *task.store_folder]
    own += [task.session.folder] if task.session is not None else []
    ways: tuple[Way, ...] = (*private_ways(), "scan") if scan else private_ways()
    refused = [] if private_ways() else ["nothing can be mounted here"]
    if refused and scan:
        say(f"{refused[0]}: what the setup changes is found by looking through the disks before and after")
    for way in ways:
        try:
            view = open_capture(
                task.folder.path / "capture",
                say=say,
                way=way,
                env=task.env,
                own=own,
                folders=[task.cwd],
                leave_out=wanted.leave_out,
                keep=wanted.keep,
            )
        except (BootseerError, OSError) as error:
            refused.append(str(error))
            continue
        opened.callback(view.close)
        return view
    raise NotShown("not-root", "; ".join(refused))


def enter_of(view: Capture) -> Callable[[], None] | None:
    """What leads a process into the view; None where the view is the machine itself."""
    return None if view.way == "scan" else view.enter


def check_ended(view: Capture, done: SetupResult) -> None:
    """Tell the user of a setup that failed. Raises `NotShown` when that may be due to the view: it is run without."""
    if not done.code:
        return
    trouble = view.trouble()
    if not trouble and view.way == "user":
        trouble = "without root only folders of this user can be changed there"
    if trouble and done.code < _SIGNALLED:
        raise NotShown("failed", f"the setup failed in its private view (exit code {done.code}): {trouble}")
    say_failed(done.what, done.code)
    if view.way != "scan":
        say("what it changed was private to it and is gone, but for scratch folders, logs and package caches")


def divided(view: Capture, changes: Sequence[Change]) -> Division:
    """Which of the changes are mounted over the machine's folders, and which are written to its own."""
    return divide(changes, FoldersBelow(str(view.root)))


def show(task: Task, view: Capture, changes: Sequence[Change], division: Division, shown: Shown) -> None:
    """Let the command see what the setup did, as a restored start would. Raises `NotShown`, with nothing left behind.

    A scanned setup changed the machine itself.
    """
    try:
        if view.way != "scan":
            _show(task, view, changes, division, shown)
    except BaseException as error:
        shown.undo.close()
        if isinstance(error, BootseerError | OSError):
            raise NotShown("failed", f"what the setup did cannot be shown: {error}") from error
        raise


def _show(task: Task, view: Capture, changes: Sequence[Change], division: Division, shown: Shown) -> None:
    # Secrets too: no snapshot has them, and this command gets them as without BootSeer.
    withheld = [change for change in view.left_out.withheld.values() if not is_system(change.path)]
    loose_ones = [change for change in (*changes, *withheld) if division.is_loose(change.path)]
    if loose_ones:
        place.apply(loose.plan(loose_entries(loose_ones), view.source_of, captured=True), view.source_of)
    if division.roots:
        user = view.way == "user"
        seen = show_on_host(view.source_of, division.roots, changes=task.changes, user=user, say=say)
        shown.undo.callback(seen.close)
        shown.enter = seen.enter

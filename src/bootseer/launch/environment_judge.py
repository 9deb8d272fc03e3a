"""May what a setup did be kept for others? What it read, what it left that no snapshot can repeat, what is broken.

Called by `environment_capture`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import bootseer
from bootseer.env.capturing import exports
from bootseer.env.capturing.any_capture import Capture
from bootseer.env.capturing.effects import Effects
from bootseer.env.capturing.mentions import mentions
from bootseer.env.capturing.unaccounted import unaccounted
from bootseer.env.capturing.watch import Reads
from bootseer.env.changes import Change
from bootseer.env.document import Trust
from bootseer.env.installing.running import runner
from bootseer.env.installing.validate import conflicts, validate
from bootseer.env.keys.key import RequestKey
from bootseer.env.keys.lock import own_uv
from bootseer.env.restoring.host import show_on_host
from bootseer.env.restoring.roots import Division
from bootseer.launch.environment_install import SetUp
from bootseer.launch.environment_task import Task
from bootseer.launch.supervise import say

_MAX_NAMED = 3
_INSTALLERS = ("uv", "uvx", "conda", "mamba", "micromamba", "pixi", "poetry", "pdm")


def unknown(
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


def trust(reads: Reads, found: tuple[str, ...]) -> tuple[Trust, tuple[str, ...]]:
    """How far the key tells everything that the setup depends on, and what it does not tell; `found` is `unknown`."""
    if not reads.complete:
        return "unobserved", ()
    if not found:
        return "observed", ()
    say(f"the setup read files that its key does not know: {_named(found)}; name them with --env-input for a snapshot")
    return "untrusted", found


def unsafe(
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


def problems(task: Task, view: Capture, division: Division, done: SetUp) -> list[str]:
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

"""Where the events of jobs lie on this machine: `<root>/<job>/attempt-<n>/<node>.<pid>.<time>.events`.

Used by `run`, which makes them, and by `report`, which takes a job's name in the place of a path.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from bootseer.trace.sinks import SUFFIX, safe_name

_ATTEMPT = "attempt-"
_MAX_ATTEMPTS = 1_000_000


def default_root(env: Mapping[str, str]) -> str:
    """`$BOOTSEER_SPOOL`, or the user's state folder."""
    if env.get("BOOTSEER_SPOOL"):
        return env["BOOTSEER_SPOOL"]
    state = env.get("XDG_STATE_HOME") or f"{env.get('HOME') or '/var/tmp'}/.local/state"  # noqa: S108 - no HOME: a daemon
    return os.path.join(state, "bootseer", "jobs")


def make_attempt(root: str, job: str, attempt: int | None) -> tuple[str, int]:
    """The folder for an attempt's events and its number; without one, the first that was never used here.

    Raises `OSError` when it cannot be made.
    """
    folder = os.path.join(os.path.abspath(root), safe_name(job))
    os.makedirs(folder, exist_ok=True)
    if attempt is not None:
        path = os.path.join(folder, f"{_ATTEMPT}{attempt}")
        os.makedirs(path, exist_ok=True)
        return path, attempt
    names = [name.removeprefix(_ATTEMPT) for name in os.listdir(folder) if name.startswith(_ATTEMPT)]
    # Who gives a number may give a huge one; counting goes on below it.
    used = [int(name) for name in names if name.isascii() and name.isdecimal() and len(name) < 6]
    for number in range(max(used, default=-1) + 1, _MAX_ATTEMPTS):
        path = os.path.join(folder, f"{_ATTEMPT}{number}")
        try:
            os.mkdir(path)  # mkdir is the lock: two runs at once get two numbers
        except FileExistsError:
            continue
        return path, number
    raise OSError(f"{folder}: no attempt number is free")


def find_job(root: str, job: str) -> str | None:
    """The folder of a job's events, if there is one."""
    folder = os.path.join(root, safe_name(job))
    return folder if os.path.isdir(folder) else None


def latest(root: str) -> str | None:
    """The attempt that was written to last."""
    from pathlib import Path

    files = [path for path in Path(root).glob(f"*/{_ATTEMPT}*/*{SUFFIX}") if path.is_file()]
    return str(max(files, key=lambda path: path.stat().st_mtime_ns).parent) if files else None

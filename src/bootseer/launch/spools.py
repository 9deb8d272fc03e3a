"""Where the events of jobs lie on this machine: `<root>/<job>/attempt-<n>/<node>.<pid>.<time>.events`.

Used by `run`, which makes them, and by `report`, which takes a job's name in the place of a path.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bootseer.trace.sinks import SUFFIX, safe_name

_ATTEMPT = "attempt-"
_MAX_ATTEMPTS = 1_000_000


def default_root(env: Mapping[str, str]) -> Path:
    """`$BOOTSEER_SPOOL`, or the user's state folder."""
    if env.get("BOOTSEER_SPOOL"):
        return Path(env["BOOTSEER_SPOOL"])
    state = env.get("XDG_STATE_HOME") or f"{env.get('HOME') or '/var/tmp'}/.local/state"  # noqa: S108 - no HOME: a daemon
    return Path(state) / "bootseer" / "jobs"


def make_attempt(root: Path, job: str, attempt: int | None) -> tuple[Path, int]:
    """The folder for an attempt's events and its number; without one, the first that was never used here.

    Raises `OSError` when it cannot be made.
    """
    folder = root.absolute() / safe_name(job)
    folder.mkdir(parents=True, exist_ok=True)
    if attempt is not None:
        path = folder / f"{_ATTEMPT}{attempt}"
        path.mkdir(exist_ok=True)
        return path, attempt
    used = [int(name) for p in folder.glob(f"{_ATTEMPT}*") if (name := p.name.removeprefix(_ATTEMPT)).isdecimal()]
    for number in range(max(used, default=-1) + 1, _MAX_ATTEMPTS):
        path = folder / f"{_ATTEMPT}{number}"
        try:
            path.mkdir()  # mkdir is the lock: two runs at once get two numbers
        except FileExistsError:
            continue
        return path, number
    raise OSError(f"{folder}: no attempt number is free")


def find_job(root: Path, job: str) -> Path | None:
    """The folder of a job's events, if there is one."""
    folder = root / safe_name(job)
    return folder if folder.is_dir() else None


def latest(root: Path) -> Path | None:
    """The attempt that was written to last."""
    files = [path for path in root.glob(f"*/{_ATTEMPT}*/*{SUFFIX}") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_mtime_ns).parent if files else None

"""Location of events on this machine: `<root>/<job>/attempt-<n>/<node>.<pid>.<time>.events`."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from contextlib import ExitStack, suppress

from bootseer.io.trusted_folder import FOLDER, open_own, open_trusted, user_state_folder
from bootseer.trace.event import fingerprint
from bootseer.trace.sinks import SUFFIX, safe_name

_ATTEMPT = "attempt-"
_MAX_ATTEMPTS = 1_000_000
_OTHERWISE = "set BOOTSEER_SPOOL (--spool) to another folder"


def default_root(env: Mapping[str, str]) -> str:
    """`$BOOTSEER_SPOOL`, or the user's state folder. Raises `UsageError` for a user without a home."""
    return env.get("BOOTSEER_SPOOL") or user_state_folder(env, "jobs", otherwise="set BOOTSEER_SPOOL")


def folder_name(job: str) -> str:
    """The name of a job's folder: invalid characters are replaced, and a digest distinguishes such jobs."""
    safe = safe_name(job)
    return safe if safe == job else f"{safe}-{fingerprint(job)[:8]}"


def make_attempt(root: str, job: str, attempt: int | None) -> tuple[str, int]:
    """The folder for an attempt's events and its number; by default the first one that was never used here.

    The root may be shared by users: the job's folder belongs to this user, who alone may write to it, and the root's
    group may read it if the root has the set-group-ID bit. Raises `OSError` and `BootseerError`.
    """
    name = folder_name(job)
    path = os.path.join(os.path.abspath(root), name)
    if os.geteuid() == 0:  # root gives subfolders to the user of a container
        above = open_trusted(root, otherwise=_OTHERWISE)
    else:
        os.makedirs(root, mode=0o700, exist_ok=True)
        above = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    mode = 0o750 if os.fstat(above).st_mode & stat.S_ISGID else 0o700
    with ExitStack() as opened:
        opened.callback(os.close, above)
        # The group may read whatever the user's own umask is; there are no threads yet.
        opened.callback(os.umask, os.umask(0o777 - mode))
        folder = open_own(above, name, path, mode=mode, otherwise=f"give another --job, or {_OTHERWISE}")
        opened.callback(os.close, folder)
        number = attempt if attempt is not None else _new_attempt(folder, path, mode)
        name = f"{_ATTEMPT}{number}"
        if attempt is not None:
            try:
                os.mkdir(name, mode, dir_fd=folder)
            except FileExistsError:  # created by another node, or a link: then opening fails
                os.close(os.open(name, FOLDER, dir_fd=folder))
    return os.path.join(path, name), number


def _new_attempt(folder: int, path: str, mode: int) -> int:
    names = [name.removeprefix(_ATTEMPT) for name in os.listdir(folder) if name.startswith(_ATTEMPT)]
    # A given number may be huge; automatic numbers stay below it.
    used = [int(name) for name in names if name.isascii() and name.isdecimal() and len(name) < 6]
    for number in range(max(used, default=-1) + 1, _MAX_ATTEMPTS):
        try:  # mkdir is atomic: concurrent runs get different numbers
            os.mkdir(f"{_ATTEMPT}{number}", mode, dir_fd=folder)
        except FileExistsError:
            continue
        return number
    raise OSError(f"{path}: no attempt number is free")


def find_job(root: str, job: str) -> str | None:
    """The folder of a job's events, or None: by its full name, or by one part of Slurm's NAME-ID (the latest)."""
    own = os.path.join(root, folder_name(job))
    if os.path.isdir(own):
        return own
    half = re.escape(job)
    ours = re.compile(rf"{half}-\d+(_\d+)?" if not job.isdecimal() else rf".+-{half}(_\d+)?")
    return next((entry.path for entry in _newest_first(root) if ours.fullmatch(entry.name)), None)


def job_names(root: str) -> list[str]:
    """The jobs of this machine by folder name, the latest first."""
    return [entry.name for entry in _newest_first(root) if entry.name.isprintable()]


def newest_attempt(folder: str) -> str:
    """A job's attempt that began last, or the folder itself if there is none."""
    return next((entry.path for entry in _newest_first(folder) if entry.name.startswith(_ATTEMPT)), folder)


def _newest_first(folder: str) -> list[os.DirEntry[str]]:
    """The folders in a folder by their last change; none if it cannot be read."""
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # deleted meanwhile
                if entry.is_dir():
                    found.append((-entry.stat().st_mtime_ns, entry))
    return [entry for _, entry in sorted(found, key=lambda one: one[0])]


def latest(root: str) -> str | None:
    """The attempt with events whose last process began last."""
    attempts = [entry for job in _newest_first(root) for entry in _newest_first(job.path)]
    for entry in sorted(attempts, key=lambda one: -one.stat().st_mtime_ns):
        with suppress(OSError):
            if entry.name.startswith(_ATTEMPT) and any(name.endswith(SUFFIX) for name in os.listdir(entry.path)):
                return entry.path
    return None

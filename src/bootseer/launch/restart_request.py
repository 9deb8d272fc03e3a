"""`bootseer restart`: ask the runs of a job on this node to start their command again in place.

A run is found by the variables that `bootseer run --restarts` sets for its command's processes, and asked by a signal
(`supervise.RESTART_REQUEST`). That reaches into containers of the node, and needs no files.

A process may claim any variables and any command line, also to root. But by these it names only an ancestor of its own
as its run, and the signal has no effect on other programs.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from bootseer.errors import PermanentError, TransientError, UsageError
from bootseer.io import proc
from bootseer.launch.restart import RUN_ID
from bootseer.launch.supervise import RESTART_REQUEST
from bootseer.trace.identity import RESTART, number

_POLL_S = 0.1
_SHIM, _INSIDE = b"/containers/shim.py\0", b"/launch/inside.py\0"
"""The programs outside and inside of a container that are between `bootseer run` and its command."""


class Run(Struct, frozen=True):
    """One `bootseer run --restarts` of this node, or the part of it in a container, and its command's first process."""

    pid: int
    command: int
    """Process id of the command."""
    job: str
    restart: int
    """The number of its current start."""


def find_runs(job: str = "") -> list[Run]:
    """The runs on this node whose command can be started again and may be signalled by this user; of one job, if
    named."""
    found = {}
    for pid in proc.pids():
        env = proc.environment(pid)
        restarts = number(env, RESTART)
        if RUN_ID not in env or restarts is None or (job and env.get("BOOTSEER_JOB") != job):
            continue
        parent = proc.parent(pid)
        if _SHIM in proc.read(parent, "cmdline"):
            parent = proc.parent(parent)
        # Others, such as those that the command left to process 1, are not its first process.
        line = proc.read(parent, "cmdline")
        is_run = _INSIDE in line or (b"bootseer" in line and RUN_ID not in proc.environment(parent))
        if is_run and _INSIDE not in proc.read(pid, "cmdline"):
            with contextlib.suppress(OSError):  # it has ended, or this user may not signal it
                os.kill(parent, 0)
                found[parent] = Run(parent, pid, env.get("BOOTSEER_JOB", ""), restarts)
    return list(found.values())


def restart(job: str, within_s: float, waiting: Callable[[], None] = lambda: None) -> list[Run]:
    """Have the commands of the job's runs on this node started again; returns the runs, with their new commands.

    Without a name, the only job that there is; runs of other users only if this user has none of the job. `waiting` is
    called often meanwhile. Raises `UsageError` if no run, or more than one job, is meant, `TransientError` if a new
    command has not started within `within_s` seconds, `PermanentError` if a run has ended.
    """
    runs = find_runs(job)
    jobs = sorted({run.job for run in runs})
    if not runs:
        what = f"no run of job {job}" if job else "no run"
        others = ", ".join(sorted({run.job for run in find_runs()}))
        hint = "start it with bootseer run --restarts N" + (f"; jobs that can: {others}" if others else "")
        raise UsageError(f"{what} on this node can be restarted", hint=hint)
    if len(jobs) > 1:
        raise UsageError(f"several jobs can be restarted: {', '.join(jobs)}", hint="name one")
    # Root may signal those of all users: another one's may have this name by chance, or a process may claim it.
    runs = [run for run in runs if proc.status(run.pid).get("Uid", "").split()[:1] == [str(os.getuid())]] or runs
    until_s = time.monotonic() + within_s
    for run in runs:
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.pid, RESTART_REQUEST)
    old = {run.pid: run for run in runs}
    while True:
        # Not by another process id: a copy of a warm parent has the variables of the start before for a moment.
        new = [run for run in find_runs(jobs[0]) if run.pid in old and run.restart > old[run.pid].restart]
        if len(new) == len(old):
            return new
        gone = [pid for pid in old if not Path(f"/proc/{pid}").exists()]
        if gone:
            raise PermanentError(f"job {jobs[0]} was not restarted: its run has ended (process {gone[0]})")
        if time.monotonic() > until_s:
            late = min(old.keys() - {run.pid for run in new})
            raise TransientError(f"run {late} of job {jobs[0]} did not start its command again within {within_s:.0f} s")
        waiting()
        time.sleep(_POLL_S)

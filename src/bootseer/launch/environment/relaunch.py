"""Daemons that a setup left running: started again at a restore, ended with the job.

    environment_setup.daemon.NAME      one daemon, from its start until it listens and its pid files exist

A helper process (`background`) starts all of them at once. As a subreaper it adopts what they fork, so that it can end
them however the run ends. None is started if an address is taken, a pid file exists or a user differs. A daemon that
exits while others are not ready yet may depend on them, and is started once more when they are.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from bootseer.env.capturing.leftovers import EMPTIED
from bootseer.env.changes import lies_in
from bootseer.env.document import Daemon, apply_exports
from bootseer.env.processes import below, clash, listening, pid_in, process, processes, sockets_of
from bootseer.env.restoring.safe_tree import SafeTree, new_folder
from bootseer.errors import BootseerError, PermanentError
from bootseer.launch.background import Background, Send, start_background
from bootseer.launch.environment.task import Task
from bootseer.launch.environment.view import EnvironmentUnavailable
from bootseer.launch.restart import end_processes
from bootseer.launch.supervise import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, StartError, prctl, spawn
from bootseer.mounts.process import die_with
from bootseer.trace.event import stage_name

STAGE = "environment_setup.daemon."
_POLL_S = 0.02
_SETTLED_S = 0.1
"""A daemon without sockets and pid files counts as ready after running this long."""
_MIN_DEADLINE_S, _MAX_DEADLINE_S = 20.0, 600.0
END_S = 60.0
"""For ending all daemons on a busy node: if the helper were killed before, they would keep running."""
_NOT_ALL = "not all that the setup left running could be started"
# Ignored by Python or by `background`; daemons get the default action.
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ)


def start_daemons(task: Task, daemons: Sequence[Daemon], enter: Callable[[], None] | None) -> Background:
    """Start the daemons of a snapshot, and wait until all are ready. `enter` enters the view with the snapshot.

    Returns the helper, to be stopped within `END_S` when the command has ended. Raises `EnvironmentUnavailable`, with
    none left running.
    """
    starts = [_DaemonStart(one, apply_exports(one.env, task.env)) for one in daemons]
    longest_s = max(one.ready_s for one in daemons)
    deadline_s = min(max(3 * longest_s, _MIN_DEADLINE_S), _MAX_DEADLINE_S)
    work, log = partial(_run_daemons, starts, enter, deadline_s), task.folder.path / "daemons.log"
    helper = start_background(work, name="bootseer-daemon", log=log)
    try:
        while not (reply := helper.next_message(2 * deadline_s)).get("ready"):
            report_start(task, daemons[reply["daemon"]].name, reply["began_s"], reply["ready_s"])
    except BaseException as error:
        helper.stop(END_S)
        if isinstance(error, BootseerError):
            raise EnvironmentUnavailable("daemons", f"{_NOT_ALL}: {error}") from error
        raise
    return helper


def report_start(task: Task, name: str, began_s: float, ready_s: float) -> None:
    """Write the stage of a daemon's start; both times are of the monotonic clock."""
    stage = stage_name(f"{STAGE}{name.replace('.', '_')}")
    task.session.tracer.emit_ended(stage, int(began_s * 1e9), int(ready_s * 1e9), {"name": name})


@dataclass(slots=True)
class _DaemonStart:
    """A daemon that is being started, in the helper process."""

    daemon: Daemon
    env: Mapping[str, str]
    pid: int = 0
    began_s: float = 0.0
    running_since_s: float = 0.0
    """When exec had succeeded."""
    ready: bool = False
    is_second_try: bool = False
    exit_reason: str = ""


def _run_daemons(
    starts: Sequence[_DaemonStart], enter: Callable[[], None] | None, deadline_s: float, send: Send
) -> None:
    parent, uid = os.getppid(), os.getuid()
    if not prctl(PR_SET_CHILD_SUBREAPER, 1):
        raise PermanentError("their children cannot be adopted")
    if enter is not None:
        enter()
        die_with(parent, signal.SIGTERM)
    for one in starts:
        _check_user(one.daemon, uid)
        _check_addresses(one.daemon)
    try:
        for one in starts:
            _start(one, uid)
        _wait_until_ready(starts, deadline_s, uid, send)
        send({"ready": True})
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                signal.pause()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        started = [one.daemon for one in starts]
        made = read_pid_files(started)
        end_processes(lambda: below(os.getpid(), processes()))
        remove_stale_files(started, made)


def read_pid_files(daemons: Iterable[Daemon]) -> dict[str, int]:
    """The process ids in their pid files, by path."""
    return {path: pid for one in daemons for path in one.pid_files if (pid := pid_in(path)) is not None}


def remove_stale_files(daemons: Iterable[Daemon], made: Mapping[str, int]) -> None:
    """Remove pid files (`made`, from `read_pid_files`) and sockets of daemons that have ended."""
    paths = [path for path, pid in made.items() if pid_in(path) == pid and process(pid) is None]
    taken = {*listening().values()}
    sockets = {address for one in daemons for address in one.sockets if address.startswith("unix /")} - taken
    for path in (*paths, *(address.removeprefix("unix ") for address in sockets)):
        with contextlib.suppress(OSError):
            if path in made or stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)  # noqa: PTH108 - a name


def check_addresses(daemons: Iterable[Daemon]) -> None:
    """Raises `EnvironmentUnavailable` if an address or pid file of a daemon is taken. Checked again at its start."""
    try:
        for one in daemons:
            _check_addresses(one)
    except PermanentError as error:
        raise EnvironmentUnavailable("daemons", f"{_NOT_ALL}: {error}") from error


def _check_user(daemon: Daemon, uid: int) -> None:
    """Raises `PermanentError` if this job cannot start a daemon as its user, who may be in the snapshot alone."""
    name = daemon.name
    if daemon.uid != uid:
        if uid != 0:
            raise PermanentError(f"{name} ran as user {daemon.user or daemon.uid}, which this job may not become")
        with contextlib.suppress(KeyError):
            if daemon.user and pwd.getpwnam(daemon.user).pw_uid == daemon.uid:
                return
        if daemon.user:
            raise PermanentError(f"{name} ran as user {daemon.user} ({daemon.uid}), unknown here or with another uid")


def _check_addresses(daemon: Daemon) -> None:
    name = daemon.name
    for number, address in listening().items():
        if any(clash(address, own) for own in daemon.sockets):
            # Without this process, which may have inherited the socket.
            others = (one for one in processes().values() if one.pid != os.getpid())
            owner = next((one for one in others if number in sockets_of((one.pid,))), None)
            by = f" by {owner.name} ({owner.pid})" if owner is not None else ""
            raise PermanentError(f"{name} listens on {address}, which is taken{by}")
    for path in daemon.pid_files:
        if os.path.lexists(path):
            pid = pid_in(path)
            other = process(pid) if pid is not None else None
            reason = f"names {other.name} ({pid})" if other is not None else "is stale: its process does not run"
            raise PermanentError(f"{path}, the pid file of {name}, already exists and {reason}")


def _start(one: _DaemonStart, uid: int) -> None:
    """Start it; returns when it runs its program, or has `exit_reason`."""
    one.began_s = time.monotonic()
    try:
        enter = partial(_exec_daemon, one.daemon, uid, one.env)
        one.pid, one.exit_reason = spawn(one.daemon.argv, one.env, own_group=False, enter=enter), ""
    except StartError as error:
        one.exit_reason = f"{one.daemon.name} cannot be started: {error}"
    one.running_since_s = time.monotonic()


def _exec_daemon(daemon: Daemon, uid: int, env: Mapping[str, str]) -> None:
    """In the child. Raises `OSError`."""
    for number in (*_IGNORED, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    os.nice(daemon.nice if uid == 0 else max(daemon.nice, 0))
    folders = [path.rpartition("/")[0] for path in daemon.runtime_files]
    if daemon.uid != uid:  # root drops its privileges
        _make_run_folders(folders, daemon)
        if daemon.user:
            os.initgroups(daemon.user, daemon.gid)
        else:
            os.setgroups([daemon.gid])
        os.setgid(daemon.gid)
        os.setuid(daemon.uid)
    # After the change of credentials, which clears it.
    prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    os.umask(daemon.umask)
    for folder in folders:
        if lies_in(folder, EMPTIED):  # in no snapshot
            os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - a name
    os.chdir(daemon.cwd)
    output = _output(daemon)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.execve(daemon.program, daemon.argv, dict(env))


def _make_run_folders(folders: Iterable[str], daemon: Daemon) -> None:
    """Create missing folders in /run (also called /var/run), which only root may create there, for the daemon's user.
    No link is followed. Raises `OSError`."""
    missing = (folder for folder in folders if lies_in(folder, ("/run", "/var/run")) and not os.path.isdir(folder))  # noqa: PTH112
    for steps in (folder.removeprefix("/var").split("/") for folder in missing):
        for end in range(2, len(steps)):
            with (
                contextlib.suppress(FileExistsError),
                SafeTree().folder("/".join(steps[:end])) as above,
                new_folder(above, steps[end], 0o755) as made,
            ):
                os.fchmod(made, 0o755)
                os.fchown(made, daemon.uid, daemon.gid)


def _output(daemon: Daemon) -> int:
    if daemon.output:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            return os.open(daemon.output, flags, 0o666)
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _wait_until_ready(starts: Sequence[_DaemonStart], deadline_s: float, uid: int, send: Send) -> None:
    """Wait until all are ready. Raises `PermanentError`."""
    until = time.monotonic() + deadline_s
    while not all(one.ready for one in starts):
        # In this order: a process that is missing from `family` has its exit status among `ended`.
        family = below(os.getpid(), processes())
        ended = dict(_reap_children())
        for one in starts:
            if one.pid in ended:
                one.exit_reason = _exit_reason(one, ended[one.pid])
        waiting = listening()
        own = {waiting[number] for number in sockets_of(family) & waiting.keys()}
        for number, one in enumerate(starts):
            if not one.ready and not one.exit_reason and _is_ready(one, family, own):
                one.ready = True
                send({"daemon": number, "began_s": one.began_s, "ready_s": time.monotonic()})
        failed = [one for one in starts if one.exit_reason]
        if failed and all(one.ready or one.exit_reason for one in starts):
            if len(failed) == len(starts) or any(one.is_second_try for one in failed):
                raise PermanentError("; ".join(one.exit_reason for one in failed))
            for one in failed:
                one.ready, one.is_second_try = False, True
                _start(one, uid)
        if not family and not failed:
            late = ", ".join(one.daemon.name for one in starts if not one.ready)
            raise PermanentError(f"{late} ended before it was ready")
        if time.monotonic() > until:
            late = ", ".join(_missing(one, family, own) for one in starts if not one.ready)
            raise PermanentError(f"not ready after {deadline_s:.0f} s: {late}")
        time.sleep(_POLL_S)


def _reap_children() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found


def _exit_reason(one: _DaemonStart, status: int) -> str:
    """Why the start failed; empty for a process that has daemonized itself by a fork."""
    code, name = os.waitstatus_to_exitcode(status), one.daemon.name
    if one.exit_reason:
        return one.exit_reason
    if code < 0:
        return f"{name} was killed by {signal.Signals(-code).name} at its start"
    return f"{name} ended with exit code {code} at its start" if code else ""


def _is_ready(one: _DaemonStart, family: set[int], own: set[str]) -> bool:
    if one.daemon.sockets or one.daemon.pid_files:
        return not _missing(one, family, own)
    return bool(family) and time.monotonic() - one.running_since_s >= _SETTLED_S


def _missing(one: _DaemonStart, family: set[int], own: set[str]) -> str:
    missing = [address for address in one.daemon.sockets if address not in own]
    missing += [path for path in one.daemon.pid_files if pid_in(path) not in family]
    return f"{one.daemon.name} ({', '.join(missing)})" if missing else ""

"""What a setup left running: how long it took until ready, started again at a restore, ended with the job.

    environment_setup.daemon      one of them, from its start until it listens and its pid files are there

One process of ours (`background`) starts all of them at once and adopts what they fork, so that it can end them with
the run however that ends. Nothing is started where an address is taken, a pid file is there or a user is another; one
that ends while others are not ready may need them, and is started once more when they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import signal
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from bootseer.env.capturing import exports
from bootseer.env.capturing.leftovers import PASSING
from bootseer.env.document import Daemon
from bootseer.env.processes import below, clash, listening, pid_in, process, processes, sockets_of
from bootseer.errors import BootseerError, Interrupted, PermanentError
from bootseer.fuse.syscalls import libc
from bootseer.launch.background import Background, Tell, start_background
from bootseer.launch.environment.task import Task
from bootseer.launch.environment.view import NotShown
from bootseer.trace.event import BEGIN, END, OK

STAGE = "daemon"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_TICK_S = 0.02
_SETTLED_S = 0.1
"""So long must one run that nothing else shows to be ready."""
_MIN_DEADLINE_S, _MAX_DEADLINE_S = 20.0, 600.0
_GRACE_S = 3.0
"""Between SIGTERM and SIGKILL."""
_END_S = 60.0
"""For all of that on a busy node: without its keeper nothing would end them."""
_MAX_WHY = 4096
_NOT_STARTED = 127
# By Python or by `background`; a daemon finds them as the setup's did.
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ)


class SocketWatch:
    """Sees beside a setup when sockets begin to wait for others."""

    def __init__(self) -> None:
        self._background = start_background(
            partial(_watch, {*listening()}), name="bootseer-ports", log=Path(os.devnull)
        )

    def end(self) -> dict[str, float]:
        """When a socket was first seen, by its inode, on the monotonic clock. May be called again."""
        self._background.stop()
        return {str(one["socket"]): one["seen_s"] for one in self._background.messages() if "socket" in one}


def _watch(known: set[int], tell: Tell) -> None:
    while True:
        time.sleep(5 * _TICK_S)
        for number in {*listening()} - known:
            known.add(number)
            tell({"socket": number, "seen_s": time.monotonic()})


class Relaunched:
    """The daemons of a restored start; close it when the command has ended."""

    def __init__(self, task: Task, daemons: Sequence[Daemon], enter: Callable[[], None] | None) -> None:
        """Begin to start them. `enter` leads into the view that has the snapshot. Raises `PermanentError`."""
        self._task = task
        self._daemons = daemons
        starts = [_Start(one, exports.apply(one.env, task.env)) for one in daemons]
        longest_s = max(one.ready_s for one in daemons)
        self._deadline_s = min(max(3 * longest_s, _MIN_DEADLINE_S), _MAX_DEADLINE_S)
        self._background: Background = start_background(
            partial(_keep, starts, enter, self._deadline_s),
            name="bootseer-daemon",
            log=task.folder.path / "daemons.log",
        )

    def wait(self) -> None:
        """Until all are ready. Raises `NotShown`, with none left running."""
        try:
            while not (reply := self._background.answer(2 * self._deadline_s)).get("ready"):
                if "error" in reply:
                    raise NotShown("daemons", f"not all that the setup left running could be started: {reply['error']}")
                daemon = self._daemons[reply["daemon"]]
                mark(self._task, daemon, reply["began_s"], reply["ready_s"])
        except BootseerError as error:
            raise NotShown("daemons", f"what the setup left running could not be started: {error}") from error

    def close(self) -> None:
        """End them, and what they started."""
        self._background.stop(_END_S)


def mark(task: Task, daemon: Daemon, began_s: float, ready_s: float) -> None:
    """A stage of the report; both on the monotonic clock."""
    if task.session is None:
        return
    tracer, name, attrs = task.session.tracer, f"environment_setup.{STAGE}", {"name": daemon.name}
    span = tracer.emit(name, BEGIN, attrs=attrs, mono_ns=int(began_s * 1e9))
    tracer.emit(name, END, span=span, outcome=OK, attrs=attrs, mono_ns=int(ready_s * 1e9))


def end_processes(find: Callable[[], set[int]]) -> None:
    """End all that `find` names, time and again until there are none: SIGTERM first, then SIGKILL."""
    until = time.monotonic() + _GRACE_S
    signalled: set[int] = set()
    while pids := find():
        late = time.monotonic() > until
        for pid in pids if late else pids - signalled:
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(pid)
                try:
                    if pid in find():  # the number may have been given to another process
                        signal.pidfd_send_signal(handle, signal.SIGKILL if late else signal.SIGTERM)
                        signal.pidfd_send_signal(handle, signal.SIGCONT)
                finally:
                    os.close(handle)
        signalled |= pids
        if time.monotonic() > until + _GRACE_S / 3:
            return
        time.sleep(_TICK_S)


@dataclass(slots=True)
class _Start:
    """One that is being started, in the keeper."""

    daemon: Daemon
    env: Mapping[str, str]
    pid: int = 0
    report: int = -1
    """Says why it could not start; empty at its end when it has."""
    began_s: float = 0.0
    runs_s: float | None = None
    """Since when its program runs."""
    why: bytes = b""
    """What it said there."""
    ready: bool = False
    again: bool = False
    """Whether it was started twice."""
    ended: str = ""


def _keep(starts: Sequence[_Start], enter: Callable[[], None] | None, deadline_s: float, tell: Tell) -> None:
    parent, uid = os.getppid(), os.getuid()
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0) != 0:
        raise PermanentError("their children cannot be adopted")
    if enter is not None:
        enter()
        # The kernel forgets it where a process enters a namespace.
        libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:
            raise Interrupted(signal.SIGTERM, "SIGTERM")
    for one in starts:
        _check(one.daemon, uid)
    try:
        for one in starts:
            _begin(one, uid)
        _bring_up(starts, deadline_s, uid, tell)
        tell({"ready": True})
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                signal.pause()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        started = [one.daemon for one in starts]
        made = pids_of(started)
        end_processes(lambda: below(os.getpid(), processes()))
        clean(started, made)


def pids_of(daemons: Iterable[Daemon]) -> dict[str, int]:
    """What their pid files say."""
    return {path: pid for one in daemons for path in one.pid_files if (pid := pid_in(path)) is not None}


def clean(daemons: Iterable[Daemon], made: Mapping[str, int]) -> None:
    """Remove what ended daemons left in the way of the next ones: pid files (`made`: `pids_of`) and sockets."""
    paths = [path for path, pid in made.items() if pid_in(path) == pid and process(pid) is None]
    taken = {*listening().values()}
    sockets = {address for one in daemons for address in one.sockets if address.startswith("unix /")} - taken
    for path in (*paths, *(address.removeprefix("unix ") for address in sockets)):
        with contextlib.suppress(OSError):
            if path in made or stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)  # noqa: PTH108 - a name


def _check(daemon: Daemon, uid: int) -> None:
    """Raises `PermanentError` for what is in the way of one."""
    name = daemon.name
    if daemon.uid != uid:
        if uid != 0:
            raise PermanentError(f"{name} ran as user {daemon.user or daemon.uid}, and this job may not start it so")
        with contextlib.suppress(KeyError):
            if daemon.user and pwd.getpwnam(daemon.user).pw_uid == daemon.uid:
                daemon = replace(daemon, user="")
        if daemon.user:
            raise PermanentError(f"{name} ran as user {daemon.user} ({daemon.uid}): not known here, or another number")
    for number, address in listening().items():
        if any(clash(address, own) for own in daemon.sockets):
            # This process may have inherited the socket.
            others = (one for one in processes().values() if one.pid != os.getpid())
            owner = next((one for one in others if number in sockets_of((one.pid,))), None)
            by = f" by {owner.name} ({owner.pid})" if owner is not None else ""
            raise PermanentError(f"{name} listens on {address}, which is taken{by}")
    for path in daemon.pid_files:
        if os.path.lexists(path):
            pid = pid_in(path)
            other = process(pid) if pid is not None else None
            reason = f"names {other.name} ({pid})" if other is not None else "is stale: what it names does not run"
            raise PermanentError(f"{path}, the pid file of {name}, is there already and {reason}")


def _begin(one: _Start, uid: int) -> None:
    one.report, report = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    one.began_s, one.runs_s, one.why, one.ended = time.monotonic(), None, b"", ""
    one.pid = os.fork()
    if one.pid == 0:
        _become(one, uid, report)
    os.close(report)


def _become(one: _Start, uid: int, report: int) -> NoReturn:
    daemon = one.daemon
    try:
        for number in (*_IGNORED, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.nice(daemon.nice if uid == 0 else max(daemon.nice, 0))
        os.umask(daemon.umask)
        if daemon.uid != uid:  # root, who gives its rights away
            if daemon.user:
                os.initgroups(daemon.user, daemon.gid)
            else:
                os.setgroups([daemon.gid])
            os.setgid(daemon.gid)
            os.setuid(daemon.uid)
        # Behind the change of rights, where the kernel forgets it.
        libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM), 0, 0, 0)
        for path in (*daemon.pid_files, *(text[5:] for text in daemon.sockets if text.startswith("unix /"))):
            # No snapshot keeps these folders.
            if path.startswith(tuple(f"{folder}/" for folder in PASSING)):
                os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120 - a name
        os.chdir(daemon.cwd)
        output = _output(daemon)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.execve(daemon.program, daemon.argv, dict(one.env))
    except BaseException as error:  # nothing may unwind into the parent's code
        words = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
        os.write(report, words.encode("utf-8", "replace")[:_MAX_WHY])
    finally:
        os._exit(_NOT_STARTED)


def _output(daemon: Daemon) -> int:
    if daemon.output:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            return os.open(daemon.output, flags, 0o666)
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _bring_up(starts: Sequence[_Start], deadline_s: float, uid: int, tell: Tell) -> None:
    """Until all are ready. Raises `PermanentError`."""
    until = time.monotonic() + deadline_s
    while not all(one.ready for one in starts):
        # In this order: how those have ended that the first no longer shows.
        family = below(os.getpid(), processes())
        ended = dict(_ended())
        for one in starts:
            if one.pid in ended:
                one.ended = _how(one, ended[one.pid])
        waiting = listening()
        own = {waiting[number] for number in sockets_of(family) & waiting.keys()}
        for number, one in enumerate(starts):
            if not one.ready and not one.ended and _is_ready(one, family, own):
                one.ready = True
                tell({"daemon": number, "began_s": one.began_s, "ready_s": time.monotonic()})
        failed = [one for one in starts if one.ended]
        if failed and all(one.ready or one.ended for one in starts):
            if len(failed) == len(starts) or any(one.again for one in failed):
                raise PermanentError("; ".join(one.ended for one in failed))
            for one in failed:
                one.ready, one.again = False, True
                _begin(one, uid)
        if not family and not failed:
            late = ", ".join(one.daemon.name for one in starts if not one.ready)
            raise PermanentError(f"{late} ended before it was ready")
        if time.monotonic() > until:
            late = ", ".join(_missing(one, family, own) for one in starts if not one.ready)
            raise PermanentError(f"not ready after {deadline_s:.0f} s: {late}")
        time.sleep(_TICK_S)


def _ended() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found


def _how(one: _Start, status: int) -> str:
    """Why it is no daemon; empty for one that left a copy of itself running."""
    code, name = os.waitstatus_to_exitcode(status), one.daemon.name
    _listen(one)
    if one.why:
        return f"{name} cannot be started: {one.why.decode('utf-8', 'replace')}"
    if code < 0:
        return f"{name} was killed by {signal.Signals(-code).name} at its start"
    return f"{name} ended with exit code {code} at its start" if code else ""


def _is_ready(one: _Start, family: set[int], own: set[str]) -> bool:
    if one.daemon.sockets or one.daemon.pid_files:
        return not _missing(one, family, own)
    _listen(one)
    return bool(family) and one.runs_s is not None and time.monotonic() - one.runs_s >= _SETTLED_S


def _listen(one: _Start) -> None:
    """Whether its program runs by now, or why not."""
    if one.runs_s is None and not one.why:
        with contextlib.suppress(BlockingIOError):
            one.why = os.read(one.report, _MAX_WHY)
            one.runs_s = None if one.why else time.monotonic()


def _missing(one: _Start, family: set[int], own: set[str]) -> str:
    missing = [address for address in one.daemon.sockets if address not in own]
    missing += [path for path in one.daemon.pid_files if pid_in(path) not in family]
    return f"{one.daemon.name} ({', '.join(missing)})" if missing else ""

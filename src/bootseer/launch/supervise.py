"""Run the user's command transparently.

The command gets its arguments, environment, standard streams and terminal unchanged. Received signals are forwarded
once; the exit code is the command's, 128+N when signal N killed it. As PID 1 this process reaps orphans.

Which processes get signals: in the foreground of a terminal the command stays in this process group, so that Ctrl-C
and Ctrl-Z reach it from the terminal, and only signals sent to this process alone are forwarded. Otherwise the command
leads a process group of its own. A forwarded signal goes to the command alone if the command catches it, else to its
whole group; signals that terminals send always go to the group. If the command caught a signal that asks for the end,
the rest of its group gets that signal after the command has ended.

SIGKILL cannot be forwarded: the kernel is asked to kill the command when this process dies (PR_SET_PDEATHSIG), so that
`timeout -k` leaves no job behind.

Signals are blocked in all threads and taken with `sigtimedwait` in the main thread, so that no handler runs and no
signal is lost.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import select
import signal
import sys
import time
from _thread import LockType, allocate_lock, start_new_thread  # `threading` would delay every job by 1.5 ms
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from bootseer.io import proc
from bootseer.trace.event import ALIVE, INSTANT, visible

if TYPE_CHECKING:
    from bootseer.trace.tracer import Tracer

FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
    # Schedulers send these too, as a warning or at a limit; their default action would end this process.
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGXCPU,
    signal.SIGIO,
    signal.SIGPWR,
    signal.SIGABRT,  # for a core dump, or the stacks of faulthandler; abort() unblocks it
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)
ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
"""Signals that ask a process to end."""
_OF_TERMINALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCONT)
"""Meant for process groups: a shell that gets SIGINT expects that its program gets it, too."""
RESTART_REQUEST = signal.SIGURG
"""Asks `bootseer run --restarts` to start its command again. A process that does not expect it ignores it."""
NOT_FOUND = 127
NOT_EXECUTABLE = 126
_ALIVE_S, _ALIVE_SHARE = 1.0, 0.1
"""Interval of `alive` events, by which the end of a run that SIGKILL ended is known: a second, or a tenth of the time
that it has run."""
_FROM_KERNEL = 0x80  # si_code SI_KERNEL: the terminal sent it, to the whole foreground group
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
EXIT_FLUSH_S = 2.0
"""How long the end of the run waits for exporters and relays."""
LAST_EVENT_S = 10.0
"""A file server that does not answer for longer when the command has ended gets no more events."""
RESTART_GRACE_S = 30.0
"""Between SIGTERM and SIGKILL for a command that is to be started again: it may save its state."""
_START_S = 120.0
"""For entering namespaces and reading the program's first bytes, which may come from a store."""
_MAX_REPORT = 4096  # an atomic write to a pipe
# Python ignores these two; the command must have their default action.
_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
is_interrupted = False
"""Whether Ctrl-C on the terminal ended the command: then a shell's loop around it has to end, too (`cli.main`)."""
erase = ""
"""What erases the line of progress that is on the terminal, before a message; empty without one."""


def say(message: str) -> None:
    """Print one line on standard error, as standard output belongs to the job. Write errors are ignored."""
    if "://" in message:
        from bootseer.store.addresses import without_credentials

        message = without_credentials(message)
    with contextlib.suppress(OSError):
        os.write(2, f"{erase}bootseer: {visible(message)}\n".encode())


def log(name: str, message: str, *args: object) -> None:
    """Log at level `info`, from modules that are imported before every job.

    Importing `logging` takes 4 ms, so without `BOOTSEER_LOG` it is not imported and nothing is logged.
    """
    if (logs := sys.modules.get("bootseer.logs")) is not None:
        logs.logger(name).info(message, *args)


class StartError(Exception):
    """The command could not be started; `code` is what a shell would return.

    `reason` is shown instead of the error if the failure came before exec.
    """

    def __init__(self, command: str, error: OSError, reason: str = "") -> None:
        missing = not reason and error.errno in (errno.ENOENT, errno.ENOTDIR)
        if missing:
            is_there = "/" in command and os.access(command, os.F_OK)
            lost = "its loader, or the interpreter in its first line, is missing (or CRLF line ends)"
            reason = lost if is_there else "command not found"
        super().__init__(f"{command or repr(command)}: {reason or error.strerror}")
        self.code = NOT_FOUND if missing else NOT_EXECUTABLE


def block_signals() -> None:
    """Block the forwarded signals; call it before anything that a signal must not interrupt."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})


def unblock_signals() -> None:
    """Unblock the signals of `block_signals` and `wait`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*FORWARDED, signal.SIGCHLD, signal.SIGTSTP})


def replace_process(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Exec the command. Returns only if it cannot be started, with a shell's exit code."""
    for number in _PYTHON_IGNORES:
        signal.signal(number, signal.SIG_DFL)
    # exec resets Python's handler of SIGINT; an ignored SIGINT stays ignored.
    try:
        _exec(command, env)
    except OSError as error:
        problem = StartError(command[0], error)
        say(str(problem))
        return problem.code


def spawn(
    command: Sequence[str],
    env: Mapping[str, str],
    streams: Mapping[int, int | None] | None = None,
    *,
    own_group: bool | None = None,
    enter: Callable[[], None] | None = None,
) -> int:
    """Start the command and return its pid. Raises `StartError`.

    `streams` are descriptors for its standard streams, by their numbers; the others are this process's.
    `own_group`: whether it leads a process group of its own; None: as `leads_group` says.
    `enter` runs in the child before exec, to enter namespaces; its exception becomes the error. Forks, so other threads
    must hold no lock that the child needs: `posix_spawn` cannot set a parent death signal.
    """
    parent = os.getpid()
    own_group = leads_group() if own_group is None else own_group
    try:
        answer, report = os.pipe2(os.O_CLOEXEC)
        with os.fdopen(answer, "rb") as file:
            try:
                pid = os.fork()
                if pid == 0:
                    _exec_command(command, env, parent, own_group, streams or {}, report, enter)
            finally:
                os.close(report)
            failed = _read_start_error(file.fileno())
    except OSError as error:
        raise StartError(command[0], error) from error
    if failed:
        proc.end_child(pid)
        number, _, reason = failed.decode("utf-8", "replace").partition(" ")
        raise StartError(command[0], OSError(int(number), os.strerror(int(number))), reason)
    log(__name__, "process %d is %s", pid, command[0])  # its arguments may hold secrets
    return pid


def _read_start_error(answer: int) -> bytes:
    """The child's report of why the command could not start; empty once exec has closed the pipe."""
    output, until, poll = b"", time.monotonic() + _START_S, select.poll()  # `select` knows no descriptor above 1023
    poll.register(answer, select.POLLIN)
    while poll.poll(1000 * max(0.0, until - time.monotonic())):
        piece = os.read(answer, 1 << 16)
        if not piece:
            return output
        output += piece
    reason = f"it did not start within {_START_S:.0f} s; does the file system that it lies on answer?"
    return b"%d %s" % (errno.ETIMEDOUT, reason.encode())


def _exec_command(
    command: Sequence[str],
    env: Mapping[str, str],
    parent: int,
    own_group: bool,
    streams: Mapping[int, int | None],
    report: int,
    enter: Callable[[], None] | None,
) -> NoReturn:
    """In the child: exec the command, or report the error number and exit."""
    try:
        if own_group:
            os.setpgid(0, 0)
        for target, stream in streams.items():
            if stream is not None:
                os.dup2(stream, target)
        if enter is not None:
            _call_enter(enter, report)
        _die_with_parent(parent)  # after `enter`: the kernel clears the death signal when credentials change
        # Pending signals, delivered when the mask is lifted, must meet the default action, not a Python handler.
        for number in (*_PYTHON_IGNORES, signal.SIGINT):
            if number in _PYTHON_IGNORES or callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        _exec(command, env)
    except OSError as error:
        os.write(report, b"%d" % (error.errno or errno.EINVAL))
    finally:
        os._exit(NOT_FOUND)


def _exec(command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Exec the command as shells do: a script without an interpreter line is run by sh. Raises `OSError`."""
    if not command[0]:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    variables = {name: value for name, value in env.items() if name}  # Python's exec refuses one without a name
    try:
        os.execvpe(command[0], list(command), variables)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
    import shutil  # rarely needed, and its import costs every job

    script = shutil.which(command[0], path=env.get("PATH")) or command[0]
    os.execve("/bin/sh", ["/bin/sh", script, *command[1:]], variables)


def _call_enter(enter: Callable[[], None], report: int) -> None:
    """In the child: call `enter`, or report its error and exit."""
    try:
        enter()
    except Exception as error:  # nothing may unwind into the parent's code
        number = error.errno if isinstance(error, OSError) and error.errno else errno.EPERM
        reason = " ".join(str(error).split()) or type(error).__name__
        os.write(report, f"{number} {reason}".encode("utf-8", "replace")[:_MAX_REPORT])
        os._exit(NOT_EXECUTABLE)


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` dies; skipped for a Python without ctypes."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it died before prctl
        os.kill(os.getpid(), signal.SIGKILL)


def prctl(option: int, value: int) -> bool:
    """Whether prctl(2) succeeds. Raises `ImportError`, `OSError` or `AttributeError` in a Python without ctypes."""
    # Only the C core of ctypes: importing the whole package takes three times as long.
    from _ctypes import call_function, dlopen, dlsym

    return not call_function(dlsym(dlopen(None, 0), "prctl"), (option, value, 0, 0, 0))  # type: ignore[arg-type]


@functools.cache
def leads_group() -> bool:
    """Whether programs that this process starts lead process groups of their own: unless it is in the foreground of a
    controlling terminal. Decided once, as `bg` and `fg` of a shell change that while programs run."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return True
    try:
        return os.tcgetpgrp(terminal) != os.getpgrp()
    except OSError:
        return True
    finally:
        os.close(terminal)


def wait(
    pid: int,
    *,
    own_group: bool | None = None,
    forwards: bool = True,
    reaps_orphans: bool = False,
    on_signal: Callable[[int], None] | None = None,
    on_restart_request: Callable[[], None] | None = None,
    tracer: Tracer | None = None,
) -> int:
    """Forward signals until the command ends; returns its exit code.

    Signals must be blocked (`block_signals`). `own_group` as in `spawn`. `on_signal` is called for each received signal
    that is not ignored.
    Not `forwards`: the command gets the same signals from their sender. `reaps_orphans`, for a subreaper: all children
    are reaped. With `on_restart_request`, a request (`RESTART_REQUEST`) is not ignored: the function is called, and the
    command ended.
    `tracer` gets `alive` events at growing intervals: about a hundred on the first day.
    """
    global is_interrupted  # noqa: PLW0603 - of the whole process
    began_s, is_ctrl_c = time.monotonic(), False
    alive_s, kill_s, owed, writing = began_s + _ALIVE_S, math.inf, 0, allocate_lock()
    own_group = leads_group() if own_group is None else own_group
    awaited = {*FORWARDED, signal.SIGCHLD}
    if on_restart_request is not None:
        awaited.add(RESTART_REQUEST)
    if own_group:
        # The terminal does not stop the command's own group together with this process.
        awaited.add(signal.SIGTSTP)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
    while (code := _reap(pid, orphans=reaps_orphans)) is None:
        # With a timeout: SIGCHLD may be delivered to a thread that has not blocked it, and would never arrive here.
        info = next_signal(awaited, max(0.0, min(alive_s, kill_s) - time.monotonic()))
        now_s = time.monotonic()
        if now_s >= kill_s:
            kill_s = math.inf
            _send(pid, signal.SIGKILL, own_group=own_group)
        if now_s >= alive_s:  # also where a signal comes more often, such as SIGCHLD of adopted orphans
            alive_s = now_s + _ALIVE_S
            if tracer is not None and not writing.locked():
                writing = write_beside(functools.partial(tracer.emit, ALIVE, INSTANT))
                alive_s = max(alive_s, now_s + (now_s - began_s) * _ALIVE_SHARE)
        if info is None or info.si_signo == signal.SIGCHLD:
            continue
        if on_restart_request is not None and info.si_signo == RESTART_REQUEST:
            on_restart_request()
            kill_s = min(kill_s, time.monotonic() + RESTART_GRACE_S)
            _send(pid, signal.SIGTERM, own_group=own_group)
            continue
        if on_signal is not None and signal.getsignal(info.si_signo) is not signal.SIG_IGN:
            on_signal(info.si_signo)
        is_ctrl_c |= info.si_signo == signal.SIGINT and info.si_code == _FROM_KERNEL
        if not forwards or (not own_group and info.si_code == _FROM_KERNEL and not _is_hangup(info.si_signo)):
            continue
        stops = info.si_signo == signal.SIGTSTP and not proc.catches(pid, signal.SIGTSTP)  # before its handler ends it
        if _send(pid, info.si_signo, own_group=own_group) and info.si_signo in ENDING:
            owed = info.si_signo
        log(__name__, "signal %d passed on to process %d", info.si_signo, pid)
        if stops:
            os.kill(os.getpid(), signal.SIGSTOP)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, owed)  # a shell with a trap ends, and leaves its program running; 0 is no signal
    is_interrupted = is_ctrl_c and code == 128 + signal.SIGINT
    log(__name__, "process %d ended with exit code %d after %.3f s", pid, code, time.monotonic() - began_s)
    return code


def _is_hangup(number: int) -> bool:
    """Whether a signal of the kernel says that the terminal has gone away: only the leader of the session gets it
    (`ssh -t NODE bootseer run`), and the others when the leader has ended."""
    return number == signal.SIGHUP and os.getsid(0) == os.getpid()


def write_beside(emit: Callable[[], object]) -> LockType:
    """Write an event in a thread, which then releases the lock: if a file server, or the reader of standard error, does
    not answer, the command still gets its signals, and the run ends."""
    writing = allocate_lock()
    writing.acquire()

    def write() -> None:
        try:
            emit()
        finally:
            writing.release()

    try:
        start_new_thread(write, ())
    except RuntimeError:  # the limit of processes is reached
        write()
    return writing


def next_signal(awaited: Collection[int], timeout_s: float) -> signal.struct_siginfo | None:
    """`sigtimedwait`, but None where this process was stopped beyond the timeout (Ctrl-Z, `scontrol suspend`, a
    debugger): Python then returns uninitialized memory."""
    info = signal.sigtimedwait(awaited, timeout_s)
    return info if info is not None and info.si_signo in awaited and not info.si_errno else None


def _send(pid: int, number: int, *, own_group: bool) -> bool:
    """Send the command a signal; or its whole process group, if that is its own. Returns whether the group got nothing.

    The group does not get a signal that the command catches, as long as that runs: it would lose the workers of a
    DataLoader while it saves.
    """
    is_alone = own_group and number not in _OF_TERMINALS and proc.catches(pid, number)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if own_group and not is_alone:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
        # One that reads the terminal in the background is stopped.
        if own_group and number in ENDING and proc.stat(pid)[:1] == [b"T"]:
            os.killpg(pid, signal.SIGCONT)
    return is_alone


def _reap(pid: int, *, orphans: bool = False) -> int | None:
    while True:
        try:
            ended, status = os.waitpid(-1 if orphans or os.getpid() == 1 else pid, os.WNOHANG)
        except ChildProcessError:
            return 1  # reaped elsewhere: its status is unknown
        if ended == 0:
            return None
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code

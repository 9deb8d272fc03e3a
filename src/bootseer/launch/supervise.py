"""Run the user's command as if we were not there.

The command gets its arguments, environment, standard streams and terminal untouched. Signals that we receive are passed
on once; its exit code is ours, 128+N when signal N killed it. As PID 1 we reap what the job orphans.

Two cases decide which processes get signals. In the foreground of a terminal the command stays in our process group, so
that Ctrl-C and Ctrl-Z reach it from the terminal just as they would without us; only what was sent to us alone is
passed on.
Everywhere else it leads its own group, and the whole group gets what we get.

SIGKILL cannot be passed on: the kernel is asked to kill the command when we die, so that `timeout -k` leaves no job
behind.

One thread: signals are blocked and taken with `sigwaitinfo`, so that no handler runs and none is lost.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from bootseer.trace.event import ALIVE, INSTANT

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
    # Schedulers send these too, as a warning or at a limit; all of them would end us.
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGXCPU,
    signal.SIGIO,
    signal.SIGPWR,
    *range(signal.SIGRTMIN, signal.SIGRTMAX + 1),
)
ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
"""Signals that ask a job to end."""
NOT_FOUND = 127
NOT_EXECUTABLE = 126
_ALIVE_S, _ALIVE_SHARE = 1.0, 0.1
"""What is left of a run that SIGKILL ended is known to a second, or to a tenth of its length."""
_FROM_KERNEL = 0x80  # si_code SI_KERNEL: the terminal sent it, to the whole foreground group
_PR_SET_PDEATHSIG = 1
EXIT_FLUSH_S = 2.0
"""What the end of the run may wait for exporters and relays."""
_START_S = 120.0
"""For going into namespaces and reading the program's first bytes, which may come from a store."""
_MAX_REPORT = 4096  # what a pipe takes at once
# Python ignores these two; the command must find them as we did before Python started.
_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)


def say(message: str) -> None:
    """One line for the user, on standard error: standard output belongs to the job. Lost when it cannot be written."""
    if "://" in message:
        from bootseer.store.addresses import without_credentials

        message = without_credentials(message)
    with contextlib.suppress(OSError):
        os.write(2, f"bootseer: {message}\n".encode("utf-8", "backslashreplace"))


def log(name: str, message: str, *args: object) -> None:
    """A log line (`info`) of a module that is imported in front of every job.

    `logging` takes 4 ms and is not imported for it: without `BOOTSEER_LOG` nothing happens.
    """
    if (logs := sys.modules.get("bootseer.logs")) is not None:
        logs.logger(name).info(message, *args)


class CannotStart(Exception):  # noqa: N818 - it carries an exit code, as a shell's would
    """The command could not be started; `code` is what a shell would return.

    `why` is reported instead of the error when the command itself was not reached.
    """

    def __init__(self, command: str, error: OSError, reason: str = "") -> None:
        missing = not reason and error.errno in (errno.ENOENT, errno.ENOTDIR)
        super().__init__(f"{command}: {'command not found' if missing else reason or error.strerror}")
        self.code = NOT_FOUND if missing else NOT_EXECUTABLE


def block_signals() -> None:
    """Hold back what will be passed on; call it before anything that a signal must not interrupt."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})


def unblock_signals() -> None:
    """Undo `block_signals`, and what `wait` holds back besides."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*FORWARDED, signal.SIGCHLD, signal.SIGTSTP})


def replace_process(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Become the command. Comes back only when it cannot be started, with a shell's exit code for that."""
    for number in _PYTHON_IGNORES:
        signal.signal(number, signal.SIG_DFL)
    # Python's handler for SIGINT is reset by exec; a SIGINT that was ignored stays ignored.
    try:
        os.execvpe(command[0], list(command), dict(env))
    except OSError as error:
        problem = CannotStart(command[0], error)
        say(str(problem))
        return problem.code


def spawn(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    own_group: bool,
    stdout: int | None = None,
    stderr: int | None = None,
    enter: Callable[[], None] | None = None,
) -> int:
    """Start the command and return its pid. Raises `CannotStart`.

    `enter` runs in the child before the command takes its place, to go into namespaces; what it raises is reported.
    By `fork` in a process of one thread: `posix_spawn` cannot tie the command's life to ours.
    """
    parent = os.getpid()
    # A group of 0 makes the command the leader of its own; its present group is ours.
    group = 0 if own_group else os.getpgrp()
    try:
        answer, report = _pipe()
        with os.fdopen(answer, "rb") as file:
            try:
                pid = os.fork()
                if pid == 0:
                    _become(command, env, parent, group, {1: stdout, 2: stderr}, report, enter)
            finally:
                os.close(report)
            failed = _start_of(file.fileno())
    except OSError as error:
        raise CannotStart(command[0], error) from error
    if failed:
        _end(pid)
        number, _, reason = failed.decode("utf-8", "replace").partition(" ")
        raise CannotStart(command[0], OSError(int(number), os.strerror(int(number))), reason)
    log(__name__, "process %d is %s", pid, command[0])  # its arguments may hold secrets
    return pid


def _start_of(answer: int) -> bytes:
    """Why the command could not start; nothing when it has taken the child's place, which closes the pipe."""
    output, until = b"", time.monotonic() + _START_S
    while select.select([answer], [], [], max(0.0, until - time.monotonic()))[0]:
        piece = os.read(answer, 1 << 16)
        if not piece:
            return output
        output += piece
    reason = f"it did not start within {_START_S:.0f} s; does the file system that it lies on answer?"
    return b"%d %s" % (errno.ETIMEDOUT, reason.encode())


def _end(pid: int) -> None:
    from bootseer.mounts.process import end_child  # rarely needed, and it costs time in front of every job

    end_child(pid)


def _pipe() -> tuple[int, int]:
    """A pipe that does not lie on a standard stream which we were started without."""
    low = os.pipe2(os.O_CLOEXEC)
    try:
        return fcntl.fcntl(low[0], fcntl.F_DUPFD_CLOEXEC, 3), fcntl.fcntl(low[1], fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        for end in low:
            os.close(end)


def _become(
    command: Sequence[str],
    env: Mapping[str, str],
    parent: int,
    group: int,
    streams: Mapping[int, int | None],
    report: int,
    enter: Callable[[], None] | None,
) -> NoReturn:
    """In the child: become the command, or report the error number, why `enter` failed, and end."""
    try:
        os.setpgid(0, group)
        for target, stream in streams.items():
            if stream is not None:
                os.dup2(stream, target)
        if enter is not None:
            _enter(enter, report)
        _die_with(parent)  # behind `enter`: the kernel forgets it where a process changes its rights
        # What waits behind the mask must meet the default, not a Python handler that exec would take away.
        for number in (*_PYTHON_IGNORES, signal.SIGINT, signal.SIGWINCH):
            if number in _PYTHON_IGNORES or callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        try:
            os.execvpe(command[0], list(command), dict(env))
        except OSError as error:
            if error.errno == errno.ENOEXEC:  # a script without an interpreter line: a shell gives it to sh
                os.execve("/bin/sh", ["/bin/sh", *command], dict(env))
            raise
    except OSError as error:
        os.write(report, b"%d" % (error.errno or errno.EINVAL))
    finally:
        os._exit(NOT_FOUND)


def _enter(enter: Callable[[], None], report: int) -> None:
    """In the child: go where the command is to run, or report why that is not possible, and end."""
    try:
        enter()
    except Exception as error:  # nothing may unwind into the parent's code
        number = error.errno if isinstance(error, OSError) and error.errno else errno.EPERM
        reason = " ".join(str(error).split()) or type(error).__name__
        os.write(report, f"{number} {reason}".encode("utf-8", "replace")[:_MAX_REPORT])
        os._exit(NOT_EXECUTABLE)


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when `parent` dies. A Python without ctypes does without."""
    with contextlib.suppress(ImportError, OSError, AttributeError):
        # The core of ctypes, without the package around it, which takes three times as long to import.
        from _ctypes import call_function, dlopen, dlsym

        prctl = dlsym(dlopen(None, 0), "prctl")  # type: ignore[arg-type]
        call_function(prctl, (_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0))
    if os.getppid() != parent:  # it was faster
        os.kill(os.getpid(), signal.SIGKILL)


def in_foreground() -> bool:
    """Whether we are in the foreground process group of a controlling terminal."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def wait(
    pid: int,
    *,
    own_group: bool,
    on_signal: Callable[[int], None] | None = None,
    tracer: Tracer | None = None,
) -> int:
    """Pass signals on until the command ends; returns its exit code.

    Signals must be blocked (`block_signals`). `on_signal` is called for each one that came and is not ignored. `tracer`
    gets an `alive` event now and then while the command runs, ever more rarely: a hundred times on the first day.
    """
    began_s = time.monotonic()
    awaited = {*FORWARDED, signal.SIGCHLD}
    if own_group:
        # A group of its own is not stopped together with us.
        awaited.add(signal.SIGTSTP)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
    while (code := _reap(pid)) is None:
        # Without a limit, SIGCHLD that a thread with other blocked signals takes would be waited for in vain.
        share = _ALIVE_SHARE if tracer is not None else 0
        info = signal.sigtimedwait(awaited, max(_ALIVE_S, (time.monotonic() - began_s) * share))
        if info is None:
            if tracer is not None:
                tracer.emit(ALIVE, INSTANT)
            continue
        if info.si_signo == signal.SIGCHLD:
            continue
        if on_signal is not None and signal.getsignal(info.si_signo) is not signal.SIG_IGN:
            on_signal(info.si_signo)
        if not own_group and info.si_code == _FROM_KERNEL:
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if own_group:
                os.killpg(pid, info.si_signo)
            else:
                os.kill(pid, info.si_signo)
        log(__name__, "signal %d passed on to process %d", info.si_signo, pid)
        if info.si_signo == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)
    log(__name__, "process %d ended with exit code %d after %.3f s", pid, code, time.monotonic() - began_s)
    return code


def _reap(pid: int) -> int | None:
    """The command's exit code if it has ended. PID 1 buries all orphans on the way."""
    while True:
        try:
            ended, status = os.waitpid(-1 if os.getpid() == 1 else pid, os.WNOHANG)
        except ChildProcessError:
            return 1  # its status was taken already: nothing better is known
        if ended == 0:
            return None
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code

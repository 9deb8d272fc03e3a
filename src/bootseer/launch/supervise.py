"""Run the user's command as if we were not there.

The command gets its arguments, environment, standard streams and terminal untouched. Signals that we receive are passed
on once; its exit code is ours, 128+N when signal N killed it. As PID 1 we reap what the job orphans.

Two cases decide who gets signals. In the foreground of a terminal the command stays in our process group, so that
Ctrl-C and Ctrl-Z reach it from the terminal just as they would without us; only what was sent to us alone is passed on.
Everywhere else it leads its own group, and the whole group gets what we get.

One thread: signals are blocked and taken with `sigwaitinfo`, so that no handler runs and none is lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)
NOT_FOUND = 127
NOT_EXECUTABLE = 126
_FROM_KERNEL = 0x80  # si_code SI_KERNEL: the terminal sent it, to the whole foreground group
# Python ignores these two; the command must find them as we did before Python started.
_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)


class CannotStart(Exception):  # noqa: N818 - it carries an exit code, as a shell's would
    """The command could not be started; `code` is what a shell would return."""

    def __init__(self, command: str, error: OSError) -> None:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        super().__init__(f"{command}: {'command not found' if missing else error.strerror}")
        self.code = NOT_FOUND if missing else NOT_EXECUTABLE


def block_signals() -> None:
    """Hold back what will be passed on; call it before anything that a signal must not interrupt."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})


def unblock_signals() -> None:
    """Undo `block_signals`."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*FORWARDED, signal.SIGCHLD})


def replace_process(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Become the command. Comes back only when it cannot be started, with a shell's exit code for that."""
    for number in _PYTHON_IGNORES:
        signal.signal(number, signal.SIG_DFL)
    # Python's handler for SIGINT is reset by exec; a SIGINT that was ignored stays ignored.
    try:
        os.execvpe(command[0], list(command), dict(env))
    except OSError as error:
        problem = CannotStart(command[0], error)
        sys.stderr.write(f"bootseer: {problem}\n")
        return problem.code


def spawn(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    own_group: bool,
    stdout: int | None = None,
    stderr: int | None = None,
) -> int:
    """Start the command and return its pid. Raises `CannotStart`."""
    actions = [(os.POSIX_SPAWN_DUP2, fd, target) for fd, target in ((stdout, 1), (stderr, 2)) if fd is not None]
    # A group of 0 makes the command the leader of its own; its present group is ours.
    group = 0 if own_group else os.getpgrp()

    def start(words: Sequence[str]) -> int:
        return os.posix_spawnp(
            words[0],
            list(words),
            env,
            file_actions=actions,
            setpgroup=group,
            setsigmask=[],
            setsigdef=_PYTHON_IGNORES,
        )

    try:
        return start(command)
    except OSError as error:
        if error.errno == errno.ENOEXEC:  # a script without an interpreter line, which execvp gives to sh
            with contextlib.suppress(OSError):
                return start(("/bin/sh", *command))
        raise CannotStart(command[0], error) from error


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


def wait(pid: int, *, own_group: bool, on_signal: Callable[[int], None] | None = None) -> int:
    """Pass signals on until the command ends; returns its exit code.

    Signals must be blocked (`block_signals`). `on_signal` hears of each one that was passed on.
    """
    awaited = {*FORWARDED, signal.SIGCHLD}
    while (code := _reap(pid)) is None:
        info = signal.sigwaitinfo(awaited)
        if info.si_signo == signal.SIGCHLD or (not own_group and info.si_code == _FROM_KERNEL):
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if own_group:
                os.killpg(pid, info.si_signo)
            else:
                os.kill(pid, info.si_signo)
        if on_signal is not None:
            on_signal(info.si_signo)
    return code


def _reap(pid: int) -> int | None:
    """The command's exit code if it has ended. PID 1 buries all orphans on the way."""
    while True:
        try:
            ended, status = os.waitpid(-1 if os.getpid() == 1 else pid, os.WNOHANG)
        except ChildProcessError:
            return 1  # somebody else took its status: nothing better is known
        if ended == 0:
            return None
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code

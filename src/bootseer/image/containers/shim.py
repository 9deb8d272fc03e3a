"""Stand between `bootseer` and a container of runc's, so that it looks like a child process.

`runc run` in the foreground copies the standard streams through pipes: what was a terminal is none any more, and input
that nobody wanted is gone. Detached, it passes the streams on as they are, but nobody waits. So this script starts it
detached, adopts the container's process, passes signals on to its process group, and ends as it does. Run with `-I -S`:

    shim.py PIDFILE WORD...     WORD... is `runc run --detach --pid-file PIDFILE ...`

It ends with the code of runc when that fails, else with the program's: 128 + N after signal N.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_CHILD_SUBREAPER = 36
# What is about this process alone, cannot be caught, or stops it at its terminal on purpose.
_OWN = {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGTTIN, signal.SIGTTOU),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS),
}


def main() -> int:
    awaited = (set(signal.valid_signals()) - _OWN) | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)
    started = subprocess.run(sys.argv[2:], check=False, preexec_fn=_as_found)
    if started.returncode:
        return started.returncode
    with open(sys.argv[1]) as file:  # noqa: PTH123
        pid = int(file.read())
    while (code := _reap(pid)) is None:
        _pass_on(pid, signal.sigwaitinfo(awaited).si_signo)
    return code


def _as_found() -> None:
    """In runc: no signal is held back, and those that Python ignores are not ignored."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _reap(pid: int) -> int | None:
    """How the program ended, if it has; whatever else was left to us is buried on the way."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == 0:
            return None
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _pass_on(pid: int, number: int) -> None:
    if number == signal.SIGCHLD:
        return
    with contextlib.suppress(ProcessLookupError):
        # Its group has no terminal, where SIGTSTP means nothing.
        os.killpg(pid, signal.SIGSTOP if number == signal.SIGTSTP else number)
    if number == signal.SIGTSTP:
        os.kill(os.getpid(), signal.SIGSTOP)
        os.killpg(pid, signal.SIGCONT)


if __name__ == "__main__":
    sys.exit(main())

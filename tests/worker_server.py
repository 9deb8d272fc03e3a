"""A process that has imported all tests, of which each worker of pytest-xdist is a fork: see `forked_workers`.

`serve` is the main function of that process. Run as a program with the path of its socket and Python's arguments, this
file requests a fork with its own standard streams and waits for the fork's end; without that process, it executes
Python with the arguments.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys


def serve() -> None:
    """Collect tests by the arguments, fork for each connection to the socket, and end at the end of standard input."""
    import pytest

    listener = socket.socket(fileno=int(sys.argv[1]))
    watch = _Watch()
    status = pytest.main(sys.argv[2:], plugins=[watch])
    # A module whose import was skipped or failed may remain incomplete in `sys.modules`, where a fork would find it.
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) or not watch.all_passed:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    while True:
        ready, _, _ = select.select([listener, sys.stdin.fileno()], [], [])
        if listener not in ready:
            return
        connection, _ = listener.accept()
        with connection:
            _, streams, _, _ = socket.recv_fds(connection, 1, 3)
            copy = os.fork()
            if copy:
                connection.send(str(copy).encode())
        if copy == 0:
            break
        for stream in streams:
            os.close(stream)
    listener.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.argv = ["-c"]
    exec(eval(sys.stdin.readline()), {"__name__": "__main__"})  # noqa: S102, S307 (as execnet starts Python)


class _Watch:
    """A plugin that records whether everything was collected."""

    all_passed = True

    def pytest_collectreport(self, report: object) -> None:
        self.all_passed &= report.passed  # type: ignore[attr-defined]


def _connect(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
        connection.connect(path)
        socket.send_fds(connection, [b"x"], [0, 1, 2])
        if answer := connection.recv(32):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                select.select([os.pidfd_open(int(answer))], [], [])
            sys.exit()


if __name__ == "__main__":
    _connect(sys.argv[1])
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])

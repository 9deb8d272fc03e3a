"""A helper process that runs beside the command and ends with `bootseer run`.

It is forked, so call `start_background` while this process has one thread. It has its own session, so that signals of
the terminal do not reach it, and writes its output to a log. SIGTERM raises `Interrupted` in it, so that cleanup runs.
It reports to the run by messages: JSON lines in a pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from bootseer import logs
from bootseer.errors import Interrupted, PermanentError, TransientError, as_message, from_message, os_errors_as
from bootseer.io.proc import end_child
from bootseer.launch.supervise import FORWARDED, say
from bootseer.mounts.process import die_with, drop_descriptors, readable, send_line

Send = Callable[[dict[str, Any]], None]
_MAX_LINE = 65_536
_KILL_AFTER_S = 5.0
_log = logs.logger(__name__)


class Background:
    """The parent's handle of a helper process."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self._pipe = pipe
        self._data = b""
        self._messages: list[dict[str, Any]] = []
        self._next = 0
        """Index of the first message that `next_message` has not returned yet."""
        self._is_open = True

    def messages(self) -> list[dict[str, Any]]:
        self._receive(0.0)
        return self._messages

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process, at most `timeout_s`; whether it has ended."""
        until = time.monotonic() + timeout_s
        while self._is_open and self._receive(max(until - time.monotonic(), 0.0)):
            pass
        return not self._is_open

    def next_message(self, timeout_s: float, who: str = "a helper process") -> dict[str, Any]:
        """Its next message; lines for the user (`say`) before it are printed. Raises the error that the process has
        sent, and `TransientError` on a timeout and when it has ended, which names it as `who`."""
        until = time.monotonic() + timeout_s
        while True:
            while len(self._messages) == self._next:
                if not self._is_open:
                    raise TransientError(f"{who} ended without an answer")
                if not self._receive(max(until - time.monotonic(), 0.0)):
                    raise TransientError(f"{who} did not answer in time")
            message = self._messages[self._next]
            self._next += 1
            if "error" in message:
                raise from_message(message)
            if "say" not in message:
                return message
            say(message["say"])

    def stop(self, timeout_s: float = _KILL_AFTER_S) -> None:
        """Ask it to clean up and end (SIGTERM); kill it after `timeout_s`."""
        if self.wait(0.0):  # and its number may be another process's, where all children are reaped
            return
        self._signal(signal.SIGTERM)
        if not self.wait(timeout_s):
            self._signal(signal.SIGKILL)
            self.wait(_KILL_AFTER_S)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _receive(self, timeout_s: float) -> bool:
        """Read from the pipe; whether there was anything, end of file included."""
        if not self._is_open:
            return False
        if not readable([self._pipe], timeout_s):
            return False
        piece = os.read(self._pipe, _MAX_LINE)
        if not piece:
            self._is_open = False
            os.close(self._pipe)
            end_child(self.pid, _KILL_AFTER_S, kill=False)
            return True
        *lines, self._data = (self._data + piece).split(b"\n")
        self._messages += [json.loads(line) for line in lines if line]
        return True


def start_background(work: Callable[[Send], None], *, name: str, log: Path, niceness: int = 0) -> Background:
    """Run `work(send)` in a child process. `name` is shown by `ps`.

    The child inherits locks and namespaces that this process has opened. An exception of the work is reported by
    `errors.as_message`.
    Raises `PermanentError` when no process can be created.
    """
    parent = os.getpid()
    with os_errors_as(PermanentError, "no helper process can be started"):
        pipe, report = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError:
            os.close(pipe)
            os.close(report)
            raise
    if pid == 0:
        _run_in_child(work, name, log, niceness, report, parent)
    os.close(report)
    return Background(pid, pipe)


def _run_in_child(
    work: Callable[[Send], None],
    name: str,
    log: Path,
    niceness: int,
    report: int,
    parent: int,
) -> NoReturn:
    def send(message: dict[str, Any]) -> None:
        send_line(report, message)

    code = 1
    try:
        os.setsid()
        # Python opens all its files as not inheritable: the others came from the caller of `bootseer run`, and others
        # may wait for the end of file of these pipes.
        drop_descriptors(log, os.get_inheritable)
        logs.set_up(os.environ, file=log)
        _terminate_with(parent)
        with contextlib.suppress(OSError):
            os.nice(niceness)
        Path("/proc/self/comm").write_text(name)
        work(send)
        code = 0
    except Interrupted as interrupted:
        send({"error": f"it was ended by {interrupted}", "kind": "Interrupted"})
    except BaseException as error:  # nothing may unwind into the parent's code
        _log.exception("the work failed")
        send(as_message(error))
    finally:
        os._exit(code)


def _terminate_with(parent: int) -> None:
    """Raise `Interrupted` at SIGTERM, and have the kernel send SIGTERM when `parent` dies."""

    def interrupt(number: int, frame: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        raise Interrupted(number, signal.Signals(number).name)

    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*FORWARDED, signal.SIGCHLD})
    die_with(parent, signal.SIGTERM)  # to be called again after entering a namespace

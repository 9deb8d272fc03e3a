"""A process of our own that works beside the command: forked, out of the command's way, and gone when we are.

It has a session of its own, so that a terminal's signals do not reach it; its output goes into a log; SIGTERM ends it
as `Interrupted`, so that what was begun is undone. It tells the run what it found by messages, lines of JSON. Fork
while this process has one thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from bootseer import logs
from bootseer.errors import BootseerError, Interrupted, PermanentError, TransientError, UsageError
from bootseer.launch.supervise import FORWARDED
from bootseer.mounts.process import end_child

Tell = Callable[[dict[str, Any]], None]
_PR_SET_PDEATHSIG = 1
_MAX_LINE = 65_536
_KILL_AFTER_S = 5.0
_log = logs.logger(__name__)


class Background:
    """One such process, seen by the run that started it."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self._pipe = pipe
        self._data = b""
        self._messages: list[dict[str, Any]] = []
        self._next = 0
        """The first one that `answer` has not given yet."""
        self._open = True

    def messages(self) -> list[dict[str, Any]]:
        """All that it has reported so far."""
        self._receive(0.0)
        return self._messages

    def ended(self, timeout_s: float) -> bool:
        """Wait until it has ended, no longer than this; whether it has."""
        until = time.monotonic() + timeout_s
        while self._open and self._receive(max(until - time.monotonic(), 0.0)):
            pass
        return not self._open

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """Its next message. Raises `TransientError` when it tells nothing in time, or has ended."""
        until = time.monotonic() + timeout_s
        while len(self._messages) == self._next:
            if not self._open:
                raise TransientError("a helper process ended without an answer")
            if not self._receive(max(until - time.monotonic(), 0.0)):
                raise TransientError("a helper process did not answer in time")
        self._next += 1
        return self._messages[self._next - 1]

    def stop(self, timeout_s: float = _KILL_AFTER_S) -> None:
        """Let it undo what it does and end; kill it when that takes longer than `timeout_s`."""
        if not self._open:
            return
        self._signal(signal.SIGTERM)
        if not self.ended(timeout_s):
            self._signal(signal.SIGKILL)
            self.ended(_KILL_AFTER_S)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _receive(self, timeout_s: float) -> bool:
        """Read what is there; whether anything was, an end included."""
        if not self._open:
            return False
        if not select.select([self._pipe], [], [], timeout_s)[0]:
            return False
        piece = os.read(self._pipe, _MAX_LINE)
        if not piece:
            self._open = False
            os.close(self._pipe)
            end_child(self.pid, _KILL_AFTER_S, kill=False)
            return True
        *lines, self._data = (self._data + piece).split(b"\n")
        self._messages += [json.loads(line) for line in lines if line]
        return True


def start_background(work: Callable[[Tell], None], *, name: str, log: Path, niceness: int = 0) -> Background:
    """Run `work(tell)` in a child. `name` is what `ps` shows.

    It has what this process opened itself: locks, namespaces. A `BootseerError` of the work is reported as
    `{"error": ..., "kind": ...}`, any other as well; a `UsageError` with its `hint`.
    Raises `PermanentError` when no process can be made.
    """
    parent = os.getpid()
    try:
        pipe, report = os.pipe2(os.O_CLOEXEC)
    except OSError as error:
        raise PermanentError(f"no helper process can be started: {error.strerror}") from error
    try:
        pid = os.fork()
    except OSError as error:
        os.close(pipe)
        os.close(report)
        raise PermanentError(f"no helper process can be started: {error.strerror}") from error
    if pid == 0:
        _become(work, name, log, niceness, report, parent)
    os.close(report)
    return Background(pid, pipe)


def _become(
    work: Callable[[Tell], None],
    name: str,
    log: Path,
    niceness: int,
    report: int,
    parent: int,
) -> NoReturn:
    def tell(message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the run is over
            os.write(report, json.dumps(message).encode() + b"\n")

    code = 1
    try:
        _daemonize(log)
        logs.set_up(os.environ, file=log)
        _exit_with(parent)
        with contextlib.suppress(OSError):
            os.nice(niceness)
        Path("/proc/self/comm").write_text(name)
        work(tell)
        code = 0
    except Interrupted as interrupted:
        tell({"error": f"it was ended by {interrupted}", "kind": "Interrupted"})
    except BootseerError as error:
        _log.exception("the work failed")
        hint = {"hint": error.hint} if isinstance(error, UsageError) else {}
        tell({"error": str(error), "kind": type(error).__name__, **hint})
    except BaseException as error:  # nothing may unwind into the parent's code
        _log.exception("the work failed")
        tell({"error": f"{type(error).__name__}: {error}", "kind": "PermanentError"})
    finally:
        os._exit(code)


def _daemonize(log: Path) -> None:
    """Give up what came from the parent: session, standard streams, pipes that others wait on.

    Objects of the parent may hold the numbers and close them at any time, so that these stay taken.
    """
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for word in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
        number = int(word)
        with contextlib.suppress(OSError):  # the one that the list was read from
            # Whatever Python opens is not inheritable.
            if number > 2 and os.get_inheritable(number):
                os.dup2(nowhere, number, inheritable=False)
    os.dup2(nowhere, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _exit_with(parent: int) -> None:
    """SIGTERM ends the work in order, and comes by itself when the run is killed."""

    def interrupt(number: int, frame: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        raise Interrupted(number, signal.Signals(number).name)

    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, interrupt)
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*FORWARDED, signal.SIGCHLD})
    if os.getppid() != parent:
        raise Interrupted(signal.SIGTERM, "SIGTERM")

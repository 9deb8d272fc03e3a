"""`bootseer run --restarts N`: a command that died for a transient reason is started again where everything is ready.

Image, environment, checkpoints and peers stay as they are; the processes that the command left are ended, and in its
next start `BOOTSEER_RESTART` counts the restarts. Not transient: what a shell or an argument parser says of a command
that cannot work (2, 126, 127), an end that a signal to `bootseer run` asked for, and a launcher that restarts its
processes itself and gave up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError
from bootseer.launch.supervise import ENDING, NOT_EXECUTABLE, NOT_FOUND, log, say
from bootseer.trace import traceparent
from bootseer.trace.event import BEGIN, END, OK
from bootseer.trace.identity import RESTART
from bootseer.units import plural

if TYPE_CHECKING:
    from bootseer.launch.session import Session

STAGE = "restart"
KIND = "BOOTSEER_KIND"
_LASTING = (0, 2, NOT_EXECUTABLE, NOT_FOUND)
"""Exit codes of a command that ended well or cannot work: 2 is what argparse and shells say of wrong arguments."""
_SIGNALLED = 128
_ITS_OWN = ("--max-restarts", "--max_restarts")
_GRACE_S = 3.0
"""For processes that the command left to end by SIGTERM; then SIGKILL ends them."""
_GONE_S = 30.0
_LOOK_S = 0.02


class Restarts:
    """The starts of one command after its first."""

    def __init__(
        self,
        most: int,
        delay_s: float,
        command: Sequence[str],
        session: Session | None,
        renew: Callable[[Mapping[str, str]], None] | None,
        *,
        warm: bool,
    ) -> None:
        """`command` as the user wrote it. `renew` makes ready what it runs in, for a start with these variables.
        `warm`: whether its launcher may have a warm parent."""
        self._most = most
        self._delay_s = delay_s
        self._elastic = restarts_itself(command, os.environ)
        self._session = session
        self._renew = renew
        self._number = self._restart = 0
        self._orphans: set[int] = set()
        self._warm = None
        if warm and session is not None and renew is None:  # a container's processes end with its first one
            from bootseer.launch.warm_restart import WarmRestart

            self._warm = WarmRestart(session)
        if session is not None:
            self._restart = session.tracer.identity.restart

    def mark(self, env: dict[str, str]) -> None:
        """Set the variable by which the command's processes are found."""
        env[RESTART] = str(self._restart)

    def again(self, code: int, signals: Sequence[int], env: dict[str, str]) -> int | None:
        """Prepare one more start, with `env` as its environment: None. Otherwise the exit code to end with.

        The command has ended with `code`, after `signals` had come for it.
        """
        died_ns = time.monotonic_ns()
        if code in _LASTING or ENDING.intersection(signals) or code - _SIGNALLED in signals:
            return code
        how = describe(code)
        if self._elastic and code <= _SIGNALLED:
            say(f"{how}; its launcher restarts it itself (--max-restarts) and gave up: not started again")
            return code
        if self._number == self._most:
            say(f"{how} after {plural(self._most, 'restart')}: not started again")
            return code
        self._number += 1
        wait = f" in {self._delay_s:g} s" if self._delay_s else ""
        say(f"{how}; starting it again{wait} (restart {self._number} of {self._most})")
        left = self._end_processes(env)
        awaited = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
        if info := signal.sigtimedwait(awaited, self._delay_s):
            say(f"interrupted by {signal.Signals(info.si_signo).name} before the command was started again")
            return _SIGNALLED + info.si_signo
        session = self._session
        self._restart = session.begin_restart() if session is not None else self._restart + 1
        env.update({RESTART: str(self._restart), KIND: "restart"})
        try:
            if self._renew is not None:
                self._renew({name: env[name] for name in (RESTART, KIND, traceparent.VARIABLE) if name in env})
        except (BootseerError, OSError) as error:
            say(f"the command cannot be started again: {error}")
            return code
        if session is not None:
            attrs = {"number": self._number, "most": self._most, "exit_code": code, "processes_ended": left}
            span = session.tracer.emit(STAGE, BEGIN, parent=session.span, attrs=attrs, mono_ns=died_ns)
            session.tracer.emit(STAGE, END, parent=session.span, span=span, outcome=OK)
        return None

    def spawn_warm(self, env: Mapping[str, str], streams: Mapping[int, int | None], *, own_group: bool) -> int | None:
        """The command's process, from the warm parent that its launcher left; None: it is to be started by exec."""
        return self._warm.spawn(env, streams, own_group=own_group) if self._warm is not None and self._number else None

    def close(self) -> None:
        """Nothing is started again any more."""
        if self._warm is not None:
            self._warm.close()

    def _end_processes(self, env: Mapping[str, str]) -> int:
        """End what the command left running: it would hold devices and ports of the next start. Returns how many."""
        parent = traceparent.parse(env.get(traceparent.VARIABLE, ""))
        if parent is None:  # without events nothing marks them
            return 0
        marks = (f"{RESTART}={self._restart}".encode(), f"{traceparent.VARIABLE}=00-{parent.trace}-".encode())
        found: set[int] = set()
        begun_s = time.monotonic()
        kept = self._warm.pids() if self._warm is not None else set()
        while (left := _marked(marks) - kept) and time.monotonic() - begun_s < _GONE_S:
            for pid in left:
                late = time.monotonic() - begun_s > _GRACE_S
                if pid not in found or late:
                    log(__name__, "process %d, which the command left, is ended", pid)
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                        os.kill(pid, signal.SIGCONT)
            found |= left
            time.sleep(_LOOK_S)
        if self._warm is not None:  # orphans are our children then
            self._orphans = {pid for pid in self._orphans | found if not _reaped(pid)}
        if left:
            say(f"{plural(len(left), 'process')} of the command did not end: {', '.join(map(str, sorted(left)))}")
        return len(found)


def _marked(marks: tuple[bytes, bytes]) -> set[int]:
    """Processes whose environment has a variable that is the first mark, and one that begins with the second."""
    found = set()
    for name in os.listdir("/proc"):  # noqa: PTH208 - thousands of names
        if name.isdecimal() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:  # noqa: PTH123
                data = b"\0" + file.read()
                if b"\0" + marks[0] + b"\0" in data and b"\0" + marks[1] in data:
                    found.add(int(name))
    return found


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def restarts_itself(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether the command is an elastic launcher that is configured to restart its processes."""
    values = [env.get("PET_MAX_RESTARTS", "")]
    for word, following in zip(command, (*command[1:], ""), strict=True):
        flag, equals, value = word.partition("=")
        if flag in _ITS_OWN:
            values.append(value if equals else following)
    return values[-1].isdecimal() and int(values[-1]) > 0


def describe(code: int) -> str:
    """How the command ended, for messages."""
    try:
        return f"the command was ended by {signal.Signals(code - _SIGNALLED).name}"
    except ValueError:
        return f"the command failed (exit code {code})"

"""`bootseer run --restarts N`: start a command again that failed for a transient reason, or on request.

Image, environment, checkpoints and peers are kept; processes that the command left running are ended, and the restart
has `BOOTSEER_RESTART` in its environment. Not transient: exit codes of a shell or an argument parser for a command that
cannot work (2, 126, 127), an end after a signal to `bootseer run`, and an elastic launcher that has used up its own
restarts. A restart on request (`bootseer restart`, after a change of the code) is a hot update; it has no limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError
from bootseer.io import proc
from bootseer.launch.session import option_values
from bootseer.launch.supervise import (
    ENDING,
    NOT_EXECUTABLE,
    NOT_FOUND,
    RESTART_GRACE_S,
    RESTART_REQUEST,
    log,
    next_signal,
    say,
)
from bootseer.trace import traceparent
from bootseer.trace.event import BEGIN, END, OK
from bootseer.trace.identity import RESTART
from bootseer.units import plural

if TYPE_CHECKING:
    from bootseer.launch.session import RunEvents

STAGE = "restart"
KIND = "BOOTSEER_KIND"
RUN_ID = "BOOTSEER_RUN_ID"
"""Marks the processes of one run; job, attempt and trace are also those of the job's other runs on the node."""
_PERMANENT = (0, 2, NOT_EXECUTABLE, NOT_FOUND)
"""Exit codes after which a restart is useless: success, wrong arguments (argparse and shells), no such program."""
_SIGNALLED = 128
GRACE_S = 3.0
"""Between SIGTERM and SIGKILL, for processes that a command or a setup left running."""
_END_S = 30.0
_POLL_S = 0.02


class Restarts:
    """The restarts of one command."""

    def __init__(
        self,
        max_restarts: int,
        delay_s: float,
        command: Sequence[str],
        session: RunEvents,
        renew: Callable[[Mapping[str, str]], None] | None,
        *,
        warm: bool,
    ) -> None:
        """`command` as the user wrote it; `renew` prepares its container for a start with the given variables; `warm`:
        whether its launcher may have a warm parent."""
        self._max_restarts = max_restarts
        self._delay_s = delay_s
        self._is_elastic = is_elastic(command, os.environ)
        self._session = session
        self._renew = renew
        self._num_restarts = 0
        self._identity = session.tracer.identity
        self._restart_number = self._identity.restart
        self._requested_ns = 0
        self.warm = None
        """With it this process is a subreaper, and has to reap what its command leaves running."""
        if warm and renew is None:  # a container's processes end with its first one
            from bootseer.launch.warm_restart import WarmRestart

            self.warm = WarmRestart(session.tracer, session.span)
        signal.pthread_sigmask(signal.SIG_BLOCK, {RESTART_REQUEST})

    def tag_environment(self, env: dict[str, str]) -> None:
        """Set the variables by which the command's processes are found."""
        env.update({RESTART: str(self._restart_number), RUN_ID: self._session.span})

    def request(self) -> None:
        """Note that the next end of the command was requested, for a restart."""
        self._requested_ns = self._requested_ns or time.monotonic_ns()

    def prepare(self, code: int, signals: Sequence[int], env: dict[str, str]) -> int | None:
        """Prepare a restart, updating its environment `env`, and return None; or the exit code if there is none.

        The command has ended with exit code `code`, after `signals` were received.
        """
        if signal.sigtimedwait([RESTART_REQUEST], 0) is not None:  # since the command's end
            self.request()
        requested_ns, self._requested_ns = self._requested_ns, 0
        began_ns = requested_ns or time.monotonic_ns()
        if ENDING.intersection(signals):
            return code
        if requested_ns:
            say("starting the command again, as requested")
        elif code in _PERMANENT or code - _SIGNALLED in signals or not self._may_restart(code):
            return code
        waited_s = (time.monotonic_ns() - began_ns) / 1e9
        left = self._end_processes(max(GRACE_S, RESTART_GRACE_S - waited_s) if requested_ns else GRACE_S)
        awaited = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
        info = next_signal(awaited, 0 if requested_ns else self._delay_s)
        if info is not None:
            say(f"interrupted by {signal.Signals(info.si_signo).name} before the command was started again")
            return _SIGNALLED + info.si_signo
        session, kind = self._session, "hot_update" if requested_ns else "restart"
        # An elastic launcher counts its own restarts, too.
        earlier = (event.restart for event in session.tail().poll(last=True))
        self._restart_number = max([self._restart_number, *earlier]) + 1
        env.update({RESTART: str(self._restart_number), KIND: kind})
        try:
            if self._renew is not None:
                self._renew({name: env[name] for name in (RESTART, KIND, traceparent.VARIABLE) if name in env})
        except (BootseerError, OSError) as error:
            say(f"the command cannot be started again: {error}")
            return code
        session.tracer.identity = self._identity._replace(restart=self._restart_number, kind=kind)
        attrs = {
            "number": self._num_restarts,
            "most": self._max_restarts,
            "exit_code": code,
            "processes_ended": left,
            **({"requested": True} if requested_ns else {}),
        }
        span = session.tracer.emit(STAGE, BEGIN, parent=session.span, attrs=attrs, mono_ns=began_ns)
        session.tracer.emit(STAGE, END, parent=session.span, span=span, outcome=OK)
        return None

    def _may_restart(self, code: int) -> bool:
        """Whether one more restart is left for a command that failed; tells the user."""
        how = describe_exit(code)
        if self._is_elastic and code <= _SIGNALLED:
            say(f"{how}; its launcher restarts it itself (--max-restarts) and gave up: not started again")
            return False
        if self._num_restarts == self._max_restarts:
            if not self._max_restarts:
                return False
            say(f"{how} after {plural(self._max_restarts, 'restart')}: not started again")
            return False
        self._num_restarts += 1
        wait = f" in {self._delay_s:g} s" if self._delay_s else ""
        say(f"{how}; starting it again{wait} (restart {self._num_restarts} of {self._max_restarts})")
        return True

    def spawn_warm(
        self, env: Mapping[str, str], streams: Mapping[int, int | None], *, own_group: bool | None = None
    ) -> int | None:
        """Fork the command from the warm parent that its launcher left; its pid, or None to start it by exec.
        `own_group` as in `supervise.spawn`."""
        return self.warm.spawn(env, streams, own_group) if self.warm is not None else None

    def restore_process(
        self, folder: str, command: Sequence[str], env: Mapping[str, str], enter: Callable[[], None] | None = None
    ) -> None:
        """Before the first start: restore the process snapshot in `folder`; see `WarmRestart.restore`."""
        if self.warm is not None and folder:
            self.warm.restore(folder, command, env, enter)

    def record_process(
        self, folder: str, command: Sequence[str], env: Mapping[str, str], enter: Callable[[], None] | None = None
    ) -> None:
        """After a successful run: see `WarmRestart.record`."""
        if self.warm is not None and folder:
            self.warm.record(folder, command, env, enter)

    def close(self) -> None:
        if self.warm is not None:
            self.warm.close()

    def _end_processes(self, grace_s: float) -> int:
        """End processes that the command left running, which would hold devices and ports; returns their number."""
        marks = {f"{RESTART}={self._restart_number}".encode(), f"{RUN_ID}={self._session.span}".encode()}
        kept = self.warm.pids() if self.warm is not None else set()
        found, left = end_processes(lambda: _processes_with(marks) - kept, grace_s, _END_S)
        if left:
            say(f"{plural(len(left), 'process')} of the command did not end: {', '.join(map(str, sorted(left)))}")
        return found


def end_processes(find: Callable[[], set[int]], grace_s: float = GRACE_S, end_s: float = 1.0) -> tuple[int, set[int]]:
    """End all processes that `find` returns, repeatedly until there are none: SIGTERM first, then SIGKILL.

    Returns how many there were, and those that have not ended `end_s` seconds after SIGKILL: they hang in the kernel,
    or are another user's.
    """
    found: set[int] = set()
    begun_s = time.monotonic()
    while (left := find()) and time.monotonic() - begun_s < grace_s + end_s:
        late = time.monotonic() - begun_s > grace_s
        for pid in left if late else left - found:
            log(__name__, "ending process %d, which was left running", pid)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                os.kill(pid, signal.SIGCONT)
        found |= left
        time.sleep(_POLL_S)
    return len(found), left


def _processes_with(variables: set[bytes]) -> set[int]:
    """Processes whose environment has all these variables with these values."""
    others = set(proc.pids()) - {os.getpid()}
    return {pid for pid in others if variables <= set(proc.read(pid, "environ").split(b"\0"))}


def is_elastic(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether the command is an elastic launcher that is configured to restart its processes."""
    values = [env.get("PET_MAX_RESTARTS", ""), *option_values(command, "--max-restarts", "--max_restarts")]
    return values[-1].isdecimal() and int(values[-1]) > 0


def describe_exit(code: int) -> str:
    try:
        return f"the command was ended by {signal.Signals(code - _SIGNALLED).name}"
    except ValueError:
        return f"the command failed (exit code {code})"

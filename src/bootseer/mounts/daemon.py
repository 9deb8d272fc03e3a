"""Start the process that serves a mount, and talk to it.

The daemon is forked, not started as a program: everything it needs is imported already, so that it serves some ten
milliseconds later. Fork while this process has one thread. It leaves the session, the standard streams and all
descriptors of its parent behind, and tells through a pipe that it serves, or why not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from bootseer.errors import NotFoundError, PermanentError, TransientError, error_named
from bootseer.logs import logger
from bootseer.mounts import control
from bootseer.mounts.control import FILES, LOG
from bootseer.mounts.process import ProcessId, end_child, json_lines

if TYPE_CHECKING:
    from bootseer.mounts.serve import DaemonSpec
    from bootseer.peers.origins import PeerGroup

_LOG = logger(__name__)
_NAME = "bootseer-mount"
"""What `ps` and `top` show, so that the daemon is not taken for the program that started it."""
_GRACE_S = 1.0
_LET_GO_S = 2.0
_END_S = 20.0
_RESTART_S = 2.0

Waiting = Callable[[], None]
"""Called twice a second while a daemon is waited for; what it raises ends the wait."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """A running daemon, as other processes see it."""

    folder: Path
    process: ProcessId

    @property
    def files(self) -> Path:
        return self.folder / FILES

    def status(self) -> dict[str, object]:
        """What it says of itself. Raises `NotFoundError` when it is dead."""
        return self._ask("status")

    def began(self) -> None:
        """Tell it that the startup is over: training has begun."""
        self._ask("began")

    def leave(self, *, force: bool) -> bool:
        """Let it unmount lazily, stop prefetching, and end when nothing uses its files; whether it has ended.

        The kernel uses files of layers for a moment after these were unmounted, and as long as another mount namespace
        has copies of their mounts. It is waited for the moment alone; with `force` the daemon ends then all the same.
        """
        try:
            self._ask("leave")
        except (NotFoundError, TransientError):
            self.process.signal(signal.SIGTERM)
        if not self._ended(time.monotonic() + _LET_GO_S) and force:
            self.end(timeout_s=_END_S)
        return not self.process.alive

    def stop(self, *, timeout_s: float = 30.0, waiting: Waiting = lambda: None) -> dict[str, object]:
        """Let it unmount, finish what was written, and end; what it says of that. Raises `PermanentError` while its
        files are in use.

        A daemon that does not answer is killed after `timeout_s`: readers get an I/O error then. One that is not waited
        for to the end, because `waiting` or a signal raised something, does all of it all the same.
        """
        return self._end("stop", timeout_s, waiting)

    def end(self, *, timeout_s: float, waiting: Waiting = lambda: None) -> dict[str, object]:
        """Let it unmount although its files are in use, finish what was written, and end; what it says of that.

        Programs that use its files get errors. A daemon that is not done after `timeout_s` is killed.
        """
        return self._end("end", timeout_s, waiting)

    def _end(self, how: str, timeout_s: float, waiting: Waiting) -> dict[str, object]:
        deadline = time.monotonic() + timeout_s
        reply: dict[str, object] = {}
        try:
            reply = self._ask(how, timeout_s, waiting)
        except (NotFoundError, TransientError):
            self.process.signal(signal.SIGTERM)
        if not self._ended(deadline):
            _LOG.warning("mount daemon %d of %s did not end in %g s: killed", self.process.pid, self.folder, timeout_s)
            self.process.signal(signal.SIGKILL)
            if not self._ended(time.monotonic() + 1.0):
                raise TransientError(f"the mount daemon {self.process.pid} does not end")
        return reply

    def _ask(self, request: str, timeout_s: float = 5.0, waiting: Waiting = lambda: None) -> dict[str, object]:
        until = time.monotonic() + _RESTART_S
        while True:
            try:
                return control.ask(self.folder, request, timeout_s=timeout_s, waiting=waiting)
            except NotFoundError:  # also between the death of the process that serves and its restart (`recovery`)
                if not self.process.alive or time.monotonic() > until:
                    raise
                time.sleep(0.02)

    def _ended(self, deadline: float) -> bool:
        while self.process.alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


def start_daemon(spec: DaemonSpec, *, deadline_s: float = 30.0, waiting: Waiting = lambda: None) -> Daemon:
    """Start a daemon; its files can be read when this returns.

    Raises what its `open` or the mount raised, or `TransientError` when it does not serve within `deadline_s`. Whatever
    is raised, no daemon is left; a mount may be that was made a moment ago.
    """

    (spec.folder / FILES).mkdir(parents=True, exist_ok=True)
    spec.folder.chmod(0o700)
    ready, report = os.pipe2(os.O_CLOEXEC)
    lifeline: tuple[int, int] | None = os.pipe2(os.O_CLOEXEC) if spec.lifeline else None
    try:
        middle = os.fork()
        if middle == 0:
            _leave(spec, report, None if lifeline is None else lifeline[0], deadline_s)
    finally:
        os.close(report)
        if lifeline is not None:
            # The other end stays open in this process for ever: that is what it is for.
            os.close(lifeline[0])
    with os.fdopen(ready, "rb", buffering=0) as pipe:
        # The middle process ends at once, and takes the daemon's parenthood with it: no process must wait for zombies.
        end_child(middle, deadline_s, kill=False)
        process: ProcessId | None = None
        try:
            for reply in json_lines(pipe.fileno(), time.monotonic() + deadline_s, waiting):
                if "pid" in reply:
                    process = ProcessId.of(reply["pid"])
                elif "error" in reply:
                    raise error_named(reply["kind"], reply["error"])
                elif process is not None:
                    _LOG.info("mount daemon %d serves %s", process.pid, spec.at or spec.folder / FILES)
                    return Daemon(spec.folder, process)
            raise PermanentError(f"the mount daemon died before it served; see {spec.folder / LOG}")
        except BaseException as error:
            if process is not None:  # one that has not sent its number yet finds the pipe closed, and ends
                process.signal(signal.SIGKILL)
                until = time.monotonic() + _GRACE_S
                while process.alive and time.monotonic() < until:
                    time.sleep(0.01)
            if isinstance(error, TimeoutError):
                message = f"the mount daemon did not serve within {deadline_s:g} s; see {spec.folder / LOG}"
                raise TransientError(message) from None
            raise


def _leave(spec: DaemonSpec, report: int, lifeline: int | None, deadline_s: float) -> NoReturn:
    """In the first child: make a session, fork once more, so that the daemon has no parent and no terminal."""
    from bootseer.mounts.recovery import serve_on
    from bootseer.mounts.serve import report_error, serve, tell

    try:
        os.setsid()
        if os.fork() > 0:
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        Path("/proc/self/comm").write_text(_NAME)
        # If the parent is killed while this hangs, nothing else would end it. `serve` calls it off.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, deadline_s + _GRACE_S)
        tell(report, {"pid": os.getpid()})
        _let_go(spec.folder, {report, *([] if lifeline is None else [lifeline])})
        os._exit((serve if spec.reopen is None else serve_on)(spec, report, lifeline))
    except BaseException as error:  # nothing may unwind into the parent's code
        report_error(report, error)
    os._exit(1)


def _let_go(folder: Path, keep: set[int]) -> None:
    """Give up everything that was inherited: standard streams, pipes that others wait on, leases, sockets.

    Objects of the parent still hold the numbers and may close them at any time, so that these stay taken.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
        number = int(name)
        if number not in (0, 1, 2, nowhere, log, *keep):
            with contextlib.suppress(OSError):  # the one that the list was read from
                os.fstat(number)
                os.dup2(nowhere, number, inheritable=False)
    os.dup2(nowhere, 0)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.chdir("/")
    os.umask(0o077)


def open_peers(on_problem: Callable[[str], None]) -> PeerGroup | None:
    """The other nodes of the job that this process belongs to, if they have blocks for each other."""
    if not os.environ.get("BOOTSEER_PEERS_DIR"):
        return None
    # Most starts have none, and importing it takes milliseconds.
    from bootseer.peers.origins import PeerGroup

    return PeerGroup.of_environment(on_problem)

"""Start the process that serves a mount, and talk to it.

The daemon is forked, not executed as a program: everything it needs is imported already, and it serves within some ten
milliseconds. Fork while this process has one thread. It detaches from the session, the standard streams and all
descriptors of its parent, and reports through a pipe when it serves, or why it cannot.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from msgspec import Struct

from bootseer.errors import NotFoundError, PermanentError, TransientError, as_message, from_message
from bootseer.io.locks import try_flock
from bootseer.io.proc import end_child
from bootseer.logs import logger
from bootseer.mounts import control
from bootseer.mounts.control import FILES, LOG
from bootseer.mounts.process import ProcessId, drop_descriptors, json_lines, send_line

if TYPE_CHECKING:
    from bootseer.mounts.serve import DaemonSpec
    from bootseer.peers.origins import PeerGroup

_LOG = logger(__name__)
_NAME = "bootseer-mount"
"""Process name in `ps` and `top`; without it the daemon would have the name of the program that started it."""
_GRACE_S = 1.0
_DETACH_S = 2.0
_END_S = 20.0
_RESTART_S = 2.0

Waiting = Callable[[], None]
"""Called twice a second during a wait for a daemon; an exception from it ends the wait."""


class Daemon(Struct, frozen=True):
    """A running daemon, as seen by other processes."""

    folder: Path
    process: ProcessId

    def status(self) -> dict[str, object]:
        """Its own status. Raises `NotFoundError` when it is dead."""
        return self._ask("status")

    def end_startup(self) -> None:
        """Report that training has begun: the startup and its record are complete."""
        self._ask("began")

    def detach(self, *, force: bool) -> bool:
        """Unmount lazily and stop prefetching; the daemon ends when its files are unused. Returns whether it has ended.

        The kernel uses a layer's files for a moment after the unmount, and for as long as another mount namespace has a
        copy of the mount. Waits `_DETACH_S` for that; with `force` the daemon is then ended anyway.
        """
        try:
            self._ask("leave")
        except (NotFoundError, TransientError):
            self.process.signal(signal.SIGTERM)
        if not self._has_ended(time.monotonic() + _DETACH_S) and force:
            self.stop(timeout_s=_END_S, force=True)
        return not self.process.alive

    def stop(
        self, *, timeout_s: float = 30.0, force: bool = False, waiting: Waiting = lambda: None
    ) -> dict[str, object]:
        """Unmount, finish pending writes, and end the daemon; returns its report of the writes.

        Raises `PermanentError` while its files are in use, unless `force`: then programs that use them get errors. A
        daemon that has not ended after `timeout_s` is killed. An exception from `waiting` only ends the wait.
        """
        deadline = time.monotonic() + timeout_s
        reply: dict[str, object] = {}
        try:
            reply = self._ask("end" if force else "stop", timeout_s, waiting)
        except (NotFoundError, TransientError):
            self.process.signal(signal.SIGTERM)
        if not self._has_ended(deadline):
            _LOG.warning("mount daemon %d of %s did not end in %g s: killed", self.process.pid, self.folder, timeout_s)
            self.process.signal(signal.SIGKILL)
            reply = reply or {"lost": [f"what was not sent within {timeout_s:g} s"]}
            if not self._has_ended(time.monotonic() + 1.0):
                raise TransientError(f"the mount daemon {self.process.pid} does not end")
        return reply

    def _ask(self, request: str, timeout_s: float = 5.0, waiting: Waiting = lambda: None) -> dict[str, object]:
        if request != "status" and self.process.alive:
            # If it was stopped (SIGSTOP), it could neither unmount nor send what was written. The group also
            # has the process that serves for a supervisor (`recovery`).
            with contextlib.suppress(OSError):
                os.killpg(os.getpgid(self.process.pid), signal.SIGCONT)
        until = time.monotonic() + _RESTART_S
        while True:
            try:
                return control.send_request(self.folder, request, timeout_s=timeout_s, waiting=waiting)
            except NotFoundError:  # also between the death of a serving process and its restart (`recovery`)
                if not self.process.alive or time.monotonic() > until:
                    raise
                time.sleep(0.02)

    def _has_ended(self, deadline: float) -> bool:
        while self.process.alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True


def start_daemon(spec: DaemonSpec, *, deadline_s: float = 30.0, waiting: Waiting = lambda: None) -> Daemon:
    """Start a daemon; its files are readable when this returns.

    Raises what its `open` or the mount raised, or `TransientError` when it does not serve within `deadline_s`. On any
    error the daemon is gone, but a mount that it had just made may remain.
    """
    (spec.folder / FILES).mkdir(parents=True, exist_ok=True)
    spec.folder.chmod(0o700)
    ready, report = os.pipe2(os.O_CLOEXEC)
    lifeline: tuple[int, int] | None = os.pipe2(os.O_CLOEXEC) if spec.lifeline else None
    try:
        middle = os.fork()
        if middle == 0:
            _daemonize(spec, report, None if lifeline is None else lifeline[0], deadline_s)
    finally:
        os.close(report)
        if lifeline is not None:
            # The write end stays open: the daemon reads end-of-file when this process ends, however it ends.
            os.close(lifeline[0])
    with os.fdopen(ready, "rb", buffering=0) as pipe:
        # The intermediate child exits at once: the daemon is adopted by init, so that this process need not reap it.
        end_child(middle, deadline_s, kill=False)
        process: ProcessId | None = None
        try:
            for reply in json_lines(pipe.fileno(), time.monotonic() + deadline_s, waiting):
                if "pid" in reply:
                    process = ProcessId.of(reply["pid"])
                elif "error" in reply:
                    raise from_message(reply)
                elif process is not None:
                    _LOG.info("mount daemon %d serves %s", process.pid, spec.at or spec.folder / FILES)
                    return Daemon(spec.folder, process)
            raise PermanentError(f"the mount daemon died before it served; see {spec.folder / LOG}")
        except BaseException as error:
            if lifeline is not None:
                os.close(lifeline[1])
            if process is not None:  # one that has not reported its pid yet finds the pipe closed, and ends
                process.signal(signal.SIGKILL)
                Daemon(spec.folder, process)._has_ended(time.monotonic() + _GRACE_S)
            if isinstance(error, TimeoutError):
                message = f"the mount daemon did not serve within {deadline_s:g} s; see {spec.folder / LOG}"
                raise TransientError(message) from None
            raise


def _daemonize(spec: DaemonSpec, report: int, lifeline: int | None, deadline_s: float) -> NoReturn:
    """In the first child: start a session and fork again, so that the daemon has no parent and no terminal."""
    try:
        from bootseer.mounts.recovery import serve_with_restarts
        from bootseer.mounts.serve import serve

        os.setsid()
        if os.fork() > 0:
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        Path("/proc/self/comm").write_text(_NAME)
        # If the parent is killed while this hangs, nothing else would end it. `serve` cancels the timer.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, deadline_s + _GRACE_S)
        send_line(report, {"pid": os.getpid()})
        drop_descriptors(spec.folder / LOG, lambda number: number not in (report, lifeline))
        with contextlib.suppress(OSError):  # a file system without locks
            # Below /tmp, systemd-tmpfiles deletes what is older than ten days, unless its folder is locked.
            try_flock(os.open(spec.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), shared=True)
        os.chdir("/")
        os.umask(0o077)
        os._exit((serve if spec.reopen is None else serve_with_restarts)(spec, report, lifeline))
    except BaseException as error:  # must not continue in the parent's code
        send_line(report, as_message(error))
    os._exit(1)


def open_peers(on_problem: Callable[[str], None]) -> PeerGroup | None:
    """The other nodes of this process's job as origins of blocks; None without peers."""
    if not os.environ.get("BOOTSEER_PEERS_DIR"):
        return None
    # Imported here: most starts have no peers, and the import takes milliseconds.
    from bootseer.peers.origins import PeerGroup

    return PeerGroup.of_environment(on_problem)

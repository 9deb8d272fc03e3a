"""The main loop of a mount daemon: open, mount, report, answer control requests, end.

The main thread waits for control requests, signals, the unmount and the end of the recording; FUSE requests and
fetching have their own threads. Runs in the process that `daemon` forked and never returns to its caller's code.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from bootseer import __version__, logs
from bootseer.errors import BootseerError, PermanentError, as_message
from bootseer.fuse.session import Session
from bootseer.mounts import control
from bootseer.mounts.control import FILES, LOG
from bootseer.mounts.process import readable, send_line

OnError = Callable[[str], None]
_SWITCH_INTERVAL_S = 0.0005
"""How long the thread that answers the kernel may wait for another thread to release the interpreter lock."""
_OOM_SCORE = "-500"
"""Lowers the risk that the OOM killer chooses the daemon, whose death fails all readers of an image."""
_BUSY_S = 2.0
"""The kernel releases files a moment after their last use, so an unmount that fails with EBUSY is retried this long."""
_HAND_OVER_S = 10.0
"""How long shutdown waits for the record to be handed over; afterwards it is lost."""
_LOG = logs.logger(__name__)


class Recorder(Protocol):
    """Records the block needs of a startup."""

    def end(self) -> None:
        """The startup is over: no later need belongs to it."""

    def close(self) -> None:
        """Hand the record over."""


class Served:
    """What the daemon serves, with the resources for it: the result of `DaemonSpec.open` in the daemon."""

    recorder: Recorder | None = None

    def mount(self, target: Path, label: str, on_error: OnError, device: int | None) -> Session:
        """Mount on a folder, with a label for the mount table and a callback for errors. With the FUSE descriptor of a
        mount whose daemon died, take over that mount."""
        raise NotImplementedError

    def status(self) -> dict[str, object]:
        """Figures for `status`."""
        return {}

    def run_background(self) -> None:
        """Called on its own thread once the mount answers: load the hot set, prefetch, stream the rest."""

    def finish_writes(self) -> dict[str, object]:
        """Called when the mount is gone, before `close`: finish pending writes. Returns figures."""
        return {}

    def end_startup(self) -> None:
        """Called when the end of the startup is reported."""

    def stop_prefetch(self) -> None:
        """Called on a lazy unmount: from now on blocks are fetched on demand only."""

    def close(self) -> None:
        """Stop all work."""


class DaemonSpec(Struct, frozen=True):
    """What a daemon serves, and how."""

    folder: Path
    """Its own folder, 0700: the mount point `files`, the socket `control`, the file `log`."""
    open: Callable[[OnError], Served]
    """Called in the daemon: opens stores, cache and fetcher. The argument logs a line."""
    label: str = "bootseer"
    """Shown in the mount table."""
    window_s: float = 120.0
    """The record ends after so many seconds, unless the end of the startup is reported earlier."""
    at: Path | None = None
    """Where to mount instead of `files`: for users that cannot mount anything on top of it."""
    lifeline: bool = False
    """Whether the daemon ends with the process that started it, however that ends."""
    reopen: Callable[[OnError], Served] | None = None
    """`open` for a restarted daemon (see `recovery`); None: no restarts, the mount ends with the daemon."""


def serve(
    spec: DaemonSpec,
    report: int,
    lifeline: int | None,
    *,
    on_mounted: Callable[[int], None] = lambda device: None,
    device: int | None = None,
    restarts: int = 0,
) -> int:
    """Serve until the end; the exit code of the process. `report` is the pipe to the parent, closed after the report.

    `on_mounted` gets the FUSE descriptor of the mount. With `restarts` above 0, `device` is the descriptor of the dead
    daemon, and no parent waits for a report.
    """
    logs.set_up(os.environ, file=spec.folder / LOG)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    protect_from_oom()
    # Each open file takes some descriptors; the usual soft limit of 1024 is for programs that use select().
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        wake = catch_signals()
        served = (spec.reopen if restarts and spec.reopen else spec.open)(_LOG.warning)
        try:
            listener = control.listen(spec.folder)
            session = served.mount(spec.at or spec.folder / FILES, spec.label, _LOG.warning, device)
            on_mounted(session.device)
        except BaseException:
            served.close()
            raise
    except BaseException as error:
        _LOG.error("cannot serve: %s: %s", type(error).__name__, error)
        if not restarts:
            send_line(report, as_message(error))
        return 1
    _LOG.info("serves %s at %s, BootSeer %s", spec.label, spec.at or spec.folder / FILES, __version__)
    daemon = _MountDaemon(spec, served, session, listener, restarts, served.recorder)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if not restarts:
        is_connected = send_line(report, {"ready": True})
        os.close(report)
        if not is_connected:
            _LOG.warning("the process that started this one was killed")
            daemon.unmount(force=True)
            return daemon.finish()
    try:
        return daemon.run(wake, lifeline)
    except Exception:  # the parent does not wait for a report any more
        _LOG.exception("ended by an error")
        return 1


def protect_from_oom() -> None:
    """Make this process an unlikely choice of the kernel's OOM killer."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def catch_signals() -> socket.socket:
    """Redirect signals to the returned socket, as bytes, so that no handler interrupts other code."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    # A closed terminal or a broken pipe must not end a daemon that other processes read from.
    for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    return ours


@dataclass
class _MountDaemon:
    """State of a serving daemon; owned by the main thread."""

    _spec: DaemonSpec
    _served: Served
    _session: Session
    _listener: socket.socket
    _restarts: int
    _recorder: Recorder | None
    """None also when the record has ended."""
    _started: float = field(default_factory=time.monotonic)
    _stopping: bool = False
    _detached: bool = False
    _write_result: control.Answer | None = None
    _handing_over: threading.Thread | None = None

    def run(self, wake: socket.socket, lifeline: int | None) -> int:
        unmounted, notify_unmounted = socket.socketpair()
        threading.Thread(target=self._wait_unmounted, args=(notify_unmounted,), name="watch", daemon=True).start()
        threading.Thread(target=self._run_background, name="background", daemon=True).start()
        watched: list[socket.socket | int] = [
            wake, unmounted, self._listener, *([] if lifeline is None else [lifeline])
        ]  # fmt: skip
        while not self._stopping:
            left_s = self._spec.window_s - (time.monotonic() - self._started)
            ready = readable(watched, None if self._recorder is None else max(0.0, left_s))
            if unmounted in ready:
                break
            if wake in ready or (lifeline is not None and lifeline in ready):
                _LOG.warning("stopped by a signal" if wake in ready else "the process that started this one has ended")
                self.unmount(force=True)
                break
            if self._listener in ready:
                control.serve_one(self._listener, self._handle)
            if time.monotonic() - self._started >= self._spec.window_s:
                self._end_recording()
        return self.finish()

    def _wait_unmounted(self, notify: socket.socket) -> None:
        self._session.wait()
        notify.send(b"x")

    def _run_background(self) -> None:
        try:
            self._served.run_background()
        except BootseerError as error:
            _LOG.warning("%s", error)
        except Exception as error:  # without prefetching the mount works, only slower
            _LOG.warning("cannot prefetch: %s: %s", type(error).__name__, error)

    def _handle(self, request: str) -> control.Answer:
        match request:
            case "status":
                return self._status()
            case "began":
                self._served.end_startup()
                self._end_recording()
                return {"recording": False}
            case "leave":  # unmount lazily: the daemon ends with the last user of the mount
                if not self._detached:
                    self._detached = True
                    self._served.stop_prefetch()
                    self._end_recording()
                    self._session.detach()
                return {"left": True}
            case "stop" | "end":
                self.unmount(force=request == "end")
                self._stopping = True
                return {"stopped": True, **self._finish_writes()}
        raise PermanentError(f"unknown request {request[:64]!r}")

    def _status(self) -> control.Answer:
        return {
            "pid": os.getpid(),
            "restarts": self._restarts,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "recording": self._recorder is not None,
            "waiting": self._session.num_pending,
            "requests": self._session.requests,
            "reads": self._session.reads,
            "read_bytes": self._session.read_bytes,
            **self._served.status(),
        }

    def _end_recording(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        recorder.end()
        # Merging accesses a store: control requests are answered meanwhile.
        thread = threading.Thread(target=self._hand_over, args=(recorder,), name="hand over", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread can be started: the record is lost
            _LOG.warning("the record was not handed over: %s", error)
        else:
            self._handing_over = thread

    def _hand_over(self, recorder: Recorder) -> None:
        try:
            recorder.close()
        except Exception as error:  # the record is lost; the mount goes on
            _LOG.warning("the record was not handed over: %s: %s", type(error).__name__, error)

    def unmount(self, *, force: bool) -> None:
        """Unmount, with retries while it is busy; after `_BUSY_S` by force, or raise `TransientError`."""
        if self._detached:  # remaining users get errors when this process ends
            return
        end = time.monotonic() + _BUSY_S
        while True:
            try:
                self._session.close()
                return
            except BootseerError as error:
                if time.monotonic() < end:
                    time.sleep(0.02)
                    continue
                if not force:
                    raise
                _LOG.warning("%s; its readers get errors from now on", error)
                break
        with contextlib.suppress(BootseerError):
            self._session.close(force=True)

    def _finish_writes(self) -> control.Answer:
        if self._write_result is None:
            try:
                self._write_result = self._served.finish_writes()
            except Exception as error:  # the process has to end in any case
                _LOG.warning("pending writes failed: %s: %s", type(error).__name__, error)
                self._write_result = {}
        return self._write_result

    def finish(self) -> int:
        self._end_recording()
        self._finish_writes()
        if self._handing_over is not None:  # it may use what is served
            self._handing_over.join(_HAND_OVER_S)
        self._served.close()
        with contextlib.suppress(OSError):
            (self._spec.folder / control.NAME).unlink()
        _LOG.info("ended")
        return 0

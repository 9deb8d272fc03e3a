"""The life of a mount daemon: open, mount, tell, answer questions, end.

The main thread waits for questions, signals, the end of the mount and the end of the startup; FUSE requests and
fetching have threads of their own. Runs in the process that `daemon` forked, and never returns to its caller's code.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bootseer import __version__, logs
from bootseer.errors import BootseerError, PermanentError
from bootseer.fuse.session import Session
from bootseer.mounts import control
from bootseer.mounts.control import FILES, LOG

OnError = Callable[[str], None]
_SWITCH_INTERVAL_S = 0.0005
"""The thread that answers the kernel waits at most so long for another one to let go of the interpreter."""
_OOM_SCORE = "-500"
"""The kernel's choice when memory runs out should be a process whose end does not break all readers of an image."""
_BUSY_S = 2.0
"""The kernel lets go of files a moment after their last use, so that "busy" counts only after a while."""
_HAND_OVER_S = 10.0
"""How long the end waits for the record to be handed over. It stays on the disk in any case."""
_LOG = logs.logger(__name__)


class Recorder(Protocol):
    """What writes down the needs of a startup."""

    def end(self) -> None:
        """The startup is over: no later need belongs to it."""

    def close(self) -> None:
        """Write what is left, and hand the record over."""


class Source(Protocol):
    """What the daemon's files come from."""

    def close(self) -> None:
        """Stop all work."""


Show = Callable[[Path, str, OnError, int | None], Session]
"""Mounts what is served: on a folder, with a label for the table of mounts, and a way to tell of faults. With the FUSE
descriptor of a mount whose daemon died it goes on answering there."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the daemon made for itself: nothing of it exists in the process that started it."""

    source: Source
    show: Show
    recorder: Recorder | None = None
    status: Callable[[], dict[str, object]] = dict
    """Figures for `status`."""
    begin: Callable[[], None] = lambda: None
    """Runs on a thread of its own once the mount answers: load the hot set, prefetch, stream the rest."""
    end: Callable[[], dict[str, object]] = dict
    """Runs when the mount is gone, before `source` is closed: finish what was written. Figures for the caller."""
    began: Callable[[], None] = lambda: None
    """Runs when the end of the startup is reported."""
    stop_prefetch: Callable[[], None] = lambda: None
    """Runs when the mount is left: nothing is fetched any more that no reader asks for."""


@dataclass(frozen=True, slots=True)
class DaemonSpec:
    """What a daemon is to do."""

    folder: Path
    """A folder of its own, 0700: the mount point `files`, the socket `control`, the file `log`."""
    open: Callable[[OnError], Served]
    """Runs in the daemon and opens stores, cache and fetcher; the callable takes lines for the log."""
    label: str = "bootseer"
    """Shown in the table of mounts."""
    window_s: float = 120.0
    """The record ends after so many seconds, unless the end of the startup is reported earlier."""
    at: Path | None = None
    """Where to mount instead of `files`: for users that cannot mount anything on top of it."""
    lifeline: bool = False
    """Whether the daemon ends when the process that started it does, however it ends."""
    reopen: Callable[[OnError], Served] | None = None
    """`open` for a daemon that takes the place of a killed one (see `recovery`); None: the mount ends with it."""


def serve(
    spec: DaemonSpec,
    report: int,
    lifeline: int | None,
    *,
    keep: Callable[[int], None] = lambda device: None,
    device: int | None = None,
    restarts: int = 0,
) -> int:
    """Serve until the end; the exit code of the process. `report` is the pipe to the parent, closed when it knows.

    `keep` gets the FUSE descriptor of the mount. After so many `restarts`, `device` is that of the daemon before, and
    nothing waits for a report.
    """
    logs.set_up(os.environ, file=spec.folder / LOG)
    log = _LOG.warning
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    protect_from_oom()
    # Each open file takes some, and the usual limit of 1024 is one for programs that use select.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        wake = catch_signals()
        served = (spec.reopen or spec.open)(log) if restarts else spec.open(log)
        try:
            listener = control.listen(spec.folder)
            mounted = served.show(spec.at or spec.folder / FILES, spec.label, log, device)
            keep(mounted.device)
        except BaseException:
            served.source.close()
            raise
    except BaseException as error:
        _LOG.error("cannot serve: %s: %s", type(error).__name__, error)
        if not restarts:
            report_error(report, error)
        return 1
    _LOG.info("serves %s at %s, BootSeer %s", spec.label, spec.at or spec.folder / FILES, __version__)
    life = _Life(spec, served, mounted, listener, log, restarts)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if not restarts:
        is_connected = tell(report, {"ready": True})
        os.close(report)
        if not is_connected:
            log("the process that started this one was killed")
            return life.end()
    return life.run(wake, lifeline)


def protect_from_oom() -> None:
    """Have the kernel rather kill others when memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def report_error(pipe: int, error: BaseException) -> None:
    """Tell the parent why there will be no mount."""
    own = isinstance(error, BootseerError)
    message = str(error) if own else f"{type(error).__name__}: {error}"
    tell(pipe, {"kind": type(error).__name__, "error": message})


def tell(pipe: int, message: dict[str, object]) -> bool:
    """Write a line to the process that waits for the daemon. False when it was killed meanwhile."""
    try:
        os.write(pipe, json.dumps(message).encode() + b"\n")
    except OSError:
        return False
    return True


def catch_signals() -> socket.socket:
    """Signals arrive as bytes on the returned socket, so that no handler interrupts anything."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.detach(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    # A terminal or a broken pipe must not end what others read from.
    for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    return ours


class _Life:
    """State of a serving daemon; all of it belongs to the main thread."""

    def __init__(
        self,
        spec: DaemonSpec,
        served: Served,
        mounted: Session,
        listener: socket.socket,
        log: OnError,
        restarts: int,
    ) -> None:
        self._spec = spec
        self._restarts = restarts
        self._served = served
        self._session = mounted
        self._listener = listener
        self._log = log
        self._started = time.monotonic()
        self._recording = served.recorder is not None
        self._stopping = False
        self._left = False
        self._ended: control.Answer | None = None
        self._handing_over: threading.Thread | None = None

    def run(self, wake: socket.socket, lifeline: int | None) -> int:
        ended, tell_ended = socket.socketpair()
        threading.Thread(target=self._watch, args=(tell_ended,), name="watch", daemon=True).start()
        threading.Thread(target=self._begin, name="begin", daemon=True).start()
        watched: list[socket.socket | int] = [wake, ended, self._listener, *([] if lifeline is None else [lifeline])]
        while not self._stopping:
            left = self._spec.window_s - (time.monotonic() - self._started) if self._recording else None
            readable = select.select(watched, [], [], None if left is None else max(0.0, left))[0]
            if ended in readable:
                break
            if wake in readable or (lifeline is not None and lifeline in readable):
                self._log("asked to end by a signal" if wake in readable else "the process that we serve has ended")
                self._unmount(force=True)
                break
            if self._listener in readable:
                control.serve_one(self._listener, self._answer)
            if self._recording and time.monotonic() - self._started >= self._spec.window_s:
                self._end_recording()
        return self._finish()

    def end(self) -> int:
        """Unmount whatever happens, and end."""
        self._unmount(force=True)
        return self._finish()

    def _watch(self, tell: socket.socket) -> None:
        self._session.wait()
        tell.send(b"x")

    def _begin(self) -> None:
        try:
            self._served.begin()
        except BootseerError as error:
            self._log(str(error))
        except Exception as error:  # without a hot set the mount is slower, and works
            self._log(f"cannot prefetch: {type(error).__name__}: {error}")

    def _answer(self, question: str) -> control.Answer:
        match question:
            case "status":
                return self._status()
            case "began":
                self._served.began()
                self._end_recording()
                return {"recording": False}
            case "leave":
                self._leave()
                return {"left": True}
            case "stop":
                self._unmount(force=False)
                self._stopping = True
                return {"stopped": True, **self._end_service()}
            case "end":
                self._unmount(force=True)
                self._stopping = True
                return {"stopped": True, **self._end_service()}
        raise PermanentError(f"{question[:64]!r} is not a request that a mount daemon knows")

    def _status(self) -> control.Answer:
        return {
            "pid": os.getpid(),
            "restarts": self._restarts,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "recording": self._recording,
            "waiting": self._session.num_waiting,
            "requests": self._session.requests,
            "reads": self._session.reads,
            "read_bytes": self._session.read_bytes,
            **self._served.status(),
        }

    def _end_recording(self) -> None:
        recorder = self._served.recorder
        if not self._recording or recorder is None:
            return
        self._recording = False
        recorder.end()
        # Merging talks to a store: questions are answered meanwhile.
        thread = threading.Thread(target=self._hand_over, args=(recorder,), name="hand over", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no room for another thread; the record lies on the disk still
            self._log(f"the record was not handed over: {error}")
        else:
            self._handing_over = thread

    def _hand_over(self, recorder: Recorder) -> None:
        try:
            recorder.close()
        except Exception as error:  # the record lies on the disk still; the mount goes on
            self._log(f"the record was not handed over: {type(error).__name__}: {error}")

    def _leave(self) -> None:
        """Unmount lazily, and end with the last user of the mount."""
        if not self._left:
            self._left = True
            self._served.stop_prefetch()
            self._end_recording()
            self._session.leave()

    def _unmount(self, *, force: bool) -> None:
        """Unmount; after a moment's patience by force, or not at all."""
        if self._left:  # users that are left get errors when this process ends
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
                self._log(f"{error}; its readers get errors from now on")
                break
        with contextlib.suppress(BootseerError):
            self._session.close(force=True)

    def _end_service(self) -> control.Answer:
        """Finish what was written, once."""
        if self._ended is None:
            try:
                self._ended = self._served.end()
            except Exception as error:  # whatever is left undone, the process has to end
                self._log(f"ended badly: {type(error).__name__}: {error}")
                self._ended = {}
        return self._ended

    def _finish(self) -> int:
        self._end_recording()
        self._end_service()
        self._served.source.close()
        if self._handing_over is not None:
            self._handing_over.join(_HAND_OVER_S)
        with contextlib.suppress(OSError):
            (self._spec.folder / control.NAME).unlink()
        _LOG.info("ended")
        return 0

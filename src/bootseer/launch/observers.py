"""Threads that run beside the command: export, shipping to the service, detecting the begin of training.

Imported only when one of them is needed. The end of the run waits for them for a bounded time.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError, needs_extra
from bootseer.launch.supervise import EXIT_FLUSH_S, say
from bootseer.logs import logger
from bootseer.trace.tracer import TRAINING_BEGAN
from bootseer.units import plural

if TYPE_CHECKING:
    from bootseer.launch.session import RunEvents, Session
    from bootseer.trace.ship import Link


class Observers:
    """The threads; the event `ended` is set when the command has ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._threads: dict[threading.Thread, float] = {}

    def start(self, work: Callable[[threading.Event], None], *, within_s: float = EXIT_FLUSH_S) -> None:
        """Run `work(ended)` in a new thread, with signals blocked. `finish` waits for it, at most `within_s` seconds.

        Where no thread can be started there is only a message: the command runs already.
        """
        thread = threading.Thread(target=work, args=(self.ended,), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            say(f"the start is not watched to its end: {error}")
            return
        self._threads[thread] = within_s

    def finish(self) -> None:
        """Set `ended`, and wait for the threads."""
        self.ended.set()
        began_s = time.monotonic()
        for thread, within_s in self._threads.items():
            thread.join(max(began_s + within_s - time.monotonic(), 0))


def export_spool(run: RunEvents, endpoint: str, ended: threading.Event) -> None:
    """Export the run's own events to the collector until `ended` is set, then flush within two seconds. `endpoint`:
    empty for that of the OTEL variables. Never raises.

    Events are read from the spool, which keeps them whatever becomes of the export.
    """
    try:
        with needs_extra("otlp", "export to OTLP"):
            from bootseer.trace.otlp import OtlpExporter
        exporter = OtlpExporter(endpoint)
    except BootseerError as error:
        hint = getattr(error, "hint", "")
        say(f"no export: {error}{f' ({hint})' if hint else ''}")
        return
    tail = run.tail()
    has_ended = False
    while not has_ended:
        has_ended = ended.wait(_POLL_S)
        exporter.feed(tail.poll(last=has_ended))
    if not exporter.close():
        text = f" ({exporter.last_error})" if exporter.last_error else ""
        kept = f"the spool keeps the events: {run.folder}"
        say(f"{plural(exporter.lost, 'span')} did not reach the collector{text}; {kept}")


class Shipping:
    """Sends the spool to the service while the command runs. The end of the run waits for it only where other processes
    would end with it: the rest is sent by a detached `bootseer ship`, for half a minute."""

    def __init__(self, folder: str, url: str, env: Mapping[str, str]) -> None:
        self._folder = folder
        self._url = url
        self._env = env
        self._link: Link | None = None
        self._done = threading.Event()
        self._is_pid_1 = os.getpid() == 1
        self._is_last = self._is_pid_1 or "SLURM_JOB_ID" in env
        """Whether processes of this one end with it: a container's, and those of a step of Slurm."""

    def watch(self, ended: threading.Event) -> None:
        """Send new events every few seconds until the command has ended. Never raises."""
        from bootseer.trace.ship import Link, Shipper, pause_s, target

        try:
            self._link = link = Link(target(self._url, self._env))
        except BootseerError as error:
            hint = getattr(error, "hint", "")
            say(f"nothing is sent to the service: {error}{f' ({hint})' if hint else ''}")
            self._done.set()
            return
        shipper = Shipper(self._folder, link)
        wait_s = random.uniform(0.0, 1.0)  # noqa: S311 - not all nodes in the same second
        while not ended.wait(wait_s):
            while not ended.is_set() and shipper.step():
                pass
            wait_s = pause_s(link)
        while self._is_last and not link.problem and shipper.step():
            pass
        shipper.close()
        self._done.set()

    def finish(self) -> None:
        """Send the rest once the last event is written; events that the service has refused are only reported."""
        link = self._link
        if link is None:  # after a short command: `watch` is still importing this, and then reads the address
            import bootseer.trace.ship  # noqa: F401
        if link is None or (self._is_last and not link.problem):
            self._done.wait(_LAST_S)
            link = self._link
        if link is not None and link.is_refused:
            say(f"the service refuses the events ({link.problem}); the spool keeps them: {self._folder}")
        elif not self._is_pid_1 and (link is not None or not self._done.is_set()):  # the address can be used
            words = [sys.executable, "-P", "-m", "bootseer", "ship", "--quiet", "--within", "30", "--to", self._url]
            # A lock or a pipe of the caller that it held open would make others wait for it. Not by `subprocess`: to
            # restore the signal mask, that runs Python after a fork, which is unsafe beside this process's threads.
            inherited = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - numbers, not paths
            to_null = [
                (os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0)
                for number in sorted({0, 1, 2, *filter(_is_inheritable, inherited)})
            ]
            with reporting_errors("the last events wait in the spool"):
                os.posix_spawn(sys.executable, [*words, self._folder], dict(self._env), file_actions=to_null,
                               setsid=True, setsigmask=[])  # fmt: skip


def _is_inheritable(number: int) -> bool:
    with suppress(OSError):  # the one that the list was read from
        return os.get_inheritable(number)
    return False


_LAST_S = 1.0
EXPORT_S = 30.0
"""Limit of `export_spool` after the command: a short one ends before OpenTelemetry is imported."""
COMMAND_ENDED = "end"
_CONNECT_S = 1.0
_POLL_S = 1.0


class StartReport:
    """Reports one part of a start once: when training began, or when the command ended."""

    def __init__(self, session: Session, record: Callable[[str], None]) -> None:
        """`record` writes the report; its argument is `TRAINING_BEGAN` or `COMMAND_ENDED`."""
        self._record = record
        self._lock = threading.Lock()
        self._is_sent = False
        session.reports.append(self)

    def send(self, until: str) -> None:
        """Report the start, with what ended it. Later calls only wait until that report is written: their callers
        unmount next, which would take away the daemon that the report asks for its figures."""
        with self._lock:
            if not self._is_sent:
                self._is_sent = True
                with reporting_errors("the record of the start is not complete"):
                    self._record(until)


class PodStart:
    """In a pod: tells the node's snapshotter that the start goes on, then that training has begun, so that it records
    what the whole start reads from the image (docs/kubernetes.md)."""

    def __init__(self, session: Session, path: str) -> None:
        """Connect to the socket that the node shares with the pod. Raises `OSError`."""
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(_CONNECT_S)
            self._socket.connect(path)
        except OSError:
            self.close()
            raise
        StartReport(session, self._record)

    def close(self) -> None:
        self._socket.close()

    def _record(self, until: str) -> None:
        if until == TRAINING_BEGAN:
            with suppress(OSError):  # the root is no image of the snapshotter, or that was restarted
                self._socket.send(b"1")


def report_when_training_begins(session: Session, ended: threading.Event) -> None:
    """Send the session's reports when the hook's `training_began` event is found, unless the command has ended."""
    tail = session.tail()
    while not ended.wait(_POLL_S):
        if any(event.stage == TRAINING_BEGAN for event in tail.poll()):
            for report in session.reports:
                report.send(TRAINING_BEGAN)
            return


@contextmanager
def reporting_errors(label: str) -> Iterator[None]:
    """Report an exception of the block and continue: the command has ended, and its exit code must be returned."""
    try:
        yield
    except Exception as error:
        logger(__name__).warning(label, exc_info=True)
        words = str(error) or type(error).__name__
        say(f"{label}: {words}")

"""What goes on beside the command: threads, the exporter, the look-out for the begin of training.

Imported only when there is something to do beside the command. The end of the run waits for it, but not long.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError
from bootseer.launch.supervise import say
from bootseer.logs import logger
from bootseer.trace.event import Event
from bootseer.trace.spool_tail import SpoolTail
from bootseer.trace.tracer import TRAINING_BEGAN
from bootseer.units import plural

if TYPE_CHECKING:
    from bootseer.launch.session import Session
    from bootseer.trace.ship import Link


class Observers:
    """Threads beside the command; the event `ended` tells them that it is over."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._loaded: list[threading.Event] = []

    def start(
        self,
        work: Callable[[threading.Event], None],
        *,
        awaited: bool = True,
        load: Callable[[], object] = lambda: None,
    ) -> None:
        """Run `load()` and `work(ended)` in a thread of its own. Signals are blocked in it, as they are in ours. One
        that is not `awaited` ends with the process."""
        loaded = threading.Event()

        def run() -> None:
            try:
                load()
            finally:
                loaded.set()
            work(self.ended)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        if awaited:
            self._threads.append(thread)
            self._loaded.append(loaded)

    def finish(self, timeout_s: float) -> bool:
        """Tell all threads that the command is over, and wait for them together no longer than this; whether all have
        ended. What a thread loads first is not of this time: a short command is over before a library is imported."""
        self.ended.set()
        deadline = time.monotonic() + _LOAD_S
        for loaded in self._loaded:
            loaded.wait(max(deadline - time.monotonic(), 0))
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)


def load_exporter() -> None:
    """Import what sends spans: it takes longer than all the rest of `bootseer run`. Where it is not installed,
    `export_spool` says so."""
    with suppress(ImportError):
        from bootseer.trace import otlp_wire  # noqa: F401


def export_spool(
    folder: str,
    owns: Callable[[Event], bool],
    endpoint: str | None,
    ended: threading.Event,
    say: Callable[[str], None],
) -> None:
    """Feed the run's own events to the collector until `ended` is set, then flush within two seconds. Never raises.

    The spool is the source: what the collector does not take now is still there later.
    """
    from bootseer.trace.otlp import CLOSE_S, OtlpExporter

    try:
        exporter = OtlpExporter(endpoint)
    except BootseerError as error:
        hint = getattr(error, "hint", "")
        say(f"no export: {error}{f' ({hint})' if hint else ''}")
        return
    tail = SpoolTail(folder)
    over = False
    while not over:
        over = ended.wait(_LOOK_EVERY_S)
        exporter.feed(filter(owns, tail.poll(last=over)))
    if not exporter.close(CLOSE_S):
        text = f" ({exporter.last_error})" if exporter.last_error else ""
        say(f"{plural(exporter.lost, 'span')} did not reach the collector{text}; the spool keeps the events: {folder}")


class Shipping:
    """Sends the spool to the service while the command runs. The end of the run waits for nothing of it: what is left
    then is sent by a process of its own, for half a minute."""

    def __init__(self, folder: str, url: str, env: Mapping[str, str]) -> None:
        self._folder = folder
        self._url = url
        self._env = env
        self._link: Link | None = None
        self._cannot = False
        self._done = threading.Event()

    def watch(self, ended: threading.Event) -> None:
        """Send what is new every few seconds until the command has ended. Never raises."""
        from bootseer.trace.ship import Link, Shipper, pause_s, target

        try:
            self._link = link = Link(target(self._url, self._env))
        except BootseerError as error:
            hint = getattr(error, "hint", "")
            self._cannot = True
            say(f"nothing is sent to the service: {error}{f' ({hint})' if hint else ''}")
            return
        shipper = Shipper(self._folder, link)
        wait_s = random.uniform(0.0, 1.0)  # noqa: S311 - not all nodes in the same second
        while not ended.wait(wait_s):
            while not ended.is_set() and shipper.step():
                pass
            wait_s = pause_s(link)
        if os.getpid() == 1 and link.last_s is not None:
            while shipper.step():
                pass
        shipper.close()
        self._done.set()

    def finish(self) -> None:
        """The last event is written. What the service has refused before is not sent again: its reason is said."""
        link = self._link
        if self._cannot:
            return
        if link is not None and link.is_refused:
            say(f"the service refuses the events ({link.problem}); the spool keeps them: {self._folder}")
        elif os.getpid() == 1:  # a container ends with us, and its spool may
            self._done.wait(_LAST_S if link is not None and link.last_s is not None else 0)
        else:
            words = [sys.executable, "-m", "bootseer", "ship", "--quiet", "--within", "30", "--to", self._url]
            nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
            with harmless("the last events wait in the spool"):
                os.posix_spawn(sys.executable, [*words, self._folder], dict(self._env), file_actions=nowhere,
                               setsid=True, setsigmask=[])  # fmt: skip


_LAST_S = 1.0
_LOAD_S = 30.0
ENDED = "end"
_LOOK_EVERY_S = 1.0


class StartEnd:
    """One start's. `watch` runs in a thread beside the command, `tell` in any."""

    def __init__(self, session: Session | None, record: Callable[[str], None]) -> None:
        """`record` keeps what is known of the start; it gets what ended it: `TRAINING_BEGAN` or `ENDED`."""
        self._session = session
        self._record = record
        self._told = threading.Lock()  # taken once: the start is reported once

    def watch(self, ended: threading.Event) -> None:
        """Look for the hook's word that training has begun, until the command has ended."""
        session = self._session
        if session is None:
            return
        tail = SpoolTail(session.folder)
        while not ended.wait(_LOOK_EVERY_S):
            if any(event.stage == TRAINING_BEGAN and session.owns(event) for event in tail.poll()):
                self.tell(TRAINING_BEGAN)
                return

    def tell(self, until: str) -> None:
        """The start is over, by this. Nothing happens the second time."""
        if self._told.acquire(blocking=False):
            with harmless("the record of the start is not complete"):
                self._record(until)


@contextmanager
def harmless(label: str) -> Iterator[None]:
    """Say what goes wrong in the block, and go on: the command has ended, and its exit code is what counts."""
    try:
        yield
    except Exception as error:  # see above
        logger(__name__).warning(label, exc_info=True)
        words = str(error) or type(error).__name__
        say(f"{label}: {words}")

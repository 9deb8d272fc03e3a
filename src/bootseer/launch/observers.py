"""What goes on beside the command: threads, the exporter, the look-out for the begin of training.

Imported only when there is something to do beside the command. The end of the run waits for it, but not long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class Observers:
    """Threads beside the command; the event `ended` tells them that it is over."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[threading.Event], None]) -> None:
        """Run `work(ended)` in a thread of its own. Signals are blocked in it, as they are in ours."""
        thread = threading.Thread(target=work, args=(self.ended,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def finish(self, timeout_s: float) -> None:
        """Tell all threads that the command is over, and wait for them together no longer than this."""
        self.ended.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))


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
    from bootseer.trace.otlp import CLOSE_S, OtlpExporter  # takes longer than all the rest of `bootseer run`

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
        why = f" ({exporter.last_error})" if exporter.last_error else ""
        say(f"{plural(exporter.lost, 'span')} did not reach the collector{why}; the spool keeps the events: {folder}")


ENDED = "end"
_LOOK_EVERY_S = 1.0


class StartEnd:
    """One start's. `watch` runs in a thread beside the command, `tell` in any."""

    def __init__(self, session: Session | None, record: Callable[[str], None]) -> None:
        """`record` keeps what is known of the start; it gets what ended it: `TRAINING_BEGAN` or `ENDED`."""
        self._session = session
        self._record = record
        self._told = threading.Lock()  # taken once: the start is told of once

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
def harmless(what: str) -> Iterator[None]:
    """Say what goes wrong in the block, and go on: the command has ended, and its exit code is what counts."""
    try:
        yield
    except Exception as error:  # see above
        logger(__name__).warning(what, exc_info=True)
        words = str(error) or type(error).__name__
        say(f"{what}: {words}")

"""The end of a start: training began, or the command ended without. What the start cost is told then, once.

Nothing that goes wrong from here on may change how the command ends: it is said, and that is all. Used by
`environment_stage` and `image_stage`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bootseer.launch.session import Session
from bootseer.launch.supervise import say
from bootseer.trace.otlp_tail import SpoolTail
from bootseer.trace.tracer import TRAINING_BEGAN

ENDED = "end"
_LOOK_EVERY_S = 1.0


class StartEnd:
    """One start's. `watch` runs in a thread beside the command, `tell` in any."""

    def __init__(self, session: Session | None, record: Callable[[str], None]) -> None:
        """`record` keeps what is known of the start; it gets what ended it: `TRAINING_BEGAN` or `ENDED`."""
        self._session = session
        self._record = record
        self._told = threading.Lock()  # held by whoever tells of the start: it is told once

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
        words = str(error) or type(error).__name__
        say(f"{what}: {words}")

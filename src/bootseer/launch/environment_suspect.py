"""A command that died right behind a restore: is the snapshot why? Called by `environment_stage`.

    environment_quarantine      it is suspected now: the next start makes it anew

Evidence is an import that failed in one of the command's processes (the hook tells), or a fault of the processor before
training began: code that was built for another one.
"""

from __future__ import annotations

import contextlib
import signal
import time

from bootseer.artifact.child import breaks_forks, run_in_child
from bootseer.env.document import EnvironmentDocument
from bootseer.env.life.local import Local
from bootseer.env.life.quarantine import Quarantine
from bootseer.errors import BootseerError
from bootseer.launch.environment_task import Task
from bootseer.launch.supervise import say
from bootseer.store.open import open_store
from bootseer.trace.event import INSTANT, Event
from bootseer.trace.otlp_tail import SpoolTail
from bootseer.trace.tracer import TRAINING_BEGAN

EVENT = "environment_quarantine"
IMPORT_FAILED = "import_failed"
_SOON_S = 60.0
_FAULTS = {128 + number: number.name for number in (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS)}


def suspect(task: Task, document: EnvironmentDocument, code: int, seconds: float) -> None:
    """Mark the snapshot, if there is evidence. The command had this exit code after so many seconds."""
    session = task.session
    if seconds > _SOON_S or session is None:
        return
    events = [event for event in SpoolTail(session.folder).poll(last=True) if session.owns(event)]
    if any(event.stage == TRAINING_BEGAN for event in events):
        return
    why = _why(events, code)
    if not why:
        return
    try:
        _mark(task, document, why)
    except BootseerError as error:
        say(f"the environment's snapshot was not marked as suspected: {error}")
        return
    session.tracer.emit(EVENT, INSTANT, parent=session.span, attrs={"key": document.key, "why": why})


def _why(events: list[Event], code: int) -> str:
    for event in events:
        if event.stage == IMPORT_FAILED:
            module, message = (str(event.attrs.get(name) or "") for name in ("module", "message"))
            return f"an import failed ({module or 'unknown'}: {message})" if message else f"import {module} failed"
    return f"the command died by {_FAULTS[code]}" if code in _FAULTS else ""


def _mark(task: Task, document: EnvironmentDocument, why: str) -> None:
    def mark() -> None:
        with contextlib.closing(open_store(task.store_uri, plain_http=task.wanted.plain_http)) as store:
            quarantine = Quarantine(store, Local(task.wanted.cache, say).store, say)
            if quarantine.mark(document, task.node, why, time.time()):
                what = "is suspected, the next start makes it anew"
            else:
                what = "is not at fault: made anew it was the same"
            say(f"{why}: the environment's snapshot {document.key[:12]} {what}")

    if breaks_forks(task.store_uri):
        run_in_child(mark)
    else:
        mark()

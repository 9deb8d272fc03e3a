"""Tell that a Python process ended by an import that failed: the mark of a broken environment.

Only what ended the process counts, and only before training began; an import that the program caught does not.
`path/sitecustomize.py` calls it at the end of an interpreter that an exception ended.
"""

from __future__ import annotations

import sys

from bootseer.trace.event import INSTANT
from bootseer.trace.tracer import process_tracer

_MAX_CHAIN = 8
_MAX_MESSAGE = 200


def report(error: BaseException) -> None:
    """Write the event if the exception, or one that it was raised from, is a failed import."""
    cause = _failed_import(error)
    if cause is None or _training_began():
        return
    tracer = process_tracer()
    if tracer is not None:
        attrs = {
            "module": getattr(cause, "name", None) or "",
            "message": f"{type(cause).__name__}: {cause}"[:_MAX_MESSAGE],
        }
        tracer.emit("import_failed", INSTANT, attrs=attrs)


def _failed_import(error: BaseException | None) -> BaseException | None:
    for _ in range(_MAX_CHAIN):
        if isinstance(error, ImportError):
            return error
        # What ctypes raises for a library that is missing, or that misses another one; it has no error number.
        if isinstance(error, OSError) and error.errno is None and ".so" in str(error):
            return error
        error = error.__cause__ if error is not None else None
    return None


def _training_began() -> bool:
    """Whether the hook saw training begin. It leaves after the first steps; what it leaves then says enough."""
    state = sys.modules.get("bootseer.hook.state")
    if state is None:
        return False
    active = state.active()
    return active is None or active.began

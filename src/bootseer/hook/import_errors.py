"""Report a Python process that a failed import ended, which is the sign of a broken environment.

Only an uncaught exception counts, and only before training began. `path/sitecustomize.py` calls this at exit.
"""

from __future__ import annotations

import sys

from bootseer.trace.event import INSTANT
from bootseer.trace.tracer import process_tracer

_MAX_CHAIN = 8
_MAX_MESSAGE = 200


def report(error: BaseException) -> None:
    """Write an event if the exception, or one in its chain of causes, is a failed import and training has not begun."""
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
        # ctypes raises OSError without an error number for a missing library, or one with missing dependencies.
        if isinstance(error, OSError) and error.errno is None and ".so" in str(error):
            return error
        error = error.__cause__ if error is not None else None
    return None


def _training_began() -> bool:
    """Whether the hook saw training begin. Its state is removed after the first steps, which also means yes."""
    state = sys.modules.get("bootseer.hook.state")
    if state is None:
        return False
    active = state.active()
    return active is None or active.began

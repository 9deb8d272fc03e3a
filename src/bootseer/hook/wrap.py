"""Put a marking function in the place of a public one, and take it away again.

The original runs exactly as it was called; what we do before and after it is guarded.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from bootseer.hook.state import active, compiling, guarded
from bootseer.trace.event import BEGIN, END, FAILED, OK

Describe = Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any]]
"""The attributes of a call, from its arguments."""


def replace(module: ModuleType, name: str, make: Callable[[Any], Any]) -> Callable[[], None] | None:
    """Put `make(original)` in the place of a function; the result puts the original back if ours still stands there."""
    original = getattr(module, name, None)
    if original is None or active() is None:
        return None
    ours = functools.wraps(original)(make(original))
    setattr(module, name, ours)

    def undo() -> None:
        for holder in (module, sys.modules.get(module.__name__.rpartition(".")[0])):
            if holder is not None and getattr(holder, name, None) is ours:
                setattr(holder, name, original)

    return undo


def spanned(stage: str, describe: Describe) -> Callable[..., Any]:
    """A wrapper maker: the original runs exactly as called, between a begin and an end event."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            state = active()
            if state is None or state.reading or compiling():
                return original(*args, **kwargs)
            span = _begin(stage, args, kwargs)
            outcome = FAILED
            state.reading += 1
            try:
                result = original(*args, **kwargs)
                outcome = OK
                return result
            finally:
                state.reading -= 1
                _end(stage, span, outcome)

        @guarded
        def _begin(stage: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
            state = active()
            return state.tracer.emit(stage, BEGIN, attrs=describe(args, kwargs)) if state is not None else ""

        return marked

    return make


@guarded
def _end(stage: str, span: str | None, outcome: str) -> None:
    state = active()
    if state is not None and span:
        state.tracer.emit(stage, END, span=span, outcome=outcome)

"""Replace functions by wrappers that mark calls, and restore them.

The original is called with unchanged arguments; errors of our code before and after it are caught (`guarded`).
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable, Mapping
from types import MethodType, ModuleType
from typing import Any

from bootseer.hook.state import active, compiling, guarded
from bootseer.trace.event import BEGIN, END, FAILED, OK

_MAX_MARKED = 1000
"""A program may read each of its samples with `torch.load`, and may never train."""
Describe = Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any]]
"""The attributes of a call, from its arguments."""


def replace(module: ModuleType | type | None, name: str, make: Callable[[Any], Any]) -> Callable[[], None] | None:
    """Replace a function by `make(original)` until marking ends. Returns a function that restores the original, unless
    ours was replaced meanwhile; None if there is no such function or marking is over."""
    original, state = getattr(module, name, None), active()
    if module is None or original is None or state is None:
        return None
    ours = functools.wraps(original)(make(original))
    setattr(module, name, ours)

    def undo() -> None:
        for holder in (module, sys.modules.get(module.__name__.rpartition(".")[0])):
            if holder is not None and getattr(holder, name, None) is ours:
                setattr(holder, name, original)

    state.undo.append(undo)
    return undo


def replace_decorated(function: Any, make: Callable[[Any], Any]) -> Callable[[], None] | None:
    """Make a decorated function's wrapper call `make(original)` until marking ends, so that the function object stays
    the same. Returns a function that restores it; None for an undecorated function, or if marking is over."""
    original: Any = getattr(function, "__wrapped__", None)
    state = active()
    cells = getattr(function, "__closure__", None) or ()
    cell = next((cell for cell in cells if original is not None and cell.cell_contents is original), None)
    if cell is None or state is None:
        return None
    cell.cell_contents = ours = functools.wraps(original)(make(original))

    def undo() -> None:
        if cell.cell_contents is ours:
            cell.cell_contents = original

    state.undo.append(undo)
    return undo


class Picklable:
    """A wrapper that is pickled as the name of the function it wraps.

    Data sets keep `torch.load` as their reader. A plain wrapper could no longer be sent to a worker after the original
    is restored, or, by cloudpickle, only to one that has BootSeer.
    """

    __name__: str
    __qualname__: str
    __wrapped__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __getattr__(self, name: str) -> Any:  # __defaults__, __code__, ...
        if name == "__wrapped__":
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)  # bind as a method, like a function

    def __reduce__(self) -> tuple[Any, ...]:
        return pkgutil.resolve_name, (f"{self.__module__}:{self.__qualname__}",)


def spanned(stage: str, describe: Describe, original: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that writes a begin and an end event around each call.

    A call within another marked one is not marked, nor are further ones after a thousand. `describe` returns the
    attributes of the begin event.
    """

    @guarded
    def begin(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        state = active()
        if state is None or state.nested or state.marked >= _MAX_MARKED or compiling():
            return ""
        state.marked += 1
        span = state.tracer.emit(stage, BEGIN, attrs=describe(args, kwargs))
        state.nested += 1
        return span

    def marked(*args: Any, **kwargs: Any) -> Any:
        span = begin(args, kwargs)
        if not span:
            return original(*args, **kwargs)
        outcome = FAILED
        try:
            result = original(*args, **kwargs)
            outcome = OK
            return result
        finally:
            _end(stage, span, outcome)

    return marked


@guarded
def _end(stage: str, span: str, outcome: str) -> None:
    state = active()
    if state is not None:
        state.nested -= 1
        state.tracer.emit(stage, END, span=span, outcome=outcome)

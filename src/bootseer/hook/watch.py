"""Tell the hook when a watched module has been imported, and how long other imports take, without changing them.

A finder at the head of `sys.meta_path` asks the finders behind it for the real spec and lends it a loader for the one
call in which the module's code runs; the module itself ends up with the loader and spec that it would have had.
Watched modules are few and known. Of all others only an outermost import by a plain source loader is timed.
Called by `path/sitecustomize.py` at the first import of torch, jax or safetensors; calls `hook.marks`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any

from bootseer.hook import marks
from bootseer.hook.state import active, begin, guarded
from bootseer.trace.identity import Identity
from bootseer.trace.sinks import FanOut
from bootseer.trace.tracer import Tracer, process_tracer

_after: dict[str, Callable[[ModuleType], None]] = {}
_running: list[str] = []
"""Imports in progress on the main thread, the outermost first."""


class _MarkingLoader(Loader):
    """Runs the real loader, then the mark for this module. All other questions go to the real loader."""

    loader: Any = None

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        spec.loader = self.loader
        module: ModuleType | None = self.loader.create_module(spec)
        spec.loader = self
        return module

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        marks.before_import(name)
        _running.append(name)
        started_ns = time.monotonic_ns()
        try:
            self.loader.exec_module(module)
        except BaseException:
            marks.after_import(name, failed=True)
            raise
        finally:
            _running.pop()
        marks.after_import(name)
        if not _running and name not in marks.FRAMEWORKS:
            marks.note_import(name, started_ns)
        after = _after.pop(name, None)
        if after is not None:
            guarded(after)(module)

    # A frame of the import system's: tracebacks leave those out, and warnings name the importing line behind them.
    exec_module.__code__ = exec_module.__code__.replace(co_filename="<frozen importlib._bootstrap>")


def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
    """The spec that the other finders give, with our loader lent to it; None lets them act as if we were not here."""
    watched = name in _after
    if not watched and not _is_outermost_import():
        return None
    for finder in sys.meta_path:
        if finder is not _Finder and hasattr(finder, "find_spec"):
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                known = hasattr(spec.loader, "exec_module") if watched else type(spec.loader) is SourceFileLoader
                if spec.loader is not None and known:
                    spec.loader = _MarkingLoader(spec.loader)
                return spec
    return None


def _is_outermost_import() -> bool:
    """Whether the main thread begins an import, as against asking for a spec or importing within an import."""
    if _running or active() is None or threading.get_ident() != threading.main_thread().ident:
        return False
    try:
        asking = sys._getframe(3)  # find_spec, then two frames of the import system
    except ValueError:  # a program that asks the finders itself, from its top level
        return False
    return asking.f_code.co_name == "_find_and_load_unlocked"


class _Finder:
    find_spec = staticmethod(find_spec)


def start(started_ns: int, warm: str = "", paths: Sequence[str] = ()) -> None:
    """Watch from now on. `started_ns` is the monotonic time at which this interpreter ran its first Python code.

    `warm` is the folder for records of what is imported, empty for none; `paths` is `sys.path` without the program's.
    """
    tracer = process_tracer()
    if tracer is None:
        return
    marks.start(tracer, started_ns)
    if warm:
        _record(warm, paths)
    if _Finder not in sys.meta_path:
        _after.update(marks.after_import_of())
        sys.meta_path.insert(0, _Finder)


def prepare() -> None:
    """In a warm parent: put the marks where they belong, for its copies, which call `start`. It tells nothing."""
    begin(Tracer(FanOut([]), Identity(), trace=""))
    _after.update(marks.after_import_of())
    sys.meta_path.insert(0, _Finder)


@guarded
def _record(folder: str, paths: Sequence[str]) -> None:
    import atexit

    from bootseer.hook.programs import Recorder

    state = active()
    if state is not None:
        state.recorder = recorder = Recorder(folder, paths)
        atexit.register(recorder.write)  # a program that does not train

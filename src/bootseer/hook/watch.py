"""Call the hook after the import of each watched module, and time other imports.

A finder at the head of `sys.meta_path` gets the real spec from the finders after it and replaces its loader while the
module's code runs; afterwards the module has its real loader and spec. Of modules that are not watched, only an
outermost import by a plain source loader is timed. Started by `path/sitecustomize.py` at the first import of torch, jax
or safetensors.
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
from bootseer.trace.event import FAILED, OK
from bootseer.trace.identity import Identity
from bootseer.trace.sinks import FanOut
from bootseer.trace.tracer import Tracer, process_tracer

_after: dict[str, Callable[[ModuleType], object]] = {}
_running: list[str] = []
"""Imports in progress on the main thread, the outermost first."""


class _MarkingLoader(Loader):
    """Runs the real loader, then the mark for this module. All other attributes are the real loader's."""

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
        span = marks.before_import(name)
        _running.append(name)
        started_ns = time.monotonic_ns()
        try:
            self.loader.exec_module(module)
        except BaseException:
            marks.after_import(name, span, FAILED)
            raise
        finally:
            _running.pop()
        marks.after_import(name, span, OK)
        if not _running and name not in marks.FRAMEWORKS:
            marks.note_import(name, started_ns)
        after = _after.pop(name, None)
        if after is not None:
            guarded(after)(module)

    # Disguised as a frame of the import system: these are removed from tracebacks and skipped by warnings.
    exec_module.__code__ = exec_module.__code__.replace(co_filename="<frozen importlib._bootstrap>")


def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
    """The spec of the other finders, with our loader in it; None leaves the import to them."""
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
    """Whether this call of a finder is an import by the main thread, not within another one. Programs may call finders
    directly, only for a spec."""
    if _running or active() is None or threading.get_ident() != threading.main_thread().ident:
        return False
    try:
        caller = sys._getframe(3)  # find_spec, then two frames of the import system
    except ValueError:  # called from the program's top level
        return False
    return caller.f_code.co_name == "_find_and_load_unlocked"


class _Finder:
    find_spec = staticmethod(find_spec)


def start(started_ns: int, warm: str = "", paths: Sequence[str] = (), stat: bytes = b"") -> None:
    """Start to watch imports. `started_ns` is the monotonic time at which this interpreter ran its first Python code,
    `stat` the content of `/proc/self/stat` then.

    `warm` is the folder for records of imports, empty: none; `paths` is `sys.path` without the program's folder.
    """
    tracer = process_tracer()
    if tracer is None:
        return
    marks.start(tracer, started_ns, stat)
    if warm:
        _record(warm, paths)
    if _Finder not in sys.meta_path:
        _after.update(marks.after_import_of())
        sys.meta_path.insert(0, _Finder)


def prepare() -> None:
    """In a process that imports for its copies, which then call `start`: install the marks. Writes no events itself."""
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
        atexit.register(recorder.write)  # for programs that do not train

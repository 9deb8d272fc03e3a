"""Find unused imports: modules of which no function ran before the first step, with import time and importer.

Only with `BOOTSEER_IMPORTS=1`, in the first rank of a node: inspecting all functions costs some 0.1 s. Whether a
function has run is read from the counters that CPython keeps in its code object in any case: 3.11 counts calls until it
specializes the code (`co_warmup`), later versions count in the code itself (`_co_code_adaptive`, PEP 659).
`sys.monitoring` (3.12) is no substitute: `torch.compile` traces its callbacks and breaks the graph (pytorch#158164).
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from bootseer.trace.event import INSTANT
from bootseer.trace.tracer import Tracer

_LEAST_NS = 20_000_000
_MAX_EVENTS = 10
_CO_WARMUP = 52
"""Offset of `co_warmup` in CPython 3.11's `PyCodeObject`."""


def _counts(code: CodeType) -> tuple[int, int]:
    """The counters that change when this code runs."""
    calls = ctypes.c_int16.from_address(id(code) + _CO_WARMUP).value if sys.version_info < (3, 12) else 0
    adapted: bytes = b"" if calls else code._co_code_adaptive  # type: ignore[attr-defined]
    return calls, hash(adapted)


def _has_counters() -> bool:
    """Whether this interpreter keeps such counters at the expected place."""

    def probe(values: list[int]) -> int:
        return len(values)

    try:
        before = _counts(probe.__code__)
        still = _counts(probe.__code__)
        probe([])
        return before == still != _counts(probe.__code__)
    except Exception:
        return False


def _functions(code: CodeType) -> Iterator[CodeType]:
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield one
            yield from _functions(one)


class Imports:
    """The imports of this process's main thread from Python files."""

    def __init__(self) -> None:
        self._own_ns: dict[str, int] = {}
        self._by: dict[str, tuple[str, str]] = {}
        """The importer of each module, and the program's own import that led to it; both are empty for the latter."""
        self._codes: dict[str, CodeType] = {}
        self._new: list[str] = []
        self._counts: dict[str, list[tuple[int, int]]] = {}
        self._running: list[tuple[str, int]] = []
        """Modules whose import is in progress, the outermost first, with the time that each spent importing others."""

    def watch(self) -> None:
        ours, main = self, threading.main_thread().ident

        def exec_module(self: SourceFileLoader, module: ModuleType) -> None:
            code: Any = self.get_code(module.__name__)
            if threading.get_ident() == main and code is not None:
                ours._run(module, code)
            else:
                exec(code, module.__dict__)  # noqa: S102 - as the loader itself

        # Disguised as frames of the import system, which are removed from tracebacks up to a frame of this name.
        for function in (exec_module, Imports._run):
            function.__code__ = function.__code__.replace(
                co_filename="<frozen importlib._bootstrap>", co_name="_call_with_frames_removed"
            )
        setattr(SourceFileLoader, "exec_module", exec_module)  # noqa: B010 - mypy takes it for a mistake

    def _run(self, module: ModuleType, code: CodeType) -> None:
        name, began_ns = module.__name__, time.monotonic_ns()
        self._by[name] = (self._running[-1][0], self._running[0][0]) if self._running else ("", "")
        self._running.append((name, 0))
        try:
            exec(code, module.__dict__)  # noqa: S102 - as the loader itself
        finally:
            took_ns = time.monotonic_ns() - began_ns
            self._own_ns[name] = took_ns - self._running.pop()[1]
            self._codes[name] = code
            self._new.append(name)
            if self._running:
                above, others_ns = self._running.pop()
                self._running.append((above, others_ns + took_ns))
            elif took_ns >= _LEAST_NS:
                self._note()

    def _note(self) -> None:
        """Called after an import statement of the program. Calls among its modules until then do not count as use."""
        for name in self._new:
            self._counts[name] = [_counts(one) for one in _functions(self._codes[name])]
        self._new.clear()

    def stop(self) -> None:
        if "exec_module" in vars(SourceFileLoader):
            del SourceFileLoader.exec_module

    def unused(self) -> list[tuple[str, float, tuple[str, str]]]:
        """The slowest unused packages and modules: name, seconds, and importer (see `_by`).

        A package without any used module is one entry; modules without functions are ignored.
        """
        took_ns: dict[str, int] = {}
        used, has_functions = set(), set()
        for name, own_ns in self._own_ns.items():
            functions = list(_functions(self._codes[name]))
            before = self._counts.get(name)
            ran = before is None or any(_counts(one) != was for one, was in zip(functions, before, strict=True))
            for package in _with_parents(name):
                took_ns[package] = took_ns.get(package, 0) + own_ns
                if functions:
                    has_functions.add(package)
                if functions and ran:
                    used.add(package)
        found = sorted((name for name in has_functions - used if took_ns[name] >= _LEAST_NS), key=len)
        whole: list[str] = []
        for name in found:
            if not any(parent in whole for parent in _with_parents(name)):
                whole.append(name)
        whole.sort(key=lambda name: -took_ns[name])
        return [(name, took_ns[name] / 1e9, self._importer(name)) for name in whole[:_MAX_EVENTS]]

    def _importer(self, package: str) -> tuple[str, str]:
        within = (by for name, by in self._by.items() if package in _with_parents(name))
        return next((by for by in within if package not in _with_parents(by[0])), ("", ""))


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def start() -> None:
    """Start to watch this process's imports, if the interpreter keeps the counters."""
    global _imports
    if _imports is None and _has_counters():
        _imports = Imports()
        _imports.watch()


def report_unused(tracer: Tracer) -> None:
    """Write an event for each import that was not used until now, and stop watching."""
    global _imports
    imports, _imports = _imports, None
    if imports is not None:
        imports.stop()
        for name, took_s, (by, within) in imports.unused():
            attrs = {"module": name, "import_s": round(took_s, 3), "by": by, "within": within}
            tracer.emit("unused_import", INSTANT, attrs=attrs)


_imports: Imports | None = None

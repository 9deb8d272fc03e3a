"""The imports of a warm parent: what they read, what they change, and why a process with them must not be copied."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import math
import os
import random
import signal
import sys
import time
import weakref
from typing import Any

from bootseer.hook import programs, watch
from bootseer.hook.warm_reads import RecordingEnviron, record_draws, record_folder, record_generators, record_names
from bootseer.io import proc

_CLOCK_NS = 20_000_000
"""Tolerance for file times, which are of the kernel's last tick."""
_CHANGE_OTHERS = (
    *("gevent", "eventlet", "ddtrace", "newrelic", "beartype.claw", "typeguard", "jaxtyping", "debugpy", "pydevd"),
    *("coverage", "viztracer", "scalene", "pyinstrument", "intel_extension_for_pytorch", "mpi4py.MPI"),
)
"""Modules that change how others are imported, or that use the network at import."""


class UnfitError(Exception):
    """This process must not be copied; the text is the reason."""

    def __init__(self, reason: str, module: str = "") -> None:
        """`module`: the module whose import is the reason."""
        super().__init__(reason)
        self.module = module


class Imports:
    """The imports of a warm parent, and their side effects."""

    def __init__(self, known: dict[str, Any], *, dumped: bool = False, recent_ns: int = 0) -> None:
        """`dumped`: this process is dumped, and restored on other nodes. There the files that were written since
        `recent_ns`, as by a setup, have other times."""
        self.unseeded: list[weakref.ref[random.Random]] = []
        self.variables = dict(os.environ)
        self.reads: dict[str, str] = {}
        self.folder, self.folder_readers = os.getcwd(), list[str]()
        """The working folder of the imports, and the modules that read it."""
        self.known = known
        self._cold = {str(name) for name in known.get("cold", {})}
        self._dumped, self._recent_ns = dumped, recent_ns
        self._contents: dict[str, bytes] = {}
        self._named: list[str] = []
        self._drawn: list[str] = []

    def load(self) -> None:
        """Import all modules of the record, and store what requests are compared with. Raises `UnfitError`."""
        watch.prepare()
        if name := _customization():
            raise UnfitError(f"the environment has a {name}, which Python runs at the start of each process")
        before = self.variables
        began_s, cpu_s = time.monotonic(), time.process_time()
        since_ns = time.time_ns() - _CLOCK_NS
        os.environ.__class__ = os.environb.__class__ = RecordingEnviron
        stop_recording = [
            record_draws(self._drawn),
            record_generators(self.unseeded),
            record_folder(self.folder_readers),
        ]
        if self._dumped:
            stop_recording.append(record_names(self._named))
        gc.disable()  # imports create hardly any garbage
        try:
            self._import(self.known["modules"])
        finally:
            gc.enable()
            for stop in stop_recording:
                stop()
            os.environ.__class__ = os.environb.__class__ = RecordingEnviron.__base__
        # A garbage collection in a copy, above all the one at exit, would write to each of these objects and so copy
        # their pages: 0.5 s of processor time for each rank of the demo.
        gc.freeze()
        self.took_s = time.monotonic() - began_s
        self.cpu_s = time.process_time() - cpu_s
        self.changed = {
            name: os.environ.get(name) for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)
        }
        self.reads = dict(RecordingEnviron.reads)
        if getattr(sys.modules.get("site"), "ENABLE_USER_SITE", None):
            self.reads.setdefault("HOME", "site")  # for a folder of modules, before this was recorded
        self._check()
        origins = (getattr(getattr(module, "__spec__", None), "origin", None) for module in list(sys.modules.values()))
        files = (path for path in origins if isinstance(path, str) and path.startswith("/"))
        self.files = [(path, _stamp(path, since_ns)) for path in files]
        # Imports look for optional packages, too. These folders change with an installation.
        folders = (entry for entry in sys.path if entry.endswith(("/site-packages", "/dist-packages")))
        self.files += [(folder, _stamp(folder)) for folder in folders]
        if self._dumped:
            recent = (path for path, stamp in self.files if stamp is not None and stamp[0] >= self._recent_ns)
            self._contents = {path: _digest(path) for path in recent}

    def _import(self, names: list[str]) -> None:
        for name in names:
            if name in sys.modules or any(name == one or name.startswith(f"{one}.") for one in self._cold):
                continue
            if any(name == one or name.startswith(f"{one}.") for one in _CHANGE_OTHERS):
                raise UnfitError(f"{name} is imported, which changes other modules", name)
            state = _state()
            # Importing a module also imports its packages. On failure, the outermost new package is left out next time.
            parts = name.split(".")
            above = (".".join(parts[:end]) for end in range(1, len(parts)))
            first = next((package for package in above if package not in sys.modules), name)
            with contextlib.suppress(Exception):  # the program raises it, too, or finds the module elsewhere
                importlib.import_module(name)
            if "*" in RecordingEnviron.reads:
                raise UnfitError(f"{RecordingEnviron.reads['*']}, which {name} imports, reads all variables", first)
            if self._drawn:
                raise UnfitError(f"the import of {name} draws random bytes, in {self._drawn[0]}", first)
            if self._named:
                raise UnfitError(f"{self._named[0]}, which {name} imports, reads the node's name", first)
            for what, value in _state().items():
                if state.get(what, value) != value:
                    raise UnfitError(f"the import of {name} changes {what}", first)

    def _check(self) -> None:
        changed = set(self.known["changed"]) - self.changed.keys()
        name = next((name for name in sorted(changed) if name in self.reads or programs.native(name)), "")
        if name:
            raise UnfitError(f"the program sets {name}, which imports read")
        if any(type(one).__module__.startswith("numpy.random") for one in _generators()):
            raise UnfitError("an import created a random generator of numpy")

    def files_differ(self) -> str:
        """Name a module's file, or a folder of packages, that has changed since the imports; empty if none has."""
        if self._dumped:
            return self._dumped_files_differ()
        changed = next((path for path, stamp in self.files if _stamp(path) != stamp), "")
        return f"{changed} has changed since the imports" if changed else ""

    def _dumped_files_differ(self) -> str:
        """`files_differ` for the first time after this process was restored.

        On other nodes inode numbers differ, and files that a setup had just written have other times in its snapshot:
        those are compared by content, and folders by their names.
        """
        now = [(path, _stamp(path)) for path, _ in self.files]
        for (path, then), (_, stamp) in zip(self.files, now, strict=True):
            content = self._contents.get(path)
            same = stamp is not None and _digest(path) == content if content else (stamp or ())[:2] == (then or ())[:2]
            if not same:
                return f"{path} has changed since the imports"
        self.files, self._dumped = now, False
        return ""


def _stamp(path: str, since_ns: float = math.inf) -> tuple[int, int, int] | None:
    """What changes with a file; None if it does not exist or has changed since this time."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if found.st_ctime_ns < since_ns else None


def _digest(path: str) -> bytes:
    import hashlib

    if os.path.isdir(path):
        text = repr(sorted(set(os.listdir(path)) - {"__pycache__"})).encode()
    else:
        with open(path, "rb") as file:
            text = file.read()
    return hashlib.blake2b(text).digest()


def _generators() -> list[Any]:
    numpy_random = sys.modules.get("numpy.random")
    own = getattr(getattr(numpy_random, "mtrand", None), "_rand", None)
    kinds = tuple(getattr(numpy_random, name, None) for name in ("RandomState", "Generator"))
    return [one for one in gc.get_objects() if type(one) in kinds and one is not own] if numpy_random else []


def _state() -> dict[str, Any]:
    """State that an import without side effects does not change. Entries missing before the import are not compared."""
    state: dict[str, Any] = {
        "the open files": proc.open_files(),
        "the current folder": os.getcwd(),
        "the state of random": hash(random.getstate()),
        "how signals are handled": [signal.getsignal(number) for number in signal.valid_signals()],
        "tracing": (sys.gettrace(), sys.getprofile()),
        "children": _children(),
    }
    mtrand: Any = sys.modules.get("numpy.random.mtrand")
    if hasattr(mtrand, "get_state"):
        state["the state of numpy.random"] = mtrand.get_state()[1].tobytes()
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "initial_seed") and hasattr(torch, "default_generator"):
        state["torch's seed"] = torch.initial_seed()
    return state


_DEVICES = ("/dev/nvidia", "/dev/kfd")


def _customization() -> str:
    """The name of the user's module that Python has run before the program, and would run in each rank with the rank's
    variables; empty without one. One in the standard library's folder is the distribution's, as on Ubuntu."""
    harmless = (os.path.join(os.path.dirname(os.path.abspath(__file__)), "path"), os.path.dirname(os.__file__))
    for name in ("sitecustomize", "usercustomize"):
        origin = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)
        if isinstance(origin, str) and os.path.dirname(origin) not in harmless:
            return name
    return ""


def unfit() -> str:
    """Why this process must not be copied now; empty if it may be."""
    maps = proc.read("self", "maps").decode(errors="replace")
    # Not the driver's library: a CUDA build of torch maps libcuda.so when it is imported, and leaves it alone until the
    # first use of a device (`cuInit`), which opens the driver's device files.
    opened = [proc.link("self", f"fd/{number}") for number in proc.open_files()]
    if any(name in maps or any(path.startswith(name) for path in opened) for name in _DEVICES):
        return "a device's driver is in use"
    if any(words[1].startswith("rw") and words[1].endswith("s") for words in map(str.split, maps.splitlines())):
        return "memory is shared with other processes"
    if len(os.listdir("/proc/self/task")) > 1:
        _end_pools(maps)
    tasks = os.listdir("/proc/self/task")
    if len(tasks) > 1:
        return f"an import started threads ({len(tasks) - 1} besides the first)"
    if _children():
        return "an import started a process"
    return ""


def _children() -> bytes:
    return proc.read("self", f"task/{os.getpid()}/children").strip()


def _end_pools(maps: str) -> None:
    """End OpenBLAS's idle threads, as its own fork handler does. The next matrix product starts them again."""
    for path in {line.split()[-1] for line in maps.splitlines() if "openblas" in line.rpartition("/")[2]}:
        end = getattr(ctypes.CDLL(path), "blas_thread_shutdown_", None)
        if end is not None:
            end()
    until_s = time.monotonic() + 1.0
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < until_s:  # joined, but still listed
        time.sleep(0.001)

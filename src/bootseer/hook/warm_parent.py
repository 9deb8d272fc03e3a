"""The warm parent of one launcher: a process that has imported the modules of the launcher's programs and is forked for
each of them ("copies").

Run as a program by `warm_launcher`, with the launcher's environment: `warm_parent.py SOCKET FOLDER LAUNCHER`. A copy is
made by `clone(CLONE_PARENT)` and so is the launcher's child: exit codes, signals and `getppid` are as after fork and
exec. `warm_child` then sets in the copy what exec would have set. Before a copy runs its program, everything in which a
fresh process could differ is compared. At the first difference the copy ends, or none is made: the difference is the
answer, and the launcher starts the program by exec.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:  # modules in this folder have common names and would hide others
    del sys.path[0]

import contextlib
import ctypes
import gc
import importlib
import marshal
import math
import os
import random
import select
import signal
import socket
import time
import weakref
from typing import Any, NoReturn

from bootseer.hook import programs, warm_child, watch
from bootseer.hook.warm_reads import RecordingEnviron, record_draws, record_generators
from bootseer.io import proc
from bootseer.io.memory import available_bytes

_IDLE_S, _IDLE_RESTARTS_S = 1800.0, 86400.0
"""After this time without a request, the warm parent ends and frees its memory; with `--restarts`, which are requests
too, the second."""
_SHARE = 0.25
"""It also ends if its memory is more than this share of what is available."""
_LOOK_S = 10.0
_CLOCK_NS = 20_000_000
"""Tolerance for file times, which are of the kernel's last tick."""
_PR_SET_PDEATHSIG = 1
_SAME_STATUS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
_SAME_FILES = ("cgroup", "attr/current", "personality")
_SAME_LINKS = ("root", "exe", "ns/mnt", "ns/net", "ns/user", "ns/ipc", "ns/uts", "ns/cgroup", "ns/pid")
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

    def __init__(self, known: dict[str, Any]) -> None:
        self.unseeded: list[weakref.ref[random.Random]] = []
        self.variables = dict(os.environ)
        self.known = known
        self._cold = {str(name) for name in known.get("cold", {})}
        self._drawn: list[str] = []

    def load(self) -> None:
        """Import all modules of the record, and store what requests are compared with. Raises `UnfitError`."""
        watch.prepare()
        before = self.variables
        began_s, cpu_s = time.monotonic(), time.process_time()
        since_ns = time.time_ns() - _CLOCK_NS
        os.environ.__class__ = RecordingEnviron
        stop_recording = record_draws(self._drawn), record_generators(self.unseeded)
        gc.disable()  # imports create hardly any garbage
        try:
            self._import(self.known["modules"])
        finally:
            gc.enable()
            for stop in stop_recording:
                stop()
            os.environ.__class__ = RecordingEnviron.__base__
        # A garbage collection in a copy, above all the one at exit, would write to each of these objects and so copy
        # their pages: 0.5 s of processor time for each rank of the demo.
        gc.freeze()
        self.took_s = time.monotonic() - began_s
        self.cpu_s = time.process_time() - cpu_s
        self.changed = {
            name: os.environ.get(name) for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)
        }
        self.reads = dict(RecordingEnviron.reads)
        self._check()
        origins = (getattr(getattr(module, "__spec__", None), "origin", None) for module in list(sys.modules.values()))
        files = (path for path in origins if isinstance(path, str) and path.startswith("/"))
        self.files = [(path, _stamp(path, since_ns)) for path in files]
        # Imports look for optional packages, too. These folders change with an installation.
        folders = (entry for entry in sys.path if entry.endswith(("/site-packages", "/dist-packages")))
        self.files += [(folder, _stamp(folder)) for folder in folders]

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
            try:
                importlib.import_module(name)
            except Exception:  # noqa: S112 - the program's own import raises it, too, or finds the module elsewhere
                continue
            if "*" in RecordingEnviron.reads:
                raise UnfitError(f"{RecordingEnviron.reads['*']}, which {name} imports, reads all variables", first)
            if self._drawn:
                raise UnfitError(f"the import of {name} draws random bytes, in {self._drawn[0]}", first)
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
        changed = next((path for path, stamp in self.files if _stamp(path) != stamp), "")
        return f"{changed} has changed since the imports" if changed else ""


def _generators() -> list[Any]:
    numpy_random = sys.modules.get("numpy.random")
    own = getattr(getattr(numpy_random, "mtrand", None), "_rand", None)
    kinds = tuple(getattr(numpy_random, name, None) for name in ("RandomState", "Generator"))
    return [one for one in gc.get_objects() if type(one) in kinds and one is not own] if numpy_random else []


def _stamp(path: str, since_ns: float = math.inf) -> tuple[int, int, int] | None:
    """What changes with a file; None if it does not exist or has changed since this time."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if found.st_ctime_ns < since_ns else None


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


def unfit() -> str:
    """Why this process must not be copied now; empty if it may be."""
    maps = proc.read("self", "maps").decode(errors="replace")
    # Not the driver's library: a CUDA build of torch maps libcuda.so when it is imported, and leaves it alone until the
    # first use of a device (`cuInit`), which opens the driver's device files.
    opened = [_link(f"/proc/self/fd/{number}") for number in proc.open_files()]
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


def _privileges_differ(request: dict[str, Any], launcher: int) -> str:
    """Changes that the launcher made to its own process since its start and that copies cannot get."""
    ours, theirs = proc.status(), proc.status(launcher)
    changed = [name for name in _SAME_STATUS if ours.get(name) != theirs.get(name)]
    changed += [name for name in _SAME_FILES if proc.read("self", name) != proc.read(launcher, name)]
    changed += [name for name in _SAME_LINKS if _link(f"/proc/self/{name}") != _link(f"/proc/{launcher}/{name}")]
    if os.sched_getscheduler(0) != os.sched_getscheduler(launcher):
        changed.append("scheduling policy")
    if not request["session"] and (os.getsid(0), os.getpgid(0)) != (os.getsid(launcher), os.getpgid(launcher)):
        changed.append("session or process group")
    return f"the launcher has changed since its start: {', '.join(changed)}" if changed else ""


def _program_differs(imports: Imports, request: dict[str, Any], folder: str) -> str:
    """What could make the imports of the program, started in this folder, differ from ours."""
    env = {os.fsdecode(name): os.fsdecode(value) for name, value in request["env"].items()}
    name = programs.differing_variable(set(imports.reads), imports.variables, env)
    if name:
        return _variable_differs(imports, name)
    if folder != os.getcwd() and not all(map(os.path.isabs, env.get("PYTHONPATH", "/").split(":"))):
        return "PYTHONPATH has a relative folder, and the program starts in another folder than its launcher"
    parsed = programs.parse(request["argv"])
    is_module = parsed is not None and parsed[2][0] == "-m"
    if parsed is None or is_module:
        main = imports.known["main"]
    else:
        main = os.path.realpath(os.path.join(folder, parsed[2][0]))
    if not main.endswith(".py") or not os.path.isfile(main):
        return "the program is not a Python file"
    own = folder if is_module else os.path.dirname(main)
    digest, sets = programs.import_lines(main, own)
    if digest != imports.known["telling"]:
        return f"{os.path.basename(main)} imports other modules, or sets other variables, than when it was recorded"
    return _may_set(imports, main, sets) or programs.own_module(own)


def _launcher_differs(imports: Imports, request: dict[str, Any], folder: str) -> str:
    """The first difference between a copy that restarts the launcher in this folder and a launcher started by exec.

    Privileges are not compared: this process inherited the first launcher's. Variables that the launcher sets only for
    its programs may differ: libraries were loaded with them here, but a launcher does not compute.
    """
    env = {os.fsdecode(name): os.fsdecode(value) for name, value in request["env"].items()}
    set_here = imports.known["native"].keys()
    own = {name: value for name, value in imports.variables.items() if name not in set_here}
    theirs = {name: value for name, value in env.items() if name not in set_here}
    name = programs.differing_variable(set(imports.reads) - set_here, own, theirs)
    if name:
        return _variable_differs(imports, name)
    parsed = programs.parse(request["argv"])
    if parsed is None:
        return "the launcher is not a Python file or module"
    if parsed[2][0] == "-m":
        return ""
    main = os.path.realpath(os.path.join(folder, parsed[2][0]))
    sets = programs.import_lines(main, os.path.dirname(main))[1]
    return _may_set(imports, main, sets)


def _variable_differs(imports: Imports, name: str) -> str:
    reader = imports.reads.get(name)
    return f"the variable {name} has changed since the imports{f' ({reader} reads it)' if reader else ''}"


def _may_set(imports: Imports, main: str, words: set[str]) -> str:
    name = next((name for name in sorted(words) if name in imports.reads or programs.native(name)), "")
    return f"{os.path.basename(main)} may set {name}, which imports read" if name else ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def prepare(number: int) -> tuple[socket.socket, socket.socket | None]:
    """Close inherited descriptors, and let this process end with the launcher, or with the `bootseer run --restarts`
    that started it.

    Returns the sockets to both. Raises `OSError`, and `UnfitError` if the socket is another process's.
    """
    os.set_inheritable(number, False)
    end = socket.socket(fileno=number)
    if programs.peer(end) != (os.getppid(), os.getuid()):
        raise UnfitError("the socket is not the launcher's")
    for other in proc.open_files():
        if other > 2 and other != number:
            os.close(other)
    run = _run(os.getppid())
    if run is None:
        warm_child.libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory is short, the kernel kills this process first
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    return end, run


def _run(launcher: int) -> socket.socket | None:
    """A socket to `bootseer run --restarts`, if it restarts this launcher; else None."""
    above, run_id = proc.parent(launcher), os.environ.get("BOOTSEER_RUN_ID")
    if not run_id or not above:
        return None
    run = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        run.connect(programs.restart_address(run_id, above))
        if programs.peer(run) == (above, os.getuid()):
            return run
    except OSError:
        pass
    run.close()
    return None


class Server:
    """Answers requests of one launcher and, after its end, of the `bootseer run --restarts` that restarts it."""

    def __init__(self, end: socket.socket, run: socket.socket | None, imports: Imports) -> None:
        """Load `imports`."""
        self._end, self._run, self._imports = end, run, imports
        above = self._launcher = os.getppid()
        self._began = {
            "argv": [os.fsdecode(word) for word in proc.read(above, "cmdline").split(b"\0")[:-1]],
            "comm": proc.read(above, "comm").strip(),
        }
        """The launcher's command line and process name, for its restart."""
        self._reason, self._module = "", ""
        try:
            imports.load()
            self._cloner = warm_child.Cloner()
            self._reason = unfit()
        except UnfitError as error:
            self._reason, self._module = str(error), error.module
        except Exception as error:
            self._reason = f"{type(error).__name__}: {error}"

    def serve(self) -> Any:
        """Answer until launcher and `bootseer run` end. Returns only in copies: the function for their program."""
        ends = [end for end in (self._end, self._run) if end is not None]
        asked_s = time.monotonic()
        while True:
            ready = select.select(ends, [], [], _LOOK_S)[0]
            if not ready:
                self._end_if_surplus(time.monotonic() - asked_s)
                continue
            asked_s = time.monotonic()
            data, fds, *_ = socket.recv_fds(ready[0], 64, 253)
            if not data:
                ends.remove(ready[0])
                if self._run not in ends:
                    break
                self._end.close()
                continue
            program = self._answer(fds, again=ready[0] is self._run)
            if program is not None:
                return program
        os._exit(0)

    def _end_if_surplus(self, idle_s: float) -> None:
        longest_s = _IDLE_S if self._run is None else _IDLE_RESTARTS_S
        if idle_s >= longest_s:
            self._leave(f"no program was started for {longest_s / 3600:g} h")
        if int(proc.status().get("RssAnon", "0").split()[0]) << 10 > _SHARE * available_bytes():
            self._leave("memory was short")

    def _clone(self) -> int:
        try:
            return self._cloner.clone()
        except OSError as error:  # its own place may be the one that the program needs
            self._leave(f"it cannot be copied: {error.strerror}")

    def _leave(self, reason: str) -> NoReturn:
        """End; the next request gets the reason."""
        for end in (self._end, self._run):
            with contextlib.suppress(OSError, AttributeError):
                end.send(f"the warm parent has ended: {reason}".encode())  # type: ignore[union-attr]
        os._exit(0)

    def _answer(self, fds: list[int], *, again: bool) -> Any:
        """Answer one request. Returns None in the warm parent; in a copy, the function that runs its program.

        Program and files are compared while the copy prepares itself, which takes about 10 ms each for PyTorch's files;
        one that would differ answers with the difference and ends. A launcher's restart is compared before.
        """
        answer = socket.socket(fileno=fds[0])
        with open(fds[1], "rb") as file:
            file.seek(0)
            request = marshal.load(file)  # noqa: S302 - from our launcher
        if again:
            request.update(self._began)
            fds.insert(2, os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))  # the launcher's first folder
        imports, folder = self._imports, _link(f"/proc/self/fd/{fds[2]}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        copy = -1
        try:
            reason = self._reason or unfit()
            if again:
                reason = reason or _launcher_differs(imports, request, folder) or imports.files_differ()
            else:
                reason = reason or _privileges_differ(request, self._launcher)
            if not reason:
                copy = self._clone()
            if copy > 0 and not again:
                reason = _program_differs(imports, request, folder) or imports.files_differ()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if copy == 0:
            ours.close()
            return self._become(request, answer, theirs, fds[2:], again=again)
        if copy > 0:
            with contextlib.suppress(OSError):  # the copy has failed, and answered
                ours.send(os.fsencode(reason)[: warm_child.MAX_REASON] or warm_child.SAME)
            if again:  # the copy has a warm parent of its own: one at a time holds the memory
                os._exit(0)
        else:
            answer.send(marshal.dumps({"why_not": reason, "module": self._module, "unfit": bool(self._reason)}))
        for end in (answer, ours, theirs):
            end.close()
        for other in fds[2:]:
            os.close(other)
        return None

    def _become(
        self, request: dict[str, Any], answer: socket.socket, comparison: socket.socket, fds: list[int], *, again: bool
    ) -> Any:
        """In a copy: see `warm_child.become`.

        With `again` this copy becomes the launcher. It first forks its own warm parent, which is a child of it as any
        launcher's is, and serves in that fork.
        """
        imports, launcher, successor = self._imports, self._launcher, None
        facts = {"saved_s": imports.cpu_s, "import_s": imports.took_s, "modules": len(sys.modules)}
        # `become` closes descriptors by number. Socket objects that close theirs later could hit new files.
        self._end.close()
        if self._run is not None:
            self._run.close()
        if again:
            successor = self._fork_successor(request)
            launcher = os.getppid()
            if successor is None:
                for other in (answer.detach(), comparison.detach(), *fds):
                    os.close(other)
                return self.serve()
        return warm_child.become(imports, request, answer, comparison, fds, launcher, facts, successor)

    def _fork_successor(self, request: dict[str, Any]) -> socket.socket | None:
        """In a copy that becomes the launcher: fork its warm parent. Returns the socket to that; None in the fork."""
        # As `supervise.spawn` does for a command, and before the fork, which is to be in the launcher's group. The fork
        # does not inherit the death signal: it ends by its sockets (`serve`).
        warm_child.libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if request["group"] >= 0:
            os.setpgid(0, request["group"])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if pid := os.fork():
            theirs.close()
            from bootseer.hook import warm_launcher

            warm_launcher.inherited = pid, ours
            return ours
        ours.close()
        self._end, self._launcher = theirs, os.getppid()
        self._run = _run(self._launcher)
        return None


def serve(number: int, folder: str, launcher: str) -> Any:
    """Import, then answer until the launcher ends. Returns only in copies: the function that runs their program."""
    try:
        end, run = prepare(number)
        warm_child.capture_output()
    except (UnfitError, OSError):
        os._exit(1)
    return Server(end, run, Imports(programs.read_known(folder).get(launcher, {}))).serve()


if __name__ == "__main__":
    program = serve(int(sys.argv[1]), sys.argv[2], sys.argv[3])
    program()

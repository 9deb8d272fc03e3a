"""Give a copy of a warm parent the state that exec would have given it: descriptors, limits, signals, environment,
streams.

Differences remain: modules are already imported, all copies of one warm parent share addresses and hash seed, and two
frames precede the program's first one.
"""

from __future__ import annotations

import contextlib
import ctypes
import marshal
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bootseer.hook import programs
from bootseer.io import proc

if TYPE_CHECKING:
    from bootseer.hook.warm_imports import Imports

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_PR_SET_NAME = 15
_PR_GET_TID_ADDRESS = 40
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_CLONE3 = 435
# System call numbers of clone, get_robust_list and set_robust_list; whether clone's argument `tls` precedes `child_tid`
_CALLS = {"x86_64": (56, 274, 273, False), "aarch64": (220, 100, 99, True)}
SAME = b"same"
MAX_REASON = 1000
libc = ctypes.PyDLL(None, use_errno=True)  # calls hold the GIL, as a fork must
libc.syscall.restype = ctypes.c_long
libc.sbrk.restype = ctypes.c_void_p
_keep: list[Any] = []
"""Keeps the memory that the kernel reads for `/proc/PID/cmdline`, and the former `__main__`, from being freed."""


class Cloner:
    """Forks this process such that the child's parent is this process's parent."""

    def __init__(self) -> None:
        """Raises `NotImplementedError` where this is not possible."""
        calls = _CALLS.get(os.uname().machine)
        address, head, length = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        # The C library caches the thread id at this address. As in its `fork`, the kernel writes the child's there
        # (CLONE_CHILD_SETTID); else the C library would use the parent's id, for example as the owner of mutexes.
        result = libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)
        if calls is None or result or not address.value or not hasattr(ctypes.pythonapi, "PyOS_BeforeFork"):
            raise NotImplementedError("this kernel or processor is not supported")
        if ctypes.c_int.from_address(address.value).value != os.getpid():  # as musl: it keeps a lock there
            raise NotImplementedError("this C library is not supported")
        self._clone, get_robust, self._set_robust, tls_first = calls
        if libc.syscall(get_robust, 0, ctypes.byref(head), ctypes.byref(length)):
            raise NotImplementedError("this kernel is not supported")
        self._robust = head, length
        self._thread = address.value
        thread = ctypes.c_void_p(address.value)
        self._rest = (ctypes.c_void_p(0), thread) if tls_first else (thread, ctypes.c_void_p(0))

    def clone(self, pid: int = 0) -> int:
        """As `os.fork`, except for the parent. The C library's atfork handlers do not run; they are not needed in a
        process with a single thread. `pid`: the child's process id, for which CAP_CHECKPOINT_RESTORE is needed. Raises
        `OSError`."""
        flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
        null = ctypes.c_void_p(0)
        call: tuple[Any, ...] = (self._clone, ctypes.c_long(flags | signal.SIGCHLD), null, null, *self._rest)
        if pid:
            wanted = ctypes.c_int(pid)
            # `struct clone_args`: flags, pidfd, child_tid, parent_tid, exit_signal (that of this process), stack,
            # stack_size, tls, set_tid, set_tid_size, cgroup
            fields = (flags, 0, self._thread, 0, 0, 0, 0, 0, ctypes.addressof(wanted), 1, 0)
            args = (ctypes.c_uint64 * len(fields))(*fields)
            call = (_CLONE3, ctypes.byref(args), ctypes.c_size_t(ctypes.sizeof(args)))
        ctypes.pythonapi.PyOS_BeforeFork()
        pid = int(libc.syscall(*call))
        if pid == 0:
            libc.syscall(self._set_robust, *self._robust)
            ctypes.pythonapi.PyOS_AfterFork_Child()
        else:
            error = ctypes.get_errno()
            ctypes.pythonapi.PyOS_AfterFork_Parent()
            if pid < 0:
                raise OSError(error, os.strerror(error))
        return pid


def become(
    imports: Imports,
    request: dict[str, Any],
    answer: socket.socket,
    comparison: socket.socket,
    fds: Sequence[int],
    launcher: int,
    facts: dict[str, Any],
    successor: socket.socket | None,
) -> Callable[[], None]:
    """Prepare this copy, answer the launcher, and return the function that runs the program. On failure the process
    answers with the reason and ends.

    `comparison`: the warm parent sends `SAME` here, or in what this copy would differ from a fresh process.
    `successor`: the program is a restarted launcher, and this is the socket to its warm parent.
    """
    started_ns = time.monotonic_ns()
    try:
        output = captured_output()
        _kernel(
            request,
            fds,
            os.getpid() if successor is not None else launcher,
            [one for one in (answer, comparison, successor) if one is not None],
        )
        program = _interpreter(imports, request, launches=successor is not None)
        found = comparison.recv(MAX_REASON)
        comparison.close()
        if found != SAME:
            facts = {"why_not": os.fsdecode(found) or "the warm parent has ended"}
        answer.send(marshal.dumps({"pid": os.getpid(), **facts}))
        if found != SAME or answer.recv(2) != b"go":  # the launcher starts the program by exec
            os._exit(0)
    except BaseException as error:
        with contextlib.suppress(OSError):
            answer.send(marshal.dumps({"pid": os.getpid(), "why_not": f"{type(error).__name__}: {error}"}))
        os._exit(1)
    answer.close()
    # Not in a launcher, which imports only a part of what was imported here.
    for number, text in zip((1, 2), output, strict=True) if successor is None else ():
        with contextlib.suppress(OSError):
            os.write(number, text)
    hook = next((one for one in sys.meta_path if hasattr(one, "begin")), None)
    if hook is not None:  # it marks this process as started then
        with contextlib.suppress(Exception):
            hook.begin(started_ns)
    return program


def capture_output() -> None:
    """In the warm parent: redirect the imports' output to memory; each copy prints it."""
    for target in (1, 2):
        memory = os.memfd_create("bootseer-printed", os.MFD_CLOEXEC)
        os.dup2(memory, target)
        os.close(memory)


def captured_output() -> list[bytes]:
    """The imports' output on stdout and stderr."""
    found = []
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
        found.append(os.pread(number, 1 << 20, 0))
    return found


def _kernel(request: dict[str, Any], fds: Sequence[int], launcher: int, kept: Sequence[socket.socket]) -> None:
    """Set the process's kernel state: session, folder, limits, priorities, signals, descriptors. All other descriptors
    but those of `kept`, which get new numbers, are closed. Raises `OSError` and `ValueError`."""
    if request["session"]:
        os.setsid()
    if request["group"] >= 0:
        os.setpgid(0, request["group"])
    os.fchdir(fds[0])
    inherit(launcher)
    if request["umask"] >= 0:
        os.umask(request["umask"])
    with open(f"/proc/{os.getppid()}/oom_score_adj") as theirs, open("/proc/self/oom_score_adj", "r+") as ours:
        adjusted = theirs.read()
        if adjusted != ours.read():
            ours.write(adjusted)
    moved = _place(dict(zip(request["places"], fds[1:], strict=True)), [one.detach() for one in kept])
    for one, number in zip(kept, moved, strict=True):
        one.__init__(fileno=number)  # type: ignore[misc]
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])


def inherit(pid: int) -> None:
    """Take what a child of process `pid` would have inherited, and exec would have kept: limits, priorities, ignored
    signals. Raises `OSError` and `ValueError`."""
    status = proc.status(pid)
    os.umask(int(status["Umask"], 8))
    nice = os.getpriority(os.PRIO_PROCESS, pid)
    if nice != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    if os.sched_getaffinity(pid) != os.sched_getaffinity(0):
        os.sched_setaffinity(0, os.sched_getaffinity(pid))
    for name in (name for name in dir(resource) if name.startswith("RLIMIT_")):
        number = getattr(resource, name)
        limits = resource.prlimit(pid, number)
        if limits != resource.getrlimit(number):
            resource.setrlimit(number, limits)
    ignored = int(status["SigIgn"], 16)
    caught = int(proc.status()["SigCgt"], 16)
    numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    # Handlers of native code stay: PYTHONFAULTHANDLER and libraries install them in a fresh process too.
    native = {one for one in numbers if caught >> (one - 1) & 1 and not callable(signal.getsignal(one))}
    for number in numbers - native:
        is_ignored = bool(ignored >> (number - 1) & 1)
        if number in (signal.SIGPIPE, signal.SIGXFSZ):  # a starting Python ignores them
            signal.signal(number, signal.SIG_IGN)
        elif number == signal.SIGINT and not is_ignored:
            signal.signal(number, signal.default_int_handler)
        else:
            signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)


def _place(wanted: dict[int, int], kept: Sequence[int]) -> list[int]:
    """Move descriptors to their numbers in the program. Close all others but `kept`; returns the numbers of `kept`."""
    import fcntl

    high = max([*wanted, *wanted.values(), *kept], default=2) + 1
    moved = {place: fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, high) for place, number in wanted.items()}
    ours = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, high) for number in kept]
    for number in proc.open_files():
        if number not in (*moved.values(), *ours):
            os.close(number)
    for place, number in moved.items():
        os.dup2(number, place, inheritable=True)
        os.close(number)
    return ours


def _interpreter(imports: Imports, request: dict[str, Any], *, launches: bool) -> Callable[[], None]:
    """Set the state of a starting interpreter; returns what runs the program. Raises `ValueError` and `OSError`."""
    argv: list[str] = request["argv"]
    env: dict[bytes, bytes] = dict(request["env"])
    parsed = programs.parse(argv)
    if parsed is None:
        raise ValueError("neither a file nor a module")
    flags, _, rest = parsed
    with contextlib.suppress(Exception):
        _set_command_line([os.fsencode(word) for word in argv], env)
        if "comm" in request:
            libc.prctl(_PR_SET_NAME, ctypes.c_char_p(request["comm"]), 0, 0, 0)
    for name in os.environb.keys() - env.keys():
        del os.environb[name]
    for name, value in env.items():
        if os.environb.get(name) != value:
            os.environb[name] = value
    # Variables that imports have set. Not in a launcher, which would pass them on: its programs set them themselves.
    for variable, values in imports.changed.items() if not launches else ():
        if values is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = values
    sys.orig_argv[:] = argv
    _streams(unbuffered="-u" in flags or bool(env.get(b"PYTHONUNBUFFERED")))
    _reseed(imports)
    if rest[0] == "-m":
        if not sys.flags.safe_path:
            sys.path.insert(0, os.getcwd())
        sys.argv[:] = ["-m", *rest[2:]]
        return lambda: _run_module(rest[1])
    sys.argv[:] = rest
    path = os.path.join(os.getcwd(), rest[0])  # Python does not normalise it either
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    return lambda: _run_file(path)


def _reseed(imports: Imports) -> None:
    """Renew what must be random or unique in each process: random generators, thread id, keys and session ids."""
    for one in imports.unseeded:
        generator = one()
        if generator is not None:
            generator.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    threading = sys.modules.get("threading")
    if threading is not None:
        threading.main_thread()._set_native_id()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        setattr(process, "ORIGINAL_DIR", os.getcwd())  # noqa: B010 - mypy does not know it
        process.current_process()._config.pop("tempdir", None)  # the parent deletes it
        process.current_process()._config["authkey"] = process.AuthenticationString(os.urandom(32))
    hub = sys.modules.get("transformers.utils.hub")
    if hasattr(hub, "SESSION_ID"):
        setattr(hub, "SESSION_ID", os.urandom(16).hex())  # noqa: B010 - mypy does not know it


def _streams(*, unbuffered: bool) -> None:
    """Reinitialize the standard streams as a starting Python, but not as new objects: imports may refer to them."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)
            continue
        stream: Any = getattr(sys, f"__{name}__")
        encoding, errors = stream.encoding, stream.errors
        raw = unbuffered and mode == "w"
        binary: Any = open(number, f"{mode}b", 0 if raw else -1, closefd=False)  # noqa: SIM115
        (binary if raw else binary.raw).name = f"<{name}>"
        stream.__init__(
            binary,
            encoding=encoding,
            errors=errors,
            newline="\n" if mode == "w" else None,
            line_buffering=mode == "w" and not unbuffered and (number == 2 or os.isatty(number)),
            write_through=unbuffered,
        )
        stream.mode = mode


class _Map(ctypes.Structure):
    """`struct prctl_mm_map`."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk")),
        *((name, ctypes.c_uint64) for name in ("brk", "start_stack", "arg_start", "arg_end", "env_start", "env_end")),
        ("auxv", ctypes.c_void_p),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def _set_command_line(argv: Sequence[bytes], env: dict[bytes, bytes]) -> None:
    """Set the content of `/proc/PID/cmdline` and `environ` as exec would. Needs no privileges."""
    arguments = b"".join(word + b"\0" for word in argv)
    text = arguments + b"".join(name + b"=" + value + b"\0" for name, value in env.items())
    memory = ctypes.create_string_buffer(text, len(text))
    stat = [int(word) for word in proc.stat(os.getpid())[1:]]
    start = ctypes.addressof(memory)
    # Field numbers as in proc_pid_stat(5); `stat` starts with the fourth field.
    code, end_code, stack, data, end_data, brk = (stat[number - 4] for number in (26, 27, 28, 45, 46, 47))
    middle = start + len(arguments)
    ends = (start, middle, middle, start + len(text))
    new = _Map(code, end_code, data, end_data, brk, libc.sbrk(0), stack, *ends, None, 0, 0xFFFFFFFF)
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(new), ctypes.c_ulong(ctypes.sizeof(new)), 0) == 0:
        _keep.append(memory)


def _main() -> ModuleType:
    _keep.append(sys.modules["__main__"])
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    return main


def _run_module(name: str) -> None:
    import runpy

    _main()
    _run(lambda: runpy._run_module_as_main(name))  # type: ignore[attr-defined]


def _run_file(path: str) -> None:
    from importlib.machinery import SourceFileLoader

    main = _main()
    main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))

    def run() -> None:
        with open(path, "rb") as file:
            text = file.read()
        exec(compile(text, path, "exec", dont_inherit=True), main.__dict__)  # noqa: S102 - the program itself

    _run(run)


def _run(program: Callable[[], None]) -> None:
    """Run the program, and print an uncaught exception as the interpreter does, without our first two frames."""
    try:
        program()
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        for _ in range(2):
            trace = trace.tb_next if trace is not None else None
        error.__traceback__ = trace
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error, trace)
        sys.excepthook = lambda *_: None  # printed already; the interpreter still sets the exit code
        raise

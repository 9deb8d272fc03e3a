"""Share one import of torch between torchrun and its warm parent.

torchrun itself imports torch, as its ranks do, and two processes that import at the same time need two cores or twice
the time. So the launcher's process executes `warm_parent.py ... lead`, imports torch, forks the warm parent, which
imports the rest, and then runs the launcher's program as a copy of a warm parent does. It keeps its process id
throughout. If this is not certainly possible, the warm parent is started as a separate program; if it fails, the
launcher is executed again without a warm parent.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from bootseer.hook import programs

_LAUNCHERS = ("torchrun", "-m torch.distributed.run")
"""Launchers that import torch first and do not compute."""
_SHARED = "torch"


def may(launcher: str, known: Mapping[str, Any]) -> bool:
    """Whether this launcher can share its import of torch: it has no children, and its standard streams are open."""
    if launcher not in _LAUNCHERS or _SHARED not in known["modules"] or _SHARED in known.get("cold", {}):
        return False
    if not {0, 1, 2} <= set(programs.open_files()):
        return False
    with open(f"/proc/self/task/{os.getpid()}/children") as file:  # started by a shell before its exec of this program
        return not file.read().strip()


def begin(folder: str, launcher: str, known: Mapping[str, Any], started_ns: int) -> None:
    """Execute the warm parent's program in this process. Does not return; raises `OSError`."""
    with open("/proc/self/comm", "rb") as file:
        comm = file.read().rstrip(b"\n")
    request = {"argv": list(sys.orig_argv), "env": dict(os.environb), "comm": comm, "started_ns": started_ns}
    with open(os.memfd_create("bootseer-request", 0), "wb") as out:
        marshal.dump(request, out)
        out.flush()
        command, env = programs.parent_command(known)
        os.execve(command[0], [*command, str(out.fileno()), folder, launcher, "lead"], env)


def lead(number: int, folder: str, launcher: str) -> Any:
    """Import torch and fork the warm parent. Returns the function that runs the launcher's program, or, in copies of
    the warm parent, their program."""
    from bootseer.hook import warm_parent

    with open(number, "rb") as file:
        file.seek(0)
        request = marshal.load(file)  # noqa: S302 - from this process, before its exec
    known: dict[str, Any] = {}
    kept = [os.dup(1), os.dup(2)]
    pid, began_ns = 0, time.monotonic_ns()
    try:
        known = programs.read_known(folder)[launcher]
        warm_parent.capture_output()
        imports = warm_parent.Imports(known)
        imports.load([_SHARED])
        reason = warm_parent.unfit()
        if reason:
            raise warm_parent.UnfitError(reason)
        ended_ns = time.monotonic_ns()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid:
            theirs.close()
            program = _become(imports, request, kept)
            _mark(request["started_ns"], (pid, ours), began_ns, ended_ns)
            return program
    except Exception as error:
        _execute_without(known, request, pid, kept, error)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ours.close()
    try:
        end, run = warm_parent.prepare(theirs.detach())
    except (warm_parent.UnfitError, OSError):
        os._exit(1)
    return warm_parent.Server(end, run, imports, request).serve()


def _become(imports: Any, request: dict[str, Any], kept: list[int]) -> Callable[[], None]:
    from bootseer.hook import warm_child

    output = warm_child.captured_output()
    for target, number in zip((1, 2), kept, strict=True):
        os.dup2(number, target)
    program = warm_child.interpreter(imports, request, launches=False)
    with open("/proc/self/cmdline", "rb") as file:
        if file.read() != b"".join(os.fsencode(word) + b"\0" for word in request["argv"]):
            raise OSError("the kernel does not allow a process to change its command line")
    for number in kept:
        os.close(number)
    warm_child.write_output(output)
    return program


def _mark(started_ns: int, parent: tuple[int, socket.socket], began_ns: int, ended_ns: int) -> None:
    from bootseer.hook import marks, warm_child, warm_launcher

    warm_launcher.inherited = parent
    with contextlib.suppress(Exception):
        warm_child.mark(started_ns)
        marks.imported_before(_SHARED, began_ns, ended_ns)


def _execute_without(
    known: Mapping[str, Any], request: dict[str, Any], pid: int, kept: list[int], error: Exception
) -> None:
    """Execute the launcher again, without a warm parent. Because of the event, the next start does not try it again."""
    from bootseer.hook import warm_launcher

    module = getattr(error, "module", None)
    reason = f"{type(error).__name__}: {error}" if module is None else str(error)
    warm_launcher.emit({"program": known.get("program", ""), "why_not": reason, "module": module or "", "unfit": True})
    if pid:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for target, number in zip((1, 2), kept, strict=True):
        os.dup2(number, target)
    env = {name: value for name, value in request["env"].items() if name != os.fsencode(programs.VARIABLE)}
    os.execve(sys.executable, request["argv"], env)

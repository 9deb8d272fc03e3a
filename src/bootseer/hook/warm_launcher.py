"""In a launcher (torchrun, accelerate, DeepSpeed): start its Python children as forks of a warm parent ("copies").

The warm parent is started as soon as the launcher runs and imports in parallel with it. Where `subprocess` would fork
and exec, the launcher instead sends the warm parent a request for a process that runs the same program and is a child
of the launcher, not of the warm parent (`warm_parent.py`). If anything differs from the record of an earlier start, or
is uncertain, the child is started by exec, with the reason in an event.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from _thread import allocate_lock
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bootseer.hook import programs
from bootseer.hook.state import STAGE, raised_by_signal
from bootseer.io import proc
from bootseer.trace.event import INSTANT
from bootseer.trace.tracer import process_tracer

if TYPE_CHECKING:
    import socket

EVENT = "warm_start"
_READY_S = 120.0
"""How long a request waits for the warm parent's imports. If it gave up earlier, eight ranks would import at the same
time and delay these."""
_LONG_S = 0.1
_MAX_FDS = 200
_NUM_ARGUMENTS = 23  # of `_posixsubprocess.fork_exec`, from Python 3.11 on


inherited: tuple[int, Any] | None = None
"""Process id of the warm parent and the socket to it, if this launcher is itself a copy of a warm parent."""


class RefusedError(Exception):
    """The process must be started by exec; the text is the reason."""

    def __init__(self, reason: str, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.facts = facts or {}


class LostError(RefusedError):
    """The warm parent has ended, or does not answer."""


class WarmLauncher:
    """The launcher's end of one warm parent."""

    def __init__(self, folder: str, launcher: str, known: Mapping[str, Any]) -> None:
        """Start the warm parent, or take over the inherited one. `known` is the record of the launcher's program, from
        `folder`. Raises `OSError`."""
        import socket

        self._program = str(known["program"])
        self._flags = list(known["flags"])
        self._lock = allocate_lock()
        self._undo: list[Callable[[], None]] = []
        self._pid = os.getpid()
        if inherited is not None:
            self.parent, self._end = inherited
            return
        self._end, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            other.set_inheritable(True)
            server = os.path.join(os.path.dirname(os.path.abspath(__file__)), programs.PARENT)
            argv = [sys.executable, *self._flags, server, str(other.fileno()), folder, launcher]
            # Its libraries are loaded with the launcher's variables and those that the launcher sets for its programs.
            self.parent = _spawn(argv, {**os.environ, **known["native"]})

    def watch(self) -> None:
        """Wrap all functions with which this process starts Python programs or waits for children."""
        import subprocess

        self._replace(subprocess, "_fork_exec", self._starting)
        self._replace(subprocess, "_USE_POSIX_SPAWN", lambda _: False)  # else it bypasses _fork_exec, often since 3.13
        for name, any_child in (
            ("wait", lambda args: True),
            ("wait3", lambda args: True),
            ("waitpid", lambda args: bool(args) and args[0] <= 0),
            ("wait4", lambda args: bool(args) and args[0] <= 0),
            ("waitid", lambda args: bool(args) and args[0] != os.P_PID and args[0] != getattr(os, "P_PIDFD", 3)),
        ):
            self._replace(os, name, self._waiting(any_child))

    def _replace(self, module: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(module, name, None)
        if original is not None:
            setattr(module, name, make(original))
            self._undo.append(lambda: setattr(module, name, original))

    def _waiting(self, any_child: Callable[[tuple[Any, ...]], bool]) -> Callable[[Any], Any]:
        """Wrap a wait function. A wait for any child could return the warm parent, which the launcher does not know, so
        the warm parent is ended before it."""

        def make(original: Any) -> Any:
            def wait(*args: Any, **kwargs: Any) -> Any:
                if os.getpid() == self._pid and any_child((*args, *kwargs.values())):
                    self.retire("the launcher waits for any child")
                return original(*args, **kwargs)

            return wait

        return make

    def _starting(self, original: Any) -> Any:
        def fork_exec(*args: Any) -> Any:
            parsed = None
            with contextlib.suppress(Exception):
                if os.getpid() == self._pid and len(args) == _NUM_ARGUMENTS and args[0][0] is not None:
                    argv = [os.fsdecode(word) for word in args[0]]
                    if argv[0] == sys.executable and args[1][0] == os.fsencode(sys.executable):
                        parsed = programs.parse(argv)
            if parsed is None or parsed[1] != self._program:
                return original(*args)
            began_s = time.monotonic()
            refusal: Mapping[str, Any] = {}
            try:
                with self._lock:
                    facts = self._ask(args, argv, parsed[0])
            except RefusedError as refused:
                reason, refusal = str(refused), refused.facts
            except Exception as error:  # no failure here may prevent the start of the program
                if raised_by_signal(error):
                    raise
                reason = f"{type(error).__name__}: {error}"
            else:
                pid = facts.pop("pid")
                emit({"program": self._program, "child": pid, **facts}, began_s)
                return pid
            emit({"program": self._program, **refusal, "why_not": reason[:300]}, began_s)
            return original(*args)

        return fork_exec

    def _ask(self, args: Sequence[Any], argv: Sequence[str], flags: Sequence[str]) -> dict[str, Any]:
        """Request a process with arguments of `_posixsubprocess.fork_exec`; as `ask`."""
        if self.parent == 0:
            raise RefusedError("the warm parent has ended")
        if list(flags) != self._flags:
            raise RefusedError(f"other flags of Python: {' '.join(flags) or 'none'}")
        request, fds = _request(args, argv)
        folder = os.open(args[4] or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return ask(self._end, request, [folder, *fds])
        except LostError:
            self.retire()
            raise
        finally:
            os.close(folder)

    def retire(self, reason: str = "") -> None:
        """End the warm parent and remove the wrappers."""
        pid, self.parent = self.parent, 0
        if not pid:
            return
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._end.close()
        proc.end_child(pid)
        if reason:
            emit({"program": self._program, "why_not": reason})


def ask(end: socket.socket, request: dict[str, Any], fds: Sequence[int], ready_s: float = _READY_S) -> dict[str, Any]:
    """Request a copy of the warm parent at `end`, with these descriptors; returns the warm parent's figures, and the
    copy's process id as `pid`. Raises `RefusedError`, `OSError`, and what `marshal` raises for a damaged answer."""
    import marshal
    import select
    import socket

    if len(fds) > _MAX_FDS:
        raise RefusedError("the launcher passes too many open files on")
    with contextlib.ExitStack() as opened:
        text = os.memfd_create("bootseer-request", os.MFD_CLOEXEC)
        opened.callback(os.close, text)
        with open(text, "wb", closefd=False) as file:
            marshal.dump(request, file)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        opened.callback(ours.close)
        try:
            socket.send_fds(end, [b"start"], [theirs.fileno(), text, *fds])
        except OSError as error:
            raise _lost(end, "the warm parent has ended") from error
        finally:
            theirs.close()
        poll = select.poll()
        poll.register(ours, select.POLLIN)
        if not poll.poll(1000 * ready_s):
            raise LostError(f"the warm parent did not answer within {ready_s:.0f} s", {"late": True})
        answer = ours.recv(65536)
        if not answer:
            raise _lost(end, "the warm parent ended before it answered")
        facts: dict[str, Any] = marshal.loads(answer)  # noqa: S302 - from our own process
        if "why_not" in facts:
            if pid := facts.pop("pid", 0):  # the copy failed and has ended
                os.waitpid(pid, 0)
            raise RefusedError(str(facts.pop("why_not")), facts)
        ours.send(b"go")
        return facts


def _lost(end: socket.socket, otherwise: str) -> LostError:
    """For a warm parent that has ended: with the reason, if it has sent one."""
    from socket import MSG_DONTWAIT

    with contextlib.suppress(OSError):
        return LostError(os.fsdecode(end.recv(1000, MSG_DONTWAIT)) or otherwise)
    return LostError(otherwise)


def _spawn(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Start a program with all signals blocked: none must end it, or a copy of it that is not set up yet."""
    pid = os.fork()  # `posix_spawn` cannot block the two signals that the C library reserves
    if pid == 0:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            os.execve(argv[0], list(argv), dict(env))
        finally:
            os._exit(127)
    return pid


def _request(args: Sequence[Any], argv: Sequence[str]) -> tuple[dict[str, Any], list[int]]:
    """The request for arguments of `_posixsubprocess.fork_exec`, and descriptors to send. Raises `RefusedError`."""
    _, _, close_fds, keep, _, env_list, stdin, _, _, stdout, _, stderr, _, errors, _, session = args[:16]
    group, gid, gids, uid, umask, before = args[16:22]
    if before is not None or (gid, gids, uid) != (None, None, None):
        raise RefusedError("the launcher changes the child before exec (preexec_fn, user, group)")
    existing = set(proc.open_files())
    wanted = {place: number if number >= 0 else place for place, number in enumerate((stdin, stdout, stderr))}
    others = keep if close_fds else (number for number in existing if os.get_inheritable(number))
    wanted.update({number: number for number in others if number > 2 and number != errors})
    wanted = {place: number for place, number in wanted.items() if number in existing}
    env = os.environb if env_list is None else dict(item.partition(b"=")[::2] for item in env_list)
    request = {
        "argv": list(argv),
        "env": dict(env),
        "places": list(wanted),
        "session": bool(session),
        "group": group,
        "umask": umask,
        "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    }
    return request, list(wanted.values())


def emit(attrs: Mapping[str, Any], began_s: float = 0.0) -> None:
    """Write the event; also a stage if the wait since `began_s` was long: the warm parent was still importing."""
    with contextlib.suppress(Exception):
        tracer = process_tracer()
        if tracer is None:
            return
        took_s = time.monotonic() - began_s if began_s else 0.0
        tracer.emit(EVENT, INSTANT, attrs={**attrs, "took_s": took_s})
        if took_s >= _LONG_S:
            tracer.emit_ended(f"{STAGE}warm_parent", int(began_s * 1e9))


def start(folder: str) -> None:
    """Start the warm parent of this process, if earlier starts recorded it as a launcher. Raises any error."""
    own = programs.parse(sys.orig_argv)
    if own is None:
        return
    known = programs.read_known(folder).get(own[1])
    if known is not None and not known.get("never"):
        WarmLauncher(folder, own[1], known).watch()

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
import marshal
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from bootseer.hook import programs, warm_child
from bootseer.hook.warm_imports import Imports, UnfitError, unfit
from bootseer.io import proc
from bootseer.io.memory import available_bytes

_IDLE_S, _IDLE_RESTARTS_S = 1800.0, 86400.0
"""After this time without a request, the warm parent ends and frees its memory; with `--restarts`, which are requests
too, the second."""
_SHARE = 0.25
"""It also ends if its memory is more than this share of what is available."""
_LOOK_S = 10.0
_PR_SET_PDEATHSIG = 1
_TRIES = 10
_SAME_STATUS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
_SAME_FILES = ("cgroup", "attr/current", "personality")
_SAME_LINKS = ("root", "exe", "ns/mnt", "ns/net", "ns/user", "ns/ipc", "ns/uts", "ns/cgroup", "ns/pid")


def _rights_differ(other: int) -> list[str]:
    """In which rights, and settings that copies cannot get, this process differs from another one."""
    ours, theirs = proc.status(), proc.status(other)
    changed = [name for name in _SAME_STATUS if ours.get(name) != theirs.get(name)]
    changed += [name for name in _SAME_FILES if proc.read("self", name) != proc.read(other, name)]
    if os.sched_getscheduler(0) != os.sched_getscheduler(other):
        changed.append("scheduling policy")
    # The C library reads it when a program starts: threads get a stack of this size.
    if resource.getrlimit(resource.RLIMIT_STACK)[0] != resource.prlimit(other, resource.RLIMIT_STACK)[0]:
        changed.append("stack size")
    return changed


def _privileges_differ(request: dict[str, Any], launcher: int) -> str:
    """Changes that the launcher made to its own process since its start and that copies cannot get."""
    changed = _rights_differ(launcher)
    changed += [name for name in _SAME_LINKS if proc.link("self", name) != proc.link(launcher, name)]
    if not request["session"] and (os.getsid(0), os.getpgid(0)) != (os.getsid(launcher), os.getpgid(launcher)):
        changed.append("session or process group")
    return f"the launcher has changed since its start: {', '.join(changed)}" if changed else ""


def _program_differs(imports: Imports, request: dict[str, Any], folder: str) -> str:
    """What could make the imports of the program, started in this folder, differ from ours."""
    env = {os.fsdecode(name): os.fsdecode(value) for name, value in request["env"].items()}
    name = programs.differing_variable(set(imports.reads), imports.variables, env)
    if name:
        return _variable_differs(imports, name)
    if reason := _folder_differs(imports, folder, env):
        return reason
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
    if reason := _folder_differs(imports, folder, env):
        return reason
    parsed = programs.parse(request["argv"])
    if parsed is None:
        return "the launcher is not a Python file or module"
    if parsed[2][0] == "-m":
        return programs.own_module(folder)
    main = os.path.realpath(os.path.join(folder, parsed[2][0]))
    own_folder = os.path.dirname(main)
    sets = programs.import_lines(main, own_folder)[1]
    return _may_set(imports, main, sets) or programs.own_module(own_folder)


def _folder_differs(imports: Imports, folder: str, env: Mapping[str, str]) -> str:
    """Why the imports could differ in this working folder."""
    if folder == imports.folder:
        return ""
    if not all(map(os.path.isabs, env.get("PYTHONPATH", "/").split(":"))):
        return "PYTHONPATH has a relative folder, and the program starts in another folder than its launcher"
    if imports.folder_readers:
        return f"{imports.folder_readers[0]} reads the working folder, which is another one than during the imports"
    return ""


def _variable_differs(imports: Imports, name: str) -> str:
    reader = imports.reads.get(name)
    return f"the variable {name} has changed since the imports{f' ({reader} reads it)' if reader else ''}"


def _may_set(imports: Imports, main: str, words: set[str]) -> str:
    name = next((name for name in sorted(words) if name in imports.reads or programs.native(name)), "")
    return f"{os.path.basename(main)} may set {name}, which imports read" if name else ""


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
    _be_killed_first()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    return end, run


def _be_killed_first() -> None:
    """Where memory is short, the kernel kills this process first."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _run(launcher: int, run_id: str = "") -> socket.socket | None:
    """A socket to `bootseer run --restarts`, if it restarts this launcher; else None."""
    above = proc.parent(launcher)
    run_id = run_id or os.environ.get("BOOTSEER_RUN_ID", "")
    return programs.connect(programs.restart_address(run_id, above), above) if run_id and above else None


class Server:
    """Answers requests of one launcher and, after its end, of the `bootseer run --restarts` that restarts it."""

    def __init__(self, end: socket.socket | None, run: socket.socket | None, imports: Imports) -> None:
        """Load `imports`. `end`: None if this process is dumped and serves where it is restored."""
        self._end, self._run, self._imports = end, run, imports
        above = self._launcher = os.getppid()
        self._began: dict[str, Any] = {}
        """The launcher's command line, process name and environment when it was executed, for its restart. A shell
        script may have changed what `bootseer run` gave it."""
        if end is not None:
            self._began["argv"] = [os.fsdecode(word) for word in proc.read(above, "cmdline").split(b"\0")[:-1]]
            self._began["comm"] = proc.read(above, "comm").strip()
            self._began["env"] = dict(
                one.partition(b"=")[::2] for one in proc.read(above, "environ").split(b"\0") if one
            )
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
                ready[0].close()
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
            own = {name: value for name, value in request["env"].items() if programs.is_own(os.fsdecode(name))}
            request.update(self._began)
            request["env"] = {**request["env"], **own}
            fds.insert(2, os.open(request.get("folder", "."), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        imports, folder = self._imports, proc.link("self", f"fd/{fds[2]}")
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
        for end in (self._end, self._run):
            if end is not None:
                end.close()
        if again:
            successor = self._fork_successor(request)
            launcher = os.getppid()
            if successor is None:
                for other in (answer.detach(), comparison.detach(), *fds):
                    os.close(other)
                return self.serve()
        return warm_child.become(imports, request, answer, comparison, fds, launcher, facts, successor)

    def _fork_successor(self, request: dict[str, Any]) -> socket.socket | None:
        """In a copy that becomes the launcher: fork its warm parent. Returns the socket to that; None in the fork.

        Both have inherited what the first launcher had, unless this process was restored from a snapshot.
        """
        if "folder" in request:
            os.chdir(request["folder"])
            warm_child.inherit(os.getppid())
        self._began = {name: request[name] for name in ("argv", "comm", "env")}
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
        self._run = _run(self._launcher, os.fsdecode(request["env"].get(b"BOOTSEER_RUN_ID", b"")))
        return None

    def snapshot(self, folder: str) -> Any:
        """Write `programs.FACTS` to `folder`, and wait until this process has been dumped, and restored by another
        `bootseer run`; then serve that. Ends the process if it must not be dumped."""
        imports, output = self._imports, warm_child.captured_output()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.close(null)
        os.chdir("/")
        here = _place()
        facts = {"pid": os.getpid(), "reads": sorted(imports.reads), "why_not": self._reason, "module": self._module}
        programs.write_facts(folder, facts)
        if self._reason:
            os._exit(0)
        # Python's own functions compute deadlines with the monotonic clock, which another machine's is far from.
        while here == _place():
            warm_child.libc.usleep(2000)
        above = self._launcher = os.getppid()
        self._run = programs.connect(programs.process_address(above), above)
        if self._run is None:
            os._exit(1)
        _be_killed_first()
        warm_child.capture_output()
        for number, text in zip((1, 2), output, strict=True):
            os.write(number, text)
        differing = _rights_differ(above)
        if differing:
            self._reason = f"the process snapshot has other rights or limits than this start: {', '.join(differing)}"
        _forget_node()
        return self.serve()


def serve(number: int, folder: str, launcher: str) -> Any:
    """Import, then answer until the launcher ends. Returns only in copies: the function that runs their program."""
    try:
        end, run = prepare(number)
        warm_child.capture_output()
    except (UnfitError, OSError):
        os._exit(1)
    return Server(end, run, Imports(programs.read_known(folder).get(launcher, {}))).serve()


def _place() -> tuple[int, ...]:
    """What a restore changes, by system calls that open no file, which would be dumped. Only the session in a pod that
    gets the namespace number of an earlier one: its parent is process 1 again."""
    return os.getppid(), os.getsid(0), os.stat("/proc/self/ns/pid").st_ino


def _forget_node() -> None:
    """Renew what the C library and Python's store about the node and the process's start."""
    for name, variable, value in (
        ("platform", "_uname_cache", None),
        ("uuid", "_node", None),
        ("logging", "_startTime", time.time() if sys.version_info < (3, 13) else time.time_ns()),
    ):
        if hasattr(sys.modules.get(name), variable):
            setattr(sys.modules[name], variable, value)
    time.tzset()  # the node may have another time zone


def snapshot(folder: str, launcher: str, recent_ns: str) -> Any:
    """Import in a process that can be dumped; see `Server.snapshot` and `Imports`. Returns only in copies of the
    restored process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        for number in proc.open_files():
            if number > 2:
                os.close(number)
        # CRIU dumps no process whose session is that of a process outside of the pid namespace, which the run's may be.
        os.setsid()
        if _clone_far() > 0:
            os._exit(0)
        warm_child.libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        warm_child.capture_output()
        known = programs.read_known(folder).get(launcher, {})
        server = Server(None, None, Imports(known, dumped=True, recent_ns=int(recent_ns)))
    except Exception as error:
        programs.write_facts(folder, {"why_not": f"{type(error).__name__}: {error}"})
        os._exit(1)
    return server.snapshot(folder)


def _clone_far() -> int:
    """Fork with a process id that is probably free on other nodes, too: among the last ones, which the kernel reaches
    last. Raises `OSError`."""
    last = int(proc.read("sys", "kernel/pid_max"))
    for attempt in range(_TRIES):
        try:
            return warm_child.Cloner().clone(last - 1 - int.from_bytes(os.urandom(4), "little") % (last // 8))
        except FileExistsError:
            if attempt == _TRIES - 1:
                raise
    raise AssertionError


if __name__ == "__main__":
    program = snapshot(*sys.argv[2:]) if sys.argv[1] == programs.SNAPSHOT else serve(int(sys.argv[1]), *sys.argv[2:])
    program()

"""Process snapshots: a warm parent is dumped with CRIU at the end of a run, and restored at the begin of later ones.

Works without privileges other than CAP_CHECKPOINT_RESTORE, beside the command: also within its container
(`launch.inside`), so only the standard library is imported. What is dumped is no process that the job used, but one
that has done nothing except the imports of the job's ranks, with a selection of the environment's variables
(`hook.warm_parent.snapshot`). Its process id is an unusual one, because it is the same where it is restored.

The folder for them belongs to one run: `RESTORED` is the snapshot that this run starts from, and `MADE` the one that it
made (`artifact.process_snapshots` stores it). It makes none if one was `FETCHED` too late for its start.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bootseer.hook import programs, warm_launcher
from bootseer.io import proc
from bootseer.launch import supervise

RESTORED, MADE, FETCHED, PENDING, REFUSED = "restored", "made", "fetched", "pending", "refused"
"""As long as `PENDING` exists, `RESTORED` may still come. `REFUSED` has what a snapshot depends on that cannot be made.
`artifact.process_snapshots`, which cannot be imported in containers, names `FETCHED` too."""
_PENDING_S = 10.0
NEW = "new"
_RESTORE_S, _DUMP_S, _IMPORT_S = 20.0, 60.0, 60.0
_CONNECT_S = 5.0
_SAID_S = 10.0
"""The end of the run says after this time what it waits for."""
_EARLIER_NS = 2_000_000_000
"""Timestamps of file systems are a few milliseconds behind the clock, those of archives whole seconds."""
_RECORD_S = 0.1
"""`bootseer run` reads records beside this, and writes what it has read a moment later."""
_OPTIONS = ("--unprivileged", "--shell-job", "--manage-cgroups=ignore")
"""The process gets the session, process group and cgroup of the CRIU that restores it."""
_TRIES = 8
"""Each learns variables that imports read, or a module that must not be imported in advance."""
_KEPT = re.compile(r"(?:PATH|HOME|USER|LOGNAME|SHELL|TERM|TMPDIR|LANG|LC_\w+|BOOTSEER_TRACE|BOOTSEER_HOOK)\Z")
"""Variables that every process may have; others only if imports read them."""
_SECRET = re.compile(r"TOKEN(?!IZER)|SECRET|PASS(?:[WP_]|\Z)|_PWD|CREDENTIAL|COOKIE|KEYS?(?:_|\Z)|AUTH", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"://[^/@\s]*:[^/@\s]+@|AccountKey=|PRIVATE KEY")
"""An address with a password, a connection string, a PEM file."""
_CAPABILITIES = 1 << 40 | 1 << 21
"""CAP_CHECKPOINT_RESTORE, and CAP_SYS_ADMIN, which includes it. `criu check` asks for more than is needed: a writable
/proc/sys, which containers do not have."""
_NEWNS = 0x0002_0000


class SnapshotError(Exception):
    """There is no process snapshot; the text is the reason."""


class RefusedError(SnapshotError):
    """None can be made for these ranks: it is not tried at the end of each run."""


def is_secret(name: str, value: str) -> bool:
    """Whether a variable is not for memory images, by its name or value."""
    return _SECRET.search(name) is not None or _SECRET_VALUE.search(value) is not None


def restore(
    folder: str, command: Sequence[str], env: Mapping[str, str], enter: Callable[[], None] | None
) -> tuple[int, socket.socket, dict[str, Any], Any] | None:
    """Restore the warm parent in `folder` for this command; returns its process id, the socket to it, what a request
    for the launcher needs, and what of the ranks it was made for. It is a child of this process. None without a
    snapshot. Raises `SnapshotError`.

    `enter` runs in a child before exec, to enter the command's namespaces.
    """
    images = os.path.join(folder, RESTORED)
    until_s = time.monotonic() + _PENDING_S
    while not os.path.isdir(images) and os.path.exists(os.path.join(folder, PENDING)) and time.monotonic() < until_s:
        time.sleep(0.005)
    if not os.path.isdir(images):
        return None
    try:
        with open(os.path.join(images, programs.FACTS), "rb") as file:
            facts = json.loads(file.read(programs.MAX_BYTES))
        if facts["program"] != _program(command, env):
            raise SnapshotError(f"{command[0]} is another program, or has changed")
        pid, start = int(facts["pid"]), [str(word) for word in facts["start"]]
        basis = facts["basis"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SnapshotError(f"{type(error).__name__}: {error}") from error
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(programs.process_address(os.getpid()))
            listener.listen(8)
            words = ("restore", "-D", images, "-d", "-S", *_OPTIONS, "-o", "restore.log")
            _run_criu(words, env, enter, _RESTORE_S, os.path.join(images, "restore.log"))
            listener.settimeout(_CONNECT_S)
            end = listener.accept()[0]
            end.settimeout(None)
    except (OSError, SnapshotError) as error:
        if proc.parent(pid) == os.getpid() and programs.SNAPSHOT.encode() in proc.read(pid, "cmdline").split(b"\0"):
            _end(pid)  # CRIU did not get to its end
        raise SnapshotError(str(error) or type(error).__name__) from error
    if programs.peer(end) != (pid, os.getuid()) or proc.parent(pid) != os.getpid():
        end.close()
        raise SnapshotError("another process answered")
    return (
        pid,
        end,
        {
            "argv": [*start, *command[1:]] if start else list(command),
            "comm": os.fsencode(os.path.basename(command[0]))[:15],
            "folder": proc.link("self", "cwd"),
        },
        basis,
    )


def record(
    folder: str, command: Sequence[str], env: Mapping[str, str], enter: Callable[[], None] | None, basis: Any = None
) -> None:
    """Make a process snapshot for the command in `MADE` of `folder`. Raises `SnapshotError`, also if no warm parent can
    be dumped.

    `basis`: of the snapshot that was restored. None is made unless the recorded ranks differ from it.
    """
    new = os.path.join(folder, NEW)
    pid = 0
    try:
        known, is_script = _known(env, command)
        now = [known[name] for name in ("program", "flags", "native", "telling")]
        now += [os.sched_getscheduler(0), resource.getrlimit(resource.RLIMIT_STACK)[0]]
        if now in (basis, _refused(folder)):
            return
        from bootseer.machine.criu import find_criu  # imports what a restore does without

        find_criu(env)
        if not int(proc.status()["CapEff"], 16) & _CAPABILITIES:
            raise SnapshotError("this needs CAP_CHECKPOINT_RESTORE; see docs/process.md")
        pid = _imported(new, known, env, enter)
        words = ("dump", "-t", str(pid), "-D", new, *_OPTIONS, "-o", "dump.log")
        _run_criu(words, env, lambda: _enter_mounts(pid), _DUMP_S, os.path.join(new, "dump.log"))
        start = known["start"] if is_script else []
        facts = {"pid": pid, "program": _program(command, env), "start": start, "basis": now}
        programs.write_facts(new, facts)
        os.rename(new, os.path.join(folder, MADE))
    except RefusedError:
        with contextlib.suppress(OSError):
            os.makedirs(new, exist_ok=True)
            with open(os.path.join(new, REFUSED), "w") as file:
                json.dump(now, file)
            os.replace(os.path.join(new, REFUSED), os.path.join(folder, REFUSED))
        raise
    except (OSError, LookupError, ValueError, TypeError, supervise.StartError) as error:
        if basis is not None and isinstance(error, LookupError):
            return  # this start has recorded nothing
        raise SnapshotError(str(error) or type(error).__name__) from error
    finally:
        if pid:
            _end(pid)
        remove(new)


def _imported(new: str, known: dict[str, Any], env: Mapping[str, str], enter: Callable[[], None] | None) -> int:
    """A process that has done the imports, with the variables that they read. Raises `SnapshotError` and `OSError`."""
    variables = {name: env[name] for name in env if _KEPT.match(name) or programs.recorded(name)}
    variables |= {name: value for name, value in known["native"].items() if programs.recorded(name)}
    variables |= {"PYTHONPATH": env["PYTHONPATH"]} if "PYTHONPATH" in env else {}
    began_s = time.monotonic()
    for attempt in range(_TRIES):
        remove(new)
        os.mkdir(new, 0o700)
        facts = _import(new, known, variables, enter, began_s)
        read = {name: env[name] for name in facts.get("reads", ()) if name in env}
        if not facts["why_not"] and read.items() <= variables.items():
            return int(facts["pid"])
        if "pid" in facts:
            _end(facts["pid"])
        if facts["why_not"]:
            if facts.get("module") is None:
                raise SnapshotError(facts["why_not"])
            if facts["module"] in ("", *programs.NEVER_WHOLE) or attempt == _TRIES - 1:
                raise RefusedError(facts["why_not"])
            # The ranks import it themselves.
            known["cold"] = {**known["cold"], programs.left_out(facts["module"], known["cold"]): facts["why_not"]}
            continue
        secret = next((name for name, value in read.items() if is_secret(name, value)), "")
        if secret:
            raise RefusedError(f"imports read {secret}, which a memory image must not contain")
        variables |= read
    raise RefusedError("the imports read other variables each time")


def _refused(folder: str) -> Any:
    with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, REFUSED), "rb") as file:
        return json.loads(file.read(programs.MAX_BYTES))
    return None


def remove(folder: str) -> None:
    """Delete a folder that has only files, as far as it is there."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def _known(env: Mapping[str, str], command: Sequence[str]) -> tuple[dict[str, Any], bool]:
    """The record of the command as a launcher, and whether the command is a script whose first line names the
    interpreter. Raises `LookupError`.

    No other program may have executed the launcher: what a shell script does first, such as redirections or a change of
    the processor affinity, would not be done when the launcher is restored.
    """
    folder = env[programs.VARIABLE]
    path = _program(command, env)[0]
    for pause_s in (_RECORD_S, 0.0):
        known = programs.read_known(folder)
        for new in programs.read_records(folder):  # of ranks that did not train; else `bootseer run` has read them
            before = known.get(new["launcher"], {"cold": {}, "never": "", "modules": ()})
            if len(new["modules"]) >= len(before["modules"]) or new["program"] == before["program"]:
                known[new["launcher"]] = {**before, **new}
        for name, one in known.items():
            words = len(one["start"])
            is_script = list(command[:words]) != list(one["start"])
            if not one["never"] and (not is_script or one["start"][-1:] == [path]):
                args = command[1:] if is_script else command[words:]
                if one["start_digest"] == programs.start_digest(os.getpid(), args, env):
                    return {**one, "launcher": name, "start_digest": ""}, is_script  # not for stores: `warm.shared`
        time.sleep(pause_s)
    raise LookupError("the command is no Python program with recorded ranks, or changes variables or limits")


def _program(command: Sequence[str], env: Mapping[str, str]) -> list[Any]:
    """The command's program, and what changes with it."""
    folders = [""] if "/" in command[0] else os.get_exec_path(env)
    paths = (os.path.join(folder, command[0]) for folder in folders)
    path = next((path for path in paths if os.path.isfile(path) and os.access(path, os.X_OK)), "")
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return [path, found.st_mtime_ns, found.st_size]
    return [path]


def _import(
    new: str,
    known: Mapping[str, Any],
    variables: Mapping[str, str],
    enter: Callable[[], None] | None,
    began_s: float,
) -> dict[str, Any]:
    """Start the process that imports; returns its facts. Raises `SnapshotError` when all tries, the first of which was
    started at `began_s`, take too long."""
    server = os.path.join(os.path.dirname(warm_launcher.__file__), programs.PARENT)
    with open(os.path.join(new, programs.KNOWN), "w") as file:
        json.dump({"schema": programs.SCHEMA, "launchers": {known["launcher"]: known}}, file)
    # The run made this folder before its setup.
    recent_ns = os.stat(os.path.join(os.path.dirname(new), "lock")).st_mtime_ns - _EARLIER_NS
    words = (programs.SNAPSHOT, new, known["launcher"], str(recent_ns))
    first = _spawn((known["python"], *known["flags"], server, *words), variables, enter)
    path = os.path.join(new, programs.FACTS)
    until_s, is_said = began_s + _IMPORT_S, time.monotonic() > began_s + _SAID_S
    try:
        while not os.path.exists(path):
            if not is_said and time.monotonic() > began_s + _SAID_S:
                supervise.say("making a process snapshot for later starts; Ctrl-C ends the run without it")
                is_said = True
            if not _importing(new) and not os.path.exists(path):
                raise SnapshotError("the process with the imports has died")
            _pause(0.02, until_s, f"the imports took longer than {_IMPORT_S:.0f} s")
    except SnapshotError:
        for pid in _importing(new):
            _end(pid)
        raise
    finally:
        proc.end_child(first)
    with open(path, "rb") as file:
        return dict(json.loads(file.read(programs.MAX_BYTES)))


def _importing(folder: str) -> list[int]:
    """The child that imports, which is no child of the one that was started (`warm_parent.snapshot`)."""
    children = map(int, proc.read("self", f"task/{os.getpid()}/children").split())
    return [pid for pid in children if os.fsencode(folder) in proc.read(pid, "cmdline").split(b"\0")]


def _run_criu(
    words: Sequence[str], env: Mapping[str, str], enter: Callable[[], None] | None, deadline_s: float, log: str
) -> None:
    """Run CRIU. Raises `SnapshotError` with the first error in its log."""
    pid = _spawn((env.get("BOOTSEER_CRIU") or "criu", *words), {"PATH": env.get("PATH", os.defpath)}, enter)
    until_s = time.monotonic() + deadline_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        try:
            _pause(0.002, until_s, f"criu {words[0]} took longer than {deadline_s:.0f} s")
        except SnapshotError:
            proc.end_child(pid)
            raise
    if status:
        reason = ""
        with contextlib.suppress(OSError), open(log, errors="replace") as file:
            reason = next((line.partition("Error ")[2] for line in file if "Error " in line), "")
        raise SnapshotError(f"criu {words[0]}: {reason.strip() or f'exit code {os.waitstatus_to_exitcode(status)}'}")


def _pause(seconds: float, until_s: float, late: str) -> None:
    """Sleep. Raises `RefusedError` with the reason `late` at the deadline, and `SnapshotError` when a signal asks the
    run to end."""
    if not supervise.ENDING.isdisjoint(signal.sigpending()):
        raise SnapshotError("interrupted")
    if time.monotonic() > until_s:
        raise RefusedError(late)
    time.sleep(seconds)


def _spawn(words: Sequence[str], env: Mapping[str, str], enter: Callable[[], None] | None) -> int:
    """Start a program without streams. Raises `SnapshotError`."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        return supervise.spawn(words, env, dict.fromkeys((0, 1, 2), null), own_group=False, enter=enter)
    except supervise.StartError as error:
        raise SnapshotError(str(error)) from error
    finally:
        os.close(null)


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    proc.end_child(pid)


def _enter_mounts(pid: int) -> None:
    """Enter a process's mount namespace, where CRIU finds its files."""
    if proc.link(pid, "ns/mnt") == proc.link("self", "ns/mnt"):
        return
    import ctypes

    namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _NEWNS):
        raise OSError(ctypes.get_errno(), "cannot enter its mount namespace")

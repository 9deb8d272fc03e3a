"""Start a container with runc or crun such that it behaves like a child process, with its signals and exit code.

`runc run` in the foreground copies the standard streams through pipes: the program sees no terminal, and input is
read ahead. Detached, the program inherits the streams, but runc does not wait for it. This script starts runc detached,
adopts the container's process (as subreaper), forwards signals as `launch.supervise` does and ends with its exit code.
Run with `-I -S` and an empty environment:

    shim.py own|try|host FOLDER WORD...

FOLDER has the container's `config.json` and receives the file `pid`; WORD... is the runtime's command line. With `own`
the container has a PID namespace. Its process 1 is a child of this script, not the program: the kernel ignores SIGTERM
for process 1, and kills all other processes when it ends. It reaps orphans, has an empty root, no capabilities and no
open files, and is killed when this script ends in any way. With `try` the container uses the host's PID namespace if
that fails: without root, the kernel refuses a new /proc where parts of the current one are covered by mounts, as in
most containers.

The exit code is the program's, or 128 + N after signal N; 127 if the program does not exist, 126 if it cannot be
executed, and the runtime's if that fails for another reason.

It runs before every container starts, so it imports little: `subprocess` and `typing` alone would
take half as much time again.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
_NEWNS, _NEWPID = 0x0002_0000, 0x2000_0000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _MOVE, _REC, _PRIVATE = 1, 2, 4, 8, 1 << 13, 1 << 14, 1 << 18
_CAPABILITY_VERSION_3 = 0x2008_0522
_CANNOT = 125
_START_S = 30.0
_END_S = 30.0
_LOOK_S = 2.0
_LOWEST_PID, _NUM_PIDS = 1000, 29_000  # below 32,768, the smallest usual limit
# Signals that are not forwarded: they cannot be caught, report a fault of this process, or are the terminal's stop
# signals for background processes.
_OWN = {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGTTIN, signal.SIGTTOU),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS),
}
_OF_TERMINALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCONT)
_ENDING = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM}

libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    pids, folder, *command = sys.argv[1:]
    awaited = (set(signal.valid_signals()) - _OWN) | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    _check_call(libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0), "adopt processes")
    first = None
    if pids != "host":
        first, reason = _make_pid_namespace()
        if first is not None:
            _enter_pid_namespace(f"{folder}/config.json", first)
        elif pids == "own":
            return _print_error(f"the container cannot have a PID namespace: {reason}\nhint: --pid host")
        else:
            _print_error(f"the container sees the processes of this machine: {reason}")
    owners = _stream_owners()
    parent, runtime = os.getpid(), os.fork()
    if runtime == 0:
        _exec_runtime(command, parent)
    handle, asked = os.pidfd_open(runtime), False
    while not select.select([handle], [], [], _LOOK_S)[0]:
        if asked:  # it hangs, as in the hook of a device whose driver is broken
            os.kill(runtime, signal.SIGKILL)
        asked = signal.SIGTERM in signal.sigpending()
    failed = os.waitstatus_to_exitcode(os.waitpid(runtime, 0)[1])
    # Both runtimes give the standard streams to the container's user, also files of the host.
    changed = owners - _stream_owners()
    if failed:
        _restore_owners(changed)
        # A signal for the process group of this script reaches the runtime and its children, too.
        if received := signal.sigpending() & _ENDING:
            return 128 + int(min(received))
        return _start_failure_code(folder) or (failed if failed > 0 else 128 - failed)
    with open(f"{folder}/pid") as file:  # noqa: PTH123
        pid = int(file.read())
    while (code := _reap(pid)) is None:
        _forward_signal(pid, signal.sigwaitinfo(awaited).si_signo)
    _restore_owners(changed)
    if first is not None:
        _kill_namespace(first)
    return code


def _stream_owners() -> set[tuple[int, int, int]]:
    """Descriptor, user and group of each standard stream that is open."""
    found = set()
    for number in range(3):
        with contextlib.suppress(OSError):
            status = os.fstat(number)
            found.add((number, status.st_uid, status.st_gid))
    return found


def _restore_owners(owners: set[tuple[int, int, int]]) -> None:
    for number, user, group in owners:
        with contextlib.suppress(OSError):
            os.fchown(number, user, group)


def _lines(path: str) -> list[str]:
    """The lines of a file; empty if it is missing."""
    with contextlib.suppress(OSError), open(path, errors="replace") as file:  # noqa: PTH123
        return file.read().splitlines()
    return []


def _start_failure_code(folder: str) -> int:
    """A shell's exit code for a missing or non-executable program, by the runtime's last message; else 0."""
    last = (_lines(f"{folder}/log") or [""])[-1].lower()
    if "hybrid mode" in last:
        return _print_error(
            "crun cannot start containers where both versions of cgroups have controllers\n"
            "hint: --runtime runc (apt-get install runc), or boot with systemd.unified_cgroup_hierarchy=1"
        )
    if ("exec: " in last or "executable" in last) and "running hook" not in last:  # of a device, such as a GPU
        is_missing = "not found" in last or "no such file" in last
        # The runtimes' messages are longer, and crun's do not always name the program.
        with open(f"{folder}/config.json") as file:  # noqa: PTH123
            program = json.load(file)["process"]["args"][0]
        _print_error(f"{program}: {'command not found' if is_missing else 'may not be executed'} in the container")
        return 127 if is_missing else 126
    return 0


def _exec_runtime(command: list[str], parent: int) -> NoReturn:
    """In the runtime's process: reset signals, die with this script, and exec the runtime."""
    try:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        os.umask(0o022)  # the folders that it makes for mounts are for any user of the container
        # `closerange` tries a billion numbers where nothing limits them and the C library is older than `close_range`.
        for descriptor in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
            if descriptor > 2:
                with contextlib.suppress(OSError):  # that of the listing
                    os.close(descriptor)
        if os.getppid() == parent:
            os.execvp(command[0], command)
    except OSError as error:
        _print_error(f"{command[0]}: {error.strerror}")
    finally:
        os._exit(_CANNOT)


def _reap(pid: int) -> int | None:
    """The program's exit code, if it has ended. Also reaps orphans that this process adopted."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == 0:
            return None
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _forward_signal(pid: int, number: int) -> None:
    if number == signal.SIGCHLD:
        return
    with contextlib.suppress(ProcessLookupError):
        if number not in _OF_TERMINALS and _catches(pid, number):
            os.kill(pid, number)
        else:  # SIGTSTP has no effect in a process group without a terminal
            os.killpg(pid, signal.SIGSTOP if number == signal.SIGTSTP else number)
    if number == signal.SIGTSTP:
        os.kill(os.getpid(), signal.SIGSTOP)
        os.killpg(pid, signal.SIGCONT)


def _catches(pid: int, number: int) -> bool:
    masks = (line.split()[1] for line in _lines(f"/proc/{pid}/status") if line.startswith("SigCgt:"))
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


# -- process ids -------------------------------------------------------------------------------------------------------


def _print_error(text: str) -> int:
    os.write(2, f"bootseer: {text}\n".encode("utf-8", "replace"))
    return _CANNOT


def _reason(error: OSError) -> str:
    limit = "; see the limit of processes (ulimit -u, pids.max)" if isinstance(error, BlockingIOError) else ""
    return f"{error.strerror}{limit}"


def _make_pid_namespace() -> tuple[int | None, str]:
    """Create a PID namespace; returns its process 1 (the PID outside), or None and the reason."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    stay, go = os.pipe2(os.O_CLOEXEC)
    middle = os.fork()
    if middle == 0:
        os.close(go)
        _fork_first_process(writer, stay)
    os.close(writer)
    os.close(stay)
    try:
        first = _receive(reader)
        if not first.isdecimal():
            return None, first
        os.waitpid(middle, 0)
        with contextlib.suppress(BrokenPipeError):  # it died; the next message reports this
            # Its parent has ended, so that we are its parent now, and its parent-death signal will refer to us.
            os.write(go, b"g")
        reason = _receive(reader)
        if reason:
            _kill_namespace(int(first))
            return None, reason
        return int(first), ""
    finally:
        os.close(reader)
        os.close(go)


def _receive(pipe: int) -> str:
    """One message: a process id, or the reason of a failure; empty is success."""
    if not select.select([pipe], [], [], _START_S)[0]:
        return "no answer in time"
    data = os.read(pipe, 512)
    return data.decode("utf-8", "replace").strip() if data else "the process that creates the namespace died"


def _fork_first_process(writer: int, stay: int) -> NoReturn:
    """Runs in a child, because all later children of the process that unshares enter the namespace, and the runtime
    must not be one of them."""
    try:
        _check_call(libc.unshare(_NEWNS | _NEWPID), "create a namespace")
        first = os.fork()
        if first == 0:
            _run_first_process(writer, stay)
        os.write(writer, b"%d\n" % first)
    except OSError as error:
        os.write(writer, f"{_reason(error)}\n".encode("utf-8", "replace"))
    finally:
        os._exit(0)


def _run_first_process(writer: int, stay: int) -> NoReturn:
    """Process 1 of the namespace: set up its `/proc`, give up all rights, wait to be killed."""
    try:
        if not os.read(stay, 1):
            os._exit(1)
        libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
        _mount("", "/", "", _REC | _PRIVATE)
        _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
        with contextlib.suppress(OSError), open("/proc/sys/kernel/ns_last_pid", "w") as file:  # noqa: PTH123
            # Events of a node are distinguished by process id, so those of two containers should differ.
            file.write(str(_LOWEST_PID + int.from_bytes(os.urandom(4), "little") % _NUM_PIDS))
        with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:  # noqa: PTH123
            file.write("bootseer-init")
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            if int(name) != writer:
                with contextlib.suppress(OSError):  # listdir's own descriptor is closed already
                    os.close(int(name))
        # The container can reach this process's root through /proc/1/root, so it must be empty.
        _mount("none", "/proc", "tmpfs", _RDONLY | _NOSUID | _NODEV | _NOEXEC)
        os.chdir("/proc")
        _mount(".", "/", "", _MOVE)
        os.chroot(".")
        # A tracer in the container (CAP_SYS_PTRACE) could make this process start a program with its rights: root on
        # the host. So it gives them up, and is not dumpable, which protects its memory.
        _check_call(libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0), "set no_new_privs")
        header, no_capabilities = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
        _check_call(libc.capset(header, no_capabilities), "give up capabilities")
        libc.prctl(_PR_SET_DUMPABLE, ctypes.c_ulong(0), 0, 0, 0)
        os.write(writer, b"\n")
        os.close(writer)
    except OSError as error:
        os.write(writer, f"{error.strerror}\n".encode("utf-8", "replace"))
        os._exit(1)
    while True:
        signal.pause()


def _enter_pid_namespace(path: str, first: int) -> None:
    """Add this PID namespace and a `/proc` for it to the container's configuration."""
    with open(path) as file:  # noqa: PTH123
        config = json.load(file)
    config["linux"]["namespaces"].append({"type": "pid", "path": f"/proc/{first}/ns/pid"})
    for mount in config["mounts"]:
        if mount["destination"] == "/proc":
            mount.update(type="proc", source="proc", options=["nosuid", "noexec", "nodev"])
    with open(path, "w") as file:  # noqa: PTH123
        json.dump(config, file)


def _kill_namespace(first: int) -> None:
    """Kill all processes of the namespace and wait for their end: then nothing uses the container's files."""
    with contextlib.suppress(ProcessLookupError):  # already dead
        handle = os.pidfd_open(first)
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        select.select([handle], [], [], _END_S)


def _mount(source: str, target: str, kind: str, flags: int) -> None:
    words = (source.encode(), target.encode(), kind.encode())
    _check_call(libc.mount(*words, ctypes.c_ulong(flags), None), f"mount {kind or target}")


def _check_call(result: int, step: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{step}: {os.strerror(number)}")


if __name__ == "__main__":
    try:
        code = main()
    except OSError as error:
        code = _print_error(f"the container: {_reason(error)}")
    sys.exit(code)

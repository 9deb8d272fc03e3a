"""What the kernel shows about processes in /proc, and the end of a child.

Nothing is shown of a process that has ended or belongs to another user: its files count as empty. Imported before every
job, so without pathlib.
"""

from __future__ import annotations

import contextlib
import os
import time

_SIGKILL = 9
_SIGNALED = 0x400  # PF_SIGNALED of the kernel


def pids() -> list[int]:
    """The visible processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 - thousands of names


def read(pid: int | str, name: str) -> bytes:
    """A file of a process or thread."""
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""


def link(pid: int | str, name: str) -> str:
    """The target of a link in a process's folder; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/{name}")  # noqa: PTH115
    return ""


def stat(pid: int) -> list[bytes]:
    """The fields of `stat` from the state on. They follow the name, which may contain anything."""
    return read(pid, "stat").rpartition(b")")[2].split()


def status(pid: int | str = "self") -> dict[str, str]:
    """The fields of `status`."""
    return _fields(read(pid, "status"))


def _fields(text: bytes) -> dict[str, str]:
    rows = (line.partition(":") for line in text.decode(errors="replace").splitlines())
    return {field: value.strip() for field, _, value in rows}


def environment(pid: int) -> dict[str, str]:
    """The environment at the start of a process."""
    words = (os.fsdecode(word).partition("=") for word in read(pid, "environ").split(b"\0"))
    return {name: value for name, equals, value in words if equals}


def open_files() -> list[int]:
    """The open descriptors of this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
        with contextlib.suppress(OSError):  # the listing's own descriptor, closed by now
            os.fstat(int(name))
            found.append(int(name))
    return found


def parent(pid: int) -> int:
    """Process id of the parent; 0 if the process has ended."""
    fields = stat(pid)
    return int(fields[1]) if fields else 0


def is_dying(pid: int) -> bool:
    """Whether a process or thread has SIGKILL pending, whichever signal killed it. It may have for long in the kernel:
    in a dead mount."""
    return _has_signal(pid, "SigPnd", _SIGKILL)


def end_child(pid: int, timeout_s: float = 1.0, *, kill: bool = True) -> int | None:
    """Kill a child (unless `kill=False`) and reap it: its wait status.

    None when it has not ended within `timeout_s` seconds: a child in an uninterruptible system call, for example in a
    dead mount, does not react even to SIGKILL and is left behind. None also when it was reaped elsewhere.
    """
    with contextlib.suppress(OSError):
        if kill:
            os.kill(pid, _SIGKILL)
        # Without a pidfd: a job's Python may be built without `os.pidfd_open`, as Conda's is, and sandboxes forbid it.
        until_s = time.monotonic() + timeout_s
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return status
            if time.monotonic() >= until_s:
                break
            time.sleep(0.001)
    return None


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for this signal."""
    return _has_signal(pid, "SigCgt", number)


def _has_signal(pid: int, field: str, number: int) -> bool:
    return bool(int(status(pid).get(field, "0"), 16) >> (number - 1) & 1)


# Of a thread whose request a file system handles, only what never blocks on its process may be read: during execve(2)
# the kernel holds `stat` and `fd/N` until the new program is loaded, and closes the process's files before that.


def process_of(thread: int) -> int:
    """The process of a thread; 0 if it is not visible."""
    return int(status(thread).get("Tgid", "0"))


def was_killed(thread: int) -> bool:
    """Whether a thread closes its files because a signal killed it. False if it is not visible."""
    known = status(thread)
    # VmSize is shown as long as the thread has memory, which is released before the files when a process ends.
    if not known or "VmSize" in known:
        return False  # it is alive, and may be executing another program
    fields = stat(thread)
    return bool(fields) and bool(int(fields[6]) & _SIGNALED)


def num_writers(process: int, inode: int) -> int:
    """How many descriptors of `process` are open for writing on the file with this inode number; 0 if not visible.

    A shell opens the file of `{ a; b; } > file` once, and each program in it inherits and closes the descriptor: FUSE
    reports each close, but not which one is the last. Descriptors from several opens of one file cannot be
    distinguished.
    """
    try:
        numbers = os.listdir(f"/proc/{process}/fdinfo") if process > 0 else []  # noqa: PTH208 - numbers, not paths
    except OSError:
        return 0
    return sum(_is_written_at(process, number, inode) for number in numbers)


def _is_written_at(process: int, number: str, inode: int) -> bool:
    text = read(process, f"fdinfo/{number}")
    if b"\nino:\t%d\n" % inode not in text:  # most of a process's descriptors
        return False
    return int(_fields(text).get("flags", "0"), 8) & os.O_ACCMODE != os.O_RDONLY

"""What the kernel shows about processes in /proc.

Nothing is shown of a process that has ended or belongs to another user: its files count as empty. Imported before every
job, so without pathlib.
"""

from __future__ import annotations

import os

_SIGKILL = 9


def pids() -> list[int]:
    """The visible processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208 - thousands of names


def read(pid: int | str, name: str) -> bytes:
    """A file of a process or thread."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""


def stat(pid: int) -> list[bytes]:
    """The fields of `stat` from the state on. They follow the name, which may contain anything."""
    return read(pid, "stat").rpartition(b")")[2].split()


def status(pid: int | str = "self") -> dict[str, str]:
    """The fields of `status`."""
    rows = (line.partition(":") for line in read(pid, "status").decode(errors="replace").splitlines())
    return {name: value.strip() for name, _, value in rows}


def environment(pid: int) -> dict[str, str]:
    """The environment at the start of a process."""
    words = (os.fsdecode(word).partition("=") for word in read(pid, "environ").split(b"\0"))
    return {name: value for name, equals, value in words if equals}


def parent(pid: int) -> int:
    """Process id of the parent; 0 if the process has ended."""
    fields = stat(pid)
    return int(fields[1]) if fields else 0


def is_dying(pid: int) -> bool:
    """Whether a process or thread has SIGKILL pending, as it may have for long in the kernel: in a dead mount."""
    return bool(int(status(pid).get("SigPnd", "0"), 16) >> (_SIGKILL - 1) & 1)

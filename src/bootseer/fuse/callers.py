"""What /proc shows about the thread of a request: whether it is being killed, and what its process still has open.

The kernel sends INTERRUPT for the first signal only, whether or not that signal ends the process. Most signals do not,
and then the read must not fail with EINTR: it never does on a disk, and a page fault would turn it into SIGBUS. A
thread that is being killed has SIGKILL pending (`io.proc.is_dying`), whichever signal killed it.

A shell opens the file of `{ a; b; } > file` once, and each program in it inherits and closes the descriptor. The kernel
reports each close with FLUSH, but not which one is the last; that is visible in /proc, too.

Only files of /proc that never block on the process are read. During execve(2) the kernel holds `stat` and `fd/N` of the
process until the new program is loaded, and closes its files before that: reading them would be a deadlock.
"""

from __future__ import annotations

import os
from pathlib import Path

from bootseer.io import proc

_PROC = Path("/proc")
_SIGNALED = 0x400  # PF_SIGNALED of the kernel


def process_of(thread: int) -> int:
    """The process of a thread; 0 if it is not visible."""
    return int(proc.status(thread).get("Tgid", "0"))


def was_killed(thread: int) -> bool:
    """Whether a thread closes its files because a signal killed it. False if it is not visible."""
    status = proc.status(thread)
    # VmSize is shown as long as the thread has memory, which is released before the files when a process ends.
    if not status or "VmSize" in status:
        return False  # it is alive, and may be executing another program
    fields = proc.stat(thread)
    return bool(fields) and bool(int(fields[6]) & _SIGNALED)


def num_writers(process: int, name: str, inode: int) -> int:
    """How many descriptors of `process` are open for writing on the file with this inode number; 0 if not visible.

    Before Linux 5.14 fdinfo has no inode numbers: all files called `name` are counted. Descriptors from several opens
    of one file cannot be distinguished.
    """
    if process <= 0:
        return 0
    folder = _PROC / str(process)
    try:
        numbers = os.listdir(folder / "fdinfo")  # noqa: PTH208 - numbers, not paths
    except OSError:
        return 0
    return sum(_is_open_at(folder, number, name, inode) for number in numbers)


def _is_open_at(folder: Path, number: str, name: str, inode: int) -> bool:
    try:
        info = dict(line.split(":", 1) for line in (folder / "fdinfo" / number).read_text().splitlines() if ":" in line)
        if int(info["flags"], 8) & os.O_ACCMODE == os.O_RDONLY:
            return False
        if "ino" in info:
            return int(info["ino"]) == inode
        path = str((folder / "fd" / number).readlink())
        return path.removesuffix(" (deleted)").rpartition("/")[2] == name
    except (OSError, ValueError, KeyError):
        return False

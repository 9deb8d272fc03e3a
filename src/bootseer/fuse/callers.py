"""What /proc tells of the thread that made a request: whether it is being killed, and what its process still has open.

The kernel reports with INTERRUPT the first signal only, and not whether it ends the process. Most do not, and a program
must not be given EINTR for these: on a disk it never is, and a page fault that gets it is a SIGBUS. /proc shows a
thread that is to die: SIGKILL is pending, whatever signal it was that kills.

A shell opens the file of `{ a; b; } > file` once; each program in it gets a copy of the descriptor and closes it when
it ends. The kernel tells a file system of each of these closes, and not which one is the last before the file is to be
complete. /proc tells that, too.

Only files of /proc are read that never wait for the process. Of one that executes another program the kernel keeps
`stat` and `fd/N` until the new one is there, and closes its files before: it would wait for us, and we for it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

_PROC = Path("/proc")
_SIGNALED = 0x400  # PF_SIGNALED of the kernel


def is_dying(thread: int) -> bool:
    """Whether a thread is being killed. One that cannot be seen is not."""
    pending = _status(thread).get("SigPnd", "0")
    return bool(int(pending, 16) >> (signal.SIGKILL - 1) & 1)


def process_of(thread: int) -> int:
    """The process that a thread belongs to; 0 when that cannot be seen."""
    return int(_status(thread).get("Tgid", "0"))


def was_killed(thread: int) -> bool:
    """Whether a thread that closes files ends by a signal, its process with it. What cannot be seen was not killed."""
    status = _status(thread)
    # Told of a thread that has memory, which it gives back before it closes its files when it ends.
    if not status or "VmSize" in status:
        return False  # it goes on, and may be executing another program
    try:
        info = (_PROC / str(thread) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return bool(int(info[6]) & _SIGNALED)
    except (OSError, ValueError, IndexError):
        return False


def _status(thread: int) -> dict[str, str]:
    """What /proc says of a thread; nothing of one that cannot be seen."""
    try:
        text = (_PROC / str(thread) / "status").read_text("utf-8", "replace") if thread > 0 else ""
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}


def num_writing(process: int, name: str, inode: int) -> int:
    """How many descriptors of `process` can write to a file of this inode number; 0 for what cannot be seen.

    Kernels before 5.14 do not tell inode numbers: there all files of this `name` are taken for it. Descriptors of
    several openings of one file look the same.
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

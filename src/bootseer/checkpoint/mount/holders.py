"""How many descriptors a process still has that can write to a file, when one of them was closed.

A shell opens the file of `{ a; b; } > file` once; each program in it gets a copy of the descriptor and closes it when
it ends. The kernel tells a file system of each of these closes, and not which one is the last before the file is to be
complete. /proc tells. Called by `open_files`.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
_SIGNALED = 0x400  # PF_SIGNALED of the kernel


def process_of(thread: int) -> int:
    """The process that a thread belongs to; 0 when that cannot be seen."""
    if thread > 0:
        try:
            for line in (_PROC / str(thread) / "status").read_text("utf-8", "replace").splitlines():
                if line.startswith("Tgid:"):
                    return int(line.split()[1])
        except (OSError, ValueError):
            return 0
    return 0


def was_killed(process: int) -> bool:
    """Whether a process ends, or has ended, by a signal. What cannot be seen was not killed."""
    try:
        fields = (_PROC / str(process) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return bool(int(fields[6]) & _SIGNALED)
    except (OSError, ValueError, IndexError):
        return False


def num_writing(process: int, name: str, inode: int) -> int:
    """How many descriptors of `process` can write to a file of this name and inode number; 0 for what cannot be seen.

    Descriptors of several openings of one file look the same.
    """
    if process <= 0:
        return 0
    folder = _PROC / str(process)
    try:
        numbers = os.listdir(folder / "fd")  # noqa: PTH208 - numbers, not paths
    except OSError:
        return 0
    return sum(_is_open_at(folder, number, name, inode) for number in numbers)


def _is_open_at(folder: Path, number: str, name: str, inode: int) -> bool:
    try:
        # Of a link into a mount that hangs only the text is read.
        path = str((folder / "fd" / number).readlink())
        if path.removesuffix(" (deleted)").rpartition("/")[2] != name:
            return False
        said = dict(line.split(":", 1) for line in (folder / "fdinfo" / number).read_text().splitlines() if ":" in line)
        return int(said.get("ino", inode)) == inode and int(said["flags"], 8) & os.O_ACCMODE != os.O_RDONLY
    except (OSError, ValueError, KeyError):
        return False

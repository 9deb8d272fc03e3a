"""Locks between processes that fall when their holder dies, however it dies.

Two kinds, which do not see each other. Whole-file locks (`flock`) show their owner's pid in /proc/locks: leases and the
lock of the root. Byte-range locks of an open file description (OFD) are many in one file: claims on blocks. Classic
POSIX record locks would fall when any descriptor of the file is closed anywhere in the process, and are not used.

Both belong to the open file description, which a forked child shares: a lock falls when the last descriptor is closed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bootseer.errors import TransientError

_POLL_S = 0.005
# struct flock: type, whence, start, length, pid. The native alignment is the kernel's.
_FLOCK = struct.Struct("@hhqqi4x")
_HELD_BY_ANOTHER = (errno.EAGAIN, errno.EACCES)


def try_flock(fd: int, *, shared: bool) -> bool:
    """Lock a whole file, or change the kind of one's lock, without waiting."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            return False
        raise
    return True


def try_range(fd: int, start: int) -> bool:
    """Lock one byte of a file against all other open file descriptions, without waiting."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0))
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            return False
        raise
    return True


def release_range(fd: int, start: int) -> None:
    """Undo `try_range`. Nothing happens when it is not locked."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, start, 1, 0))


@contextmanager
def flocked(path: Path, *, deadline_s: float) -> Iterator[None]:
    """Hold a whole file for oneself. Raises `TransientError` when others hold it for `deadline_s`."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        until = time.monotonic() + deadline_s
        while not try_flock(fd, shared=False):
            if time.monotonic() >= until:
                raise TransientError(f"{path} has been locked for {deadline_s:.0f} s by process {holders(path) or '?'}")
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)


def holders(path: Path) -> list[int]:
    """Pids that hold a whole-file lock, as far as the kernel shows them: not those of other pid namespaces."""
    try:
        status = path.stat()
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    # "7: FLOCK  ADVISORY  READ  1234 fd:01:5678 0 EOF"; lines of waiters have "->" in their second place
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    rows = [line.split() for line in lines]
    return sorted({int(row[4]) for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5] == file} - {-1, 0})

"""Locks on whole files and folders (`flock`) between processes, released when the holder dies.

A lock belongs to the open file description, which a forked child shares: it is released when the last descriptor is
closed. All waits have a deadline: a hung holder must not block a start for ever.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bootseer.errors import TransientError, UsageError

HELD_BY_ANOTHER = (errno.EAGAIN, errno.EACCES)
_POLL_S, _MAX_POLL_S = 0.005, 0.5
_LONG_S = 2.5
OnWait = Callable[[list[int]], object]
"""Gets the processes that hold a lock, as far as they are known (`holders`)."""


def try_flock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file or folder, or change the lock's kind, without waiting. False if another holds it."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD_BY_ANOTHER:
            return False
        raise
    return True


@contextmanager
def flocked(
    path: Path, *, deadline_s: float, on_wait: OnWait = lambda pids: None, shared: bool = False
) -> Iterator[int]:
    """Lock a file, created if missing; yields its descriptor.

    Raises `OSError`, `TransientError` if others hold it for `deadline_s`, and what `on_wait` raises, which is called
    once, when the wait is long.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _lock(fd, path, deadline_s, on_wait, shared)
            if is_same(fd, path):  # a previous holder may have deleted it; a lock on a deleted file protects nothing
                yield fd
                return
        finally:
            os.close(fd)


def _lock(fd: int, path: Path, deadline_s: float, on_wait: OnWait, shared: bool) -> None:
    began_s = time.monotonic()
    is_long = False
    while not try_flock(fd, shared=shared):
        waited_s = time.monotonic() - began_s
        if waited_s >= deadline_s:
            raise TransientError(f"{path} has been locked for {deadline_s:g} s by process {holders(path) or '?'}")
        if waited_s >= _LONG_S and not is_long:
            is_long = True
            on_wait(holders(path))
        # Rarely only after a long wait: of many that take turns, the one that asks less often would hardly get it.
        time.sleep(min(_POLL_S + waited_s / 50, _MAX_POLL_S) if is_long else _POLL_S)


def claim(path: Path, taken: str, hint: str = "") -> int:
    """Lock a file, created if missing, without waiting; returns its descriptor, which holds the lock.

    Raises `UsageError` with the message `taken` if another process holds it, and `OSError`.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with ExitStack() as undo:
        undo.callback(os.close, fd)
        if not try_flock(fd):
            raise UsageError(taken, hint=hint)
        undo.pop_all()
    return fd


def is_same(fd: int, path: Path) -> bool:
    """Whether a path still refers to the open file."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def holders(path: Path) -> list[int]:
    """Pids of holders of a whole-file lock as shown by the kernel, without those of other pid namespaces."""
    try:
        status = path.stat()
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    # "7: FLOCK  ADVISORY  READ  1234 fd:01:5678 0 EOF"; waiters have "->" in second place
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    rows = [line.split() for line in lines]
    return sorted({int(row[4]) for row in rows if len(row) > 5 and row[1] == "FLOCK" and row[5] == file} - {-1, 0})

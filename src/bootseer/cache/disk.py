"""The files of a cache on disk: their names, how they are opened and replaced, and their errors.

Files in a cache may be truncated, foreign or of another type. Each is opened without following links and without
blocking on a pipe, and checked to be a regular file. The format is in docs/formats/cache.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from bootseer.errors import AccessError, BootseerError, PermanentError, TransientError
from bootseer.io.files import discard, may_be_shared, replace_file

FILES = "files"
NEW = "new"
TRASH = "trash"
ROOT_LOCK = "lock"
LOCK_S = 30.0
"""How long to wait for other processes, whose locks are short and released when they die."""

INDEX = "index"
DATA = "data"
LIVE = "live"
DURABLE = "durable"
LEASE = "lease"
LAST_USE = "last-use"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
_BUSY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOLCK)


class CacheFull(TransientError):  # noqa: N818 - a state that callers handle, rather than a mistake
    """The disk has no space for this. Existing content is unaffected."""


class MissingBlocks(BootseerError):  # noqa: N818 - an answer that callers handle: fetch them and read again
    """These blocks are not in the cache, or were damaged and have been dropped."""

    def __init__(self, blocks: Sequence[int]) -> None:
        super().__init__(f"{len(blocks)} blocks are not in the cache, the first of them is {blocks[0]}")
        self.blocks = list(blocks)


class Damaged(Exception):  # noqa: N818 - never leaves this package: the entry is replaced
    """A file of an entry is invalid: nothing in the entry can be trusted."""


@contextlib.contextmanager
def mapped(action: str, path: Path) -> Iterator[None]:
    """Map `OSError` to an error of ours that names the action and the path."""
    try:
        yield
    except OSError as error:
        message = f"cannot {action} {path}: {error.strerror or error}"
        if error.errno in NO_SPACE:
            what_to_do = (
                "free space on this disk (bootseer cache prune --to SIZE), or set BOOTSEER_CACHE to another disk"
            )
            raise CacheFull(f"{message}; {what_to_do}") from error
        if error.errno in _REFUSED:
            raise AccessError(f"{message}; set BOOTSEER_CACHE to a folder that this user may write") from error
        if error.errno in _BUSY:
            raise TransientError(message) from error
        raise PermanentError(message) from error


def boot_id() -> str:
    """The kernel's random id of the current boot."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def open_file(path: Path, flags: int = os.O_RDWR) -> int:
    """Open a file of an entry. Raises `Damaged` if it is not a regular file, and `OSError`."""
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        try:
            fd = os.open(path, flags | os.O_NONBLOCK, 0o600)  # a pipe in its place must not block
        except BlockingIOError:  # another process has a lease on the file, for microseconds (`has_other_users`)
            fd = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO):
            raise Damaged(f"{path} is not a file") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Damaged(f"{path} is not a file")
    return fd


def read_file(path: Path, max_bytes: int) -> bytes:
    """Read a whole file of an entry. Raises `Damaged` if it is larger than `max_bytes` or the disk fails, and `OSError`
    if it cannot be opened."""
    fd = open_file(path, os.O_RDONLY)
    try:
        with os.fdopen(fd, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from error
    if len(data) > max_bytes:
        raise Damaged(f"{path} is too large")
    return data


def write_file(path: Path, data: bytes, *, durable: bool = False) -> None:
    """`replace_file` for a file of an entry, in whose place there may be a foreign folder. Raises `OSError`."""
    try:
        replace_file(path, data, durable=durable)
    except IsADirectoryError:
        discard(path)
        replace_file(path, data, durable=durable)


def has_other_users(fd: int) -> bool:
    """Whether anything else has this file open for reading or writing, such as a mount of it in any mount namespace.
    False where the file system cannot tell; network file systems refuse leases for reasons of their own."""
    try:
        # The kernel grants a write lease only for a file that nothing else has open. A process that opens it meanwhile
        # waits, and we get a signal, by default one that would kill us.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        return error.errno == errno.EAGAIN and not may_be_shared(fd)
    return False

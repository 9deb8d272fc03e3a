"""Files that are written completely or not at all, holes in files, and what is best-effort."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from functools import cache
from io import BufferedReader
from pathlib import Path

_KEEP_SIZE = 0x01  # <linux/falloc.h>
_PUNCH_HOLE = 0x02
_SHARED = (
    *(b"9p", b"afs", b"beegfs", b"ceph", b"cifs", b"fuse", b"gfs", b"glusterfs", b"gpfs", b"lustre", b"nfs", b"ocfs"),
    *(b"orangefs", b"panfs", b"smb", b"virtiofs", b"wekafs"),
)
"""Types of network and cluster file systems, as mountinfo begins them."""


def replace_file(path: Path, data: bytes, *, mode: int = 0o600, durable: bool = False) -> None:
    """Create a file or replace it atomically; `durable`: also after a machine crash it is the old or the new one.

    `mode` is that of the new file, less the umask. Raises `OSError`, leaving nothing behind.
    """
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            write_all(fd, data, 0)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_all(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of `data`, also if the kernel accepts it in parts. Raises `OSError`."""
    written = os.pwrite(fd, data, offset)
    while written < len(data):
        written += os.pwrite(fd, memoryview(data)[written:], offset + written)


def open_unfollowed(path: str | Path) -> BufferedReader:
    """Open a file of another user for reading: a link is an `OSError`, and a named pipe is empty."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def discard(path: Path) -> None:
    """Remove a file, or a folder with its content, as far as possible. A link is not followed."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            delete_tree(path)
        else:
            path.unlink()


def delete_tree(folder: Path) -> None:
    """Delete a folder with its content, also read-only folders in it. Nothing happens if it does not exist.

    Raises `OSError` if something cannot be deleted; the rest is.
    """
    import shutil
    import subprocess

    if not folder.exists():
        return
    try:
        if os.geteuid():
            folder.chmod(0o700)
            for path, names, _ in os.walk(folder):
                for name in names:
                    if not (child := Path(path, name)).is_symlink():
                        child.chmod(0o700)
        shutil.rmtree(folder)
    except (OSError, RecursionError) as error:
        # Programs make trees deeper than Python's recursion limit, PATH_MAX and the limit of open files.
        done = subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.PIPE, check=False)
        if folder.exists():
            why = os.fsdecode(done.stderr).strip().rpartition("\n")[2]
            raise OSError(errno.ENOTEMPTY, why or os.strerror(errno.ENOTEMPTY), str(folder)) from error


def lines_of(path: str | Path) -> list[str]:
    """The lines of a text file; none if it cannot be read."""
    try:
        return Path(path).read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []


def sync_path(path: Path) -> None:
    """fsync a file, or the names in a folder. Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def may_be_shared(fd: int) -> bool:
    """Whether other machines may use the file system of an open file, by its type."""
    device = os.fstat(fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}".encode()
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    return any(line.split(b" ", 3)[2] == number and line.partition(b" - ")[2].startswith(_SHARED) for line in lines)


def punch(fd: int, offset: int, length: int) -> None:
    """Punch a hole of the whole pages inside the range. The size stays. Raises `OSError`."""
    if _fallocate()(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@cache
def _fallocate() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).fallocate
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    return function

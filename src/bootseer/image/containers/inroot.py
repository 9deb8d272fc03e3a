"""Look into an image's tree without ever leaving it: links lead where they would in the container.

An image is data from outside: `/etc/passwd` in it may be a link to the host's, a device, or a terabyte. The kernel
resolves the path inside the tree (openat2), only plain files are read, and of these only the beginning.
Called by `image.containers.users` and `image.containers.container`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from pathlib import Path

from bootseer.errors import PermanentError

_OPENAT2 = 437  # the same number on all architectures
_RESOLVE_IN_ROOT = 0x10
_RESOLVE_NO_MAGICLINKS = 0x02


def read_in_root(root: Path, path: str, max_bytes: int) -> bytes | None:
    """At most `max_bytes` of a plain file below `root`; None when there is no such file.

    Raises `PermanentError` when it cannot be read.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # a FIFO or a device must not hold us
    try:
        top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = _open_in_root(top, path.lstrip("/"), flags)
        finally:
            os.close(top)
        with os.fdopen(fd, "rb") as file:
            return file.read(max_bytes) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR):
            return None
        raise PermanentError(f"/{path.lstrip('/')} of the image cannot be read: {error.strerror}") from error


def is_executable(root: Path, path: str) -> bool | None:
    """Whether the plain file at `path` below `root` may be executed by anybody; None when there is no such file."""
    try:
        top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = _open_in_root(top, path.lstrip("/"), os.O_PATH | os.O_CLOEXEC)
        finally:
            os.close(top)
        try:
            mode = os.fstat(fd).st_mode
        finally:
            os.close(fd)
    except OSError:
        return None
    return bool(mode & 0o111) and stat.S_ISREG(mode)


def _open_in_root(top: int, path: str, flags: int) -> int:
    how = struct.pack("=QQQ", flags, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    fd = syscall(
        ctypes.c_long(_OPENAT2), ctypes.c_int(top), ctypes.c_char_p(os.fsencode(path)), how, ctypes.c_size_t(len(how))
    )
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return int(fd)

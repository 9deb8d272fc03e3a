"""Give a range of a file back to the file system, so that it reads as zeros and takes no room.

Python has no `fallocate` that punches, so it is called through ctypes. Called by `evict`.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache

_KEEP_SIZE = 0x01  # <linux/falloc.h>
_PUNCH_HOLE = 0x02


def supported(fd: int) -> bool:
    """Whether the file system of a file, open for writing, can do it. Raises `OSError`."""
    try:
        punch(fd, os.fstat(fd).st_size + (1 << 20), 4096)  # behind the end there is nothing to lose
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise
    return True


def punch(fd: int, offset: int, length: int) -> None:
    """Make a hole, of whole pages of the file system inside the range. The file keeps its size. Raises `OSError`."""
    if _fallocate()(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@cache
def _fallocate() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).fallocate
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    return function

"""mount(2) and umount2(2), which Python lacks, and errors of system calls."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from bootseer.errors import AccessError, BootseerError, NotFoundError, PermanentError, TransientError

MS_RDONLY, MS_NOSUID, MS_NODEV = 1, 2, 4
MNT_FORCE, MNT_DETACH, UMOUNT_NOFOLLOW = 1, 2, 8
CLONE_NEWNS, CLONE_NEWUSER = 0x0002_0000, 0x1000_0000

libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]

_KINDS: dict[int, type[BootseerError]] = {
    errno.EPERM: AccessError,
    errno.EACCES: AccessError,
    errno.ENOENT: NotFoundError,
    errno.EBUSY: TransientError,
    errno.EAGAIN: TransientError,
    errno.EINTR: TransientError,
    errno.ENOMEM: TransientError,
}


def failure(step: str, number: int, detail: str = "") -> BootseerError:
    """The exception for error `number` of a system call; `detail` is the kernel's explanation."""
    explanation = f" ({detail})" if detail else ""
    error = _KINDS.get(number, PermanentError)(f"{step}: {os.strerror(number)}{explanation}")
    # The cause holds the errno, for callers that handle some failures.
    error.__cause__ = OSError(number, os.strerror(number))
    return error


def number_of(error: BootseerError) -> int:
    """The errno of an error made by `failure`, or 0."""
    cause = error.__cause__
    return cause.errno or 0 if isinstance(cause, OSError) else 0


def check(result: int, step: str) -> int:
    """The result of a system call. Raises if it is negative."""
    if result < 0:
        raise failure(step, ctypes.get_errno())
    return result


def mount(kind: str | None, source: Path | str, target: Path | str, *, flags: int = 0, options: str = "") -> None:
    """mount(2). The kernel truncates options to a page, so longer ones are an error here."""
    data = os.fsencode(options)
    if len(data) >= os.sysconf("SC_PAGE_SIZE"):
        raise failure(f"mount {kind} on {target}", errno.E2BIG, "the options are longer than a page")
    name = None if kind is None else kind.encode()
    check(libc.mount(os.fsencode(source), os.fsencode(target), name, flags, data or None), f"mount {kind} on {target}")


def unmount(target: Path | str, *, flags: int = 0) -> None:
    """umount2(2), without following a symbolic link."""
    check(libc.umount2(os.fsencode(target), flags | UMOUNT_NOFOLLOW), f"unmount {target}")

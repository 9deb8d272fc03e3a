"""Errors of the kernel's file systems as ours. Called by `folder`."""

from __future__ import annotations

import errno
import os

from bootseer.checkpoint.places.place import IsFolderError, NoSpaceError, NotEmptyError, NotFolderError, TakenError
from bootseer.errors import AccessError, BootseerError, NotFoundError, PermanentError, TransientError

_KINDS: dict[int, type[BootseerError]] = {
    errno.EEXIST: TakenError,
    errno.ENOTEMPTY: NotEmptyError,
    errno.EISDIR: IsFolderError,
    errno.ENOTDIR: NotFolderError,
    errno.EACCES: AccessError,
    errno.EPERM: AccessError,
    errno.EROFS: AccessError,
    errno.ENAMETOOLONG: PermanentError,
    errno.EINVAL: PermanentError,
    errno.EXDEV: PermanentError,
    errno.ENOTSUP: PermanentError,
}


def mapped(error: OSError, what: str) -> BootseerError:
    """An error of the file system as one of ours; `what` was asked for."""
    if error.errno in (errno.ENOENT, errno.ELOOP):  # a symbolic link is no file here
        return NotFoundError(f"there is no {what}")
    text = f"{what}: {os.strerror(error.errno) if error.errno else error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceError(f"{text}; make room and try again")
    return _KINDS.get(error.errno or 0, TransientError)(text)

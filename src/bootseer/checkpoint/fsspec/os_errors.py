"""Our errors as the `OSError`s that callers of fsspec know."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from bootseer.checkpoint.files import OtherFolderError
from bootseer.checkpoint.places.place import (
    IsFolderError,
    NoSpaceError,
    NoSpaceNowError,
    NotEmptyError,
    NotFolderError,
    TakenError,
)
from bootseer.checkpoint.writing.budget import TooLargeError
from bootseer.errors import AccessError, BootseerError, NotFoundError, UsageError

_NUMBERS: tuple[tuple[type[BootseerError], int], ...] = (
    (NotFolderError, errno.ENOTDIR),  # which is a NotFoundError too
    (NotFoundError, errno.ENOENT),
    (AccessError, errno.EACCES),
    (OtherFolderError, errno.EXDEV),
    (IsFolderError, errno.EISDIR),
    (NotEmptyError, errno.ENOTEMPTY),
    (TakenError, errno.EEXIST),
    (NoSpaceError, errno.ENOSPC),
    (NoSpaceNowError, errno.ENOSPC),
    (TooLargeError, errno.EFBIG),
    (UsageError, errno.EINVAL),
)


@contextlib.contextmanager
def os_errors(path: str) -> Iterator[None]:
    """Raise what fits best: `FileNotFoundError`, `PermissionError`, …, else an input/output error."""
    try:
        yield
    except BootseerError as error:
        number = next((number for kind, number in _NUMBERS if isinstance(error, kind)), errno.EIO)
        raise OSError(number, str(error), path) from error

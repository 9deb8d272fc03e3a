"""From BootSeer's errors to errno values and `OSError`s.

An error's text goes to the log; a program behind a mount sees the number alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator

from bootseer.checkpoint.files import OtherFolderError
from bootseer.checkpoint.writing.spool import TooLargeError
from bootseer.errors import (
    AccessError,
    AlreadyExistsError,
    BootseerError,
    IsFolderError,
    NoSpaceError,
    NoSpaceNowError,
    NotEmptyError,
    NotFolderError,
    NotFoundError,
    UsageError,
)

_NUMBERS: tuple[tuple[type[BootseerError], int], ...] = (
    (OtherFolderError, errno.EXDEV),
    (AlreadyExistsError, errno.EEXIST),
    (NotEmptyError, errno.ENOTEMPTY),
    (IsFolderError, errno.EISDIR),
    (NotFolderError, errno.ENOTDIR),
    (NoSpaceError, errno.ENOSPC),
    (NoSpaceNowError, errno.ENOSPC),
    (TooLargeError, errno.EFBIG),
    (NotFoundError, errno.ENOENT),
    (AccessError, errno.EACCES),
)
"""In order: the first match counts."""


def number_of(error: BootseerError) -> int:
    """The errno of an error; EIO if none fits better."""
    if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EROFS:  # of the spool or the place
        return errno.EROFS
    return next((number for kind, number in _NUMBERS if isinstance(error, kind)), errno.EIO)


def os_error(number: int) -> OSError:
    """The `OSError` of an errno."""
    return OSError(number, os.strerror(number))


class LoggedOsErrors:
    """For mounts: turns BootSeer's errors into `OSError`s, and logs what an errno cannot say.

    A class, because it wraps every request: a generator would take four times as long.
    """

    __slots__ = ("_on_error", "_operation")

    def __init__(self, operation: str, on_error: Callable[[str], None]) -> None:
        self._operation = operation
        self._on_error = on_error

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if isinstance(error, BootseerError):
            number = number_of(error)
            if number in (errno.EIO, errno.EACCES, errno.ENOSPC, errno.EROFS):
                self._on_error(f"{self._operation}: {error}")
            raise OSError(number, str(error)) from error


@contextlib.contextmanager
def os_errors(path: str) -> Iterator[None]:
    """For callers of fsspec: raise the best-fitting `OSError`: `FileNotFoundError`, `PermissionError`, …, or EIO."""
    try:
        yield
    except BootseerError as error:
        number = errno.EINVAL if isinstance(error, UsageError) else number_of(error)
        raise OSError(number, str(error), path) from error

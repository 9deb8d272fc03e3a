"""From our errors to the error numbers and `OSError`s that programs know.

The text of an error is for the log; a program behind a mount sees a number only.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator

from bootseer.checkpoint.files import OtherFolderError
from bootseer.checkpoint.writing.sending import TooLargeError
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
"""The first that fits counts."""


def number_of(error: BootseerError) -> int:
    """The error number that says most of what an error says; EIO for all that has none of its own."""
    return next((number for kind, number in _NUMBERS if isinstance(error, kind)), errno.EIO)


def refusal(number: int) -> OSError:
    """An error that is answered with `number`."""
    return OSError(number, os.strerror(number))


def stale() -> OSError:
    """A node's name leads elsewhere by now; the kernel looks it up again where it can."""
    return refusal(errno.ESTALE)


def bad_handle() -> OSError:
    """Not the number of an open file."""
    return refusal(errno.EBADF)


class LoggedOsErrors:
    """For a mount. Turn our errors into `OSError`s; what a program cannot know from a number goes to the log.

    A class, as it stands around each request: a generator would take four times as long.
    """

    __slots__ = ("_on_error", "_what")

    def __init__(self, operation: str, on_error: Callable[[str], None]) -> None:
        self._what = operation
        self._on_error = on_error

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if isinstance(error, BootseerError):
            number = number_of(error)
            if number in (errno.EIO, errno.EACCES, errno.ENOSPC):
                self._on_error(f"{self._what}: {error}")
            raise OSError(number, str(error)) from error


@contextlib.contextmanager
def os_errors(path: str) -> Iterator[None]:
    """For callers of fsspec. Raise what fits best: `FileNotFoundError`, `PermissionError`, …, else an input/output
    error."""
    try:
        yield
    except BootseerError as error:
        number = errno.EINVAL if isinstance(error, UsageError) else number_of(error)
        raise OSError(number, str(error), path) from error

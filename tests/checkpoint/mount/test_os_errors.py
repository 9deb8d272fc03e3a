"""Mapping of errors to `errno` for programs."""

from __future__ import annotations

import errno

import pytest

from bootseer.checkpoint.files import OtherFolderError
from bootseer.checkpoint.os_errors import LoggedOsErrors
from bootseer.checkpoint.writing.spool import TooLargeError
from bootseer.errors import (
    AccessError,
    AlreadyExistsError,
    BootseerError,
    CorruptError,
    IsFolderError,
    NoSpaceError,
    NotEmptyError,
    NotFolderError,
    NotFoundError,
    PermanentError,
    TransientError,
)


def caused(error: BootseerError, number: int) -> BootseerError:
    error.__cause__ = OSError(number, "")
    return error


@pytest.mark.parametrize(
    ("error", "number", "is_logged"),
    [
        (caused(PermanentError("x"), errno.EROFS), errno.EROFS, True),
        (caused(AccessError("x"), errno.EPERM), errno.EACCES, True),
        (OtherFolderError("x"), errno.EXDEV, False),
        (AlreadyExistsError("x"), errno.EEXIST, False),
        (NotEmptyError("x"), errno.ENOTEMPTY, False),
        (IsFolderError("x"), errno.EISDIR, False),
        (NotFolderError("x"), errno.ENOTDIR, False),
        (NoSpaceError("x"), errno.ENOSPC, True),
        (TooLargeError("x"), errno.EFBIG, False),
        (NotFoundError("x"), errno.ENOENT, False),
        (AccessError("x"), errno.EACCES, True),
        (CorruptError("x"), errno.EIO, True),
        (TransientError("x"), errno.EIO, True),
        (PermanentError("x"), errno.EIO, True),
    ],
)
def test_each_error_has_its_number_and_those_that_need_details_are_logged(
    error: BootseerError, number: int, is_logged: bool
) -> None:
    said: list[str] = []
    with pytest.raises(OSError) as raised, LoggedOsErrors("opening f", said.append):
        raise error
    assert raised.value.errno == number
    assert said == (["opening f: x"] if is_logged else [])

"""Errors of the HDFS client as those of a place. Called by `hdfs`.

HDFS has few classes for its refusals, and one text may stand for two errors of a file system: whoever asked knows more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bootseer.checkpoint.places.place import (
    IsFolderError,
    NoSpaceError,
    NoSpaceNowError,
    NotEmptyError,
    NotFolderError,
    TakenError,
)
from bootseer.errors import BootseerError, PermanentError
from bootseer.hdfs.errors import NoRoomError
from bootseer.hdfs.errors import TakenError as NameTakenError
from bootseer.hdfs.lease import NoNodesError

_KINDS: dict[str, type[PermanentError]] = {
    "PathIsNotEmptyDirectoryException": NotEmptyError,
    "is not empty": NotEmptyError,
    "ParentNotDirectoryException": NotFolderError,
    "Path is not a file": IsFolderError,
    "already exists as a directory": IsFolderError,
    "must both be directories": IsFolderError,
}


@contextlib.contextmanager
def place_errors() -> Iterator[None]:
    """Errors that pass through here become more exact, where HDFS says it only in words."""
    try:
        yield
    except NoNodesError as error:
        if not error.is_short:
            raise
        raise NoSpaceNowError(str(error)) from error
    except PermanentError as error:
        exact = _exact(error)
        if exact is error:
            raise
        raise exact from error


def _exact(error: PermanentError) -> BootseerError:
    text = str(error)
    if isinstance(error, NoRoomError):
        return NoSpaceError(text)
    for part, kind in _KINDS.items():
        if part in text:
            return kind(text)
    return TakenError(text) if isinstance(error, NameTakenError) else error

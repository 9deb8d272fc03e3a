"""Our errors as the `OSError`s that callers of fsspec know."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from bootseer.checkpoint.files import OtherFolderError
from bootseer.checkpoint.places.place import IsFolderError, NotEmptyError, NotFolderError
from bootseer.errors import AccessError, BootseerError, NotFoundError, UsageError

_NUMBERS: tuple[tuple[type[BootseerError], int], ...] = (
    (NotFoundError, errno.ENOENT),
    (AccessError, errno.EACCES),
    (OtherFolderError, errno.EXDEV),
    (IsFolderError, errno.EISDIR),
    (NotFolderError, errno.ENOTDIR),
    (NotEmptyError, errno.ENOTEMPTY),
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

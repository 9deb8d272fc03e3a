"""What can go wrong with a cache, and the one place that turns `OSError` into it."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bootseer.errors import AccessError, PermanentError, TransientError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_BUSY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOLCK)


class CacheFull(TransientError):  # noqa: N818 - a state that callers handle, rather than a mistake
    """There is no room for this on the disk. What was there before is still there."""


class MissingBlocks(TransientError):  # noqa: N818 - an answer that callers handle: fetch them and read again
    """These blocks are not in the cache, or were found damaged and are not any more."""

    def __init__(self, blocks: Sequence[int]) -> None:
        super().__init__(f"{len(blocks)} blocks are not in the cache, the first of them is {blocks[0]}")
        self.blocks = list(blocks)


class Damaged(Exception):  # noqa: N818 - never leaves this package: the entry is replaced
    """A file of an entry is not what it must be, so that nothing in this entry can be believed."""


@contextmanager
def mapped(action: str, path: Path) -> Iterator[None]:
    """Turn `OSError` into an error of ours that says what could not be done, and where."""
    try:
        yield
    except OSError as error:
        message = f"cannot {action} {path}: {error.strerror or error}"
        if error.errno in NO_SPACE:
            what_to_do = "free space on this disk (bootseer cache prune --to SIZE), or give another cache folder"
            raise CacheFull(f"{message}; {what_to_do}") from error
        if error.errno in _REFUSED:
            raise AccessError(f"{message}; give a cache folder that this user may write") from error
        if error.errno in _BUSY:
            raise TransientError(message) from error
        raise PermanentError(message) from error

"""The folders that captures work in, on disk.

    <captures>/capture-<letters>/lock      held by its capture for as long as that lives
                                 uppers/   what the setup changed, one folder for each overlay
                                 works/    overlayfs' own

What a killed capture left is deleted by the next one. Who calls: `capture`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bootseer.artifact.places import own_folder
from bootseer.artifact.unpacked import delete_tree
from bootseer.errors import PermanentError
from bootseer.io import locks
from bootseer.mounts.kernel import is_mounted_anywhere

_PREFIX = "capture-"
_LOCK = "lock"
_LOCK_S = 60.0
"""Who holds it may be deleting what a killed capture left."""


class CaptureFolder:
    """One capture's folder, locked."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def made(cls, captures: Path) -> CaptureFolder:
        """A new folder below `captures`; what killed captures left there goes. Raises `BootseerError`."""
        try:
            captures = own_folder(captures)
            with _locked(captures):
                _clean(captures)
                path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=captures))
                lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return cls(path, lock)
        except OSError as error:
            raise PermanentError(f"{error.filename or captures}: {error.strerror}") from error

    def close(self, *, keep: bool = False) -> None:
        """Delete it, unless it is to be kept, or somebody still works on it: then until a later capture."""
        if not keep and not is_mounted_anywhere(f"/{self.path.name}/"):
            # Something in it that cannot be deleted (an immutable file, too deep a tree) is no reason to fail a job.
            with contextlib.suppress(OSError, RecursionError):
                delete_tree(self.path)
        os.close(self._lock)


@contextlib.contextmanager
def _locked(captures: Path) -> Iterator[None]:
    folder = os.open(captures, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        locks.lock(folder, captures, _LOCK_S)
        yield
    finally:
        os.close(folder)


def _clean(captures: Path) -> None:
    for left in captures.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, RecursionError):
            lock = os.open(left / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # What the setup left running may still work on it.
                if not is_mounted_anywhere(f"/{left.name}/"):
                    delete_tree(left)
            finally:
                os.close(lock)

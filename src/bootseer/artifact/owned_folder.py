"""A folder on the node's disk that goes with its process: a run's, or a capture's.

    <parent>/<prefix><letters>/lock    locked by the owner, and by children that keep the descriptor
                              /...     the owner's files

It is deleted by its owner, or, when that was killed, by the next one to make such a folder. Nothing is deleted while
something in it is mounted: what a setup or a command left running still works on these files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from bootseer.artifact.places import CACHE, own_folder
from bootseer.errors import PermanentError
from bootseer.io.locks import try_flock
from bootseer.logs import logger
from bootseer.mounts.kernel import is_mounted_anywhere

_LOCK, _NEW = "lock", "new-"
_LEFT_OVER_S = 3600.0
_log = logger(__name__)


class OwnedFolder:
    """One such folder, at `path`. `lock` is a descriptor that children may keep."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.lock = lock

    @classmethod
    def made(cls, parent: Path, prefix: str) -> OwnedFolder:
        """A new folder below `parent`. Raises `PermanentError` when it cannot be made, or others could change it."""
        try:
            parent = own_folder(parent)
            delete_abandoned(parent, prefix)
            new = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
            lock = _open_lock(new)
            try_flock(lock)
            # Nothing cleans it up before it has this name, and then it is locked.
            return cls(new.rename(parent / (prefix + new.name.removeprefix(_NEW))), lock)
        except OSError as error:
            raise PermanentError(f"{parent}: {error.strerror}; set {CACHE} to another folder") from error

    def remove(self) -> None:
        """Delete it with everything in it. What cannot be deleted now is tried again by a later owner."""
        try:
            _delete(self.path)
        finally:
            os.close(self.lock)


def delete_abandoned(parent: Path, prefix: str) -> None:
    """Delete the folders that no process holds. What cannot be deleted now is tried again by the next owner."""
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            lock = _open_lock(path)
            try:
                if try_flock(lock):
                    _log.info("%s: its process has ended without deleting it", path)
                    _delete(path)
            finally:
                os.close(lock)
    for path in parent.glob(f"{_NEW}*"):  # its process was killed before it had a name and a lock
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFT_OVER_S:
                shutil.rmtree(path, ignore_errors=True)


def _open_lock(folder: Path) -> int:
    return os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _delete(path: Path) -> None:
    # Something that cannot be deleted (an immutable file, too deep a tree) is no reason to fail a job.
    with contextlib.suppress(OSError, RecursionError):
        if not is_mounted_anywhere(f"/{path.name}/"):
            # Each start waits for this module, and few have anything to delete.
            from bootseer.artifact.unpacked import delete_tree

            delete_tree(path)

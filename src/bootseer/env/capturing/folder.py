"""Folders that belong to a process for as long as it lives, or a child with its lock: a start's, a capture's.

    <root>/<prefix><letters>/lock      held
                             ...       layers, logs, in a capture `uppers` and `works` (`overlay`)

A lock falls with its holders, however they end. What a killed process left is deleted by the next one that makes such a
folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from bootseer.artifact.places import CACHE, own_folder
from bootseer.artifact.unpacked import delete_tree
from bootseer.errors import PermanentError
from bootseer.mounts.kernel import is_mounted_anywhere

_LOCK = "lock"
_NEW = "new-"
_LEFT_OVER_S = 3600.0


class OwnedFolder:
    """One such folder. `lock` is a descriptor that children may keep."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.lock = lock

    @classmethod
    def made(cls, root: Path, prefix: str) -> OwnedFolder:
        """A new folder below `root`. Raises `PermanentError` when it cannot be made, or others could change it."""
        try:
            root = own_folder(root)
            clean_up(root, prefix)
            new = Path(tempfile.mkdtemp(prefix=_NEW, dir=root))
            lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # It is not cleaned up before it has this name, and then it is locked.
            path = new.rename(root / (prefix + new.name.removeprefix(_NEW)))
        except OSError as error:
            raise PermanentError(f"{root}: {error.strerror}; set {CACHE} to another folder") from error
        return cls(path, lock)

    def close(self, *, keep: bool = False) -> None:
        """Delete it with all that is in it, unless it is to be kept: then, as what cannot be deleted now, it goes when
        the next one is made."""
        try:
            if not keep:
                _delete(self.path)
        finally:
            os.close(self.lock)


def clean_up(root: Path, prefix: str) -> None:
    """Delete the folders of killed processes. What cannot be deleted now is tried again when the next one is made."""
    for path in root.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _delete(path)
            finally:
                os.close(lock)
    for path in root.glob(f"{_NEW}*"):  # its process was killed before the folder had a name and a lock
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFT_OVER_S:
                shutil.rmtree(path, ignore_errors=True)


def _delete(path: Path) -> None:
    """All but the lock first: until the last file is gone it says that the folder is in use.

    Nothing while something in it is mounted: what the setup or the command left running still works on these layers.
    Something that cannot be deleted (an immutable file, too deep a tree) is no reason to fail a job.
    """
    with contextlib.suppress(OSError, RecursionError):
        if is_mounted_anywhere(f"/{path.name}/"):
            return
        for entry in list(path.iterdir()):
            if entry.name != _LOCK:
                if entry.is_dir() and not entry.is_symlink():
                    delete_tree(entry)
                else:
                    entry.unlink()
        shutil.rmtree(path)

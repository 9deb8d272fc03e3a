"""A folder for one start's own layers, and the end of those that killed starts left behind.

    <cache>/environments/runs/<name>/      lock, layers, logs

Whoever works in the folder holds its lock: the run, and what goes on beside the command. A lock falls with its holders,
however they end, so that a folder whose lock is free is nobody's. Called by `environment_task`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from bootseer.bring.places import CACHE, own_folder
from bootseer.errors import PermanentError
from bootseer.mounts.kernel import is_mounted_anywhere

_LOCK = "lock"
_PREFIX, _NEW = "run-", "new-"
_LEFT_OVER_S = 3600.0


class RunFolder:
    """One such folder. `lock` is a descriptor that children may keep."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.lock = lock

    @classmethod
    def made(cls, root: Path) -> RunFolder:
        """A new folder below `root`. Raises `PermanentError` when it cannot be made, or others could change it."""
        try:
            root = own_folder(root)
            clean_up(root)
            new = Path(tempfile.mkdtemp(prefix=_NEW, dir=root))
            lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Nobody cleans it up before it has this name, and then it is locked.
            path = new.rename(root / (_PREFIX + new.name.removeprefix(_NEW)))
        except OSError as error:
            raise PermanentError(f"{root}: {error.strerror}; set {CACHE} to another folder") from error
        return cls(path, lock)

    def remove(self) -> None:
        """Delete the folder with everything in it. What cannot be deleted now is tried again by a later start."""
        try:
            with contextlib.suppress(OSError):
                _delete(self.path)
        finally:
            os.close(self.lock)


def clean_up(root: Path) -> None:
    """Delete the folders that nobody holds. What cannot be deleted now is tried again by the next start."""
    for path in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _delete(path)
            finally:
                os.close(lock)
    for path in root.glob(f"{_NEW}*"):  # whoever made it was killed before it had a name and a lock
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFT_OVER_S:
                shutil.rmtree(path, ignore_errors=True)


def _delete(path: Path) -> None:
    """All but the lock first: until the last file is gone it says whose folder this is.

    Nothing while something in it is mounted: what the setup or the command left running still works on these layers.
    """
    if is_mounted_anywhere(f"/{path.name}/"):
        return
    for entry in list(path.iterdir()):
        if entry.name != _LOCK:
            if entry.is_dir() and not entry.is_symlink():
                _open_up(entry)
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _open_up(top: Path) -> None:
    """The kernel's own folders in a layer may be entered by nobody, and setups make folders read-only."""
    for folder, folders, _ in os.walk(top):
        for name in ("", *folders):
            path = Path(folder, name)
            with contextlib.suppress(OSError):
                mode = path.lstat().st_mode
                if stat.S_ISDIR(mode) and mode & 0o700 != 0o700:
                    path.chmod(0o700)

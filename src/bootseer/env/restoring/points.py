"""Folders that are made on the host because a mount needs a place: for roots that are new.

    <changes>/points/lock        locked while a process makes or removes such folders
    <changes>/points/<digest>    says which folders we made for a root

Nothing shows in them outside of a run's own mounts. The last run that uses one removes it, if it is still
empty; what a killed run left, the next one does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bootseer.env.restoring.inside import Inside, new_folder
from bootseer.env.restoring.private import is_shown
from bootseer.errors import BootseerError, PermanentError
from bootseer.io import locks

_LOCK_S = 60.0
"""Longer than a namespace may take to be made."""


class Points:
    """The places of mounts below `changes`."""

    def __init__(self, changes: Path) -> None:
        self._changes = changes
        self._folder = changes / "points"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """No other process makes or removes a place. Hold it from `make` until the mount is there: it is short.

        Raises `TransientError` when another process holds it for too long.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            locks.lock(lock, self._folder / "lock", _LOCK_S)
            yield
        finally:
            os.close(lock)

    def make(self, root: str, where: Callable[[str], Path]) -> bool:
        """Have a folder at `root`, looking as in the snapshot; `where` tells where that has a path. True: it is ours.

        Raises `PermanentError` for a place that is not a folder, or that is reached through a symbolic link.
        """
        if os.path.realpath(root) != root:
            raise PermanentError(f"{root} is reached through a symbolic link: nothing is mounted there")
        record = self._record(root)
        if os.path.lexists(root):
            if not stat.S_ISDIR(os.lstat(root).st_mode):
                raise PermanentError(f"{root} is not a folder on this machine: nothing is mounted there")
            return record.exists()
        missing = [root]
        while not os.path.lexists(above := missing[-1].rpartition("/")[0]):
            missing.append(above)
        # First the word, then the deed: what a kill leaves is known.
        record.write_text(json.dumps(missing))
        try:
            for path in reversed(missing):
                folder, _, name = path.rpartition("/")
                with Inside().folder(folder) as opened, new_folder(opened, name, 0o755) as made:
                    _dress(made, where(path))
        except OSError as error:
            raise PermanentError(f"{error.filename or root}: {error.strerror}") from error
        return True

    def take_away(self) -> None:
        """Delete the places that no run uses any more. A later run does what does not work now."""
        if not self._folder.is_dir():
            return
        with contextlib.suppress(BootseerError, OSError), self.locked():
            for record in self._folder.iterdir():
                if record.name == "lock":
                    continue
                with contextlib.suppress(OSError, ValueError, TypeError, IndexError):
                    paths: Sequence[str] = json.loads(record.read_text())
                    if is_shown(self._changes, paths[0]):
                        continue
                    with contextlib.suppress(OSError):  # another process put something there, or removed it
                        for path in paths:
                            os.rmdir(path)  # noqa: PTH106
                    record.unlink()

    def _record(self, root: str) -> Path:
        return self._folder / hashlib.sha256(os.fsencode(root)).hexdigest()[:24]


def _dress(made: int, like: Path) -> None:
    """Owner and mode as in the snapshot, as far as we may."""
    with contextlib.suppress(OSError):
        status = like.stat(follow_symlinks=False)
        with contextlib.suppress(PermissionError):
            os.fchown(made, status.st_uid, status.st_gid)
        os.fchmod(made, stat.S_IMODE(status.st_mode))

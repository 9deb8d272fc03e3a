"""Create mount points on the host for roots that do not exist there.

    <changes>/points/lock        locked while a process creates or removes mount points
    <changes>/points/<digest>    JSON: the folders that were created for a root

They are empty outside of a run's own mounts. The last run that uses a mount point removes it, if it is still empty;
after a kill the next run does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bootseer.env.restoring.private_layer import is_root_in_use
from bootseer.env.restoring.safe_tree import SafeTree, new_folder
from bootseer.errors import BootseerError, PermanentError
from bootseer.io import locks

_LOCK_S = 60.0
"""Longer than the creation of a namespace may take."""


class MountPoints:
    """The mount points that are recorded below `changes`."""

    def __init__(self, changes: Path) -> None:
        self._changes = changes
        self._folder = changes / "points"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock out other processes from creating and removing mount points.

        Hold it from `ensure` until the mount is made. Raises `TransientError` if another process holds it for too long.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            locks.lock(lock, self._folder / "lock", _LOCK_S)
            yield
        finally:
            os.close(lock)

    def ensure(self, root: str, source_of: Callable[[str], Path]) -> bool:
        """Have a folder at `root`, looking as in the snapshot; `source_of` tells where that has a path. True: it is
        ours.

        Raises `PermanentError` for a place that is not a folder, or that is reached through a symbolic link.
        """
        if os.path.realpath(root) != root:
            raise PermanentError(f"{root} is reached through a symbolic link, so nothing can be mounted there")
        record = self._record(root)
        if os.path.lexists(root):
            if not stat.S_ISDIR(os.lstat(root).st_mode):
                raise PermanentError(f"{root} is not a folder on this machine, so nothing can be mounted there")
            return record.exists()
        missing = [root]
        while not os.path.lexists(above := missing[-1].rpartition("/")[0]):
            missing.append(above)
        # Recorded before it is created, so that after a kill the next run can clean up.
        record.write_text(json.dumps(missing))
        try:
            for path in reversed(missing):
                folder, _, name = path.rpartition("/")
                with SafeTree().folder(folder) as opened, new_folder(opened, name, 0o755) as made:
                    _set_attributes(made, source_of(path))
        except OSError as error:
            raise PermanentError(f"{error.filename or root}: {error.strerror}") from error
        return True

    def remove_unused(self) -> None:
        """Delete the mount points that no run uses. Failures are left to a later run."""
        if not self._folder.is_dir():
            return
        with contextlib.suppress(BootseerError, OSError), self.locked():
            for record in self._folder.iterdir():
                if record.name == "lock":
                    continue
                with contextlib.suppress(OSError, ValueError, TypeError, IndexError):
                    paths: Sequence[str] = json.loads(record.read_text())
                    if is_root_in_use(self._changes, paths[0]):
                        continue
                    with contextlib.suppress(OSError):  # it is no longer empty, or was removed
                        for path in paths:
                            os.rmdir(path)  # noqa: PTH106
                    record.unlink()

    def _record(self, root: str) -> Path:
        return self._folder / hashlib.sha256(os.fsencode(root)).hexdigest()[:24]


def _set_attributes(made: int, like: Path) -> None:
    """Set owner and mode as in the snapshot, as far as permitted."""
    with contextlib.suppress(OSError):
        status = like.stat(follow_symlinks=False)
        with contextlib.suppress(PermissionError):
            os.fchown(made, status.st_uid, status.st_gid)
        os.fchmod(made, stat.S_IMODE(status.st_mode))

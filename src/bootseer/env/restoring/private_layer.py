"""What a run has on the machine: the private layer of a job's changes to mounted folders, and mount points.

    <changes>/points/lock        locked while a process creates or removes mount points
    <changes>/points/<digest>    JSON: the folders that were created for a root
    <changes>/run-<id>/<n>/root  the path of a root; `run-<id>` is an `OwnedFolder`
                        .../upper    the job's changes in the root; `work` beside it belongs to overlayfs
    <changes>/kept/run-<id>/...  kept files of a run that has ended, by their paths

Changes in system folders such as `/usr` are discarded with a message (except caches), as an environment must be what
its snapshot says. Changes elsewhere may be results that the user misses: they are kept for a week, with a message
where. After a kill a later run does this.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from bootseer.artifact.owned_folder import OwnedFolder
from bootseer.artifact.progress import Say
from bootseer.env.changes import lies_in
from bootseer.env.restoring.roots import is_system
from bootseer.env.restoring.safe_tree import SafeTree, new_folder
from bootseer.errors import BootseerError, PermanentError
from bootseer.io import locks
from bootseer.io.files import delete_tree, replace_file
from bootseer.mounts.kernel import is_mounted_anywhere
from bootseer.units import listed

_PREFIX, _ROOT, _KEPT = "run-", "root", "kept"
_OLD_RECORD = "run.json"
"""In the folder of a run of version 0.2, also if it has ended and left files."""
_KEPT_S = 7 * 86_400.0
_CACHE = re.compile(r"cache", re.IGNORECASE)
"""In the name of a file or folder: `__pycache__`, `ld.so.cache`, `fontconfig-cache`."""


class PrivateFolder:
    """The folder of one run, locked until `close` or the end of this process."""

    def __init__(self, changes: Path, say: Say) -> None:
        """Settles the folders of killed runs, too, and deletes kept files after their week. Raises `PermanentError` if
        it cannot be created."""
        owned = OwnedFolder.made(changes, _PREFIX, partial(_settle_abandoned, say=say))
        self._lock = owned.lock
        self.path = owned.path
        """A real path, as it appears in the mount table."""
        self._numbers: dict[str, str] = {}
        for folder in (*changes.glob(f"{_KEPT}/*"), *(record.parent for record in changes.glob(f"*/{_OLD_RECORD}"))):
            with contextlib.suppress(OSError):
                if time.time() - folder.stat().st_mtime > _KEPT_S and not is_mounted_anywhere(f"/{folder.name}/"):
                    delete_tree(folder)

    def add(self, root: str) -> Path:
        """Record a root; its folder."""
        folder = self.path / self._numbers.setdefault(root, str(len(self._numbers)))
        folder.mkdir(exist_ok=True)
        (folder / _ROOT).write_bytes(os.fsencode(root))
        return folder

    def folders(self, root: str) -> tuple[Path, Path]:
        """New upper and work folders of a root."""
        folder = self.add(root)
        for name in ("upper", "work"):
            (folder / name).mkdir()
        return folder / "upper", folder / "work"

    def close(self, say: Say, memory: Path | None = None) -> None:
        """Keep what may matter to the user, and delete the rest. `memory` has the upper layers that are not here.

        If a process of the job is still running, a later run does this.
        """
        try:
            if not is_mounted_anywhere(f"/{self.path.name}/"):
                _settle(self.path, say, memory)
                delete_tree(self.path)
        finally:
            os.close(self._lock)


def _settle_abandoned(folder: Path, *, say: Say) -> None:
    # After `bootseer run` was killed, the job may still be running with its mounts.
    if is_mounted_anywhere(f"/{folder.name}/"):
        raise BlockingIOError(errno.EBUSY, os.strerror(errno.EBUSY), folder)
    _settle(folder, say)


def is_root_in_use(changes: Path, root: str) -> bool:
    """Whether a running job has a mount on this root, or a run that has mounts and no job yet."""
    for record in changes.glob(f"{_PREFIX}*/*/{_ROOT}"):
        with contextlib.suppress(OSError):
            if record.read_bytes() == os.fsencode(root) and _is_in_use(record.parents[1]):
                return True
    for record in changes.glob(f"*/{_OLD_RECORD}"):
        with contextlib.suppress(OSError, ValueError):
            if root in json.loads(record.read_text())["roots"] and is_mounted_anywhere(f"/{record.parent.name}/"):
                return True
    return False


def _is_in_use(folder: Path) -> bool:
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return not locks.try_flock(lock) or is_mounted_anywhere(f"/{folder.name}/")
    finally:
        os.close(lock)


def _settle(folder: Path, say: Say, memory: Path | None = None) -> None:
    """Keep or drop what the job wrote. May be repeated after a kill at any point: what was kept before stays."""
    files = folder.parent / _KEPT / folder.name
    records = [record for place in (folder, memory) if place is not None for record in place.glob(f"*/{_ROOT}")]
    uppers = {os.fsdecode(record.read_bytes()): record.with_name("upper") for record in records}
    num_dropped = 0
    dropped = []
    for root, upper in sorted(uppers.items()):
        count = _written(upper)
        if count and is_system(root):
            num_dropped += count
            dropped.append(root)
        elif count:
            _keep(upper, files / root.lstrip("/"))
    if num_dropped:
        say(
            f"the job wrote {num_dropped} files into {listed(dropped)}, which were discarded: system folders belong to"
            " the environment; write results elsewhere"
        )
    outermost = [root for root in uppers if not lies_in(root, uppers.keys() - {root})]
    kept = {root: _written(files / root.lstrip("/")) for root in outermost}
    if touched := [root for root, count in kept.items() if count]:
        say(
            f"the job wrote {sum(kept.values())} files into its environment, {listed(touched)}: the environment is"
            f" unchanged, and the files are kept in {files} for a week"
        )


def _keep(upper: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        upper.rename(target)
    except OSError:  # on another file system: in memory
        shutil.copytree(upper, target, symlinks=True, ignore=_no_marks)


def _no_marks(folder: str, names: Sequence[str]) -> list[str]:
    """Entries that are not files of the job: overlayfs' whiteouts."""
    kinds = (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR)
    return [name for name in names if stat.S_IFMT(os.lstat(f"{folder}/{name}").st_mode) not in kinds]


def _written(upper: Path) -> int:
    """Number of the files that a job wrote, without bytecode and other caches."""
    num_files, waiting = 0, [os.fspath(upper)]
    while waiting:  # `os.walk` of Python 3.11 ends at a thousand levels
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if not _CACHE.search(entry.name):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    num_files += entry.is_file(follow_symlinks=False) or entry.is_symlink()
    return num_files


_LOCK_S = 60.0
"""Longer than the creation of a namespace may take."""


class MountPoints:
    """The mount points on the host for roots that do not exist there, recorded below `changes`.

    They are empty outside of a run's own mounts. The last run that uses a mount point removes it, if it is still empty;
    after a kill the next run does.
    """

    def __init__(self, changes: Path) -> None:
        self._changes = changes
        self._folder = changes / "points"

    def locked(self) -> contextlib.AbstractContextManager[int]:
        """Lock out other processes from creating and removing mount points.

        Hold it from `ensure` until the mount is made. Raises `TransientError` if another process holds it for too long.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return locks.flocked(self._folder / "lock", deadline_s=_LOCK_S)

    def ensure(self, root: str, source_of: Callable[[str], Path]) -> bool:
        """Create the folder `root` if it is missing, with owner and mode as in the snapshot (`source_of` returns where
        its version of a path can be read); whether it is a recorded mount point.

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
        replace_file(record, json.dumps(missing).encode())
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
                    with contextlib.suppress(OSError):  # it is no longer empty
                        for path in filter(os.path.lexists, paths):
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

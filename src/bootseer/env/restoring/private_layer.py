"""What a run has on the machine: the private layer of a job's changes to mounted folders, and mount points.

    <changes>/points/lock        locked while a process creates or removes mount points
    <changes>/points/<digest>    JSON: the folders that were created for a root
    <changes>/<id>/lock          locked by the run
    <changes>/<id>/run.json      numbers of the roots; `kept` (a time) once the run has ended and left files
    <changes>/<id>/<n>/upper     the job's changes in a root; `work` beside it belongs to overlayfs
    <changes>/<id>/files/...     kept files, by their paths

Changes in system folders such as `/usr` are discarded with a message (except caches), as an environment must be what
its snapshot says. Changes elsewhere may be results that the user misses: they are kept for a week, with a message
where. After a kill a later run does this.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bootseer.artifact.places import own_folder
from bootseer.artifact.progress import Say
from bootseer.artifact.unpacked import delete_tree
from bootseer.env.changes import lies_in
from bootseer.env.restoring.roots import is_system
from bootseer.env.restoring.safe_tree import SafeTree, new_folder
from bootseer.errors import BootseerError, PermanentError, os_errors_as
from bootseer.io import locks
from bootseer.io.files import replace_file
from bootseer.mounts.kernel import is_mounted_anywhere
from bootseer.units import listed

_LOCK, _RECORD, _FILES = "lock", "run.json", "files"
_KEPT_S = 7 * 86_400.0
_MAX_BYTES = 1 << 20
_CACHE = re.compile(r"cache", re.IGNORECASE)
"""In the name of a file or folder: `__pycache__`, `ld.so.cache`, `fontconfig-cache`."""


class PrivateFolder:
    """The folder of one run, locked until `close` or the end of this process."""

    def __init__(self, changes: Path, roots: Sequence[str]) -> None:
        """Raises `PermanentError` if it cannot be created."""
        self.roots = {root: str(number) for number, root in enumerate(roots)}
        with os_errors_as(PermanentError, changes, then="; the job's changes cannot be stored there"):
            # A real path, as it appears in the mount table.
            self.path = own_folder(changes) / secrets.token_hex(6)
            self.path.mkdir(mode=0o700)
            lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._lock = lock
            fcntl.flock(lock, fcntl.LOCK_EX)
            _save_record(self.path, self.roots)

    def folders(self, root: str) -> tuple[Path, Path]:
        """New upper and work folders of a root."""
        folder = self.path / self.roots.setdefault(root, str(len(self.roots)))
        folder.mkdir()
        for name in ("upper", "work"):
            (folder / name).mkdir()
        return folder / "upper", folder / "work"

    def set_roots(self, roots: Mapping[str, str]) -> None:
        """Record the roots as the process that made the mounts has numbered them."""
        if roots != self.roots:
            self.roots = dict(roots)
            _save_record(self.path, self.roots)

    def close(self, say: Say, place: Path | None = None) -> None:
        """Keep what may matter to the user, and delete the rest. `place` is where the upper layers are, if not here.

        If a process of the job is still running, a later run does this.
        """
        try:
            if not is_mounted_anywhere(f"/{self.path.name}/"):
                _settle(self.path, self.roots, say, place)
        finally:
            os.close(self._lock)


def settle_abandoned(changes: Path, say: Say) -> None:
    """Settle the folders of killed runs, and delete kept files after their week."""
    if not changes.is_dir():
        return
    for folder in sorted(changes.iterdir()):
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError), _abandoned(folder) as record:
            kept_s = record.get("kept")
            if kept_s is None:
                _settle(folder, record["roots"], say, None)
            elif time.time() - float(kept_s) > _KEPT_S:
                delete_tree(folder)


def is_root_in_use(changes: Path, root: str) -> bool:
    """Whether a running job has a mount on this root, or a run that has mounts and no job yet."""
    for record in changes.glob(f"*/{_RECORD}"):
        try:
            with _abandoned(record.parent):
                continue
        except BlockingIOError:
            if root in json.loads(record.read_text())["roots"]:
                return True
        except (OSError, ValueError):
            continue
    return False


@contextlib.contextmanager
def _abandoned(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The record of a run that has ended. Raises `BlockingIOError` for one that has not."""
    record = folder / _RECORD
    if record.stat().st_size > _MAX_BYTES:
        raise ValueError
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Not before it is locked: another process may have settled it meanwhile.
        found = json.loads(record.read_text())
        # After `bootseer run` was killed, the job may still be running with its mounts. They are searched for in the
        # tables of all processes, so not for the folders of kept files, which are many.
        if "kept" not in found and is_mounted_anywhere(f"/{folder.name}/"):
            raise BlockingIOError
        yield found
    finally:
        os.close(lock)


def _save_record(folder: Path, roots: Mapping[str, str], **more: float) -> None:
    """Write the record of a run; after an error the old one is still there."""
    replace_file(folder / _RECORD, json.dumps({"roots": roots, **more}).encode())


def _settle(folder: Path, roots: Mapping[str, str], say: Say, place: Path | None) -> None:
    """Keep or drop what the job wrote. May be repeated after a kill at any point: what was kept before stays."""
    files = folder / _FILES
    num_dropped = 0
    dropped = []
    for root, number in roots.items():
        upper = next(
            (above / number / "upper" for above in (place, folder) if above and (above / number).is_dir()), None
        )
        count = _written(upper) if upper is not None else 0
        if count and is_system(root):
            num_dropped += count
            dropped.append(root)
        elif count and upper is not None:
            _keep(upper, files / root.lstrip("/"))
    if num_dropped:
        say(
            f"the job wrote {num_dropped} files into {listed(dropped)}, which were discarded: system folders belong to"
            " the environment; write results elsewhere"
        )
    outermost = [root for root in roots if not lies_in(root, roots.keys() - {root})]
    kept = {root: _written(files / root.lstrip("/")) for root in outermost}
    touched = [root for root, count in kept.items() if count]
    if not touched:
        delete_tree(folder)
        return
    # The record last: what the job wrote may have filled the disk.
    for child in folder.iterdir():
        if child != files and child.is_dir():
            delete_tree(child)
    _save_record(folder, roots, kept=time.time())
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
    num_files = 0
    for path, folders, names in os.walk(upper):
        folders[:] = [name for name in folders if not _CACHE.search(name)]
        for name in (*names, *folders):
            mode = os.lstat(f"{path}/{name}").st_mode
            num_files += not _CACHE.search(name) and (stat.S_ISREG(mode) or stat.S_ISLNK(mode))
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

"""Where a job's changes of mounted folders go: a folder for each run, and what becomes of it.

    <changes>/<id>/lock          locked by the run
    <changes>/<id>/run.json      which root has which number; `kept` once the run is over and left something
    <changes>/<id>/<n>/upper     what the job wrote into a root; `work` beside it is overlayfs' own
    <changes>/<id>/files/...     what is kept, by its path

What a job writes into `/usr` and the like ends with it, as an environment must be what its snapshot says: a line tells
of it, unless it is caches. Everything else could be a result that is unexpected there, so that it is kept for a week,
and the user is told where. What a killed run left, a later one looks through.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bootseer.artifact.places import own_folder
from bootseer.artifact.progress import Say
from bootseer.artifact.unpacked import delete_tree
from bootseer.env.restoring.roots import is_system
from bootseer.errors import PermanentError
from bootseer.mounts.kernel import is_mounted_anywhere

_LOCK, _RECORD, _FILES = "lock", "run.json", "files"
_KEPT_S = 7 * 86_400.0
_MAX_BYTES = 1 << 20
_CACHE = re.compile(r"cache", re.IGNORECASE)
"""In the name of a file or folder: `__pycache__`, `ld.so.cache`, `fontconfig-cache`."""


class PrivateFolder:
    """The folder of one run; locked as long as this process lives or until `close`."""

    def __init__(self, changes: Path, roots: Sequence[str]) -> None:
        """Raises `PermanentError` when the disk does not take it."""
        self.roots = {root: str(number) for number, root in enumerate(roots)}
        try:
            # Without links, as the kernel writes it in the table of mounts.
            self.path = own_folder(changes) / secrets.token_hex(6)
            self.path.mkdir(mode=0o700)
            lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._lock = lock
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._write_down()
        except OSError as error:
            raise PermanentError(f"{changes}: {error.strerror}; the job's changes have no place there") from error

    def folders(self, root: str, place: Path | None = None) -> tuple[Path, Path]:
        """New folders for the changes of a root and for overlayfs, in `place` if this folder's disk is unfit."""
        folder = (place or self.path) / self.roots.setdefault(root, str(len(self.roots)))
        folder.mkdir()
        for name in ("upper", "work"):
            (folder / name).mkdir()
        return folder / "upper", folder / "work"

    def also(self, roots: Mapping[str, str]) -> None:
        """Know of roots that came to it while the mounts were made, by another process."""
        if roots != self.roots:
            self.roots = dict(roots)
            self._write_down()

    def _write_down(self) -> None:
        (self.path / _RECORD).write_text(json.dumps({"roots": self.roots}))

    def close(self, say: Say, place: Path | None = None) -> None:
        """Keep what may matter to the user, and delete the rest. `place` is where the uppers were, if not here.

        When a process of the job lives on, all of it stays for a later run to look through.
        """
        try:
            if not is_mounted_anywhere(f"/{self.path.name}/"):
                _settle(self.path, self.roots, say, place)
        finally:
            os.close(self._lock)


def clean(changes: Path, say: Say) -> None:
    """Settle what killed runs left, and forget what was kept long enough."""
    if not changes.is_dir():
        return
    for folder in sorted(changes.iterdir()):
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError), _abandoned(folder) as record:
            kept_s = record.get("kept")
            if kept_s is None:
                _settle(folder, record["roots"], say, None)
            elif time.time() - float(kept_s) > _KEPT_S:
                delete_tree(folder)


def is_shown(changes: Path, root: str) -> bool:
    """Whether a run that is not over shows something on this root."""
    for folder in changes.iterdir():
        if not (folder / _RECORD).is_file():
            continue
        try:
            with _abandoned(folder):
                continue
        except BlockingIOError:
            if root in json.loads((folder / _RECORD).read_text())["roots"]:
                return True
        except (OSError, ValueError):
            continue
    return False


@contextlib.contextmanager
def _abandoned(folder: Path) -> Iterator[Mapping[str, Any]]:
    """What was written down of a run that is over. Raises `BlockingIOError` for one that is not."""
    record = folder / _RECORD
    if record.stat().st_size > _MAX_BYTES:
        raise ValueError
    value = json.loads(record.read_text())
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its process was killed, and the job may live on, with all its mounts.
        if is_mounted_anywhere(f"/{folder.name}/"):
            raise BlockingIOError
        yield value
    finally:
        os.close(lock)


def _settle(folder: Path, roots: Mapping[str, str], say: Say, place: Path | None) -> None:
    files = folder / _FILES
    num_files = num_bytes = num_dropped = 0
    touched, dropped = [], []
    for root, number in roots.items():
        upper = next(
            (above / number / "upper" for above in (place, folder) if above and (above / number).is_dir()), None
        )
        if upper is None:
            continue
        count, size = _written(upper)
        if count and is_system(root):
            num_dropped += count
            dropped.append(root)
        elif count:
            num_files, num_bytes = num_files + count, num_bytes + size
            touched.append(root)
            _keep(upper, files / root.lstrip("/"))
    if num_dropped:
        say(
            f"the job wrote {num_dropped} files into {', '.join(dropped[:3])}, and they are gone: folders of the system"
            " belong to the environment; keep results elsewhere"
        )
    if not num_files:
        delete_tree(folder)
        return
    for child in folder.iterdir():
        if child != files and child.is_dir():
            delete_tree(child)
    (folder / _RECORD).write_text(json.dumps({"roots": roots, "kept": time.time()}))
    say(
        f"the job wrote {num_files} files ({num_bytes} bytes) into its environment, {', '.join(touched[:3])}:"
        f" the environment stays as it was, and they are kept in {files} for a week"
    )


def _keep(upper: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        upper.rename(target)
    except OSError:  # it lies in memory
        shutil.copytree(upper, target, symlinks=True, ignore=_no_marks)


def _no_marks(folder: str, names: Sequence[str]) -> list[str]:
    """What is not a file of the job: overlayfs' deletions."""
    kinds = (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR)
    return [name for name in names if stat.S_IFMT(os.lstat(f"{folder}/{name}").st_mode) not in kinds]


def _written(upper: Path) -> tuple[int, int]:
    """Number and bytes of the files that a job wrote; bytecode and other caches do not count."""
    num_files = num_bytes = 0
    for path, folders, names in os.walk(upper):
        folders[:] = [name for name in folders if not _CACHE.search(name)]
        for name in [*names, *(name for name in folders if Path(path, name).is_symlink())]:
            if _CACHE.search(name):
                continue
            status = os.lstat(f"{path}/{name}")
            if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                num_files += 1
                num_bytes += status.st_size
    return num_files, num_bytes

"""A hidden folder beside a local name, where what is to have that name is made.

A process that is killed or interrupted leaves one, as large as a checkpoint: the next one that makes the same there
goes on in it, and one that makes something else removes it. A lock that ends with its process tells whether a folder
is in use; only those of this machine are judged, since file servers may not show the locks of others. Called by
`download`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from bootseer.errors import Interrupted, TransientError

FRONT = ".bootseer-get-"
OLD = "old"
"""In the folder: what had the name, until it is replaced. A folder that has one is left to people."""

_NEW = ".bootseer-new-"
_WHAT = "what"
"""In the folder: what is made there."""


@contextlib.contextmanager
def beside(target: Path, what: str) -> Iterator[Path]:
    """Such a folder, in that of `target`, for making `what`: the one that an interrupted process left, or a new one.

    Removed at the end, but left for another try after an interrupt and after a `TransientError`. Raises `OSError`.
    """
    front = f"{FRONT}{platform.node()}-"
    folder, lock = _left(target.parent, front, what) or _made(target.with_name(f"{front}{secrets.token_hex(8)}"), what)
    try:
        yield folder
    except (TransientError, Interrupted):
        raise
    except BaseException:
        _remove_unless_old(folder)
        raise
    else:
        _remove_unless_old(folder)
    finally:
        os.close(lock)


def _made(folder: Path, what: str) -> tuple[Path, int]:
    """A new folder, and its lock. It gets its name when it is locked: without a lock others would remove it."""
    new = folder.with_name(f"{_NEW}{secrets.token_hex(8)}")
    new.mkdir(mode=0o700)
    lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _take(lock)
        (new / _WHAT).write_text(what)
        new.rename(folder)
    except BaseException:
        remove(new)
        os.close(lock)
        raise
    return folder, lock


def _remove_unless_old(folder: Path) -> None:
    if not os.path.lexists(folder / OLD):
        remove(folder)


def remove(path: Path) -> None:
    """Remove a file or folder, as far as that can be."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _left(parent: Path, front: str, what: str) -> tuple[Path, int] | None:
    """A folder for `what` that is not in use any more, and its lock. All others that are not are removed."""
    found = None
    # What cannot be listed or opened belongs to another user.
    with contextlib.suppress(OSError):
        with os.scandir(parent) as entries:
            paths = [Path(entry) for entry in entries if entry.name.startswith(front)]
        for path in paths:
            with contextlib.suppress(OSError):
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                if not _take(lock) or os.path.lexists(path / OLD):
                    os.close(lock)
                elif found is None and _says(path, what):
                    found = path, lock
                else:
                    remove(path)
                    os.close(lock)
    return found


def _says(folder: Path, what: str) -> bool:
    try:
        return folder.stat().st_uid == os.geteuid() and (folder / _WHAT).read_text() == what
    except (OSError, ValueError):
        return False


def _take(lock: int) -> bool:
    """Whether nobody else has it. Where there are no such locks, nobody can say."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

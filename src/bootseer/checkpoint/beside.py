"""A hidden folder beside a local name, where what is to have that name is made.

Who is killed leaves one, as large as a checkpoint: the next one who works there removes it. A lock that ends with its
process tells whether anybody works in a folder; only those of this machine are judged, since file servers may not show
the locks of others. Called by `download`.
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

FRONT = ".bootseer-get-"
OLD = "old"
"""In the folder: what had the name, until it is replaced. A folder that has one is left to people."""


@contextlib.contextmanager
def beside(target: Path) -> Iterator[Path]:
    """Such a folder, in that of `target`; removed at the end. Raises `OSError`."""
    front = f"{FRONT}{platform.node()}-"
    _remove_dead(target.parent, front)
    folder = target.with_name(f"{front}{secrets.token_hex(8)}")
    folder.mkdir(mode=0o700)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _take(lock)
    try:
        yield folder
    finally:
        if not os.path.lexists(folder / OLD):
            remove(folder)
        os.close(lock)


def remove(path: Path) -> None:
    """Remove a file or folder, as far as that can be."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _remove_dead(parent: Path, front: str) -> None:
    # What cannot be listed or opened belongs to somebody else.
    with contextlib.suppress(OSError):
        for path in [Path(entry) for entry in os.scandir(parent) if entry.name.startswith(front)]:
            with contextlib.suppress(OSError):
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if _take(lock) and not os.path.lexists(path / OLD):
                        remove(path)
                finally:
                    os.close(lock)


def _take(lock: int) -> bool:
    """Whether nobody else has it. Where there are no such locks, nobody can say."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True

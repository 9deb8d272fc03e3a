"""Which files were compared with which digest before, so that large ones are not read again at every start.

A file is known by its size, times and inode; the kernel changes the time of the last change with every write. A file
that was changed a moment before it was read is not noted: a later change could have the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

_MAX_BYTES = 64 << 20
_UNUSED_S = 30 * 86_400.0
_SETTLED_NS = 2_000_000_000


class Known:
    """What was found out before, in the file `path`; without one it is kept in memory alone."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._before: dict[str, list[object]] = {}
        self._now: dict[str, list[object]] = {}
        with contextlib.suppress(OSError, ValueError):
            if path is not None and path.stat().st_size <= _MAX_BYTES:
                found = json.loads(path.read_text())
                if isinstance(found, dict):
                    self._before = found

    def has(self, path: str, status: os.stat_result, digest: str) -> bool:
        """Whether this very file had the digest."""
        row = _row(status, digest)
        if self._before.get(path) != row:
            return False
        self._now[path] = row
        return True

    def note(self, path: str, status: os.stat_result, digest: str) -> None:
        """The file was read, and had the digest; `status` is what it was before."""
        if time.time_ns() - status.st_ctime_ns > _SETTLED_NS:
            self._now[path] = _row(status, digest)

    def save(self) -> None:
        """Keep it for the next start. That costs nothing but time when it does not work."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            _forget(self._path.parent)
        if self._now == self._before:
            with contextlib.suppress(OSError):
                os.utime(self._path)
            return
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(self._now))
            new.replace(self._path)


def _forget(folder: Path) -> None:
    """Delete what was found out for snapshots that were not asked for in a month, and what killed starts left."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _UNUSED_S:
                path.unlink()


def _row(status: os.stat_result, digest: str) -> list[object]:
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, digest]

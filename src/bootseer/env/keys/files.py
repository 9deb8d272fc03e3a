"""How a key looks at the node's files: bounded, never waiting for a pipe or a device, one digest for a content.

Digests of large files are remembered by everything that changes with a file (`facts`). Called by `request_key` and the
collectors of components.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable, Sequence
from typing import Literal

from bootseer.env.keys import archives
from bootseer.env.keys.facts import Facts
from bootseer.errors import PermanentError
from bootseer.units import format_bytes

MAX_TEXT_BYTES = 4 << 20
"""Of a script or a requirement file; pip's largest lock files have some 2 MB."""
MAX_FILES = 20_000
MAX_BYTES = 1 << 30
_MAX_NAMES = 100_000
_REMEMBERED_BYTES = 1 << 20
_LARGE_WHEEL_BYTES = 64 << 20
"""Wheels with CUDA have gigabytes: of these the list of contents is read, with a checksum for each file."""
_CHUNK = 1 << 20
_SETTLED_NS = 2_000_000_000
"""A file that was changed within this time may change again without another time stamp."""


class NodeFiles:
    """The files of this node, as far as the setup can see them.

    All digests together are bounded: a key that would read more than `MAX_FILES` or `MAX_BYTES` is none. What was
    remembered does not count.
    """

    def __init__(self, facts: Facts, visible: Callable[[str], bool] = lambda path: True) -> None:
        self._facts = facts
        self._visible = visible
        self._num_files = 0
        self._num_bytes = 0

    def kind(self, path: str) -> Literal["file", "folder", ""]:
        """What is there; links are followed. Pipes, sockets and devices are not there."""
        try:
            mode = os.stat(path).st_mode if self._visible(path) else 0  # noqa: PTH116 - many calls, no object for each
        except (OSError, ValueError):
            return ""
        return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else ""

    def names(self, path: str) -> Sequence[str]:
        """The names in a folder, sorted; nothing when it cannot be read or is too large."""
        try:
            found = os.listdir(path) if self._visible(path) else []  # noqa: PTH208 - names are wanted
        except (OSError, ValueError):
            return ()
        return sorted(found) if len(found) <= _MAX_NAMES else ()

    def read(self, path: str) -> bytes:
        """The content of a text file. Raises `PermanentError`."""
        with _opened(path) as file:
            data = file.read(MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            raise PermanentError(f"{path}: more than {format_bytes(MAX_TEXT_BYTES)}, too large for a file of this kind")
        return data

    def is_program(self, path: str) -> bool:
        """Whether somebody may run the file: who copies it copies that."""
        with _opened(path) as file:
            return bool(os.fstat(file.fileno()).st_mode & 0o111)

    def digest(self, path: str) -> tuple[str, int]:
        """SHA-256 of the content as hex digits, and the size. Raises `PermanentError`."""
        with _opened(path) as file:
            status = os.fstat(file.fileno())
            stamp = [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]
            large = status.st_size >= _REMEMBERED_BYTES
            known = self._facts.get("digest", path, stamp) if large else None
            if isinstance(known, str):
                return known, status.st_size
            if path.endswith(".whl") and status.st_size > _LARGE_WHEEL_BYTES:
                directory = archives.directory(file.fileno(), status.st_size)
                if directory is not None:
                    self._count(path, len(directory))
                    return hashlib.sha256(directory).hexdigest(), status.st_size
            self._count(path, status.st_size)
            digest, size = hashlib.sha256(), 0
            while chunk := file.read(_CHUNK):
                size += len(chunk)
                if size > status.st_size + _CHUNK:
                    raise PermanentError(f"{path}: grows while it is read; the setup must not depend on it")
                digest.update(chunk)
        if large and time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
            self._facts.put("digest", path, stamp, digest.hexdigest())
        return digest.hexdigest(), size

    def _count(self, path: str, size: int) -> None:
        self._num_files += 1
        self._num_bytes += size
        if self._num_files > MAX_FILES or self._num_bytes > MAX_BYTES:
            limit = f"{MAX_FILES:,} files and {format_bytes(MAX_BYTES)}"
            raise PermanentError(f"{path}: the files that the setup depends on are more than {limit}")


class _opened:  # noqa: N801 - used like a function
    """A regular file, open; a pipe or a device is refused without waiting for it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> _File:
        try:
            number = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except (OSError, ValueError) as error:
            why = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
            raise PermanentError(f"{self._path}: {why}") from error
        self._file = _File(number, self._path)
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise PermanentError(f"{self._path}: not a regular file")
        return self._file

    def __exit__(self, *_: object) -> None:
        os.close(self._file.fileno())


class _File:
    """A descriptor whose errors are ours."""

    def __init__(self, number: int, path: str) -> None:
        self._number = number
        self._path = path

    def fileno(self) -> int:
        return self._number

    def read(self, size: int) -> bytes:
        try:
            parts, left = [], size
            while left > 0 and (part := os.read(self._number, left)):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)
        except OSError as error:
            raise PermanentError(f"{self._path}: {os.strerror(error.errno or 0)}") from error

"""Bounded access to the node's files for request keys: never blocks on a pipe or device, one digest per content.

Results (digests of large files, answers of an interpreter) are cached as facts for the next start. A fact is valid
while the stamp of its source is the same: device, inode, size and times. A fact file that others could write is not
trusted: a forged digest would select the wrong environment.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import stat
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from bootseer.env.processes import pid_in
from bootseer.errors import PermanentError
from bootseer.io.files import replace_file
from bootseer.units import format_bytes

_FACTS_NAME = "facts.json"
_MAX_FACTS_BYTES = 8 << 20
_MAX_FACTS = 8192


class FactCache:
    """Facts by kind and path. Without a folder nothing is cached."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known: dict[str, list[Any]] | None = None
        self._changed = False

    def get(self, kind: str, path: str, stamp: Sequence[object]) -> Any:
        """The fact if it is known and has the same stamp, else None."""
        known = self._load().get(f"{kind}:{path}")
        return known[1] if known is not None and known[0] == list(stamp) else None

    def put(self, kind: str, path: str, stamp: Sequence[object], value: Any) -> None:
        """Set a fact; `save` writes it."""
        facts = self._load()
        facts.pop(f"{kind}:{path}", None)  # most recently used last
        facts[f"{kind}:{path}"] = [list(stamp), value]
        self._changed = True

    def save(self) -> None:
        """Write new facts. If the folder cannot be written, only the next start takes longer."""
        if self._folder is None or not self._changed:
            return
        facts = dict(list(self._load().items())[-_MAX_FACTS:])
        with contextlib.suppress(OSError, ValueError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(self._folder / _FACTS_NAME, json.dumps(facts).encode())
        self._changed = False

    def _load(self) -> dict[str, list[Any]]:
        if self._known is None:
            self._known = _read_facts(self._folder / _FACTS_NAME) if self._folder is not None else {}
        return self._known


def _read_facts(path: Path) -> dict[str, list[Any]]:
    """The facts in a file; empty if others can write it or it is damaged."""
    damaged = (PermanentError, RecursionError, AttributeError)
    with contextlib.suppress(*damaged), open_regular(path) as file:
        status = os.fstat(file.fileno())
        if status.st_uid == os.geteuid() and not status.st_mode & 0o022 and status.st_size <= _MAX_FACTS_BYTES:
            facts = json.loads(file.read(_MAX_FACTS_BYTES)).items()
            return {name: fact for name, fact in facts if isinstance(fact, list) and len(fact) == 2}
    return {}


MAX_TEXT_BYTES = 4 << 20
"""Limit for a script or a requirement file; pip's largest lock files have about 2 MB."""
MAX_FILES = 20_000
MAX_BYTES = 1 << 30
_MAX_NAMES = 100_000
_REMEMBERED_BYTES = 1 << 20
_LARGE_WHEEL_BYTES = 64 << 20
"""Wheels with CUDA have gigabytes: of larger wheels only the list of contents is hashed, which has a checksum per file.
"""
_CHUNK = 1 << 20
_SETTLED_NS = 2_000_000_000
"""A file that changed within this time may change again with the same timestamp."""


class NodeFiles:
    """The files of this node as the setup sees them.

    All digests together are limited to `MAX_FILES` and `MAX_BYTES`; cached ones do not count.
    """

    def __init__(self, facts: FactCache, visible: Callable[[str], bool] = lambda path: True) -> None:
        self._facts = facts
        self._visible = visible
        self.digest = functools.cache(self._digest)  # each file once, as an input may lie in another one
        self._num_files = 0
        self._num_bytes = 0

    def kind(self, path: str) -> Literal["file", "folder", ""]:
        """The kind of a path; links are followed. Pipes, sockets, devices and magic links of /proc give ""."""
        try:
            mode = os.stat(path).st_mode if self._visible(path) else 0  # noqa: PTH116 - many calls, no object for each
        except (OSError, ValueError):
            return ""
        if path.endswith(".pid") and pid_in(path) is not None:
            return ""
        return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else ""

    def names(self, path: str) -> Sequence[str]:
        """The names in a folder, sorted; empty if it cannot be read or is too large."""
        try:
            found = os.listdir(path) if self._visible(path) else []  # noqa: PTH208 - names are wanted
        except (OSError, ValueError):
            return ()
        return sorted(found) if len(found) <= _MAX_NAMES else ()

    def read(self, path: str) -> bytes:
        """The content of a text file. Raises `PermanentError`."""
        with open_regular(path) as file:
            data = file.read(MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            raise PermanentError(f"{path}: more than {format_bytes(MAX_TEXT_BYTES)}, too large for a file of this kind")
        return data

    def may_execute(self, path: str) -> bool:
        """Whether this process may execute the file."""
        return os.access(path, os.X_OK)

    def _digest(self, path: str) -> tuple[str, os.stat_result]:
        """SHA-256 of the content as hex digits, and the file's status. Raises `PermanentError`."""
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            stamp = stamp_of(status)
            large = status.st_size >= _REMEMBERED_BYTES
            known = self._facts.get("digest", path, stamp) if large else None
            if isinstance(known, str):
                return known, status
            if path.endswith(".whl") and status.st_size > _LARGE_WHEEL_BYTES:
                contents = wheel_contents(file)
                if contents is not None:
                    self._count(path, len(contents))
                    return hashlib.sha256(contents).hexdigest(), status
                file.seek(0)
            self._count(path, status.st_size)
            digest, size = hashlib.sha256(), 0
            while chunk := file.read(_CHUNK):
                size += len(chunk)
                if size > status.st_size + _CHUNK:
                    raise PermanentError(f"{path}: grows while it is read; the setup must not depend on it")
                digest.update(chunk)
        if large and is_settled(status):
            self._facts.put("digest", path, stamp, digest.hexdigest())
        return digest.hexdigest(), status

    def _count(self, path: str, size: int) -> None:
        self._num_files += 1
        self._num_bytes += size
        if self._num_files > MAX_FILES or self._num_bytes > MAX_BYTES:
            limit = f"{MAX_FILES:,} files and {format_bytes(MAX_BYTES)}"
            reason = f"the files that the setup depends on are more than {limit}"
            raise PermanentError(f"{path}: {reason}; keep data and results out of folders that it installs from")


def stamp_of(status: os.stat_result) -> list[object]:
    """Values that change when the file's content does."""
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def is_settled(status: os.stat_result) -> bool:
    """Whether every later change of the file will change its stamp."""
    return time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS


@contextlib.contextmanager
def open_regular(path: str | Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; pipes and devices are refused without blocking. Raises `PermanentError`, also
    for errors while it is read."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise PermanentError(f"{path}: not a regular file")
        with os.fdopen(number, "rb") as file:
            yield file
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
        raise PermanentError(f"{path}: {reason}") from error


def wheel_contents(file: BinaryIO) -> bytes | None:
    """Names, sizes and checksums of the entries of a zip archive; None if it is none."""
    try:
        with zipfile.ZipFile(file) as archive:
            rows = [(each.filename, each.file_size, each.CRC) for each in archive.infolist()]
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return None
    return json.dumps(rows).encode()

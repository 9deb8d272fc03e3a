"""What a mount does for the start of a job: it brings what the start will read, and notes what it did read.

The checkpoint is the one that `latest` names, or what lies in the mounted folder itself. What was read is kept in the
node's cache, for the next start of the same part of the job.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from bootseer.checkpoint.files import Files
from bootseer.checkpoint.hot import MAX_BYTES, Range, Recorder, decode, encode, plan
from bootseer.checkpoint.latest import read_latest
from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.checkpoint.reading.reading import Reading
from bootseer.errors import AccessError, BootseerError, CorruptError, NotFoundError, PermanentError
from bootseer.mounts.daemon import OnError

_FOLDER = "checkpoints"
_MAX_FILES = 100_000
_MAX_DEPTH = 8


class Startup:
    """One start. Safe for many threads. It is what a daemon calls a recorder."""

    def __init__(
        self, files: Files, reading: Reading, slot: str, cache: Path | None, memory_bytes: int, on_error: OnError
    ) -> None:
        """`slot`: which of the job's nodes this is, "" for the only one; `cache`: the cache's root. Without one,
        `memory_bytes` are brought."""
        self._files = files
        self._reading = reading
        self._slot = slot
        self._cache = cache
        self._memory_bytes = memory_bytes
        self._on_error = on_error
        self._lock = threading.Lock()
        self._recorder: Recorder | None = Recorder()
        self._ranges: list[Range] = []
        self._checkpoint = ""
        self._ahead: dict[str, CheckpointFile] = {}

    def note(self, path: str, offset: int, length: int) -> None:
        """A reader asked for this."""
        with self._lock:
            if self._recorder is not None:
                self._recorder.read(path, offset, length)

    def begin(self) -> None:
        """Bring what the start will read, the first need first. Gives way to readers."""
        self._checkpoint = read_latest(self._files.place, "") or ""
        files = list(self._walk(self._checkpoint, _MAX_DEPTH if self._checkpoint else 0))
        for one in plan(files, self._known(), alone=not self._slot, budget_bytes=self._budget_bytes()):
            try:
                file = self._opened(one.path)
                if file is None:
                    return
                file.prefetch(one.offset, one.length)
            except (NotFoundError, AccessError, CorruptError) as error:
                self._on_error(f"{one.path} is not brought: {error}")
            except PermanentError:
                if not self._is_over:  # else it was closed a moment ago
                    raise

    @property
    def _is_over(self) -> bool:
        with self._lock:
            return self._recorder is None

    def _opened(self, path: str) -> CheckpointFile | None:
        """A file that stays open while it is brought; None when the start is over."""
        if self._is_over or path in self._ahead:
            return self._ahead.get(path)
        file = self._reading.open(path)
        with self._lock:
            if self._recorder is not None:
                self._ahead[path] = file
                return file
        file.close()
        return None

    def end(self) -> None:
        """The start is over: nothing that is read from now on belongs to it."""
        with self._lock:
            if self._recorder is not None:
                self._ranges = self._recorder.ranges()
                self._recorder = None

    def close(self) -> None:
        """Keep what was noted for the next start."""
        path = self._path()
        if path is not None and self._ranges:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = path.with_suffix(f".{os.getpid()}")
            new.write_bytes(encode(self._ranges, self._checkpoint))
            new.replace(path)

    def drop(self) -> None:
        """Bring nothing any more."""
        self.end()
        with self._lock:
            files = list(self._ahead.values())
        for file in files:
            file.close()

    def _walk(self, folder: str, depth: int) -> Iterator[tuple[str, int]]:
        for number, info in enumerate(self._files.list(folder)):
            if number >= _MAX_FILES:
                return
            if not info.is_folder:
                yield info.path, info.size_bytes
            elif depth > 0:
                yield from self._walk(info.path, depth - 1)

    def _known(self) -> list[Range]:
        path = self._path()
        if path is None:
            return []
        try:
            with path.open("rb") as file:
                return decode(file.read(MAX_BYTES + 1), self._checkpoint)
        except FileNotFoundError:
            return []
        except (OSError, BootseerError) as error:
            self._on_error(f"{path}: {error}; the start is recorded anew")
            return []

    def _path(self) -> Path | None:
        if self._cache is None:
            return None
        key = hashlib.sha256(f"{self._files.place.uri}\n{self._slot}".encode()).hexdigest()[:32]
        return self._cache / _FOLDER / f"{key}.json"

    def _budget_bytes(self) -> int:
        """Half of what is free on the cache's disk: it is not the only thing that needs room there."""
        if self._cache is not None:
            with contextlib.suppress(OSError):
                return shutil.disk_usage(self._cache).free // 2
        return self._memory_bytes

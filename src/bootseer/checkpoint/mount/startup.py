"""What the start of a job reads of its checkpoint: prefetched, and recorded for the next start.

The checkpoint is the one that `latest` names; without a `latest`, the folder with the highest step and the files beside
it. Image and environment come over the same link and are needed first, so that the prefetch takes what they leave
(`PrefetchWindow`).
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path

from bootseer.checkpoint.catalog import walk
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.hot_list import PIECE_BYTES, SMALL_BYTES, PrefetchWindow, Range, Recorder, plan
from bootseer.checkpoint.latest import STEP_NAME, latest_or_none, step_of
from bootseer.checkpoint.mount.hot_lists import HotLists
from bootseer.checkpoint.reading.file import CheckpointFile
from bootseer.checkpoint.reading.reading import Reading
from bootseer.errors import AccessError, CorruptError, NotFoundError, PermanentError, TransientError
from bootseer.mounts.serve import OnError

_MAX_FILES = 100_000
_MAX_OPEN = 1000
"""Files that the prefetch keeps open: in a folder each takes a descriptor."""
_NO_ROOM_S = 0.05


class Startup:
    """The prefetch and the record of one start (a daemon's recorder). Safe to use from many threads."""

    def __init__(
        self, files: Files, reading: Reading, slot: str, cache: Path | None, memory_bytes: int, on_error: OnError
    ) -> None:
        """`slot`: the node's position in the job, "" for the only one; `cache`: the cache's root. Without a cache, at
        most `memory_bytes` are prefetched."""
        self._files = files
        self._reading = reading
        self._slot = slot
        self._cache = cache
        self._memory_bytes = memory_bytes
        self._on_error = on_error
        self._hot_lists = HotLists(files.place, slot, on_error)
        self._changed = threading.Condition()
        self._recorder: Recorder | None = Recorder()
        self._ranges: list[Range] = []
        self._has_begun = False
        self._checkpoint = ""
        self._ahead: dict[str, CheckpointFile] = {}
        self._window = PrefetchWindow()
        self._in_flight = 0

    def note(self, path: str, offset: int, length: int) -> None:
        with self._changed:
            if self._recorder is not None:
                self._recorder.read(path, offset, length)

    def begin(self) -> None:
        """Prefetch what the start will read, in order of need, until all is requested or the start is over."""
        latest = latest_or_none(self._files.place, "") or ""
        top = [] if latest else list(self._files.list(""))
        self._checkpoint = latest or _newest_step(info.path for info in top if info.is_folder)
        found = chain(top, walk(self._files, self._checkpoint) if self._checkpoint else ())
        infos = islice((info for info in found if not info.is_folder), _MAX_FILES)
        # Ordinary files are not cached: what is not read within seconds would be read once more.
        files = [(info.path, info.size_bytes) for info in infos if info.is_striped or info.size_bytes <= SMALL_BYTES]
        hot = self._hot_lists.load(self._checkpoint)
        wanted = plan(
            files, hot, alone=not self._slot, budget_bytes=self._budget_bytes(), position=self._reading.position
        )
        for one in wanted:
            try:
                file = self._opened(one.path)
                if file is None:
                    return
                offset, end = one.offset, one.offset + one.length
                while offset < end:
                    num_pieces = self._wait_for_room()
                    if not num_pieces:
                        return
                    offset += self._prefetch(file, offset, min(num_pieces * PIECE_BYTES, end - offset))
            except (NotFoundError, AccessError, CorruptError, TransientError) as error:
                self._on_error(f"{one.path} is not prefetched: {error}")
            except PermanentError:
                if self._recorder is not None:  # otherwise `end` has closed it
                    raise

    def _prefetch(self, file: CheckpointFile, offset: int, length: int) -> int:
        """Returns how many bytes need not be requested again; 0 after a pause, when there was no room."""
        began_s = time.monotonic()
        num_pieces = -(-length // PIECE_BYTES)

        def ended(num_bytes: int) -> None:
            with self._changed:
                self._in_flight -= num_pieces
                self._window.note_end(num_bytes, began_s, time.monotonic())
                self._changed.notify_all()

        with self._changed:
            self._in_flight += num_pieces
        num_bytes = file.prefetch(offset, length, ended)
        with self._changed:
            self._changed.wait_for(lambda: self._recorder is None, 0.0 if num_bytes else _NO_ROOM_S)
        return num_bytes

    def _wait_for_room(self) -> int:
        """Wait until more may be requested; returns how many pieces, 0 when the start is over."""
        window = self._window
        with self._changed:
            self._changed.wait_for(lambda: self._recorder is None or self._in_flight + window.step <= window.size)
            self._changed.wait_for(lambda: self._recorder is None, window.pause_s)
            return 0 if self._recorder is None else window.step

    def _opened(self, path: str) -> CheckpointFile | None:
        """An open file, kept open for a while; None when the start is over."""
        with self._changed:
            if self._recorder is None or path in self._ahead:
                return self._ahead.get(path)
            surplus = [self._ahead.pop(next(iter(self._ahead)))] if len(self._ahead) >= _MAX_OPEN else []
        for file in surplus:
            file.close()
        file = self._reading.open(path)
        with self._changed:
            if self._recorder is not None:
                self._ahead[path] = file
                return file
        file.close()
        return None

    def training_began(self) -> None:
        self._has_begun = True

    def end(self) -> None:
        """The start is over: later reads are not recorded, and nothing more is prefetched."""
        with self._changed:
            if self._recorder is not None:
                self._ranges = self._recorder.ranges()
                self._recorder = None
                self._changed.notify_all()
            files, self._ahead = self._ahead, {}
        for file in files.values():
            file.close()

    def close(self) -> None:
        """Save the record for the next start."""
        if self._ranges:
            self._hot_lists.save(self._ranges, self._checkpoint, began=self._has_begun)

    def _budget_bytes(self) -> int:
        """Half of the free space of the cache's disk, which others need too."""
        if self._cache is not None:
            with contextlib.suppress(OSError):
                return shutil.disk_usage(self._cache).free // 2
        return self._memory_bytes


def _newest_step(folders: Iterable[str]) -> str:
    """The folder with the highest step: most frameworks write no `latest`. Empty if none is named by its step."""
    steps = [(step_of(name) or 0, name) for name in folders if STEP_NAME.match(name) or name.isdecimal()]
    return max(steps, default=(0, ""))[1]

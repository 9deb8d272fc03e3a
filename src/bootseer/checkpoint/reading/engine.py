"""What all files of a `Reading` share: its memory, its threads, and the figures of what they did."""

from __future__ import annotations

import threading
import time

from bootseer.cache.cache import Cache
from bootseer.checkpoint.places.place import Place
from bootseer.checkpoint.reading.buffer import ChunkBuffer
from bootseer.checkpoint.reading.donors import Donors
from bootseer.checkpoint.reading.facts import Facts
from bootseer.checkpoint.reading.keeper import Keeper
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.errors import TransientError
from bootseer.io.executor import Executor
from bootseer.io.timer import Timer

_OPENING = 8
_CLOSE_S = 10.0
_RECOUNT_S = 0.25


class Engine:
    """Of one process: a forked child makes its own. Threads are started when they are needed."""

    def __init__(self, place: Place, cache: Cache | None, settings: ReadingSettings, facts: Facts) -> None:
        self.place = place
        self.cache = cache
        self.settings = settings
        self.facts = facts
        self.timer = Timer()
        self.workers = Executor("bootseer-open", _OPENING)
        self.buffer = ChunkBuffer(settings.memory_bytes, settings.idle_s, self.timer, facts)
        self.keeper = Keeper(facts) if cache is not None else None
        self.donors = Donors(cache, settings.max_donors, settings.donors_s) if cache is not None else None
        self._lock = threading.Lock()
        self._streams: dict[int, tuple[float, int]] = {}
        self._counted_s = 0.0

    def share_bytes(self, file: int, num_streams: int) -> int:
        """What may be read ahead for one stream, when this file has so many: half of the memory, for all in use."""
        now = time.monotonic()
        with self._lock:
            self._streams[file] = (now, num_streams)
            if now - self._counted_s >= _RECOUNT_S:
                self._counted_s = now
                before = now - self.settings.idle_s
                self._streams = {one: seen for one, seen in self._streams.items() if seen[0] >= before}
            total = sum(count for _, count in self._streams.values())
            return self.settings.memory_bytes // 2 // max(total, 1)

    def close(self) -> None:
        """All files were closed: end what is on its way, wait a little for what is to be kept, and end the threads."""
        self.buffer.cancel(TransientError(f"{self.place.uri}: the reading was closed"))
        if self.keeper is not None:
            self.keeper.close(self.settings.keep_s, self.settings.keep_still_s)
        self.buffer.wait_empty(_CLOSE_S)
        self.timer.close()

    def settle(self) -> None:
        """The process ends: wait a little for what is to be kept."""
        if self.keeper is not None:
            self.keeper.settle(self.settings.keep_s, self.settings.keep_still_s)

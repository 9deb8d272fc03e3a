"""The needs of one startup, recorded while it runs.

They are in the memory of the mount daemon until training has begun, and are then merged into a `hotset.HotSet`. If
the daemon is killed they are lost: half a startup would be taken for a whole one (ADR 36).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from bootseer.fetch.hotset import MAX_NEEDS, Block, Record


class Recorder:
    """Records one startup, from now until `end` or `close`. Safe for many threads."""

    def __init__(self, on_finished: Callable[[Record], object], clock: Callable[[], float] = time.monotonic) -> None:
        """`on_finished` is called by `close`."""
        self._on_finished = on_finished
        self._clock = clock
        self._started_s = time.time()
        self._begin = clock()
        self._duration_ms: int | None = None
        self._needs: dict[Block, int] = {}
        self._lock = threading.Lock()

    def need(self, file: str, block: int) -> None:
        """A reader needed a block of the file with this identity."""
        with self._lock:
            if self._duration_ms is None and len(self._needs) < MAX_NEEDS:
                self._needs.setdefault((file, block), self._passed_ms())

    def end(self) -> None:
        """The startup is over (training has begun): ignore later needs."""
        with self._lock:
            if self._duration_ms is None:
                self._duration_ms = self._passed_ms()

    def close(self) -> None:
        """`end`, and hand the record over."""
        self.end()
        needs, self._needs = self._needs, {}  # the mount may last for weeks
        self._on_finished(Record(self._started_s, self._duration_ms or 0, needs))

    def _passed_ms(self) -> int:
        return int((self._clock() - self._begin) * 1000)

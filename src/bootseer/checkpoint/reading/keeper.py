"""Puts chunks that were read into the node's cache, behind the readers' backs.

One thread writes; what waits for it is bounded, and what does not fit is not kept, so that a slow or full disk never
holds up a reader. What was put is made durable when there is nothing else to do, and before a file is closed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bootseer.cache.errors import CacheFull
from bootseer.cache.file import CachedFile
from bootseer.checkpoint.reading.facts import Facts
from bootseer.errors import BootseerError

_QUEUE_BYTES = 64 << 20
_IDLE_S = 2.0
_FULL_PAUSE_S = 10.0
"""A disk that was full is asked again after this."""


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    cached: CachedFile
    block: int
    data: memoryview
    then: Callable[[], None]


class Keeper:
    """The thread that puts, and its queue."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._change = threading.Condition(threading.Lock())
        self._queue: deque[_Chunk | CachedFile] = deque()  # a file stands for its closing
        self._unsynced: set[CachedFile] = set()
        self._queued_bytes = 0
        self._full_until = 0.0
        self._running = False
        self._busy = False

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much would be kept now."""
        return self._queued_bytes + num_bytes <= _QUEUE_BYTES and time.monotonic() >= self._full_until

    def put(self, cached: CachedFile, block: int, data: memoryview, then: Callable[[], None]) -> None:
        """Keep a verified chunk, and give up the claim on it if there is one. `then` is called when it is done, or not
        to be done: until then nobody may change `data` or close `cached`.
        """
        with self._change:
            accepted = self.has_room(len(data))
            if accepted:
                self._queued_bytes += len(data)
                self._add(_Chunk(cached, block, data, then))
        if not accepted:
            self._facts.add("not_kept_chunks")
            _release(cached, block)
            then()

    def close_file(self, cached: CachedFile) -> None:
        """Close a file when all that was put into it is there."""
        with self._change:
            self._add(cached)

    def drain(self, timeout_s: float) -> bool:
        """Wait until all is done that was asked for so far."""
        with self._change:
            return self._change.wait_for(lambda: not self._queue and not self._busy, timeout_s)

    def _add(self, item: _Chunk | CachedFile) -> None:
        self._queue.append(item)
        if not self._running:
            self._running = True
            threading.Thread(target=self._run, name="bootseer-keep", daemon=True).start()
        else:
            self._change.notify_all()

    def _run(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Do the next thing: whether there was any."""
        with self._change:
            self._busy = False
            self._change.notify_all()
            self._change.wait_for(lambda: self._queue, _IDLE_S)
            item = self._queue.popleft() if self._queue else None
            if item is None and not self._unsynced:
                self._running = False
                return False
            self._busy = True
        if isinstance(item, _Chunk):
            self._put(item)
        elif item is not None:
            self._sync(item)
            item.close()
        else:
            self._sync(next(iter(self._unsynced)))
        return True

    def _put(self, chunk: _Chunk) -> None:
        try:
            chunk.cached.put(chunk.block, chunk.data)
            self._unsynced.add(chunk.cached)
            self._facts.add("kept_chunks")
        except BootseerError as error:
            self._facts.add("not_kept_chunks")
            if isinstance(error, CacheFull):
                self._full_until = time.monotonic() + _FULL_PAUSE_S
        _release(chunk.cached, chunk.block)
        with self._change:
            self._queued_bytes -= len(chunk.data)
        chunk.then()

    def _sync(self, cached: CachedFile) -> None:
        if cached in self._unsynced:
            self._unsynced.discard(cached)
            try:
                cached.sync()
            except BootseerError:
                self._facts.add("not_kept_chunks")  # it is still here until the machine crashes


def _release(cached: CachedFile, block: int) -> None:
    try:
        cached.release(block)
    except BootseerError:
        return  # the kernel releases it with the process

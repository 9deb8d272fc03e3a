"""The node's cache: chunks that were read are written to it.

`CacheWriter` writes chunks in the background by one thread. Its queue is bounded, and what does not fit is not kept, so
that a slow or full disk never delays a reader. Chunks are synced when the thread is idle, and before a file is closed.
At exit a process waits briefly for its queue: the next process would have to read these chunks again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from bootseer.cache.cached_file import CachedFile
from bootseer.cache.disk import CacheFull
from bootseer.checkpoint.reading.transfer import Counters
from bootseer.errors import BootseerError, TransientError
from bootseer.io.executor import Executor

_QUEUE_BYTES = 64 << 20
_IDLE_S = 2.0
_RESERVE_BYTES = 2 << 30
"""Free space that chunks leave on a disk: files that are written through a mount wait there until they are sent. It is
as much as their spool may take (`checkpoint.writing.lane`)."""
_FULL_PAUSE_S = 10.0
"""Pause after the disk was full."""


class CacheWriter:
    """The cache writer's thread and its queue."""

    def __init__(self, facts: Counters) -> None:
        self._facts = facts
        self._lock = threading.Lock()  # taken by blocks, as in `io.executor`
        self._change = threading.Condition(self._lock)
        self._unsynced: set[CachedFile] = set()
        self._queued_bytes = 0
        self._num_chunks = 0  # queued, or being written
        self._full_until = 0.0
        self._closed = False
        self._thread = Executor("bootseer-keep", 1, idle_s=_IDLE_S, when_idle=self._sync_all)

    def has_room(self, num_bytes: int) -> bool:
        """Whether `num_bytes` would be kept now."""
        has_room = self._queued_bytes + num_bytes <= _QUEUE_BYTES
        return has_room and not self._closed and time.monotonic() >= self._full_until

    def put(self, cached: CachedFile, block: int, data: memoryview, then: Callable[[], None]) -> None:
        """Keep a verified chunk, and release the claim on it. `then` is called when the chunk is kept or dropped; until
        then `data` must not change and `cached` must stay open."""
        with self._lock:
            accepted = self.has_room(len(data)) and self._submit(partial(self._put, cached, block, data, then))
            if accepted:
                self._queued_bytes += len(data)
                self._num_chunks += 1
        if not accepted:
            self._facts.add("not_kept_chunks")
            _release(cached, block)
            then()

    def close_file(self, cached: CachedFile) -> None:
        """Close a file after all chunks that were put into it."""
        if not self._submit(partial(self._close_file, cached)):
            self._close_file(cached)

    def settle(self, timeout_s: float, still_s: float) -> bool:
        """Wait until all queued chunks are kept; returns whether they are. Waits at most `timeout_s`, and not for a
        disk that has kept none for `still_s`. A kept chunk survives this process."""
        until = time.monotonic() + timeout_s
        with self._lock:
            while self._num_chunks:
                before = self._num_chunks
                wait_s = min(still_s, until - time.monotonic())
                if not self._change.wait_for(partial(self._fewer_than, before), max(wait_s, 0.0)):
                    return False
        return True

    def _fewer_than(self, num_chunks: int) -> bool:
        return self._num_chunks < num_chunks

    def close(self, timeout_s: float, still_s: float) -> None:
        """`settle`, then drop what is not kept. Files are still closed."""
        self.settle(timeout_s, still_s)
        self._closed = True
        self._thread.close()

    def _submit(self, job: Callable[[], None]) -> bool:
        """Returns False when no thread can be started."""
        try:
            self._thread.submit(job)
        except TransientError:
            return False
        return True

    def _put(self, cached: CachedFile, block: int, data: memoryview, then: Callable[[], None]) -> None:
        is_kept = False
        try:
            if not self._closed:
                cached.put(block, data, reserve_bytes=_RESERVE_BYTES)
                self._unsynced.add(cached)
                is_kept = True
        except BootseerError as error:
            if isinstance(error, CacheFull):
                self._full_until = time.monotonic() + _FULL_PAUSE_S
        finally:
            self._facts.add("kept_chunks" if is_kept else "not_kept_chunks")
            _release(cached, block)
            with self._lock:
                self._queued_bytes -= len(data)
                self._num_chunks -= 1
                self._change.notify_all()
            then()

    def _close_file(self, cached: CachedFile) -> None:
        try:
            self._sync(cached)
        finally:
            cached.close()

    def _sync_all(self) -> None:
        while self._unsynced and not self._num_chunks:
            self._sync(next(iter(self._unsynced)))

    def _sync(self, cached: CachedFile) -> None:
        if cached in self._unsynced:
            self._unsynced.discard(cached)
            try:
                cached.sync()
            except BootseerError:
                self._facts.add("not_kept_chunks")  # not durable: lost only if the machine crashes now


def _release(cached: CachedFile, block: int) -> None:
    try:
        cached.release(block)
    except BootseerError:
        return  # the kernel releases it at the end of the process

"""Chunks of other files in the node's cache that are the same as chunks of this one.

The next checkpoint of a job has much in common with the last: what did not change need not be read again. Chunks are
compared by their digests; the cache verifies what it gives out, so that a donor can be wrong about nothing. Called by
`striped`; the search is bounded in number and time, the most recently used files first.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict

from bootseer.blocks.index import Index
from bootseer.cache.cache import Cache
from bootseer.cache.file import CachedFile
from bootseer.checkpoint.head import Head
from bootseer.checkpoint.layout import CHUNK_BYTES
from bootseer.errors import BootseerError

_MAX_OPEN = 16


class Donors:
    """What the cache can give to one file."""

    def __init__(self, cache: Cache, max_files: int, timeout_s: float) -> None:
        self._cache = cache
        self._max_files = max_files
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._open: OrderedDict[str, CachedFile] = OrderedDict()
        self._places: dict[bytes, tuple[Index, int]] = {}

    def search(self, head: Head) -> None:
        """Find the donors of a file."""
        until = time.monotonic() + self._timeout_s
        own = {segment.index.identity for segment in head.segments}
        wanted = {segment.index.digest(block) for segment in head.segments for block in range(segment.index.num_blocks)}
        with contextlib.suppress(BootseerError):
            for index, states in self._cache.recent(self._max_files):
                if index.block_size == CHUNK_BYTES and index.identity not in own:
                    for block in range(index.num_blocks):
                        if states[block] and (digest := index.digest(block)) in wanted:
                            self._places.setdefault(digest, (index, block))
                if time.monotonic() >= until:
                    return

    def has(self, digest: bytes) -> bool:
        """Whether another file had this chunk."""
        return digest in self._places

    def read(self, digest: bytes, start: int, into: memoryview) -> bool:
        """Read from byte `start` of a chunk on: whether it was there and right."""
        place = self._places.get(digest)
        if place is None:
            return False
        index, block = place
        try:
            with self._lock:  # closing a file is not for the time that others read it
                self._opened(index).readinto(block * CHUNK_BYTES + start, into)
        except BootseerError:
            self._places.pop(digest, None)
            return False
        return True

    def close(self) -> None:
        """Give the leases back."""
        with self._lock:
            for cached in self._open.values():
                cached.close()
            self._open.clear()
            self._places = {}

    def _opened(self, index: Index) -> CachedFile:
        cached = self._open.get(index.identity)
        if cached is None:
            cached = self._open[index.identity] = self._cache.open(index)
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
        else:
            self._open.move_to_end(index.identity)
        return cached

"""Chunks of other files in the node's cache that are the same as chunks of files that are read now.

The next checkpoint of a job has much in common with the last: what did not change need not be read again. Chunks are
compared by their digests; the cache verifies what it gives out, so that a donor can be wrong about nothing. Called by
`striped`; one for all files of a `Reading`, because a checkpoint has thousands of them and the search takes a moment.
It is bounded in number and time, the most recently used files first.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import OrderedDict

from bootseer.blocks.index import Index
from bootseer.cache.cache import Cache
from bootseer.cache.file import CachedFile
from bootseer.checkpoint.layout import CHUNK_BYTES
from bootseer.errors import BootseerError

_MAX_OPEN = 16
_FRESH_S = 60.0
"""What was put into the cache since then is not known."""


class Donors:
    """What the cache can give. Safe to use from many threads."""

    def __init__(self, cache: Cache, max_files: int, timeout_s: float) -> None:
        self._cache = cache
        self._max_files = max_files
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # guards _open
        self._searching = threading.Lock()
        self._searched_s = -math.inf
        self._open: OrderedDict[str, CachedFile] = OrderedDict()
        self._places: dict[bytes, tuple[Index, int]] = {}

    def search(self) -> None:
        """Look what is there, unless that was done lately or is being done."""
        if time.monotonic() - self._searched_s < _FRESH_S or not self._searching.acquire(blocking=False):
            return
        try:
            self._places = self._search(time.monotonic() + self._timeout_s)
            self._searched_s = time.monotonic()
        finally:
            self._searching.release()

    def has(self, digest: bytes) -> bool:
        """Whether a file had this chunk."""
        return digest in self._places

    def read(self, digest: bytes, start: int, into: memoryview) -> bool:
        """Read from byte `start` of a chunk on: whether it was there and right."""
        place = self._places.get(digest)
        if place is None:
            return False
        index, block = place
        try:
            self._opened(index).readinto(block * CHUNK_BYTES + start, into)
        except BootseerError:
            self._places.pop(digest, None)
            return False
        return True

    def give_back(self) -> None:
        """Give the leases back; they are taken again when they are needed."""
        with self._lock:
            closing = list(self._open.values())
            self._open.clear()
        for cached in closing:
            cached.close()  # who reads at this moment gets an error, and asks the place

    def _search(self, until: float) -> dict[bytes, tuple[Index, int]]:
        places: dict[bytes, tuple[Index, int]] = {}
        with contextlib.suppress(BootseerError):
            for index, states in self._cache.recent(self._max_files):
                if index.block_size == CHUNK_BYTES:
                    for block in range(index.num_blocks):
                        if states[block]:
                            places.setdefault(index.digest(block), (index, block))
                if time.monotonic() >= until:
                    break
        return places

    def _opened(self, index: Index) -> CachedFile:
        with self._lock:
            cached = self._open.get(index.identity)
            if cached is not None:
                self._open.move_to_end(index.identity)
                return cached
        made = self._cache.open(index)  # not under the lock: it may wait for other processes
        with self._lock:
            cached = self._open.setdefault(index.identity, made)
            surplus = self._open.popitem(last=False)[1] if len(self._open) > _MAX_OPEN else None
        for closing in (surplus, None if made is cached else made):
            if closing is not None:
                closing.close()
        return cached

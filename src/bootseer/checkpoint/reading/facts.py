"""What a `Reading` has done, for the report: counted from many threads."""

from __future__ import annotations

import threading
from collections import Counter

NAMES = (
    "place_bytes",  # came from the place: what readers asked for, parity, and reads ahead
    "cache_bytes",  # came from this node's cache
    "donor_bytes",  # came from chunks of other files in the cache that are the same
    "chunks",  # chunks and pieces that came from the place
    "reads",  # calls of readers
    "rebuilt",  # chunks that were computed from the others of their row
    "wrong_chunks",  # chunks that came with wrong bytes, and were refused
    "retries",  # chunks that were asked for again
    "kept_chunks",  # chunks that were put into the cache
    "not_kept_chunks",  # chunks that were not, because the disk was full or slower than the place
    "claims_waited",  # chunks that another process of this node was fetching already
    "waited_for_room",  # reads that had to wait for memory
)


class Facts:
    """Counts by name, of `NAMES`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Count so many more."""
        with self._lock:
            self._counts[name] += count

    def all(self) -> dict[str, int]:
        """What was counted so far, zeros too."""
        with self._lock:
            return {name: self._counts[name] for name in NAMES}

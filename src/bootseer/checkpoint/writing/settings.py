"""What a `Writing` may use and how long it tries."""

from __future__ import annotations

import random
from dataclasses import dataclass

from bootseer.errors import TransientError


@dataclass(frozen=True, slots=True)
class WritingSettings:
    """Bounds of all files that are written at the same time. The defaults suit a node of a training cluster."""

    max_threads: int = 20
    """Parts of all files that are written at the same moment; each holds a few chunks of 1 MiB."""
    segments_ahead: int = 2
    """Segments of one file that are open at the same time: while one ends, the next one uses the links."""
    part_tries: int = 8
    """How often a part is begun before its file fails."""
    retry_s: float = 5.0
    """The longest pause between two tries; the first ones are shorter."""
    retry_for_s: float = 90.0
    """No try begins so long after the first failure: a NameNode restarts or another one takes over in less."""
    excluded_s: float = 120.0
    """How long a node is avoided after a part on it failed."""
    spool_bytes: int = 2 << 30
    """Bytes on the local disk that are not safe elsewhere yet, of all files that are written as a stream."""
    random_bytes: int = 16 << 30
    """Bytes on the local disk, besides, that cannot be sent before the file is committed: writers that do not go from
    front to back."""
    idle_s: float = 15.0
    """A segment to which nothing was added for so long is ended: servers drop connections that say nothing."""
    lease_s: float = 60.0
    """How often the lease of an unfinished file is renewed."""
    end_s: float = 30.0
    """How long dropping a file waits for what is on its way."""

    def pause_s(self, failures: int, error: TransientError) -> float:
        """How long to wait after so many failures: longer each time, never to the same moment as all others."""
        wait_s = error.retry_after_s or 0.1 * 2**failures * random.uniform(0.5, 1.5)  # noqa: S311 - no secret
        return min(wait_s, self.retry_s)

"""Settings of reading, each with its reason, and the parity policy: which chunk of a row to rebuild instead of waiting
for its own part. Decides and touches nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct, field

from bootseer.checkpoint.read_ahead import ReadAheadSettings

_MIB = 1 << 20


class ReadingSettings(Struct, frozen=True):
    """How much to read at once, how much memory to use, how long to wait."""

    memory_bytes: int = 256 * _MIB
    """Memory of one `Reading`: chunks in flight, read ahead, or queued for the cache. Readers wait for room; only one
    row at a time may exceed it, for a rebuild."""
    direct_bytes: int = 64 * _MIB
    """Bytes in flight of one large read into the caller's own memory."""
    direct_ordinary_bytes: int = 128 * _MIB
    """The same for an ordinary file: more in flight spreads more evenly over its disks."""
    direct_lane_bytes: int = 32 * _MIB
    """... and for one disk. A link of 1 MiB/s delivers this within the deadline."""
    direct_min_bytes: int = 4 * _MIB
    """Reads of this size and more go straight into the caller's memory; smaller ones through the read-ahead buffer."""
    at_once_bytes: int = 64 << 10
    """An ordinary file up to this size that is read as a whole is not buffered, and is received by the calling thread:
    waking another one costs more than the read."""
    piece_bytes: int = 4 * _MIB
    """Largest request to an ordinary file: beyond this, the cost per request is negligible."""
    unit_bytes: int = _MIB
    """Unit of read-ahead of an ordinary file: the largest read of the kernel."""
    ahead: ReadAheadSettings = field(default_factory=ReadAheadSettings)
    ahead_ordinary_bytes: int = 512 * _MIB
    """Largest read-ahead window of an ordinary file, within half of the memory. Its blocks, usually of 128 MiB, lie on
    one disk each, so that several disks work only if the window spans several blocks."""
    idle_s: float = 5.0
    """Unused pieces are dropped after this: idle handles hold no memory."""

    deadline_s: float = 60.0
    """Deadline of one attempt at one chunk, including the place's own retries."""
    stall_s: float = 270.0
    """A read without any progress for this much longer than the deadline fails: its end was lost. HDFS reads extend
    their deadline up to four times while their DataNodes send."""
    row_check_s: float = 0.05
    """Interval at which a row with parity checks whether a rebuild would deliver a chunk sooner."""
    late_s: float = 0.3
    """A chunk that is this much later than expected is rebuilt, if there is parity."""
    late_factor: float = 2.0
    """... or later than this multiple of the expectation."""
    claim_s: float = 2.0
    """How long to wait for a chunk that another process of this node is fetching, before it is fetched twice."""

    keep_s: float = 5.0
    """How long the end of a process waits for chunks that are queued for the node's cache."""
    keep_still_s: float = 1.0
    """... and how long for a disk that makes no progress."""

    max_descriptors: int = 4096
    """Descriptors of open segments of all files, if the process may have that many; segments beyond are opened again
    when they are read."""


_WORTH = 1.5
_WORTH_S = 0.05
"""A rebuild costs processor time: parity must arrive earlier by this factor and these seconds."""
_ALONE_WORTH = 2.0
_ALONE_WORTH_S = 0.25
"""... and earlier by these if helpers must be read for it."""


def chunk_to_skip(delays: Mapping[int, float], wanted: frozenset[int], parity_s: float) -> int | None:
    """The chunk of a row to replace by parity from the start; None: none of them.

    `delays`: estimated arrival of each chunk of the row; `wanted`: the requested ones.
    """
    last = max(wanted, key=lambda chunk: delays[chunk])
    others = [delay_s for chunk, delay_s in delays.items() if chunk not in wanted]
    return last if _pays(delays[last], max([parity_s, *others]), alone=bool(others)) else None


def chunk_to_replace(left: Mapping[int, float], others_s: float, parity_s: float, *, alone: bool) -> int | None:
    """Which of the chunks in flight to replace by parity; None: none of them.

    `left`: estimated arrival of each of them; `others_s`: of the rest of the row; `alone`: some of the rest would be
    read for this rebuild alone.
    """
    if not left:
        return None
    last = max(left, key=lambda chunk: left[chunk])
    rest_s = max((left_s for chunk, left_s in left.items() if chunk != last), default=0.0)
    return last if _pays(left[last], max(rest_s, others_s, parity_s), alone=alone) else None


def is_late(waited_s: float, expected_s: float, settings: ReadingSettings) -> bool:
    """Whether a read has taken so long that something must be wrong, whatever the estimates say."""
    # Where no arrival was expected at all, nothing is known about the usual time.
    times = settings.late_factor * expected_s if expected_s < math.inf else 0.0
    return waited_s >= max(settings.late_s, times)


def _pays(own_s: float, instead_s: float, *, alone: bool) -> bool:
    worth, worth_s = (_ALONE_WORTH, _ALONE_WORTH_S) if alone else (_WORTH, _WORTH_S)
    return own_s > instead_s * worth + worth_s

"""The numbers of reading, each with its reason, and the parity policy: which chunk of a row to compute from the others
and parity, instead of waiting for its own part. Decides and touches nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from bootseer.checkpoint.ahead import AheadSettings

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ReadingSettings:
    """How much to read at once, how much to hold, how long to wait."""

    memory_bytes: int = 256 * _MIB
    """All that one `Reading` holds in memory of its own: chunks on their way, read ahead, or on their way to the disk.
    Readers wait for room rather than exceed it; only one row at a time that must be rebuilt may."""
    direct_bytes: int = 64 * _MIB
    """What one large read may have under way, in the caller's own memory."""
    direct_ordinary_bytes: int = 128 * _MIB
    """The same of an ordinary file: several disks have what is under way, and the more there is to choose from, the
    evener they share it."""
    direct_lane_bytes: int = 32 * _MIB
    """... and for one disk. A link of 1 MiB/s brings this within the deadline."""
    direct_min_bytes: int = 4 * _MIB
    """A read from this size on goes straight into the caller's memory; a smaller one through chunks read ahead."""
    at_once_bytes: int = 64 << 10
    """An ordinary file up to this size that is read as a whole is neither kept nor read ahead, and is received by the
    calling thread: waking another one costs more than the read."""
    piece_bytes: int = 4 * _MIB
    """Largest piece of an ordinary file: beyond this, requests cost nothing any more."""
    unit_bytes: int = _MIB
    """Of an ordinary file that is read in sequence, this much at once: what the kernel asks for at most."""
    prefetch_bytes: int = 64 * _MIB
    """What a prefetch may have under way."""
    ahead: AheadSettings = field(default_factory=AheadSettings)
    ahead_ordinary_bytes: int = 512 * _MIB
    """The largest window of an ordinary file, as far as half of the memory allows: its blocks lie one after the other,
    usually 128 MiB each, so that several disks have work only where the window spans several blocks."""
    idle_s: float = 5.0
    """What was not asked for in so long is dropped: idle handles hold nothing."""

    deadline_s: float = 60.0
    """One attempt at one chunk, by all means the place has."""
    lost_s: float = 270.0
    """So much later than this deadline, a read that has not gone on at all is an error: its end was lost. HDFS's own
    client puts the deadline off, four times at most, as long as the DataNodes concerned send."""
    look_s: float = 0.05
    """So often a row with parity looks whether one of its chunks would come sooner by rebuilding it."""
    late_s: float = 0.3
    """A chunk that is this much later than expected is rebuilt from the others of its row, if there is parity."""
    late_factor: float = 2.0
    """... or later than so many times the expectation."""
    claim_s: float = 2.0
    """How long to wait for a chunk that another process of this node is fetching, before it is fetched twice."""

    keep_s: float = 5.0
    """The end of a process waits so long, at most, for what was read and is still on its way into the node's cache."""
    keep_still_s: float = 1.0
    """... and not for a disk that has kept nothing for so long."""

    max_segments: int = 64
    """Segments of one file that are open at once; the others are opened again when they are read."""
    max_dedup_segments: int = 1024
    """Cached segments that are searched for equal chunks: 256 GiB of the latest checkpoints."""
    dedup_search_s: float = 1.0
    """... and how long that search may take when a file is opened, once a minute at most."""


_WORTH = 1.5
_WORTH_S = 0.05
"""Rebuilding costs some time of the processor: parity must come so much earlier."""
_ALONE_WORTH = 2.0
_ALONE_WORTH_S = 0.25
"""... and much earlier where the other chunks of the row must be read for it, which were not asked for."""


def chunk_to_skip(delays: Mapping[int, float], wanted: frozenset[int], parity_s: float) -> int | None:
    """Which chunk of a row not to ask its own part for; None: none of them.

    `delays`: when each chunk of the row would be here; `wanted`: those that were asked for.
    """
    last = max(wanted, key=lambda chunk: delays[chunk])
    others = [delay_s for chunk, delay_s in delays.items() if chunk not in wanted]
    return last if _pays(delays[last], max([parity_s, *others]), alone=bool(others)) else None


def chunk_to_replace(left: Mapping[int, float], others_s: float, parity_s: float, *, alone: bool) -> int | None:
    """Which of the chunks that are on their way to give up for parity; None: none of them.

    `left`: when each of them will be here; `others_s`: when the rest of the row will be; `alone`: some of that would be
    read for it alone.
    """
    if not left:
        return None
    last = max(left, key=lambda chunk: left[chunk])
    rest_s = max((left_s for chunk, left_s in left.items() if chunk != last), default=0.0)
    return last if _pays(left[last], max(rest_s, others_s, parity_s), alone=alone) else None


def parity_no_longer_pays(own_s: float, parity_s: float) -> bool:
    """Whether a chunk that parity is on its way for, instead of its own part, would come sooner from that by now."""
    return _pays(parity_s, own_s, alone=False)


def is_late(waited_s: float, expected_s: float, settings: ReadingSettings) -> bool:
    """Whether a read has taken so long that something must be wrong, whatever the place knows of it."""
    # Of what was not expected at all, and asked for all the same, nothing is known.
    times = settings.late_factor * expected_s if expected_s < math.inf else 0.0
    return waited_s >= max(settings.late_s, times)


def _pays(own_s: float, instead_s: float, *, alone: bool) -> bool:
    worth, worth_s = (_ALONE_WORTH, _ALONE_WORTH_S) if alone else (_WORTH, _WORTH_S)
    return own_s > instead_s * worth + worth_s

"""The numbers of reading, each with its reason. Decides and touches nothing."""

from __future__ import annotations

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
    lost_s: float = 30.0
    """So much later than this deadline, a read that has not gone on at all is an error: its end was lost."""
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

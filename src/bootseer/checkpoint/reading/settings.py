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
    direct_min_bytes: int = 4 * _MIB
    """A read from this size on goes straight into the caller's memory; a smaller one through chunks read ahead."""
    piece_bytes: int = 4 * _MIB
    """Largest piece of an ordinary file: beyond this, requests cost nothing any more."""
    unit_bytes: int = _MIB
    """Of an ordinary file that is read in sequence, this much at once: what the kernel asks for at most."""
    prefetch_bytes: int = 64 * _MIB
    """What a prefetch may have under way."""
    ahead: AheadSettings = field(default_factory=AheadSettings)
    idle_s: float = 5.0
    """What nobody has asked for in so long is dropped: handles that nobody reads from hold nothing."""

    deadline_s: float = 60.0
    """One attempt at one chunk, by all means the place has."""
    late_s: float = 0.3
    """A chunk that is this much later than expected is rebuilt from the others of its row, if there is parity."""
    late_factor: float = 2.0
    """... or later than so many times the expectation."""
    claim_s: float = 2.0
    """How long to wait for a chunk that another process of this node is fetching, before it is fetched twice."""

    max_segments: int = 64
    """Segments of one file that are open at once; the others are opened again when they are read."""
    max_donors: int = 1024
    """Cached segments that are searched for equal chunks: 256 GiB of the latest checkpoints."""
    donors_s: float = 1.0
    """... and how long that search may take when a file is opened, once a minute at most."""

"""Fetch statistics of one startup, for the report."""

from __future__ import annotations

from msgspec import Struct, field

from bootseer.fetch.fetch_settings import Purpose


class FetchStats(Struct):
    """Bytes are stored (compressed) bytes unless noted."""

    waited_s: float = 0.0
    """Total waiting time of reads."""
    failed_reads: int = 0
    needs: int = 0
    """Distinct blocks that readers needed."""
    covered: int = 0
    """Those in the hot set."""
    late: int = 0
    """Those of them that were in flight, not cached yet."""
    hot_blocks: int = 0
    wasted_blocks: int = 0
    """Fetched for the hot set and not needed so far."""
    bytes_by_purpose: dict[Purpose, int] = field(default_factory=lambda: dict.fromkeys(Purpose, 0))
    requests_by_purpose: dict[Purpose, int] = field(default_factory=lambda: dict.fromkeys(Purpose, 0))
    peer_bytes: int = 0
    """Part of `bytes_by_purpose` that came from other nodes of the job, uncompressed; the rest came from the store."""
    hedges: int = 0
    corrupt_blocks: int = 0
    first_corrupt: str = ""
    """The first block that was invalid or missing at every attempt, with its origin; empty if none."""
    first_failure: str = ""
    """The first error that a reader got; empty if none."""
    dropped: int = 0
    """Blocks whose prefetch was given up."""

"""What fetching did in one startup, in numbers for the report."""

from __future__ import annotations

from dataclasses import dataclass, field

from bootseer.fetch.settings import Purpose


@dataclass(slots=True)
class FetchStats:
    """Times are seconds since the fetcher was made; bytes are stored (compressed) bytes unless said otherwise."""

    reads: int = 0
    """Reads of any size, whether or not their blocks were here."""
    waited_reads: int = 0
    """Those of them that had to wait."""
    waited_s: float = 0.0
    """What they waited, all together."""
    failed_reads: int = 0
    first_need_s: float | None = None
    last_need_s: float | None = None
    """When a block was needed for the first time most recently."""
    needs: int = 0
    """Blocks that readers needed."""
    hits: int = 0
    """Those of them that were in the cache."""
    late: int = 0
    """Those that were on their way."""
    missed: int = 0
    covered: int = 0
    """Those that are in the hot set."""
    hot_blocks: int = 0
    wasted_blocks: int = 0
    """Fetched for the hot set and not needed so far."""
    suspended: bool = False
    suspensions: int = 0
    bytes_by_purpose: dict[Purpose, int] = field(default_factory=lambda: dict.fromkeys(Purpose, 0))
    requests_by_purpose: dict[Purpose, int] = field(default_factory=lambda: dict.fromkeys(Purpose, 0))
    bytes_by_second: list[int] = field(default_factory=list)
    """What arrived in each second; the last one counts all the rest after an hour."""
    peer_bytes: int = 0
    """Those of `bytes_by_purpose` that came from other nodes of the job, uncompressed; the rest came from the store."""
    peers: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of each node that was asked, by name: `bytes`, `requests`, `late`, and the `seconds` that its answers took."""
    data_bytes: int = 0
    """Uncompressed bytes of the blocks that arrived."""
    blocks_from_others: int = 0
    """Blocks that another process of this node brought."""
    hedges: int = 0
    failures: int = 0
    """Requests that broke off."""
    corrupt_blocks: int = 0
    first_corrupt: str = ""
    """Of a block whose bytes were wrong at every attempt: where, and which. Empty when there was none."""
    first_failure: str = ""
    """Why a reader got an error for the first time. Empty when none did."""
    dropped: int = 0
    """Blocks whose prefetch was given up."""
    cache_full: bool = False
    threads: int = 0
    decode_s: float = 0.0
    """Time of worker threads in verification and decompression."""
    process_cpu_s: float = 0.0
    """Processor time of the whole process since the fetcher was made."""

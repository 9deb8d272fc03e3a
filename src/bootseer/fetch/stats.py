"""What fetching did in one startup, in numbers for the report.

`Meter` counts while `fetcher` works, under the fetcher's lock; `FetchStats` is what it hands out.
"""

from __future__ import annotations

from dataclasses import dataclass

from bootseer.fetch.need import Found
from bootseer.fetch.purpose import Purpose

_MAX_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class FetchStats:
    """Times are seconds since the fetcher was made; bytes are stored (compressed) bytes unless said otherwise."""

    reads: int
    """Reads of any size, whether or not their blocks were here."""
    waited_reads: int
    """Those of them that had to wait."""
    waited_s: float
    """What they waited, all together."""
    failed_reads: int
    first_need_s: float | None
    last_need_s: float | None
    """When a block was needed for the first time most recently."""
    needs: int
    """Blocks that readers needed."""
    hits: int
    """Those of them that were in the cache."""
    late: int
    """Those that were on their way."""
    missed: int
    covered: int
    """Those that are in the hot set."""
    hot_blocks: int
    wasted_blocks: int
    """Fetched for the hot set and not needed so far."""
    suspended: bool
    suspensions: int
    bytes_by_purpose: dict[Purpose, int]
    requests_by_purpose: dict[Purpose, int]
    bytes_by_second: tuple[int, ...]
    """What arrived in each second; the last one counts all the rest after an hour."""
    data_bytes: int
    """Uncompressed bytes of the blocks that arrived."""
    blocks_from_others: int
    """Blocks that another process of this node brought."""
    hedges: int
    failures: int
    """Requests that broke off."""
    corrupt_blocks: int
    first_corrupt: str
    """Of a block whose bytes were wrong at every attempt: where, and which. Empty when there was none."""
    first_failure: str
    """Why a reader got an error for the first time. Empty when none did."""
    dropped: int
    """Blocks whose prefetch was given up."""
    cache_full: bool
    threads: int
    decode_s: float
    """Time of worker threads in verification and decompression."""
    process_cpu_s: float
    """Processor time of the whole process since the fetcher was made."""

    @property
    def coverage(self) -> float | None:
        """Part of the needs that the hot set covers; None without needs."""
        return self.covered / self.needs if self.needs else None


class Meter:
    """The counters behind `FetchStats`. `start` is the time at which seconds begin to count."""

    def __init__(self, start: float) -> None:
        self._start = start
        self.waited_reads = 0
        self.waited_s = 0.0
        self.failed_reads = 0
        self.first_need_s: float | None = None
        self.last_need_s: float | None = None
        self.found = dict.fromkeys(Found, 0)
        self.bytes_by_purpose = dict.fromkeys(Purpose, 0)
        self.data_bytes = 0
        self.blocks_from_others = 0
        self.corrupt_blocks = 0
        self.decode_s = 0.0
        self._by_second: list[int] = []

    def needed(self, found: Found, now: float) -> None:
        """A reader needed a block for the first time."""
        self.found[found] += 1
        self.last_need_s = now - self._start
        if self.first_need_s is None:
            self.first_need_s = self.last_need_s

    def arrived(self, purpose: Purpose, stored: int, length: int, now: float) -> None:
        """A block came from its origin: `stored` bytes that are `length` bytes of the file."""
        self.bytes_by_purpose[purpose] += stored
        self.data_bytes += length
        second = min(int(now - self._start), _MAX_SECONDS)
        if second >= len(self._by_second):
            self._by_second += [0] * (second + 1 - len(self._by_second))
        self._by_second[second] += stored

    @property
    def by_second(self) -> tuple[int, ...]:
        """Bytes that arrived in each second."""
        return tuple(self._by_second)

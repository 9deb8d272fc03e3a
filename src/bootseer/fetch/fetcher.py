"""On-demand reads plus fetching in advance: hot blocks, the rest in the background, or everything at full speed.

One `Fetcher` per mount daemon or pull.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future, wait

from msgspec.structs import replace

from bootseer.blocks.codec import Buffer
from bootseer.cache.cached_file import Progress
from bootseer.cache.disk import CacheFull
from bootseer.errors import BootseerError, TransientError
from bootseer.fetch.block_reads import Reads, closed
from bootseer.fetch.ledger import FetchStats
from bootseer.io.executor import show_threads

# `read_blocking` must return even if the clock thread has died.
_GRACE_S = 5.0
_PROGRESS_S = 0.2
# Prefetches are queued in batches, so that a long plan does not keep readers from the lock.
_PLANNED_AT_ONCE = 256


class Fetcher(Reads):
    """Block files that are read and prefetched together. Safe for many threads."""

    def read_blocking(self, file: int, offset: int, length: int, deadline_s: float | None = None) -> Buffer:
        """Read a range and wait for it. Raises the error that `read` would report."""
        answer: Future[Buffer | BootseerError] = Future()
        longest_s = self._settings.deadline_s if deadline_s is None else deadline_s
        if self.read(file, offset, length, answer.set_result, longest_s) is not None:
            wait([answer], longest_s + _GRACE_S)
        if not answer.done():
            show_threads("a read was not answered")
            raise TransientError(f"file {self._files[file].index.identity[:16]}: no answer in {longest_s:.1f} s")
        data = answer.result()
        if isinstance(data, BootseerError):
            raise data
        return data

    def prefetch(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Prefetch these blocks (file number, block), in this order.

        Invalid numbers are ignored: hot sets are external data.
        """
        known = [
            (file, block)
            for file, block in dict.fromkeys(blocks)
            if 0 <= file < len(self._files) and 0 <= block < self._files[file].index.num_blocks
        ]
        self._stats.hot_blocks += len(known)
        known = self._scheduler.rotate_hot(known)
        for start in range(0, len(known), _PLANNED_AT_ONCE):
            with self._lock:
                self._scheduler.want_hot(known[start : start + _PLANNED_AT_ONCE])
                actions = self._advance(time.monotonic())
            self._run_actions(actions)

    def stream_rest(self, *, full_speed: bool = False) -> None:
        """Fetch everything missing: in the background while readers are idle, or with `full_speed` at once."""
        missing = [file.missing() for file in self._files]
        with self._lock:
            now = time.monotonic()
            for number, parts in enumerate(missing):
                for blocks in parts:
                    self._scheduler.want_cold(number, blocks, now)
            if full_speed:
                self._scheduler.fetch_all_now()
            actions = self._advance(now)
        self._run_actions(actions)

    def stop_prefetch(self) -> None:
        """Fetch only what readers ask for from now on. Running requests continue."""
        with self._lock:
            for number in range(len(self._files)):
                self._scheduler.stop_prefetch(number)

    def pull_all(self, progress: Progress | None = None) -> None:
        """Fetch everything missing at full speed, and wait. Afterwards all files are complete and durable.

        Raises `CacheFull` if they do not fit, the error of a block that could not be fetched, and `TransientError` when
        no block has arrived for `stall_s`.
        """
        self.stream_rest(full_speed=True)
        total = sum(file.index.num_blocks for file in self._files)
        last, since, is_idle = -1, time.monotonic(), False
        while not is_idle:
            with self._lock:
                self._changed.wait_for(lambda: self._scheduler.idle or self._closed, _PROGRESS_S)
                if self._closed:
                    raise closed()
                is_idle = self._scheduler.idle
            num_ready = sum(file.cached.num_ready for file in self._files)
            now = time.monotonic()
            if num_ready != last:
                last, since = num_ready, now
                if progress is not None:
                    progress(num_ready, total)
            if not is_idle and now - since > self._settings.stall_s:
                paces = (origin.pace for origin in self._scheduler.origins.values())
                error = next((pace.error for pace in paces if pace.error), self._scheduler.prefetch_error)
                raise TransientError(f"no block came in {self._settings.stall_s:.0f} s{f': {error}' if error else ''}")
        for file in self._files:
            if not file.cached.complete:
                full = self._cache_error
                if isinstance(full, CacheFull):
                    raise CacheFull(f"no room for the whole of {file.cached.path}: {full}")
                incomplete = TransientError(f"file {file.index.identity[:16]} is not complete; try again")
                raise full or self._scheduler.prefetch_error or incomplete
            file.cached.sync()

    def stats(self) -> FetchStats:
        trust, stats = self._scheduler.trust, self._stats
        return replace(
            stats,
            covered=trust.covered,
            wasted_blocks=sum(
                (int.from_bytes(file.prefetched_hot) & ~int.from_bytes(file.needed)).bit_count() for file in self._files
            ),
            bytes_by_purpose=dict(stats.bytes_by_purpose),
            requests_by_purpose=dict(stats.requests_by_purpose),
        )

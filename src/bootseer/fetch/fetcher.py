"""Reads of block files: from the cache when the blocks are there, from their origin when not, and in advance.

One `Fetcher` per mount daemon or pull. A block that is in the cache is served on the reader's own thread, without a
lock held during the read; everything else is the affair of `engine`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable

from bootseer.blocks.codec import Buffer
from bootseer.blocks.index import Index
from bootseer.cache.disk import CacheFull, MissingBlocks
from bootseer.cache.file import CachedFile
from bootseer.errors import BootseerError, TransientError
from bootseer.fetch.engine import Engine
from bootseer.fetch.need import Found
from bootseer.fetch.settings import FetchSettings
from bootseer.fetch.stats import FetchStats
from bootseer.fetch.tickets import Done, Ticket
from bootseer.io.executor import show_threads
from bootseer.store.store import Store

OnNeed = Callable[[int, int, Found], None]
"""File number, block, where it was found: once per block, on the reader's thread and without a lock."""
Progress = Callable[[int, int], None]
"""Blocks that are here, blocks in all."""

_CLOSE_S = 5.0
# Reading must end even if the clock thread has died.
_GRACE_S = 5.0
_PROGRESS_S = 0.2


class Fetcher:
    """Block files that are read, fetched and prefetched together. Safe to use from many threads."""

    def __init__(
        self,
        settings: FetchSettings | None = None,
        *,
        on_need: OnNeed | None = None,
        on_problem: Callable[[str], None] | None = None,
    ) -> None:
        """`on_problem` gets a line for the user when something goes on working, but worse; once per thing."""
        self._settings = settings or FetchSettings()
        self._on_need = on_need
        self._on_problem = on_problem
        self._start_cpu = time.process_time()
        self._engine = Engine(self._settings, random.Random().random, on_problem)  # noqa: S311 - spreads requests
        self._files = self._engine.files
        self._reads = 0
        self._reads_lock = threading.Lock()
        self._hot_blocks = 0

    def add(self, index: Index, origin: Store, cached: CachedFile) -> int:
        """A file to read, and where its blocks come from; returns its number.

        The caller closes both after this fetcher.
        """
        return self._engine.add(index, origin, cached)

    def read(self, file: int, offset: int, length: int, done: Done, deadline_s: float | None = None) -> Ticket | None:
        """Read a range, cut at the end of the file. `done` gets the bytes, or why there are none.

        When all is in the cache, `done` is called before this returns and there is no ticket. Otherwise it is called
        once on another thread, which it must not hold up, after `deadline_s` at the latest; `Ticket.cancel` calls it
        off. After a `TransientError` a new read tries afresh.
        """
        here = self._files[file]
        with self._reads_lock:
            self._reads += 1
        missing: list[int] = []
        data = b""
        try:
            data = here.cached.read(offset, length)
        except MissingBlocks as error:
            missing = error.blocks
        except BootseerError as error:
            done(error)
            return None
        blocks = here.index.blocks_of(offset, length)
        if here.needed.find(0, blocks.start, blocks.stop) >= 0:
            needs = self._engine.needed(file, blocks, missing)
            if self._on_need is not None:
                for block, found in needs:
                    self._on_need(file, block, found)
        if not missing:
            done(data)
            return None
        now = time.monotonic()
        until = now + (self._settings.deadline_s if deadline_s is None else deadline_s)
        ticket = Ticket(file, offset, length, now, until, done, self._engine.leave)
        self._engine.demand(ticket, missing)
        return ticket

    def read_blocking(self, file: int, offset: int, length: int, deadline_s: float | None = None) -> Buffer:
        """Read a range and wait for it. Raises what `read` would answer with."""
        answers: list[Buffer | BootseerError] = []
        answered = threading.Event()

        def done(answer: Buffer | BootseerError) -> None:
            answers.append(answer)
            answered.set()

        longest_s = self._settings.deadline_s if deadline_s is None else deadline_s
        if self.read(file, offset, length, done, longest_s) is not None:
            answered.wait(longest_s + _GRACE_S)
        if not answers:
            show_threads("a read was not answered")
            raise TransientError(f"file {self._files[file].index.identity[:16]}: no answer in {longest_s:.1f} s")
        if isinstance(answers[0], BootseerError):
            raise answers[0]
        return answers[0]

    def prefetch(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Fetch these blocks (file number, block) in this order, as long as readers need what is among them.

        Numbers that do not exist are ignored: hot sets come from outside.
        """
        known = [
            (file, block)
            for file, block in dict.fromkeys(blocks)
            if 0 <= file < len(self._files) and 0 <= block < self._files[file].index.num_blocks
        ]
        self._hot_blocks += len(known)
        self._engine.prefetch(known)
        for number, file in enumerate(self._files):
            try:
                file.cached.mark_hot([block for other, block in known if other == number])
            except BootseerError as error:
                if self._on_problem is not None:
                    self._on_problem(f"hot blocks may be evicted as early as others: {error}")

    def stream_rest(self) -> None:
        """Fetch all that is missing, in the background, when readers are silent."""
        self._engine.want_rest(rush=False)

    def stop_prefetch(self) -> None:
        """Fetch only what readers ask for from now on. Requests that are under way end."""
        self._engine.stop_prefetch()

    def pull_all(self, progress: Progress | None = None) -> None:
        """Fetch all that is missing, at full speed, and wait for it. Afterwards all files are complete and durable.

        Raises `CacheFull` when they do not fit, otherwise why a block could not be fetched, and `TransientError`
        when no block has come for a long time.
        """
        self._engine.want_rest(rush=True)
        total = sum(file.index.num_blocks for file in self._files)
        last, since = -1, time.monotonic()
        while True:
            idle = self._engine.wait_until_idle(_PROGRESS_S)
            num_ready = sum(file.cached.num_ready for file in self._files)
            now = time.monotonic()
            if num_ready != last:
                last, since = num_ready, now
                if progress is not None:
                    progress(num_ready, total)
            if idle:
                break
            if now - since > self._settings.stall_s:
                raise TransientError(f"no block came in {self._settings.stall_s:.0f} s{self._reason()}")
        for file in self._files:
            if not file.cached.complete:
                raise self._why_incomplete(file.index, file.cached)
            file.cached.sync()

    def stats(self) -> FetchStats:
        """What was done so far."""
        meter, counts, worth = self._engine.meter, self._engine.scheduler.counts, self._engine.scheduler.worth
        return FetchStats(
            reads=self._reads,
            waited_reads=meter.waited_reads,
            waited_s=meter.waited_s,
            failed_reads=meter.failed_reads,
            first_need_s=meter.first_need_s,
            last_need_s=meter.last_need_s,
            needs=sum(meter.found.values()),
            hits=meter.found[Found.READY],
            late=meter.found[Found.IN_FLIGHT],
            missed=meter.found[Found.MISSING],
            covered=worth.covered,
            hot_blocks=self._hot_blocks,
            wasted_blocks=sum(_num_only_in(file.brought_hot, file.needed) for file in self._files),
            suspended=worth.suspended,
            suspensions=worth.suspensions,
            bytes_by_purpose=dict(meter.bytes_by_purpose),
            requests_by_purpose=dict(counts.requests),
            bytes_by_second=meter.by_second,
            data_bytes=meter.data_bytes,
            blocks_from_others=meter.blocks_from_others,
            hedges=counts.hedges,
            failures=counts.failures,
            corrupt_blocks=meter.corrupt_blocks,
            first_corrupt=self._engine.corrupt.first,
            first_failure=self._engine.first_failure,
            dropped=counts.dropped,
            cache_full=self._engine.cache_error is not None,
            threads=len(self._engine.workers),
            decode_s=meter.decode_s,
            process_cpu_s=time.process_time() - self._start_cpu,
        )

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """End all threads, at most `timeout_s` later; readers who wait get an error. Safe to call twice."""
        self._engine.close(timeout_s)

    def _why_incomplete(self, index: Index, cached: CachedFile) -> BootseerError:
        full = self._engine.cache_error
        if isinstance(full, CacheFull):
            return CacheFull(f"no room for the whole of {cached.path}: {full}")
        error = full or self._engine.scheduler.prefetch_error
        return error or TransientError(f"file {index.identity[:16]} is not complete; try again")

    def _reason(self) -> str:
        error = self._engine.scheduler.origin_error or self._engine.scheduler.prefetch_error
        return f": {error}" if error else ""


def _num_only_in(marks: bytearray, others: bytearray) -> int:
    """How many blocks are marked 1 in the first and 0 in the second."""
    return (int.from_bytes(marks) & ~int.from_bytes(others)).bit_count()

"""Reads of block files: from the cache when the blocks are there, from their origins when not.

The walk of a missing block:

1. `read`: the cache does not have it (`MissingBlocks`), so the read becomes a `PendingRead` of these blocks.
2. `_advance`: the scheduler decides which blocks are asked for now, together with which others, and from which of the
   file's origins (`schedule`); a worker thread gets each request.
3. `_fetch`, on that thread: `transfer.bring` claims the blocks against other processes, asks the origin, verifies each
   block as it arrives and keeps it in the cache. A block that another process has claimed is looked for from time to
   time (`_look_at`).
4. `_took`: the scheduler learns that it came (or that it was damaged, and asks again, or gives up), and the reads that
   have all they need are served (`_serve`), from memory or from the cache.

A block that is in the cache is served on the reader's own thread, without a lock held during the read. All other state
belongs to `_lock`, which is never held during input, output, decoding or a reader's callback: methods collect a `_ToDo`
under the lock and carry it out after it. One more thread (`bootseer-fetch-clock`) does what is due by time.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from bootseer.blocks.codec import Buffer
from bootseer.blocks.index import Index
from bootseer.cache.disk import MissingBlocks
from bootseer.cache.file import CachedFile
from bootseer.errors import BootseerError, CorruptError, PermanentError, TransientError
from bootseer.fetch.hotset import Found
from bootseer.fetch.ledger import Fetch, Key
from bootseer.fetch.pending import Done, ForeignClaims, PendingRead, PendingReads
from bootseer.fetch.routed import RoutedScheduler
from bootseer.fetch.settings import FetchSettings, Purpose
from bootseer.fetch.stats import FetchStats
from bootseer.fetch.transfer import Arrived, Claim, File, Peers, StoreOrigin, bring
from bootseer.io.executor import Executor, report_exception, run_reported
from bootseer.logs import logger
from bootseer.store.store import Store

_LOG = logger(__name__)
OnNeed = Callable[[int, int, Found], None]
"""File number, block, where it was found: once per block, on the reader's thread and without a lock."""

_CLOSE_S = 5.0
_MAX_SECONDS = 3600


@dataclass(slots=True)
class _ToDo:
    """What to do once the lock is released."""

    fetches: list[Fetch] = field(default_factory=list)
    complete: list[PendingRead] = field(default_factory=list)
    failed: list[tuple[PendingRead, BootseerError]] = field(default_factory=list)

    def add(self, more: _ToDo) -> None:
        self.fetches += more.fetches
        self.complete += more.complete
        self.failed += more.failed


class Reads:
    """Block files that are read together. Safe to use from many threads."""

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
        self._start_cpu, self._start = time.process_time(), time.monotonic()
        self._lock = threading.Lock()
        self._reads_lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        """The clock's next time, or that nothing is left to fetch."""
        self._files: list[File] = []
        self._scheduler = RoutedScheduler(self._settings, random.Random().random)  # noqa: S311 - spreads requests
        self._pending = PendingReads()
        self._foreign = ForeignClaims(self._settings.claim_s)
        self._distrusted: set[Key] = set()
        """Blocks that the cache called ready and could not give, and those whose claim is overdue."""
        self._cancelled: set[int] = set()
        """Running requests that are to break off. Changed under the lock, looked at without."""
        self._urgent: set[int] = set()
        """Running prefetch requests that a reader waits for by now. Changed under the lock, looked at without."""
        self._wake_at: float | None = None
        self._wants_all = False
        self._closed = False
        self._cache_error: BootseerError | None = None
        """Why blocks cannot be kept."""
        self._stats = FetchStats()
        self._processors = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))
        self._workers = Executor("bootseer-fetch")
        self._clock = Executor("bootseer-fetch-clock", 1)
        self._clock.submit(self._run_clock)

    def add(self, index: Index, store: Store, cached: CachedFile, *, peers: Peers | None = None) -> int:
        """A file to read, and where its blocks come from: the store, or `peers` that have them before it.

        Returns its number. The caller closes all of them after this fetcher.
        """
        origins = (store.uri,) if peers is None else (peers.uri, store.uri)
        marks = index.num_blocks
        file = File(index, StoreOrigin(store), peers, cached, bytearray(marks), bytearray(marks))
        with self._lock:
            self._files.append(file)
            return self._scheduler.add(index, *origins, routes=peers)

    def read(
        self, file: int, offset: int, length: int, done: Done, deadline_s: float | None = None
    ) -> PendingRead | None:
        """Read a range, cut at the end of the file. `done` gets the bytes, or why there are none.

        When all is in the cache, `done` is called before this returns, and it returns None. Otherwise it is called once
        on another thread, which it must not hold up, after `deadline_s` at the latest; `PendingRead.cancel` calls it
        off. After a `TransientError` a new read tries afresh.
        """
        here = self._files[file]
        with self._reads_lock:
            self._stats.reads += 1
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
            self._note_needs(file, blocks, missing)
        if not missing:
            done(data)
            return None
        now = time.monotonic()
        until = now + (self._settings.deadline_s if deadline_s is None else deadline_s)
        read = PendingRead(file, offset, length, now, until, done, self._leave)
        with self._lock:
            if not self._closed:
                self._stats.waited_reads += 1
            to_do = self._wait(read, missing)
        self._carry_out(to_do)
        return read

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """End all threads, at most `timeout_s` later; readers that wait get an error. Safe to call twice.

        What hangs in a request is left behind.
        """
        with self._lock:
            self._closed = True
            reads = self._pending.close_all()
            self._changed.notify_all()
        for read in reads:
            _answer(read, closed())
        until = time.monotonic() + timeout_s
        self._workers.close(timeout_s)
        self._clock.close(max(until - time.monotonic(), 0.0))

    def _note_needs(self, number: int, blocks: range, missing: list[int]) -> None:
        """A reader reads blocks: note those that no reader had needed before, and where they were."""
        file, now, stats = self._files[number], time.monotonic(), self._stats
        needs: list[tuple[int, Found]] = []
        with self._lock:
            was_suspended = self._scheduler.trust.suspended
            for block in blocks:
                if file.needed[block]:
                    continue
                file.needed[block] = 1
                found = Found.READY
                if block in missing:
                    found = Found.IN_FLIGHT if self._scheduler.in_flight(number, block) else Found.MISSING
                needs.append((block, found))
                stats.needs += 1
                stats.hits += found is Found.READY
                stats.late += found is Found.IN_FLIGHT
                stats.missed += found is Found.MISSING
                stats.last_need_s = now - self._start
                if stats.first_need_s is None:
                    stats.first_need_s = stats.last_need_s
                self._scheduler.needed(number, block, now)
            trust = self._scheduler.trust
            if trust.suspended is not was_suspended:
                verdict = "suspended" if trust.suspended else "resumed"
                _LOG.info("the hot set is %s: it covers %d of %d needs", verdict, trust.covered, trust.needs)
            # A hot set has more or less to prefetch by now; a read that waits asks the scheduler itself.
            to_do = _ToDo() if missing else self._advance(now)
        self._carry_out(to_do)
        if self._on_need is not None:
            for block, found in needs:
                self._on_need(number, block, found)

    def _leave(self, read: PendingRead) -> None:
        with self._lock:
            self._scheduler.cancelled(read.file, self._pending.close(read))

    # With the lock held

    def _wait(self, read: PendingRead, missing: list[int]) -> _ToDo:
        if self._closed:
            return _ToDo(failed=[(read, closed())])
        now = time.monotonic()
        if error := self._scheduler.outage(read.file, read.deadline, now):
            self._stats.failed_reads += 1
            return _ToDo(failed=[(read, error)])
        self._scheduler.want(read.file, missing, Purpose.DEMAND, now)
        self._pending.wait(read, missing)
        for block in missing:
            self._urgent.update(self._scheduler.requests_for(read.file, block))
        return self._advance(now)

    def _advance(self, now: float) -> _ToDo:
        """What the scheduler decided, and which reads ran out of time."""
        to_do = _ToDo()
        for read, missing in self._pending.expired(now):
            to_do.failed.append((read, self._timeout_error(read, missing)))
            self._scheduler.expired(read.file, missing, now)
        plan = self._scheduler.tick(now)
        to_do.fetches = plan.fetches
        self._cancelled.update(plan.cancelled)
        for file, block, error in plan.given_up:
            if isinstance(error, CorruptError):
                self._stats.first_corrupt = self._stats.first_corrupt or str(error)
            for read, others in self._pending.given_up((file, block)):
                to_do.failed.append((read, error))
                self._scheduler.cancelled(file, others)
        for read, error in to_do.failed:
            self._stats.first_failure = self._stats.first_failure or str(error)
            self._stats.failed_reads += 1
            self._stats.waited_s += now - read.since
            _LOG.info("a read of %d bytes failed after %.1f s: %s", read.length, now - read.since, error)
        times = (plan.wake_at, self._pending.next_deadline, self._foreign.next_look)
        wake_at = min((at for at in times if at is not None), default=None)
        earlier = wake_at is not None and (self._wake_at is None or wake_at < self._wake_at)
        self._wake_at = wake_at
        if earlier or self._scheduler.idle:
            self._changed.notify_all()
        return to_do

    def _here(self, key: Key, data: bytes | None, now: float) -> list[PendingRead]:
        """A block is in the cache, or at least in memory. Returns the reads that are complete."""
        self._foreign.forget(key)
        complete = self._pending.arrived(key, data)
        for read in complete:
            self._stats.waited_s += now - read.since
        return complete

    def _from_other(self, key: Key, now: float) -> list[PendingRead]:
        """Another process has brought a block."""
        self._stats.blocks_from_others += 1
        self._scheduler.have(*key)
        return self._here(key, None, now)

    def _timeout_error(self, read: PendingRead, missing: set[int]) -> TransientError:
        file, block = self._files[read.file], min(missing)
        error = self._scheduler.error(read.file, block)
        return TransientError(
            f"{file.store.uri}: block {block} of file {file.index.identity[:16]} did not come in"
            f" {read.deadline - read.since:.1f} s{f' ({error})' if error else ''}"
        )

    # Without the lock

    def _carry_out(self, to_do: _ToDo) -> None:
        for fetch in to_do.fetches:
            try:
                self._workers.submit(partial(self._fetch, fetch))
            except TransientError as refused:  # no thread can be started: the request has failed
                to_do.add(self._finished(fetch, refused))  # this loop also runs over what is added
        for read, error in to_do.failed:
            _answer(read, error)
        for read in to_do.complete:
            self._serve(read)

    def _serve(self, read: PendingRead) -> None:
        file = self._files[read.file]
        try:
            data = file.assembled(read.offset, read.length, read.held)
        except MissingBlocks as error:  # damaged on the disk, or never written to it
            with self._lock:
                self._distrusted.update((read.file, block) for block in error.blocks)
                to_do = self._wait(read, error.blocks)
            self._carry_out(to_do)
        except BootseerError as error:
            _answer(read, error)
        except Exception as error:  # not foreseen; but this reader waits, and others behind it
            report_exception()
            _answer(read, TransientError(f"{file.store.uri}: {type(error).__name__}: {error}"))
        else:
            _answer(read, data)

    def _run_clock(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                now = time.monotonic()
                if self._wake_at is None or self._wake_at > now:
                    self._changed.wait(None if self._wake_at is None else self._wake_at - now)
                    continue
                look_at = self._foreign.due(now)
                to_do = self._advance(now)
            # Without this thread no read would ever run out of time.
            for job in (partial(self._carry_out, to_do), *(partial(self._look_at, key) for key in look_at)):
                run_reported(job)

    def _look_at(self, key: Key) -> None:
        """Check whether a block that another process has claimed is cached, or its claim released."""
        file = self._files[key[0]]
        is_here = file.is_here(key[1])
        now = time.monotonic()
        complete: list[PendingRead] = []
        with self._lock:
            if is_here:
                complete = self._from_other(key, now)
            elif is_here is None or not self._scheduler.in_flight(*key) or self._foreign.overdue(key, now):
                if is_here is False and self._scheduler.in_flight(*key):
                    _LOG.info("another process has claimed block %d for too long: it is fetched here too", key[1])
                    self._distrusted.add(key)
                self._foreign.forget(key)
                self._scheduler.freed(*key)
            else:
                return
            to_do = self._advance(now)
        to_do.complete += complete
        self._carry_out(to_do)

    # One request, on a worker thread

    def _fetch(self, fetch: Fetch) -> None:
        if self._closed:
            return
        file = self._files[fetch.file]
        uri = file.origin(fetch).uri
        error: BootseerError | None = None
        with self._lock:
            distrusted = frozenset(block for number, block in self._distrusted if number == fetch.file)
        try:
            with contextlib.closing(bring(file, fetch, distrusted, partial(self._turn, fetch))) as steps:
                for step in steps:
                    self._take_step(fetch, step)
                    if self._closed or fetch.number in self._cancelled:
                        break
        except BootseerError as problem:
            error = problem
        except Exception as problem:
            # An adapter let a foreign error through: readers must not wait for the deadline because of that.
            error = TransientError(f"{uri}: {type(problem).__name__}: {problem}")
            report_exception()
        if error is not None:
            _LOG.info("request %d of %s, blocks %s: %s", fetch.number, uri, list(fetch.blocks)[:4], error)
        to_do = self._finished(fetch, error)
        is_last = self._wants_all and self._scheduler.idle
        self._carry_out(to_do)
        if is_last:
            self._sync()

    def _turn(self, fetch: Fetch) -> contextlib.AbstractContextManager[object]:
        """Prefetches take turns to decompress: dozens at once would leave little of a core for a reader's block."""
        is_urgent = fetch.purpose is Purpose.DEMAND or fetch.number in self._urgent
        return contextlib.nullcontext() if is_urgent else self._processors

    def _take_step(self, fetch: Fetch, step: Claim | Arrived) -> None:
        """Pass a step of a request to the scheduler, and serve the reads that are complete."""
        complete: list[PendingRead] = []
        with self._lock:
            now = time.monotonic()
            could_keep = self._cache_error is None
            if isinstance(step, Claim):
                for block in step.ready:
                    complete += self._from_other((fetch.file, block), now)
                for block in step.foreign:
                    self._scheduler.foreign(fetch.number, block)
                    self._foreign.watch((fetch.file, block), now)
            else:
                complete = self._arrived(fetch, step, now)
            to_do = self._advance(now)
        to_do.complete += complete
        self._carry_out(to_do)
        if could_keep and self._cache_error is not None:
            self._report_problem(f"blocks are served without being kept: {self._cache_error}")

    def _arrived(self, fetch: Fetch, step: Arrived, now: float) -> list[PendingRead]:
        """With the lock held: an origin sent a block. Returns the reads that are complete."""
        stats, key = self._stats, (fetch.file, step.block)
        stats.decode_s += step.decode_s
        if isinstance(step.data, CorruptError):
            _LOG.warning("%s", step.data)
            stats.corrupt_blocks += 1
            peers = self._files[fetch.file].peers
            if peers is not None and fetch.step is not None:
                peers.sent_wrong(fetch.step, step.data)
            self._scheduler.failed(fetch.number, step.block, step.data, now)
            return []
        stats.bytes_by_purpose[fetch.purpose] += step.received_bytes
        if fetch.step is not None:
            stats.peer_bytes += step.received_bytes
        stats.data_bytes += len(step.data)
        second = min(int(now - self._start), _MAX_SECONDS)
        stats.bytes_by_second += [0] * (second + 1 - len(stats.bytes_by_second))
        stats.bytes_by_second[second] += step.received_bytes
        self._scheduler.arrived(fetch.number, step.block, now)
        self._distrusted.discard(key)
        if fetch.purpose is Purpose.HOT:
            self._files[fetch.file].brought_hot[step.block] = 1
        if step.not_kept is not None:
            self._cache_error = step.not_kept
            for number in range(len(self._files)):
                self._scheduler.stop_prefetch(number)
        return self._here(key, step.data, now)

    def _finished(self, fetch: Fetch, error: BootseerError | None) -> _ToDo:
        with self._lock:
            now = time.monotonic()
            self._cancelled.discard(fetch.number)
            self._urgent.discard(fetch.number)
            self._scheduler.finished(fetch.number, now, error)
            return self._advance(now)

    def _sync(self) -> None:
        """All wanted blocks are cached: files that are complete can be mounted without this process from now on."""
        for file in self._files:
            try:
                if file.cached.complete:
                    file.cached.sync()
            except BootseerError as error:
                self._report_problem(f"what was fetched may be lost when the machine stops: {error}")

    def _report_problem(self, problem: str) -> None:
        if self._on_problem is not None and not self._closed:
            self._on_problem(problem)


def _answer(read: PendingRead, answer: Buffer | BootseerError) -> None:
    # Behind one read that hangs, reads that were answered long ago wait for their deadlines: without their blocks.
    read.held = {}
    try:
        read.done(answer)
    except Exception:
        report_exception()


def closed() -> PermanentError:
    return PermanentError("the fetcher was closed")

"""Reads of block files: from the cache if the blocks are there, otherwise from their origins.

The path of a missing block:

1. `read`: the cache does not have it (`MissingBlocks`), so the read becomes a `PendingRead` of the missing blocks.
2. `_advance`: the scheduler decides which blocks to request now, together with which others, and from which of the
   file's origins (`scheduler`); each request goes to a worker thread.
3. `_fetch`, on that thread: `block_request.fetch_blocks` claims the blocks against other processes, asks the origin,
   verifies each block as it arrives and stores it in the cache. Blocks claimed by another process are polled
   (`_check_claim`).
4. `_process_step`: the arrival, or damage, is reported to the scheduler, which may retry or give up. Complete reads are
   served (`_serve`), from memory or from the cache.

A cached block is served on the reader's own thread, without a lock during the read. All other state is guarded by
`_lock`, which is never held during I/O, decoding or callbacks: methods collect `_Actions` under the lock and run them
after its release. The thread `bootseer-fetch-clock` handles everything that is due by time.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from msgspec import Struct, field

from bootseer.blocks.codec import Buffer
from bootseer.blocks.index import Index
from bootseer.cache.cached_file import CachedFile
from bootseer.cache.disk import MissingBlocks
from bootseer.errors import (
    BootseerError,
    CorruptError,
    NotFoundError,
    PermanentError,
    TooShortError,
    TransientError,
)
from bootseer.fetch.block_request import ArrivedBlock, Claim, File, Peers, StoreOrigin, fetch_blocks
from bootseer.fetch.fetch_settings import FetchSettings, Purpose
from bootseer.fetch.ledger import Fetch, Key
from bootseer.fetch.pending import Done, PendingRead, PendingReads
from bootseer.fetch.scheduler import Scheduler
from bootseer.io.executor import Executor, report_exception, run_reported
from bootseer.logs import logger
from bootseer.store.store import Store

_LOG = logger(__name__)
OnNeed = Callable[[int, int], None]
"""File number and block that a reader needs: once per block, on the reader's thread, without a lock."""

_CLOSE_S = 5.0
_CHECK_S = 0.005
_CHECK_PER_BLOCK_S = 50e-6
_MAX_CHECK_S = 0.05


class _Actions(Struct):
    """What to do after the lock is released."""

    fetches: list[Fetch] = field(default_factory=list)
    complete: list[PendingRead] = field(default_factory=list)
    failed: list[tuple[PendingRead, BootseerError]] = field(default_factory=list)

    def add(self, more: _Actions) -> None:
        self.fetches += more.fetches
        self.complete += more.complete
        self.failed += more.failed


class Reads:
    """Block files that are read together. Safe for many threads."""

    def __init__(
        self,
        settings: FetchSettings | None = None,
        *,
        on_need: OnNeed | None = None,
        on_problem: Callable[[str], None] = lambda problem: None,
    ) -> None:
        """`on_problem` gets a line for the user about degraded operation, once per cause."""
        self._settings = settings or FetchSettings()
        self._on_need = on_need
        self._on_problem = on_problem
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        """Notifies of an earlier wake-up time for the clock, or that nothing is left to fetch."""
        self._files: list[File] = []
        self._scheduler = Scheduler(self._settings, random.Random().random)  # noqa: S311 - spreads requests
        self._pending = PendingReads()
        self._next_check_s = 0.0
        """When to look at the claims of other processes again."""
        self._distrusted: set[Key] = set()
        """Blocks that the cache lists and could not deliver, and those with an overdue claim: fetched without a
        claim."""
        self._cancelled: set[int] = set()
        """Running requests to abort. Changed under the lock, read without."""
        self._wake_at: float | None = None
        self._closed = False
        self._cache_error: BootseerError | None = None
        """Why blocks cannot be cached."""
        self._stats = self._scheduler.stats
        self._processors = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))
        self._workers = Executor("bootseer-fetch")
        self._clock = Executor("bootseer-fetch-clock", 1)
        self._clock.submit(self._run_clock)

    def add(self, index: Index, store: Store, cached: CachedFile, *, peers: Peers | None = None) -> int:
        """Add a file with its origins: the store, and `peers`, which are asked before it.

        Returns its number. The caller closes all of them after this fetcher.
        """
        num_blocks = index.num_blocks
        origin = StoreOrigin(store, None if peers is None else peers.store_sent)
        file = File(index, origin, peers, cached, bytearray(num_blocks), bytearray(num_blocks))
        here = bytearray(b"\1" * num_blocks)
        for blocks in file.missing():
            here[blocks.start : blocks.stop] = bytes(len(blocks))
        with self._lock:
            self._files.append(file)
            return self._scheduler.add(index, store.uri, peers, here)

    def read(
        self, file: int, offset: int, length: int, done: Done, deadline_s: float | None = None
    ) -> Callable[[], None] | None:
        """Read a range, cut at the end of the file. `done` gets the bytes or an error.

        If everything is cached, `done` is called before this returns None. Otherwise it is called once, on any thread,
        which it must not block, within `deadline_s`, unless the read is cancelled before by calling what this returns.
        After a `TransientError` a new read starts over.
        """
        here = self._files[file]
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
        read = PendingRead(file, offset, length, now, until, done)
        with self._lock:
            actions = self._wait(read, missing)
        self._run_actions(actions)
        return partial(self._cancel, read)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """End all threads within `timeout_s`; waiting readers get an error. Safe to call twice.

        Threads that hang in a request are abandoned.
        """
        with self._lock:
            self._closed = True
            reads = self._pending.take_expired(float("inf"))
            self._changed.notify_all()
        for read, _ in reads:
            _answer(read, closed())
        until = time.monotonic() + timeout_s
        self._workers.close(timeout_s)
        self._clock.close(max(until - time.monotonic(), 0.0))

    def _note_needs(self, number: int, blocks: range, missing: list[int]) -> None:
        """A reader reads blocks: note the first need of each."""
        file, now, stats = self._files[number], time.monotonic(), self._stats
        with self._lock:
            trust = self._scheduler.trust
            was_suspended = trust.suspended
            new = [block for block in blocks if not file.needed[block]]
            for block in new:
                file.needed[block] = 1
                is_late = block in missing and self._scheduler.in_flight(number, block)
                stats.needs += 1
                stats.late += is_late and (number, block) in trust
                self._scheduler.note_need(number, block, now)
            if trust.suspended is not was_suspended:
                verdict = "suspended" if trust.suspended else "resumed"
                _LOG.info("the hot set is %s: it covers %d of %d needs", verdict, trust.covered, trust.needs)
            # The need may have changed how much of the hot set to prefetch; a waiting read asks the scheduler anyway.
            actions = _Actions() if missing else self._advance(now)
        self._run_actions(actions)
        if self._on_need is not None:
            for block in new:
                self._on_need(number, block)

    def _cancel(self, read: PendingRead) -> None:
        with self._lock:
            self._scheduler.reader_cancelled(read.file, self._pending.close(read))

    # With the lock held

    def _wait(self, read: PendingRead, missing: list[int]) -> _Actions:
        if self._closed:
            return _Actions(failed=[(read, closed())])
        now = time.monotonic()
        if error := self._scheduler.outage(read.file, read.deadline, now):
            self._stats.failed_reads += 1
            return _Actions(failed=[(read, error)])
        self._scheduler.want(read.file, missing, now)
        self._pending.wait(read, missing)
        return self._advance(now)

    def _advance(self, now: float, complete: Sequence[PendingRead] = ()) -> _Actions:
        """Collect the scheduler's decisions, the `complete` reads, and those past their deadline."""
        actions = _Actions(complete=list(complete))
        for read, missing in self._pending.take_expired(now):
            actions.failed.append((read, self._timeout_error(read, missing)))
            self._scheduler.reader_timed_out(read.file, missing, now)
        plan = self._scheduler.tick(now)
        actions.fetches = plan.fetches
        self._cancelled.update(plan.cancelled)
        for file, block, error in plan.given_up:
            if isinstance(error, CorruptError | NotFoundError | TooShortError):
                self._stats.first_corrupt = self._stats.first_corrupt or str(error)
            for read, others in self._pending.fail_block((file, block)):
                actions.failed.append((read, error))
                self._scheduler.reader_cancelled(file, others)
        for read, error in actions.failed:
            self._stats.first_failure = self._stats.first_failure or str(error)
            self._stats.failed_reads += 1
            self._stats.waited_s += now - read.since
            _LOG.info("a read of %d bytes failed after %.1f s: %s", read.length, now - read.since, error)
        next_check_s = self._next_check_s if self._scheduler.claims else None
        times = (plan.wake_at, self._pending.next_deadline, next_check_s)
        wake_at = min((at for at in times if at is not None), default=None)
        earlier = wake_at is not None and (self._wake_at is None or wake_at < self._wake_at)
        self._wake_at = wake_at
        if earlier or self._scheduler.idle:
            self._changed.notify_all()
        return actions

    def _block_available(self, key: Key, data: Buffer | None, now: float) -> list[PendingRead]:
        """A block is in the cache, or at least in memory. Returns the complete reads."""
        self._scheduler.mark_present(*key)
        complete = self._pending.arrived(key, data)
        for read in complete:
            self._stats.waited_s += now - read.since
        return complete

    def _claims_to_check(self, now: float) -> list[Key]:
        """The blocks claimed by other processes, if it is time to look at them. Processes do not notify each other, so
        claims are polled, less often the more there are."""
        claims = self._scheduler.claims
        if not claims or now < self._next_check_s:
            return []
        self._next_check_s = now + min(_CHECK_S + len(claims) * _CHECK_PER_BLOCK_S, _MAX_CHECK_S)
        return list(claims)

    def _timeout_error(self, read: PendingRead, missing: set[int]) -> TransientError:
        file, block = self._files[read.file], min(missing)
        error = self._scheduler.error(read.file, block)
        return TransientError(
            f"{file.store.uri}: block {block} of file {file.index.identity[:16]} did not come in"
            f" {read.deadline - read.since:.1f} s{f' ({error})' if error else ''}"
        )

    # Without the lock

    def _run_actions(self, actions: _Actions) -> None:
        for fetch in actions.fetches:
            try:
                self._workers.submit(partial(self._fetch, fetch))
            except TransientError as refused:  # no thread could be started: the request fails
                actions.add(self._finish(fetch, refused))  # extends the list of this loop
        for read, error in actions.failed:
            _answer(read, error)
        for read in actions.complete:
            self._serve(read)

    def _serve(self, read: PendingRead) -> None:
        file = self._files[read.file]
        try:
            data = file.assemble(read.offset, read.length, read.held)
        except MissingBlocks as error:  # damaged on disk, or never written
            with self._lock:
                self._distrusted.update((read.file, block) for block in error.blocks)
                actions = self._wait(read, error.blocks)
            self._run_actions(actions)
        except BootseerError as error:
            _answer(read, error)
        except Exception as error:  # unexpected, but this reader and those behind it must get an answer
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
                look_at = self._claims_to_check(now)
                actions = self._advance(now)
            # Without this thread no read would ever time out.
            for job in (partial(self._run_actions, actions), *(partial(self._check_claim, key) for key in look_at)):
                run_reported(job)

    def _check_claim(self, key: Key) -> None:
        """Check whether a block claimed by another process is cached, or its claim released."""
        file = self._files[key[0]]
        state = file.state(key[1])
        now = time.monotonic()
        complete: list[PendingRead] = []
        with self._lock:
            if state == "cached":
                complete = self._block_available(key, None, now)
            elif state == "free" or not self._scheduler.in_flight(*key) or self._is_overdue(key, now):
                if state == "claimed" and self._scheduler.in_flight(*key):
                    _LOG.info("another process has claimed block %d for too long: fetching it here too", key[1])
                    self._distrusted.add(key)
                self._scheduler.claim_released(*key)
            else:
                return
            actions = self._advance(now, complete)
        self._run_actions(actions)

    def _is_overdue(self, key: Key, now: float) -> bool:
        """Whether another process has claimed a block for so long that it must hang. Without a hedge, a reader would
        wait for it until its deadline."""
        claim_s = self._settings.claim_s
        limit_s = min(self._settings.deadline_s / 2, claim_s) if key in self._scheduler.demanded else claim_s
        return now - self._scheduler.claims.get(key, now) >= limit_s

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
            with contextlib.closing(fetch_blocks(file, fetch, distrusted, partial(self._decode_slot, fetch))) as steps:
                for step in steps:
                    self._process_step(fetch, step)
                    if self._closed or fetch.number in self._cancelled:
                        break
        except BootseerError as problem:
            error = problem
        except BaseException as problem:  # panics of Rust code are not Exceptions
            # A foreign exception of an adapter: readers must not wait until their deadline for it, nor the request
            # count as running for ever.
            error = TransientError(f"{uri}: {type(problem).__name__}: {problem}")
            report_exception()
        if error is not None:
            _LOG.info("request %d of %s, blocks %s: %s", fetch.number, uri, list(fetch.blocks)[:4], error)
        self._run_actions(self._finish(fetch, error))

    def _decode_slot(self, fetch: Fetch) -> contextlib.AbstractContextManager[object]:
        """Prefetches decode only as many blocks at once as there are cores, which leaves CPU for a reader's block. A
        request with such a block does not wait. (`demanded` changes under the lock, and is read without.)"""
        demanded = self._scheduler.demanded
        is_urgent = fetch.purpose is Purpose.DEMAND or any((fetch.file, block) in demanded for block in fetch.blocks)
        return contextlib.nullcontext() if is_urgent else self._processors

    def _process_step(self, fetch: Fetch, step: Claim | ArrivedBlock) -> None:
        """Pass a step of a request to the scheduler, and serve the complete reads."""
        complete: list[PendingRead] = []
        with self._lock:
            now = time.monotonic()
            could_cache = self._cache_error is None
            if isinstance(step, Claim):
                if not step.owned:  # nothing is left to ask for
                    self._stats.requests_by_purpose[fetch.purpose] -= 1
                for block in step.ready:
                    complete += self._block_available((fetch.file, block), None, now)
                for block in step.claimed_elsewhere:
                    self._scheduler.claimed_elsewhere(fetch.number, block, now)
            else:
                complete = self._arrived(fetch, step, now)
            actions = self._advance(now, complete)
        self._run_actions(actions)
        if could_cache and self._cache_error is not None and not self._closed:
            self._on_problem(f"blocks are served without being cached: {self._cache_error}")

    def _arrived(self, fetch: Fetch, step: ArrivedBlock, now: float) -> list[PendingRead]:
        """With the lock held: an origin sent a block. Returns the complete reads."""
        stats, key = self._stats, (fetch.file, step.block)
        if isinstance(step.data, CorruptError):
            _LOG.warning("%s", step.data)
            stats.corrupt_blocks += 1
            peers = self._files[fetch.file].peers
            if peers is not None and fetch.step is not None:
                peers.sent_wrong(fetch.step, step.data)
            self._scheduler.block_failed(fetch.number, step.block, step.data, now)
            return []
        stats.bytes_by_purpose[fetch.purpose] += step.received_bytes
        if fetch.step is not None:
            stats.peer_bytes += step.received_bytes
        self._scheduler.block_arrived(fetch.number, step.block, now)
        self._distrusted.discard(key)
        if fetch.purpose is Purpose.HOT and key in self._scheduler.trust:
            self._files[fetch.file].prefetched_hot[step.block] = 1
        if step.cache_error is not None:
            self._cache_error = step.cache_error
            for number in range(len(self._files)):
                self._scheduler.stop_prefetch(number)
        return self._block_available(key, step.data, now)

    def _finish(self, fetch: Fetch, error: BootseerError | None) -> _Actions:
        with self._lock:
            now = time.monotonic()
            self._cancelled.discard(fetch.number)
            self._scheduler.request_finished(fetch.number, now, error)
            return self._advance(now)


def _answer(read: PendingRead, answer: Buffer | BootseerError) -> None:
    read.held = {}  # its caller may keep the object
    try:
        read.done(answer)
    except Exception:
        report_exception()


def closed() -> PermanentError:
    return PermanentError("the fetcher was closed")

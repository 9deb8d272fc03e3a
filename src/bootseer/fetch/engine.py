"""Carries out what the scheduler decides: requests, the cache, claims between processes, answers to readers.

`Fetcher` is the face of this. Shared state - scheduler, tickets, meter and the blocks claimed by others - belongs to
`_lock`, which is never held during input, output, decoding or a reader's callback: methods collect a `_ToDo` under the
lock and carry it out after it. Worker threads make one request each; one more thread (`bootseer-fetch-clock`) does
what is due by time.
"""

from __future__ import annotations

import contextlib
import os
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
from bootseer.fetch.corrupt import CorruptBlocks
from bootseer.fetch.elsewhere import Elsewhere
from bootseer.fetch.file import Claim, File, ranges
from bootseer.fetch.ledger import Fetch
from bootseer.fetch.need import Found
from bootseer.fetch.purpose import Purpose
from bootseer.fetch.queues import Key
from bootseer.fetch.schedule import Scheduler
from bootseer.fetch.settings import FetchSettings
from bootseer.fetch.stats import Meter
from bootseer.fetch.tickets import Ticket, Tickets
from bootseer.fetch.transfer import transfer
from bootseer.io.executor import Executor, report_exception, run_reported
from bootseer.logs import logger
from bootseer.store.store import Store

_LOG = logger(__name__)
# A long plan must not keep the first reader from the lock.
_PLANNED_AT_ONCE = 256


@dataclass(slots=True)
class _ToDo:
    """What to do once the lock is released."""

    fetches: list[Fetch] = field(default_factory=list)
    complete: list[Ticket] = field(default_factory=list)
    failed: list[tuple[Ticket, BootseerError]] = field(default_factory=list)

    def add(self, more: _ToDo) -> None:
        self.fetches += more.fetches
        self.complete += more.complete
        self.failed += more.failed


class Engine:
    """All files of one fetcher, and what goes on with them."""

    def __init__(
        self, settings: FetchSettings, jitter: Callable[[], float], on_problem: Callable[[str], None] | None
    ) -> None:
        self._on_problem = on_problem
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        """The clock's next time, or that nothing is left to fetch."""
        self._tickets = Tickets()
        self._elsewhere = Elsewhere(settings.claim_s)
        self._distrusted: set[Key] = set()
        """Blocks that the cache called ready and could not give, and those whose claim is overdue."""
        self.corrupt = CorruptBlocks()
        self._cancelled: set[int] = set()
        """Running requests that are to break off. Changed under the lock, looked at without."""
        self._urgent: set[int] = set()
        """Running prefetch requests that a reader waits for by now. Changed under the lock, looked at without."""
        self._wake_at: float | None = None
        self._wants_all = False
        self._closed = False
        self.start = time.monotonic()
        self.files: list[File] = []
        self.scheduler = Scheduler(settings, jitter)
        self.meter = Meter(self.start)
        self.first_failure = ""
        """Why a reader got an error for the first time, for the user."""
        self.cache_error: BootseerError | None = None
        """Why blocks cannot be kept."""
        self._processors = threading.BoundedSemaphore(len(os.sched_getaffinity(0)))
        self.workers = Executor("bootseer-fetch")
        self._clock = Executor("bootseer-fetch-clock", 1)
        self._clock.submit(self._run_clock)

    # What the fetcher wants

    def add(self, index: Index, origin: Store, cached: CachedFile) -> int:
        """A file; returns its number."""
        marks = index.num_blocks
        with self._lock:
            self.files.append(File(index, origin, cached, bytearray(marks), bytearray(marks)))
            return self.scheduler.add(index, origin.uri)

    def demand(self, ticket: Ticket, missing: list[int]) -> None:
        """A reader waits for blocks."""
        with self._lock:
            if self._closed:
                to_do = _ToDo(failed=[(ticket, _closed())])
            else:
                self.meter.waited_reads += 1
                to_do = self._wait(ticket, missing)
        self._carry_out(to_do)

    def leave(self, ticket: Ticket) -> None:
        """A reader does not wait any more."""
        with self._lock:
            self.scheduler.cancelled(ticket.file, self._tickets.close(ticket))

    def needed(self, number: int, blocks: range, missing: list[int]) -> list[tuple[int, Found]]:
        """A reader reads blocks. Returns those that no reader had needed before, and where they were."""
        file, now = self.files[number], time.monotonic()
        needs: list[tuple[int, Found]] = []
        with self._lock:
            for block in blocks:
                if file.needed[block]:
                    continue
                file.needed[block] = 1
                found = Found.READY
                if block in missing:
                    found = Found.IN_FLIGHT if self.scheduler.in_flight(number, block) else Found.MISSING
                needs.append((block, found))
                self.meter.needed(found, now)
                self.scheduler.needed(number, block, now)
            to_do = self._advance(now)
        self._carry_out(to_do)
        return needs

    def prefetch(self, blocks: list[Key]) -> None:
        """Hot blocks, in their order."""
        for start in range(0, len(blocks), _PLANNED_AT_ONCE):
            here = [self.files[file].cached.ready(block) for file, block in blocks[start : start + _PLANNED_AT_ONCE]]
            with self._lock:
                now = time.monotonic()
                for (file, block), is_here in zip(blocks[start:], here, strict=False):
                    if is_here:
                        self.scheduler.have(file, block)
                    self.scheduler.want(file, (block,), Purpose.HOT, now)
                to_do = self._advance(now)
            self._carry_out(to_do)

    def want_rest(self, *, rush: bool) -> None:
        """All that is missing."""
        missing = [file.missing() for file in self.files]
        with self._lock:
            now = time.monotonic()
            for number, parts in enumerate(missing):
                for blocks in parts:
                    self.scheduler.want_rest(number, blocks, now)
            self._wants_all = True
            if rush:
                self.scheduler.rush()
            to_do = self._advance(now)
        self._carry_out(to_do)

    def stop_prefetch(self) -> None:
        """Fetch only what readers ask for from now on."""
        with self._lock:
            self._wants_all = False
            for number in range(len(self.files)):
                self.scheduler.stop_prefetch(number)

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is wanted and nothing runs; False when `timeout_s` passed before. Raises when closed."""
        with self._lock:
            self._changed.wait_for(lambda: self.scheduler.idle or self._closed, timeout_s)
            if self._closed:
                raise _closed()
            return self.scheduler.idle

    def close(self, timeout_s: float) -> None:
        """Answer all who wait with an error, and end the threads. What hangs in a request is left behind."""
        with self._lock:
            self._closed = True
            tickets = self._tickets.close_all()
            self._changed.notify_all()
        for ticket in tickets:
            _answer(ticket, _closed())
        until = time.monotonic() + timeout_s
        self.workers.close(timeout_s)
        self._clock.close(max(until - time.monotonic(), 0.0))

    # With the lock held

    def _wait(self, ticket: Ticket, missing: list[int]) -> _ToDo:
        now = time.monotonic()
        hopeless = self.scheduler.hopeless(ticket.file, ticket.deadline, now)
        if error := self.corrupt.error(ticket.file, missing, now) or hopeless:
            self.meter.failed_reads += 1
            return _ToDo(failed=[(ticket, error)])
        self.scheduler.want(ticket.file, missing, Purpose.DEMAND, now)
        self._tickets.wait(ticket, missing)
        for block in missing:
            self._urgent.update(self.scheduler.requests_for(ticket.file, block))
        return self._advance(now)

    def _advance(self, now: float) -> _ToDo:
        """What the scheduler wants done, and whose time has run out."""
        to_do = _ToDo()
        for ticket, missing in self._tickets.expired(now):
            to_do.failed.append((ticket, self._too_late(ticket, missing)))
            self.scheduler.expired(ticket.file, missing, now)
        plan = self.scheduler.tick(now)
        to_do.fetches = plan.fetches
        self._cancelled.update(plan.cancelled)
        for file, block, error in plan.given_up:
            self.corrupt.add((file, block), error, now)
            for ticket, others in self._tickets.given_up((file, block)):
                to_do.failed.append((ticket, error))
                self.scheduler.cancelled(file, others)
        for ticket, error in to_do.failed:
            self.first_failure = self.first_failure or str(error)
            self.meter.failed_reads += 1
            self.meter.waited_s += now - ticket.since
        times = (plan.wake_at, self._tickets.next_deadline, self._elsewhere.next_look)
        wake_at = min((at for at in times if at is not None), default=None)
        earlier = wake_at is not None and (self._wake_at is None or wake_at < self._wake_at)
        self._wake_at = wake_at
        if earlier or self.scheduler.idle:
            self._changed.notify_all()
        return to_do

    def _here(self, key: Key, data: bytes | None, now: float) -> list[Ticket]:
        """A block is in the cache, or at least in our hands. Returns the readers who have all they waited for."""
        self._elsewhere.forget(key)
        complete = self._tickets.arrived(key, data)
        for ticket in complete:
            self.meter.waited_s += now - ticket.since
        return complete

    def _too_late(self, ticket: Ticket, missing: set[int]) -> TransientError:
        file, block = self.files[ticket.file], min(missing)
        error = self.scheduler.error(ticket.file, block)
        return TransientError(
            f"{file.origin.uri}: block {block} of file {file.index.identity[:16]} did not come in"
            f" {ticket.deadline - ticket.since:.1f} s{f' ({error})' if error else ''}"
        )

    # Without the lock

    def _carry_out(self, to_do: _ToDo) -> None:
        for fetch in to_do.fetches:
            try:
                self.workers.submit(partial(self._fetch, fetch))
            except TransientError as refused:  # no thread can be started: the request has failed
                to_do.add(self._finished(fetch, refused))  # this loop also runs over what is added
        for ticket, error in to_do.failed:
            _answer(ticket, error)
        for ticket in to_do.complete:
            self._serve(ticket)

    def _serve(self, ticket: Ticket) -> None:
        """Answer a reader whose blocks are all here."""
        file = self.files[ticket.file]
        try:
            data = file.assembled(ticket.offset, ticket.length, ticket.held)
        except MissingBlocks as error:  # damaged on the disk, or never written to it
            with self._lock:
                if self._closed:
                    to_do = _ToDo(failed=[(ticket, _closed())])
                else:
                    self._distrusted.update((ticket.file, block) for block in error.blocks)
                    to_do = self._wait(ticket, error.blocks)
            self._carry_out(to_do)
        except BootseerError as error:
            _answer(ticket, error)
        except Exception as error:  # not foreseen; but this reader waits, and others behind it
            report_exception()
            _answer(ticket, TransientError(f"{file.origin.uri}: {type(error).__name__}: {error}"))
        else:
            _answer(ticket, data)

    def _run_clock(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                now = time.monotonic()
                if self._wake_at is None or self._wake_at > now:
                    self._changed.wait(None if self._wake_at is None else self._wake_at - now)
                    continue
                look_at = self._elsewhere.due(now)
                to_do = self._advance(now)
            # Without this thread no read would ever run out of time.
            for job in (partial(self._carry_out, to_do), *(partial(self._look_at, key) for key in look_at)):
                run_reported(job)

    def _look_at(self, key: Key) -> None:
        """Is the block here that another process has claimed, or has its claim fallen?"""
        file = self.files[key[0]]
        is_free = file.is_free(key[1])
        is_here = not is_free and file.cached.ready(key[1])
        now = time.monotonic()
        complete: list[Ticket] = []
        with self._lock:
            if is_here:
                self.meter.blocks_from_others += 1
                self.scheduler.have(*key)
                complete = self._here(key, None, now)
            elif is_free or not self.scheduler.in_flight(*key):
                self._elsewhere.forget(key)
                self.scheduler.freed(*key)
            elif self._elsewhere.overdue(key, now):
                self._distrusted.add(key)
                self._elsewhere.forget(key)
                self.scheduler.freed(*key)
            else:
                return
            to_do = self._advance(now)
        to_do.complete += complete
        self._carry_out(to_do)

    # One request, on a worker thread

    def _fetch(self, fetch: Fetch) -> None:
        if self._closed:
            return
        file = self.files[fetch.file]
        error: BootseerError | None = None
        held: set[int] = set()
        try:
            claim = file.claim(fetch.blocks, hedge=fetch.hedge, distrusted=self._distrusted_of(fetch.file))
            held = claim.held
            self._say_claimed(fetch, claim)
            self._bring(fetch, claim)
        except BootseerError as problem:
            error = problem
        except Exception as problem:
            # An adapter let a foreign error through: readers must not wait for the deadline because of that.
            error = TransientError(f"{file.origin.uri}: {type(problem).__name__}: {problem}")
            report_exception()
        finally:
            run_reported(partial(file.release, held))
        if error is not None:
            _LOG.info("request %d of %s, blocks %s: %s", fetch.number, file.origin.uri, list(fetch.blocks)[:4], error)
        to_do = self._finished(fetch, error)
        is_last = self._wants_all and self.scheduler.idle
        self._carry_out(to_do)
        if is_last:
            self._sync()

    def _finished(self, fetch: Fetch, error: BootseerError | None) -> _ToDo:
        with self._lock:
            now = time.monotonic()
            self._cancelled.discard(fetch.number)
            self._urgent.discard(fetch.number)
            self.scheduler.finished(fetch.number, now, error)
            return self._advance(now)

    def _bring(self, fetch: Fetch, claim: Claim) -> None:
        file = self.files[fetch.file]
        for blocks in ranges(claim.mine, fetch.blocks.step):
            with contextlib.closing(transfer(file.index, file.origin, blocks, fetch.timeout_s)) as answer:
                for block, stored in answer:
                    self._take(fetch, block, stored, claim.held)
                    if self._closed or fetch.number in self._cancelled:
                        return

    def _sync(self) -> None:
        """All that was wanted is here: files that are complete now can be mounted without us from now on."""
        for file in self.files:
            try:
                if file.cached.complete:
                    file.cached.sync()
            except BootseerError as error:
                self._say(f"what was fetched may be lost when the machine stops: {error}")

    def _distrusted_of(self, number: int) -> frozenset[int]:
        with self._lock:
            return frozenset(block for file, block in self._distrusted if file == number)

    def _say_claimed(self, fetch: Fetch, claim: Claim) -> None:
        """Tell the scheduler which blocks of a request it need not bring."""
        if not (claim.here or claim.elsewhere):
            return
        complete: list[Ticket] = []
        with self._lock:
            now = time.monotonic()
            for block in claim.here:
                self.meter.blocks_from_others += 1
                self.scheduler.have(fetch.file, block)
                complete += self._here((fetch.file, block), None, now)
            for block in claim.elsewhere:
                self.scheduler.elsewhere(fetch.number, block)
                self._elsewhere.watch((fetch.file, block), now)
            to_do = self._advance(now)
        to_do.complete += complete
        self._carry_out(to_do)

    def _take(self, fetch: Fetch, block: int, stored: Buffer, held: set[int]) -> None:
        """Verify a block, keep it, and give it to its readers."""
        file = self.files[fetch.file]
        problem: BootseerError | None = None
        data: bytes | CorruptError
        # Dozens of prefetches that all decompress at once would leave a reader's block its small part of a core.
        is_urgent = fetch.purpose is Purpose.DEMAND or fetch.number in self._urgent
        with contextlib.nullcontext() if is_urgent else self._processors:
            begin = time.perf_counter()
            data = file.decoded(block, stored)
            decode_s = time.perf_counter() - begin
            if not isinstance(data, CorruptError):
                try:
                    file.cached.put(block, data)
                except BootseerError as error:
                    problem = error
        file.release(held & {block})
        held.discard(block)
        complete: list[Ticket] = []
        with self._lock:
            now = time.monotonic()
            self.meter.decode_s += decode_s
            if isinstance(data, CorruptError):
                _LOG.warning("%s", data)
                self.meter.corrupt_blocks += 1
                self.scheduler.failed(fetch.number, block, data, now)
            else:
                self.meter.arrived(fetch.purpose, len(stored), len(data), now)
                self.scheduler.arrived(fetch.number, block, now)
                complete = self._here((fetch.file, block), data, now)
                self._distrusted.discard((fetch.file, block))
                self.corrupt.forget((fetch.file, block))
                if fetch.purpose is Purpose.HOT:
                    file.brought_hot[block] = 1
            say = problem if problem is not None and self.cache_error is None else None
            if problem is not None:
                self.cache_error = problem
                for number in range(len(self.files)):
                    self.scheduler.stop_prefetch(number)
            to_do = self._advance(now)
        to_do.complete += complete
        self._carry_out(to_do)
        if say is not None:
            self._say(f"blocks are served without being kept: {say}")

    def _say(self, problem: str) -> None:
        if self._on_problem is not None and not self._closed:
            self._on_problem(problem)


def _answer(ticket: Ticket, answer: Buffer | BootseerError) -> None:
    # Behind one read that hangs, tickets that were answered long ago wait for their deadlines: without their blocks.
    ticket.held = {}
    try:
        ticket.done(answer)
    except Exception:
        report_exception()


def _closed() -> PermanentError:
    return PermanentError("the fetcher was closed")

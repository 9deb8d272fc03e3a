"""Chunks of one row that are read together from a file with parity: any one of them can be rebuilt from the others.

The members of a row are its chunks and the parity, and each is the XOR of all others. When a row starts, it estimates
which chunk would arrive last, and reads the parity instead of that chunk's own part if the parity comes earlier. So a
slow disk gets fewer reads, and all disks, including the parity's, share the work. Later, a chunk that is late,
unreadable or wrong is rebuilt. Nothing that has arrived or is in flight is read twice: only members that no reader
requested are read for the rebuild alone (helpers). A rebuilt chunk is compared with its digest like any other.

Each batch of reads has a `Row` of its own, unaware of other batches.

Lock order (ADR 27): under its lock a row changes its own state and asks for estimates, and calls nothing else. Chunks
hold no lock when they call a row, and a row's follow-up calls are made after its lock is released. Otherwise a read
that ends inside such a call would re-enter the row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Final

from bootseer.checkpoint.layout import CHUNK_BYTES, xor_into
from bootseer.checkpoint.reading.chunk_read import ChunkRead, ParityRead
from bootseer.checkpoint.reading.context import OpenSegment, ReadContext, reworded
from bootseer.checkpoint.reading.settings import chunk_to_replace, chunk_to_skip, is_late
from bootseer.checkpoint.reading.transfer import RangeRequest, failure, run_effects
from bootseer.errors import BootseerError, TransientError
from bootseer.logs import logger
from bootseer.places.place import OpenFile

_LOG = logger(__name__)

_PARITY: Final = -1
"""The number of the parity among the members of a row."""


class Row:
    """The reads of one row in one batch. At most one chunk at a time is rebuilt, the target: it needs all others."""

    def __init__(self, context: ReadContext, chunks: range) -> None:
        """`chunks`: all chunks of the row, requested or not."""
        self._context = context
        self._chunks = chunks
        self._members = (_PARITY, *chunks)
        self._lock = threading.Lock()
        self._jobs: dict[int, ChunkRead] = {}
        self._helpers: dict[int, ChunkRead] = {}  # the members that are read for rebuilds alone
        self._data: dict[int, memoryview] = {}  # members that have arrived
        self._unreadable: set[int] = set()  # members whose own parts failed
        self._target: int | None = None
        self._rebuilding = False
        self._rebuilt: memoryview | None = None  # the target's bytes, until its own read has ended
        self._parity_problem = ""
        self._parity_first: int | None = None
        self._segment: OpenSegment | None = None
        self._begun: set[int] = set()
        self._finished: set[int] = set()
        self._scratch_bytes = 0
        self._overdrawn = False
        self._watching = False

    def read(self, request: RangeRequest, stripe: int) -> ChunkRead:
        """A read of a chunk of this row, not started yet."""
        job = _RowChunk(self, self._context, request, stripe)
        self.add(job)
        return job

    def add(self, job: ChunkRead) -> None:
        """Add a requested chunk, before any of them is started."""
        self._jobs[job.chunk] = job

    def begin(self, job: ChunkRead) -> None:
        """Start a chunk, from its own part or by a rebuild."""
        with self._lock:
            if not self._begun:
                delays = {chunk: self._delay_s(job.segment, chunk) for chunk in self._chunks}
                parity_s = self._delay_s(job.segment, _PARITY)
                self._parity_first = chunk_to_skip(delays, frozenset(self._jobs), parity_s)
            self._register(job)
            if self._parity_first == job.chunk and self._target is None:
                self._target = job.chunk
            is_target = self._target == job.chunk
        self._watch()
        if is_target:
            self._advance()
        else:
            job.read_own()

    def _register(self, job: ChunkRead) -> None:
        self._begun.add(job.chunk)
        if self._segment is None:
            self._segment = job.segment
            self._context.retain(job.segment)

    def own_ended(self, job: ChunkRead, error: BootseerError | None, *, keep: bool) -> None:
        """The read of a chunk's own part has ended, and no thread writes into its memory any more."""
        with self._lock:
            data = None
            if self._target == job.chunk and not self._rebuilding:
                data, self._rebuilt = self._rebuilt, None
            if error is not None and data is not None:
                job.into[:] = data
                error = None
            if error is not None:
                self._unreadable.add(job.chunk)
                if job.chunk not in self._begun:
                    # It failed before `begin`. It must count as active: the last active one frees the rebuild's memory.
                    self._register(job)
            else:
                self._arrived(job)
        if error is None:
            job.finish(None, keep=keep)
        self._watch()
        self._advance()

    def _arrived(self, job: ChunkRead) -> None:
        """A chunk has its bytes."""
        self._data[job.chunk] = job.into
        self._finished.add(job.chunk)
        if self._target == job.chunk:
            self._target = None

    @property
    def _is_active(self) -> bool:
        """Whether a chunk was started that has not ended."""
        return not self._begun <= self._finished

    def on_cancelled(self) -> None:
        """A chunk was cancelled: it must not wait for others of the row, which may never be started now."""
        self._advance()

    def _delay_s(self, segment: OpenSegment, member: int) -> float:
        """Estimated seconds until a member arrives that is requested now."""
        part, offset = segment.parity_of(self._chunks.start) if member == _PARITY else segment.place_of(member)
        return part.delay_s(offset, CHUNK_BYTES)

    def check(self) -> None:
        """Rebuild a chunk that is late, or that a rebuild would deliver sooner by the current estimates."""
        with self._lock:
            former = self._choose_target()
        if former is not None:
            former.read_own()
        self._advance()

    def _watch(self) -> None:
        """Check regularly, as long as a chunk is active."""
        with self._lock:
            if self._watching or not self._is_active:
                return
            try:
                self._context.timer.after(self._context.settings.row_check_s, self._check_and_watch)
                self._watching = True
            except TransientError:  # no thread can be started: the next chunk that starts or ends tries again
                return

    def _check_and_watch(self) -> None:
        try:
            self.check()
        finally:
            self._watching = False
            self._watch()

    def _choose_target(self) -> ChunkRead | None:
        """Choose the target anew, unless it has been tried already. Returns the former one if it must be read from its
        own part after all."""
        segment, now, settings = self._segment, self._context.timer.now_s(), self._context.settings
        former = None if self._target is None else self._jobs[self._target]
        if segment is None or self._unreadable or self._rebuilding or (former and former.started_s is not None):
            return None
        waited = {chunk: now - began for chunk in self._begun if (began := self._jobs[chunk].started_s) is not None}
        on_way = {chunk: self._jobs[chunk] for chunk in waited.keys() - self._data.keys()}
        for chunk, job in on_way.items():
            if is_late(waited[chunk], job.expected_s, settings):
                self._target = chunk
                return former
        awaited = [helper for member, helper in self._helpers.items() if member not in self._data]
        left = {chunk: job.remaining_s() for chunk, job in on_way.items()}
        if former is not None:
            left[former.chunk] = self._delay_s(segment, former.chunk)
        others = [chunk for chunk in self._chunks if chunk not in left and chunk not in self._data]
        others_s = max((self._delay_s(segment, chunk) for chunk in others), default=0.0)
        parity_s = self._delay_s(segment, _PARITY)
        if _PARITY in self._helpers:
            parity_s = 0.0 if _PARITY in self._data else self._helpers[_PARITY].remaining_s()
        loser = chunk_to_replace(left, others_s, parity_s, alone=not self._jobs.keys() >= set(others))
        if loser in on_way:
            self._target = loser
            return former
        if any(one.started_s is not None and is_late(now - one.started_s, one.expected_s, settings) for one in awaited):
            self._target = None
            return former
        return None

    def _advance(self) -> None:
        interrupt: BaseException | None = None
        while True:
            try:
                with self._lock:
                    step = self._next_step()
                if step is None:
                    break
                step()
            except BaseException as error:  # for lack of memory perhaps: chunks are left to their own parts
                problem = failure(error, f"{self._context.path}: chunks {self._chunks}")
                with self._lock:
                    self._rebuilding = False
                    self._reject_parity(str(problem))
                if not isinstance(error, Exception):
                    interrupt = error
        self._release_extra()
        if interrupt is not None:
            raise interrupt

    def _reject_parity(self, problem: str) -> None:
        self._data.pop(_PARITY, None)
        self._unreadable.add(_PARITY)
        self._parity_problem = problem

    def _next_step(self) -> Callable[[], None] | None:
        failed = sorted((self._unreadable & self._jobs.keys()) - self._finished)
        if self._target is None and failed:
            self._target = failed[0]
        if self._target is None or self._rebuilding or self._rebuilt is not None:
            return None
        job = self._jobs[self._target]
        missing = [member for member in self._members if member != job.chunk and member not in self._data]
        if job.is_cancelled or not self._unreadable.isdisjoint(missing):
            return self._give_up(job, missing) or (self._next_step() if failed else None)
        if not missing:
            self._rebuilding = True
            del self._helpers[_PARITY]  # its memory will hold the rebuilt chunk
            return partial(self._rebuild, job, self._data.pop(_PARITY))
        wanted = [member for member in missing if member not in self._jobs and member not in self._helpers]
        if not wanted:
            return None
        # All or nothing: rows that each hold a part of the memory they need could wait for each other forever.
        if not self._reserve(len(wanted) * CHUNK_BYTES, job):
            # One that was tried waits for room: `check` comes here again.
            is_untried = job.started_s is None and job.chunk not in self._unreadable
            return self._give_up(job, missing) if is_untried else None
        made = {member: self._helper(job.segment, member) for member in wanted}
        self._helpers |= made
        return partial(run_effects, [partial(helper.start, urgent=True) for helper in made.values()])

    def _give_up(self, job: ChunkRead, missing: list[int]) -> Callable[[], None] | None:
        """The target cannot be rebuilt: its own part remains, if that has not failed."""
        self._target = None
        if job.chunk in self._unreadable:
            self._finished.add(job.chunk)
            is_hopeless = not self._unreadable.isdisjoint(missing)
            return partial(job.finish, self._error(job, missing) if is_hopeless else job.problem, keep=False)
        return job.read_own if job.started_s is None else None

    def _reserve(self, num_bytes: int, job: ChunkRead) -> bool:
        buffer = self._context.buffer
        if not buffer.reserve(num_bytes, demand=job.urgent):
            # All memory may be held by reads that only a rebuild can end. Overdrawing is safe: it is freed in time,
            # because this row does not wait for anything that has not started.
            no_other_way = job.chunk in self._unreadable and self._jobs.keys() <= self._begun
            if self._overdrawn or not no_other_way or not buffer.overdraw(num_bytes):
                return False
            self._overdrawn = True
        self._scratch_bytes += num_bytes
        return True

    def _helper(self, segment: OpenSegment, member: int) -> ChunkRead:
        """A read of a member that no reader requested. It has no row: if its part fails, there is no other way."""

        def ended(error: BootseerError | None) -> None:
            with self._lock:
                if error is None:
                    self._data[member] = helper.into
                elif helper.is_cancelled:
                    # By `_release_extra`, as no chunk was active. One that has been started since requests it again.
                    del self._helpers[member]
                elif member == _PARITY:
                    self._reject_parity(str(error))
                else:
                    self._unreadable.add(member)
            self._advance()

        read, chunk = (ParityRead, self._chunks.start) if member == _PARITY else (ChunkRead, member)
        request = RangeRequest(chunk * CHUNK_BYTES, memoryview(bytearray(segment.length(chunk))), ended)
        helper: ChunkRead = read(self._context, request, 0, shared=False)
        return helper

    def _rebuild(self, job: ChunkRead, data: memoryview) -> None:
        """`data`: the parity."""
        xor_into(data, *(self._data[chunk] for chunk in self._chunks if chunk != job.chunk))
        data = data[: job.num_bytes]
        right = job.is_right(data)
        with self._lock:
            self._rebuilding = False
            here = job.chunk in self._data  # its own part arrived meanwhile
            waits = right and not here and job.started_s is not None and job.chunk not in self._unreadable
            if not right:
                self._reject_parity("the parity part has wrong bytes")
            elif waits:
                self._rebuilt = data
            elif not here:
                job.into[:] = data
                self._arrived(job)
        if not right:
            _LOG.warning("%s: the parity of chunks %s has wrong bytes", self._context.path, self._chunks)
            self._context.facts.add("wrong_chunks")
        elif not here:
            _LOG.debug("%s: chunk %d was rebuilt from parity", self._context.path, job.chunk)
            self._context.facts.add("rebuilt")
            if waits:
                job.stop()
            else:
                job.finish(None)

    def _release_extra(self) -> None:
        """When no chunk is active, cancel the helpers, and free their memory when they have ended.
        Chunks that start later begin anew."""
        with self._lock:
            if self._is_active or self._rebuilding:
                return
            arrived = self._data.keys() | self._unreadable
            extra = [helper for member, helper in self._helpers.items() if member not in arrived]
            if not extra and self._finished == self._jobs.keys():
                self._data.clear()  # the memory belongs to its readers again, and the jobs refer to this
                self._jobs.clear()
            if self._segment is None:
                return
            if not extra:
                segment, self._segment = self._segment, None
                given, self._scratch_bytes = self._scratch_bytes, 0
                overdrawn, self._overdrawn = self._overdrawn, False
                self._unreadable -= {_PARITY, *self._helpers}
                for member in self._helpers:
                    self._data.pop(member, None)
                self._helpers = {}
        for helper in extra:
            helper.cancel()
        if not extra:
            self._context.release(segment)
            self._context.buffer.free(given, overdrawn=overdrawn)

    def _error(self, job: ChunkRead, missing: list[int]) -> BootseerError:
        gone = [str(chunk) for chunk in missing if chunk in self._unreadable and chunk != _PARITY]
        reason = f"chunk {', '.join(gone)} of its row cannot be read either" if gone else self._parity_problem
        return reworded(job.problem, f"{job.problem}; it cannot be rebuilt from the others of its row: {reason}")


class _RowChunk(ChunkRead):
    """A chunk whose row decides how it is read, and whether an error is final."""

    def __init__(self, row: Row, context: ReadContext, request: RangeRequest, stripe: int) -> None:
        super().__init__(context, request, stripe)
        self._row = row

    def cancel(self) -> None:
        super().cancel()
        self._row.on_cancelled()

    def _ready(self) -> None:
        self._row.begin(self)

    def _part_opened(self, file: OpenFile | None, error: BootseerError | None) -> None:
        super()._part_opened(file, error)
        if self.remaining_s() == inf:  # its node is excluded, or no node has it: parity need not wait for a late chunk
            run_effects([self._row.check])

    def _own_read_ended(self, error: BootseerError | None, *, keep: bool) -> None:
        self._row.own_ended(self, error, keep=keep)

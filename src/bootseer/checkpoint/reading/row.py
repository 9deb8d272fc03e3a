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
from bootseer.checkpoint.reading.settings import chunk_to_replace, chunk_to_skip, is_late, parity_no_longer_pays
from bootseer.checkpoint.reading.transfer import RangeRequest, failure, run_effects
from bootseer.errors import BootseerError, TransientError
from bootseer.logs import logger
from bootseer.places.place import OpenFile

_LOG = logger(__name__)

_NO_ROOM_S = 0.05
_PARITY: Final = -1
"""The number of the parity among the members of a row."""


class Row:
    """The reads of one row in one batch."""

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
        self._to_rebuild: dict[int, ChunkRead] = {}  # waiting for their rebuild
        self._rebuilt: dict[int, memoryview] = {}  # until their own reads have ended
        self._parity_problem = ""
        self._rebuilding: int | None = None  # the chunk that is being rebuilt
        self._segment: OpenSegment | None = None
        self._begun: set[int] = set()
        self._finished: set[int] = set()
        self._num_extra = 0  # helpers that have not ended
        self._scratch_bytes = 0
        self._overdrawn = False
        self._parity_first: int | None = None
        self._watching = False
        self._waits_for_room = False

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
        segment = job.segment
        with self._lock:
            first = not self._begun
            self._register(job)
            if first:
                self._parity_first = self._choose_parity_first(segment)
            if self._parity_first == job.chunk:
                self._to_rebuild[job.chunk] = job
            watch, self._watching = not self._watching, True
        if watch:
            self._check_again_later()
        if self._parity_first == job.chunk:
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
        chunk = job.chunk
        with self._lock:
            data = self._rebuilt.pop(chunk, None)
            self._to_rebuild.pop(chunk, None)
            over = error is None or data is not None
            if error is None:
                self._data[chunk] = job.into
            elif data is None:
                self._unreadable.add(chunk)
                if chunk not in self._begun:
                    # It failed before `begin`. It must count as active: the last active one frees the rebuild's memory.
                    self._register(job)
                if self._rebuilding != chunk:  # otherwise the rebuilding thread ends it
                    self._to_rebuild[chunk] = job
        if error is not None and data is not None:
            job.into[:] = data
            error = None
        if over:
            self._finish(job, error, keep=keep)
        self._advance()

    @property
    def _is_active(self) -> bool:
        """Whether a chunk was started that has not ended."""
        return not self._begun <= self._finished

    def on_cancelled(self) -> None:
        """A chunk was cancelled: it must not wait for others of the row, which may never be started now."""
        self._advance()

    def _choose_parity_first(self, segment: OpenSegment) -> int | None:
        """The chunk to replace by parity from the start; None: each chunk is read from its own part."""
        delays = {chunk: self._delay_s(segment, chunk) for chunk in self._chunks}
        return chunk_to_skip(delays, frozenset(self._jobs), self._delay_s(segment, _PARITY))

    def _delay_s(self, segment: OpenSegment, member: int) -> float:
        """Estimated seconds until a member arrives that is requested now."""
        part, offset = segment.parity_of(self._chunks.start) if member == _PARITY else segment.place_of(member)
        return part.delay_s(offset, CHUNK_BYTES)

    def check(self) -> None:
        """Rebuild chunks that are late, or that a rebuild would deliver sooner by the current estimates."""
        for job in self._request_late_rebuilds():
            job.read_own()
        self._advance()

    def _check_regularly(self) -> None:
        try:
            self.check()
        finally:
            self._check_again_later()

    def _check_again_later(self) -> None:
        with self._lock:
            self._watching = self._is_active
            if self._watching:
                try:
                    self._context.timer.after(self._context.settings.row_check_s, self._check_regularly)
                except TransientError:  # no thread can be started: the next chunk that starts tries again
                    self._watching = False

    def _request_late_rebuilds(self) -> list[ChunkRead]:
        """Queue rebuilds of late chunks. Returns chunks that must be read from their own parts after all."""
        settings, now = self._context.settings, self._context.timer.now_s()
        with self._lock:
            on_way: dict[int, ChunkRead] = {}
            for chunk in (
                self._begun - self._data.keys() - self._unreadable - self._to_rebuild.keys() - self._rebuilt.keys()
            ):
                job = self._jobs[chunk]
                if job.started_s is None:
                    continue
                on_way[chunk] = job
                waited_s = now - job.started_s
                if is_late(waited_s, job.expected_s, settings) and self._helpers_pay(waited_s):
                    self._to_rebuild[chunk] = job
            return self._reconsider_parity(on_way) + self._drop_late_helpers(now)

    def _reconsider_parity(self, on_way: dict[int, ChunkRead]) -> list[ChunkRead]:
        """Decide anew which chunk, if any, parity should replace, by the current estimates. Returns the chunks that it
        was to replace before, which must be read from their own parts after all."""
        segment = self._segment
        untried = [job for job in self._to_rebuild.values() if job.started_s is None]
        if segment is None or self._unreadable or len(self._to_rebuild) > len(untried) or self._rebuilding is not None:
            return []
        left = {chunk: job.remaining_s() for chunk, job in on_way.items()}
        left |= {job.chunk: self._delay_s(segment, job.chunk) for job in untried}
        others = [chunk for chunk in self._chunks if chunk not in left and chunk not in self._data]
        others_s = max((self._delay_s(segment, chunk) for chunk in others), default=0.0)
        helpers_s = {one: 0.0 if one in self._data else read.remaining_s() for one, read in self._helpers.items()}
        parity_s = helpers_s[_PARITY] if _PARITY in helpers_s else self._delay_s(segment, _PARITY)
        loser = chunk_to_replace(left, others_s, parity_s, alone=not self._jobs.keys() >= set(others))
        rebuild_s = max([parity_s, *helpers_s.values()])
        if loser in on_way:
            self._to_rebuild = {loser: on_way[loser]}
        elif loser is None and any(parity_no_longer_pays(left[job.chunk], rebuild_s) for job in untried):
            self._to_rebuild = {}
        else:
            return []
        return untried

    def _drop_late_helpers(self, now: float) -> list[ChunkRead]:
        """The chunks to be read from their own parts after all, because a helper is late."""
        awaited = [helper for member, helper in self._helpers.items() if member not in self._data]
        settings = self._context.settings
        if not any(
            read.started_s is not None and is_late(now - read.started_s, read.expected_s, settings) for read in awaited
        ):
            return []
        untried = [job for job in self._to_rebuild.values() if job.started_s is None]
        for job in untried:
            del self._to_rebuild[job.chunk]
        return untried

    def _helpers_pay(self, waited_s: float) -> bool:
        """Whether reading the helpers would probably take less than has been waited already."""
        segment = self._segment
        missing = [chunk for chunk in self._chunks if chunk not in self._jobs and chunk not in self._data]
        return segment is not None and all(self._delay_s(segment, chunk) < waited_s for chunk in missing)

    def _advance(self) -> None:
        interrupt: BaseException | None = None
        while True:
            try:
                with self._lock:
                    step = self._next_step()
                if step is None:
                    break
                step()
            except BaseException as error:
                self._give_up_parity(failure(error, f"{self._context.path}: chunks {self._chunks}"))
                if not isinstance(error, Exception):
                    interrupt = error
        self._release_extra()
        if interrupt is not None:
            raise interrupt

    def _give_up_parity(self, error: BootseerError) -> None:
        """The rebuild cannot go on, for lack of memory perhaps: chunks are left to their own parts."""
        with self._lock:
            self._reject_parity(str(error))
            chunk, self._rebuilding = self._rebuilding, None
            if chunk is not None and chunk not in self._data:
                self._to_rebuild[chunk] = self._jobs[chunk]

    def _reject_parity(self, problem: str) -> None:
        self._data.pop(_PARITY, None)
        self._unreadable.add(_PARITY)
        self._parity_problem = problem

    def _next_step(self) -> Callable[[], None] | None:
        for chunk, job in list(self._to_rebuild.items()):
            missing = [other for other in self._members if other != chunk and other not in self._data]
            hopeless = not self._unreadable.isdisjoint(missing)
            contested = not self._to_rebuild.keys().isdisjoint(missing)
            untried = job.started_s is None
            if job.is_cancelled or hopeless or (contested and untried):
                del self._to_rebuild[chunk]
                if untried:
                    return job.read_own
                if chunk in self._unreadable:
                    error = self._error(job, missing) if hopeless else job.problem
                    return partial(self._finish, job, error, keep=False)
            elif not contested and self._rebuilding is None:
                step = self._next_read_for(job, missing)
                if step is not None:
                    return step
        return None

    def _next_read_for(self, job: ChunkRead, missing: list[int]) -> Callable[[], None] | None:
        """The next read for a chunk's rebuild; None: wait."""
        if not missing:
            del self._to_rebuild[job.chunk]
            self._rebuilding = job.chunk
            del self._helpers[_PARITY]  # its memory will hold the rebuilt chunk
            return partial(self._rebuild, job, self._data.pop(_PARITY))
        wanted = [member for member in missing if member not in self._jobs and member not in self._helpers]
        if not wanted:
            return None
        # All or nothing: rows that each hold a part of the memory they need could wait for each other forever.
        if not self._reserve(len(wanted) * CHUNK_BYTES, job):
            if job.started_s is None:
                del self._to_rebuild[job.chunk]
                return job.read_own
            if not self._waits_for_room:
                self._context.timer.after(_NO_ROOM_S, self._retry_reserve)
                self._waits_for_room = True
            return None
        made = {member: self._helper(job.segment, member) for member in wanted}
        self._num_extra += len(made)
        self._helpers |= made
        return partial(run_effects, [partial(helper.start, urgent=True) for helper in made.values()])

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

    def _retry_reserve(self) -> None:
        with self._lock:
            self._waits_for_room = False
        self._advance()

    def _helper(self, segment: OpenSegment, member: int) -> ChunkRead:
        """A read of a member that no reader requested. It has no row: if its part fails, there is no other way."""

        def ended(error: BootseerError | None) -> None:
            with self._lock:
                self._num_extra -= 1
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

        helper: ChunkRead
        if member == _PARITY:
            helper = ParityRead(self._context, segment, self._chunks.start, ended)
        else:
            data = memoryview(bytearray(segment.length(member)))
            helper = ChunkRead(self._context, RangeRequest(member * CHUNK_BYTES, data, ended), 0, shared=False)
        return helper

    def _rebuild(self, job: ChunkRead, data: memoryview) -> None:
        """`data`: the parity."""
        xor_into(data, *(self._data[chunk] for chunk in self._chunks if chunk != job.chunk))
        data = data[: job.num_bytes]
        right = job.is_right(data)
        with self._lock:
            self._rebuilding = None
            running = job.started_s is not None and job.chunk not in self._unreadable
            here = job.chunk in self._data  # its own part arrived meanwhile
            self._to_rebuild.pop(job.chunk, None)
            if not right:
                self._reject_parity("the parity part has wrong bytes")
                if not here:
                    self._to_rebuild[job.chunk] = job
            elif running and not here:
                self._rebuilt[job.chunk] = data
        if not right:
            _LOG.warning("%s: the parity of chunks %s has wrong bytes", self._context.path, self._chunks)
            self._context.facts.add("wrong_chunks")
        elif not here:
            _LOG.debug("%s: chunk %d was rebuilt from parity", self._context.path, job.chunk)
            self._context.facts.add("rebuilt")
            if running:
                job.stop()
            else:
                job.into[:] = data
                self._finish(job, None, keep=True)

    def _finish(self, job: ChunkRead, error: BootseerError | None, *, keep: bool) -> None:
        with self._lock:
            if error is None:
                self._data[job.chunk] = job.into
        try:
            job.finish(error, keep=keep)
        finally:
            with self._lock:
                self._finished.add(job.chunk)

    def _release_extra(self) -> None:
        """When no chunk is active, cancel the helpers, and free their memory when they have ended.
        Chunks that start later begin anew."""
        with self._lock:
            if self._is_active or self._rebuilding is not None or self._segment is None:
                return
            extra = list(self._helpers.values()) if self._num_extra else []
            if not extra:
                segment, self._segment = self._segment, None
                given, self._scratch_bytes = self._scratch_bytes, 0
                overdrawn, self._overdrawn = self._overdrawn, False
                self._reset_scratch()
        if extra:
            for read in extra:
                read.cancel()
        else:
            self._context.release(segment)
            self._context.buffer.free(given, overdrawn=overdrawn)

    def _reset_scratch(self) -> None:
        for member in self._helpers:
            self._data.pop(member, None)
        self._unreadable -= {_PARITY, *self._helpers}
        self._helpers = {}
        if self._finished == self._jobs.keys():
            self._data.clear()  # the memory belongs to its readers again

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

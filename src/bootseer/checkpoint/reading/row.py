"""The chunks of one row that are read together, where the file has parity: any one of them follows from the others.

A row decides when it begins which chunk comes last by the place's estimate, and reads the parity part in its stead if
that comes earlier. So a slow disk is read less, and all disks, that of the parity too, share the work. Later, a chunk
that is late, unreadable or wrong is rebuilt. Nothing that is on its way or here already is read twice: only chunks of
the row that were not asked for are read for the rebuilding alone. What was rebuilt is compared with the digest of the
chunk like everything else.

There is one row for each batch of reads; two rows of the same chunks do not know each other. Locking (ADR 27): under
its lock a row changes its own state and asks for estimates, and calls nothing else. Its lock is taken by chunks that
hold none, and what follows from a change is called after the lock is released.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum
from functools import partial
from math import inf

from bootseer.checkpoint.layout import CHUNK_BYTES, xor_into
from bootseer.checkpoint.reading.chunk_read import ChunkRead, ParityRead
from bootseer.checkpoint.reading.context import LazyPart, OpenSegment, ReadContext, alike
from bootseer.checkpoint.reading.settings import chunk_to_replace, chunk_to_skip, is_late, parity_no_longer_pays
from bootseer.checkpoint.reading.source import Want, carry_out, failure
from bootseer.errors import BootseerError, TransientError
from bootseer.logs import logger

_LOG = logger(__name__)

_NO_ROOM_S = 0.05


class _Parity(Enum):
    NONE = 1
    LOADING = 2
    HERE = 3
    USELESS = 4


class Row:
    """The reads of one row in one batch."""

    def __init__(self, context: ReadContext, chunks: range) -> None:
        """`chunks`: all of the row, whether they are wanted or not."""
        self._context = context
        self._chunks = chunks
        self._lock = threading.Lock()
        self._jobs: dict[int, ChunkRead] = {}
        self._data: dict[int, memoryview] = {}  # chunks that are here
        self._lost: set[int] = set()  # their own parts were tried, and are of no use
        self._asked: dict[int, ChunkRead] = {}  # to be rebuilt
        self._rebuilt: dict[int, memoryview] = {}  # for when their own reads have ended
        self._helpers: dict[int, ChunkRead] = {}
        self._parity = _Parity.NONE
        self._parity_read: ParityRead | None = None
        self._why = ""
        self._rebuilding: int | None = None  # this chunk, at this moment
        self._segment: OpenSegment | None = None
        self._num_active = 0  # chunks that have begun and not ended
        self._num_extra = 0  # reads for the rebuilding alone that have not ended
        self._scratch_bytes = 0
        self._overdrawn = False
        self._begun: set[int] = set()
        self._chosen: int | None = None
        self._watching = False
        self._waits_for_room = False
        self._num_finished = 0

    def read(self, want: Want, stripe: int) -> ChunkRead:
        """The read of a chunk of this row, not started yet."""
        job = _RowChunk(self, self._context, want, stripe)
        self.add(job)
        return job

    def add(self, job: ChunkRead) -> None:
        """A chunk that is wanted. Before any of them is started."""
        self._jobs[job.chunk] = job

    def begin(self, job: ChunkRead) -> None:
        """A chunk is to be read now, by whichever way is better."""
        segment = job.segment
        with self._lock:
            first = not self._begun
            self._enter(job)
            if first:
                self._chosen = self._choose(segment)
            if self._chosen == job.chunk:
                self._asked[job.chunk] = job
            watch, self._watching = not self._watching, True
        if watch:
            self._check_again_later()
        if self._chosen == job.chunk:
            self._advance()
        else:
            job.read_own()

    def _enter(self, job: ChunkRead) -> None:
        self._begun.add(job.chunk)
        self._num_active += 1
        if self._segment is None:
            self._segment = job.segment
            self._context.segments.hold(job.segment)

    def own_ended(self, job: ChunkRead, error: BootseerError | None, *, keep: bool) -> None:
        """A chunk's own read has ended, and no thread writes into its memory any more."""
        chunk = job.chunk
        with self._lock:
            data = self._rebuilt.pop(chunk, None)
            self._asked.pop(chunk, None)
            over = error is None or data is not None
            if error is None:
                self._data[chunk] = job.into
            elif data is None:
                self._lost.add(chunk)
                if (
                    chunk not in self._begun
                ):  # it went wrong before `begin`: the memory of the rebuilding must come back
                    self._enter(job)
                if self._rebuilding != chunk:  # else the thread that rebuilds it also ends it
                    self._asked[chunk] = job
        if error is not None and data is not None:
            job.into[:] = data
            error = None
        if over:
            self._finish(job, error, keep=keep)
        self._advance()

    def withdrawn(self) -> None:
        """A chunk is not wanted any more: it must not wait for others of the row, which may never be started now."""
        self._advance()

    def _choose(self, segment: OpenSegment) -> int | None:
        """The chunk that parity is read for from the beginning; None: each chunk is read from its own part."""
        delays = {chunk: _delay_s(*segment.place_of(chunk)) for chunk in self._chunks}
        return chunk_to_skip(delays, frozenset(self._jobs), _delay_s(*segment.parity_of(self._chunks.start)))

    def _check_late(self) -> None:
        """Have chunks rebuilt that are late, or that would come sooner so, now that more is known of their nodes."""
        try:
            instead = self._late()
        finally:
            self._check_again_later()
        for job in instead:
            job.read_own()
        self._advance()

    def _check_again_later(self) -> None:
        with self._lock:
            self._watching = self._num_active > 0
            if self._watching:
                try:
                    self._context.timer.after(self._context.settings.look_s, self._check_late)
                except TransientError:  # no thread can be started: the next chunk that begins tries again
                    self._watching = False

    def _late(self) -> list[ChunkRead]:
        """Ask for the rebuilding of what is late. Returns chunks whose own parts are to be asked after all."""
        settings, now = self._context.settings, self._context.timer.now_s()
        with self._lock:
            on_way: dict[int, ChunkRead] = {}
            for chunk in self._begun - self._data.keys() - self._lost - self._asked.keys() - self._rebuilt.keys():
                job = self._jobs[chunk]
                if job.started_s is None:
                    continue
                on_way[chunk] = job
                waited_s = now - job.started_s
                if is_late(waited_s, job.expected_s, settings) and self._helpers_pay(waited_s):
                    self._asked[chunk] = job
            return self._reconsidered(on_way) + self._without_late_help(now)

    def _reconsidered(self, on_way: dict[int, ChunkRead]) -> list[ChunkRead]:
        """Use parity for the chunk that would come last, as far as is known now, or for none. Returns those that it was
        to stand in for, and which are to be asked of their own parts after all.
        """
        segment = self._segment
        untried = [job for job in self._asked.values() if job.started_s is None]
        if segment is None or self._lost or len(self._asked) > len(untried) or self._rebuilding is not None:
            return []
        left = {chunk: job.left_s() for chunk, job in on_way.items()}
        left |= {job.chunk: _delay_s(*segment.place_of(job.chunk)) for job in untried}
        others = [chunk for chunk in self._chunks if chunk not in left and chunk not in self._data]
        others_s = max((_delay_s(*segment.place_of(chunk)) for chunk in others), default=0.0)
        parity_s = self._parity_s(segment)
        helpers_s = max((one.left_s() for chunk, one in self._helpers.items() if chunk not in self._data), default=0.0)
        loser = chunk_to_replace(left, others_s, parity_s, alone=not self._jobs.keys() >= set(others))
        if loser in on_way:
            self._asked = {loser: on_way[loser]}
        elif loser is None and any(parity_no_longer_pays(left[job.chunk], max(parity_s, helpers_s)) for job in untried):
            self._asked = {}
        else:
            return []
        return untried

    def _parity_s(self, segment: OpenSegment) -> float:
        """When parity will be here, or would be if it was asked for now."""
        if self._parity is _Parity.NONE:
            return _delay_s(*segment.parity_of(self._chunks.start))
        if self._parity is _Parity.LOADING and self._parity_read is not None:
            return self._parity_read.left_s()
        return 0.0 if self._parity is _Parity.HERE else inf

    def _without_late_help(self, now: float) -> list[ChunkRead]:
        """Chunks that parity was to be read for, when it is parity that is late, or what is read besides."""
        awaited = [helper for chunk, helper in self._helpers.items() if chunk not in self._data]
        if self._parity is _Parity.LOADING and self._parity_read is not None:
            awaited.append(self._parity_read)
        settings = self._context.settings
        if not any(
            read.started_s is not None and is_late(now - read.started_s, read.expected_s, settings) for read in awaited
        ):
            return []
        untried = [job for job in self._asked.values() if job.started_s is None]
        for job in untried:
            del self._asked[job.chunk]
        return untried

    def _helpers_pay(self, waited_s: float) -> bool:
        """Whether reading what the rebuilding needs besides would probably take less than has been waited already."""
        segment = self._segment
        missing = [chunk for chunk in self._chunks if chunk not in self._jobs and chunk not in self._data]
        if segment is None:
            return False
        return all(part.delay_s(offset, CHUNK_BYTES) < waited_s for part, offset in map(segment.place_of, missing))

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
                self._cannot_rebuild(failure(error, f"{self._context.path}: chunks {self._chunks}"))
                if not isinstance(error, Exception):
                    interrupt = error
        self._release_extra()
        if interrupt is not None:
            raise interrupt

    def _cannot_rebuild(self, error: BootseerError) -> None:
        """What the rebuilding needs cannot be made, for lack of memory perhaps: chunks are left to their own parts."""
        with self._lock:
            self._parity, self._why = _Parity.USELESS, str(error)
            chunk, self._rebuilding = self._rebuilding, None
            if chunk is not None and chunk not in self._data:
                self._asked[chunk] = self._jobs[chunk]

    def _next_step(self) -> Callable[[], None] | None:
        for chunk, job in list(self._asked.items()):
            missing = [other for other in self._chunks if other != chunk and other not in self._data]
            hopeless = self._parity is _Parity.USELESS or not self._lost.isdisjoint(missing)
            contested = not self._asked.keys().isdisjoint(missing)
            untried = job.started_s is None
            if job.abandoned or hopeless or (contested and untried):
                del self._asked[chunk]
                if untried:
                    return job.read_own
                if chunk in self._lost:
                    error = self._error(job, missing) if hopeless else job.problem
                    return partial(self._finish, job, error, keep=False)
            elif not contested and self._rebuilding is None:
                step = self._next_of(job, missing)
                if step is not None:
                    return step
        return None

    def _next_of(self, job: ChunkRead, missing: list[int]) -> Callable[[], None] | None:
        """What the rebuilding of one chunk needs next; None: to wait."""
        if self._parity is _Parity.HERE and not missing:
            del self._asked[job.chunk]
            self._rebuilding = job.chunk
            return partial(self._rebuild, job)
        helpers = [chunk for chunk in missing if chunk not in self._jobs and chunk not in self._helpers]
        needs_parity = self._parity is _Parity.NONE
        num_reads = len(helpers) + needs_parity
        if not num_reads:
            return None
        # All at once: rows that have a part of what they need could wait for each other for ever.
        if not self._take(num_reads * CHUNK_BYTES, job):
            if job.started_s is None:
                del self._asked[job.chunk]
                return job.read_own
            if not self._waits_for_room:
                self._context.timer.after(_NO_ROOM_S, self._try_again)
                self._waits_for_room = True
            return None
        starts: list[Callable[[], None]] = []
        made = {chunk: self._helper(job.segment, chunk) for chunk in helpers}
        if needs_parity:
            self._parity_read = ParityRead(self._context, job.segment, self._chunks.start, self._parity_ended)
            self._parity = _Parity.LOADING
            starts.append(partial(self._parity_read.start, urgent=True))
        self._num_extra += num_reads
        self._helpers |= made
        starts += [partial(helper.start, urgent=True) for helper in made.values()]
        return partial(carry_out, starts)

    def _take(self, num_bytes: int, job: ChunkRead) -> bool:
        """Whether there is memory to rebuild a chunk with."""
        buffer = self._context.buffer
        if not buffer.take(num_bytes, demand=job.urgent):
            # When nothing but the rebuilding ends its read, all memory may be held by such reads. It is returned in
            # time, because the row waits for nothing that has not begun.
            no_other_way = job.chunk in self._lost and self._jobs.keys() <= self._begun
            if self._overdrawn or not no_other_way or not buffer.overdraw(num_bytes):
                return False
            self._overdrawn = True
        self._scratch_bytes += num_bytes
        return True

    def _try_again(self) -> None:
        with self._lock:
            self._waits_for_room = False
        self._advance()

    def _parity_ended(self, error: BootseerError | None) -> None:
        with self._lock:
            self._num_extra -= 1
            self._parity = _Parity.HERE if error is None else _Parity.USELESS
            self._why = str(error)
        self._advance()

    def _helper(self, segment: OpenSegment, chunk: int) -> ChunkRead:
        """Reads a chunk that was not asked for. It has no row: if its part is of no use either, nothing helps."""
        data = memoryview(bytearray(segment.index.length(chunk - segment.first_chunk)))

        def ended(error: BootseerError | None) -> None:
            with self._lock:
                self._num_extra -= 1
                if error is None:
                    self._data[chunk] = data
                else:
                    self._lost.add(chunk)
            self._advance()

        return ChunkRead(self._context, Want(chunk * CHUNK_BYTES, data, ended), 0, shared=False)

    def _rebuild(self, job: ChunkRead) -> None:
        others = [self._data[chunk] for chunk in self._chunks if chunk != job.chunk]
        parity = self._parity_read
        if parity is None:
            raise RuntimeError("there is no parity to rebuild from")
        data = parity.into
        xor_into(data, *others)
        data = data[: job.num_bytes]
        right = job.is_right(data)
        with self._lock:
            self._rebuilding = None
            running = job.started_s is not None and job.chunk not in self._lost
            here = job.chunk in self._data  # by its own part, meanwhile
            self._asked.pop(job.chunk, None)
            self._parity = _Parity.NONE if right else _Parity.USELESS  # its bytes are those of the chunk now
            if not right:
                self._why = "the parity part has wrong bytes"
                if not here:
                    self._asked[job.chunk] = job
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
                self._num_finished += 1
                if job.chunk in self._begun:
                    self._num_active -= 1

    def _release_extra(self) -> None:
        """When no chunk is under way: end what is read for the rebuilding, and then give its memory back. What comes
        later begins anew.
        """
        with self._lock:
            if self._num_active or self._rebuilding is not None or self._segment is None:
                return
            extra: list[ChunkRead] = []
            if self._num_extra:
                extra += self._helpers.values()
                extra += [] if self._parity_read is None else [self._parity_read]
            else:
                segment, self._segment = self._segment, None
                given, self._scratch_bytes = self._scratch_bytes, 0
                overdrawn, self._overdrawn = self._overdrawn, False
                self._forget()
        if extra:
            for read in extra:
                read.cancel()
        else:
            self._context.segments.release(segment)
            self._context.buffer.give(given, overdrawn=overdrawn)

    def _forget(self) -> None:
        self._parity = _Parity.NONE
        self._parity_read = None
        for chunk in self._helpers:
            self._data.pop(chunk, None)
        self._lost -= self._helpers.keys()
        self._helpers = {}
        if self._num_finished == len(self._jobs):
            self._data.clear()  # the memory is its owners' again

    def _error(self, job: ChunkRead, missing: list[int]) -> BootseerError:
        gone = [str(chunk) for chunk in missing if chunk in self._lost]
        reason = f"chunk {', '.join(gone)} of its row cannot be read either" if gone else self._why
        return alike(job.problem, f"{job.problem}; it cannot be rebuilt from the others of its row: {reason}")


class _RowChunk(ChunkRead):
    """A chunk of which its row decides how it is read, and whether an error is its end."""

    def __init__(self, row: Row, context: ReadContext, want: Want, stripe: int) -> None:
        super().__init__(context, want, stripe)
        self._row = row

    def cancel(self) -> None:
        super().cancel()
        self._row.withdrawn()

    def _ready(self) -> None:
        self._row.begin(self)

    def _own_read_ended(self, error: BootseerError | None, *, keep: bool) -> None:
        self._row.own_ended(self, error, keep=keep)


def _delay_s(part: LazyPart, offset: int) -> float:
    return part.delay_s(offset, CHUNK_BYTES)

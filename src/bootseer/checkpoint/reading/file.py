"""An open file of a checkpoint, striped or ordinary: what readers work with."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import count, pairwise

from bootseer.checkpoint.ahead import Advice, Ahead
from bootseer.checkpoint.ranges import apart
from bootseer.checkpoint.reading.buffer import Ask, BufferedPiece, ChunkBuffer, Key, Prefetch
from bootseer.checkpoint.reading.context import Engine
from bootseer.checkpoint.reading.source import Gather, Source, Transfer, Waiting, Want, failure
from bootseer.errors import BootseerError, PermanentError, TransientError

Answer = bytes | memoryview | BootseerError


class Assembly:
    """Waits for pieces, and answers when the last is there. Of several, none is held while others are awaited:
    readers that hold what they have and wait for memory would wait for each other.
    """

    def __init__(
        self, buffer: ChunkBuffer, offset: int, length: int, num_pieces: int, done: Callable[[Answer], None]
    ) -> None:
        self._buffer = buffer
        self._offset = offset
        self._end = offset + length
        self._missing = num_pieces
        self._done = done
        self._lock = threading.Lock()
        self._error: BootseerError | None = None
        self._whole = memoryview(bytearray(length)) if num_pieces > 1 else None

    def arrived(self, piece: BufferedPiece) -> None:
        low, high = max(self._offset, piece.offset), min(self._end, piece.offset + piece.length)
        part = memoryview(piece.data)[low - piece.offset : high - piece.offset]
        if self._whole is None:
            try:
                self._done(piece.error or part)
            finally:
                self._let_go(piece)
            return
        if piece.error is None:
            self._whole[low - self._offset : high - self._offset] = part
        self._let_go(piece)
        with self._lock:
            self._error = self._error or piece.error
            self._missing -= 1
            if self._missing:
                return
        self._done(self._error or self._whole)

    def _let_go(self, piece: BufferedPiece) -> None:
        self._buffer.let_go(piece, spent=self._end >= piece.offset + piece.length)


_Slice = tuple[int, memoryview]
"""Bytes of the file from an offset on, and where they are to go."""


class SharedFile:
    """Safe to use from many threads."""

    def __init__(self, number: int, path: str, engine: Engine, make_source: Callable[[Engine], Source]) -> None:
        """`number` tells it from all other files of the engine. `make_source` is called again after a fork."""
        self.number = number
        self.path = path
        self._make_source = make_source
        self.renew(engine)
        self.size_bytes = self._source.size_bytes
        self.version = self._source.version
        self.direct_min_bytes = engine.settings.direct_min_bytes
        """Reads from this size on go straight into the caller's memory."""
        self.lost_s = engine.settings.deadline_s + engine.settings.lost_s
        """When none of the parts of a read has ended for so long, one was lost."""

    def renew(self, engine: Engine) -> None:
        """Begin, or begin anew in a forked child, with nothing of the parent's but what was opened."""
        self._engine = engine
        self._source = self._make_source(engine)
        self.__dict__.pop("_ahead", None)
        self._lock = threading.Lock()
        self._prefetches: set[Prefetch] = set()
        self._alone = count(1)
        self._closed = False

    @cached_property
    def _ahead(self) -> Ahead:
        """Not there for small files, which are read at once."""
        settings = replace(self._engine.settings.ahead, max_bytes=self._source.max_ahead_bytes)
        row_bytes = max(self._source.row_bytes, self._source.unit_bytes)
        return Ahead(self._source.size_bytes, settings, row_bytes=row_bytes)

    def prepare(self) -> None:
        """Look for what this node has of it. Not needed, and takes a moment."""
        self._source.prepare()

    def read_async(
        self, offset: int, length: int, done: Callable[[Answer], None], room: memoryview | None = None
    ) -> None:
        """See `CheckpointFile.read_async`; the range lies inside the file and is not empty."""
        engine = self._engine
        engine.facts.add("reads")
        if length == self.size_bytes <= engine.settings.at_once_bytes and not self._source.whole_units:
            data = memoryview(bytearray(length))
            self._source.jobs([Want(0, data, lambda error: done(error or data), here=True)])[0].start(urgent=True)
            return
        advice = self._note(offset, length)
        if length >= self.direct_min_bytes:
            whole = memoryview(bytearray(length))
            self.read_ranges([(offset, whole)], Gather(lambda error: done(error or whole)))
        elif not self._read_local(offset, length, done, room):
            asks = self._asks(offset, length)
            if not (advice.sequential or self._source.whole_units or any(engine.buffer.holds(ask.key) for ask in asks)):
                asks = [Ask(Key(self.number, -next(self._alone)), offset, length)]
            engine.buffer.want(asks, self._load, Assembly(engine.buffer, offset, length, len(asks), done).arrived)
        self._bring(advice)

    def read_large(self, offset: int, into: memoryview, gather: Gather) -> None:
        """Like `read_ranges`, of one range that others may follow."""
        self._engine.facts.add("reads")
        advice = self._note(offset, len(into))
        self.read_ranges([(offset, into)], gather)
        self._bring(advice)

    def read_ranges(self, ranges: Sequence[_Slice], gather: Gather) -> None:
        """Fill memory with ranges that lie inside the file. `gather` ends when no thread writes into any of it.

        Blocks for what lies on this node's disk.
        """
        pieces, copies = apart([(offset, offset + len(into)) for offset, into in ranges])

        def view(number: int, start: int, end: int) -> memoryview:
            offset, into = ranges[number]
            return into[start - offset : end - offset]

        def copy_all() -> None:
            for copy in copies:
                span = (copy.start, copy.end)
                view(copy.number, *span)[:] = view(copy.source, *span)

        gather.copy = copy_all
        try:
            local: list[_Slice] = []
            self._fetch([(piece.start, view(piece.number, piece.start, piece.end)) for piece in pieces], gather, local)
            damaged = [one for one in local if not self._source.read_local(*one)]
            if damaged:
                self._fetch(damaged, gather, None)
        except BaseException as error:
            gather.cancel(failed := failure(error, self.path))
            gather.ended(failed)
            if not isinstance(error, Exception):
                raise
        else:
            gather.ended()

    def prefetch(self, offset: int, length: int) -> None:
        engine = self._engine
        cache_writer = engine.cache_writer if self._source.whole_units else None
        if cache_writer is None:  # memory is all there is, and it is for what comes soon
            length = min(length, engine.settings.memory_bytes // 2)
        run = Prefetch(
            self._units(offset, length),
            buffer=engine.buffer,
            timer=engine.timer,
            load=self._load,
            is_wanted=lambda ask: not self._source.is_local(ask.offset),
            has_room=cache_writer.has_room if cache_writer is not None else lambda _: True,
            max_bytes=engine.settings.prefetch_bytes,
            spent=cache_writer is not None,
            ended=self._prefetches.discard,
        )
        with self._lock:
            if self._closed:
                return
            self._prefetches.add(run)
        run.go_on()

    def close(self) -> None:
        """No handle has it open any more."""
        with self._lock:
            self._closed = True
            prefetches = list(self._prefetches)
        for run in prefetches:
            run.cancel()
        self._engine.buffer.drop(self.number)
        self._source.close()

    def _note(self, offset: int, length: int) -> Advice:
        with self._lock:
            limit = self._engine.share_bytes(self.number, max(self._ahead.num_streams, 1))
            return self._ahead.note(offset, length, limit)

    def _bring(self, advice: Advice) -> None:
        if advice.start >= advice.end or self._closed:
            return
        asks = [
            ask
            for ask in self._asks(advice.start, advice.end - advice.start)
            if not self._engine.buffer.holds(ask.key) and not self._source.is_local(ask.offset)
        ]
        done, _ = self._engine.buffer.ahead(asks, self._load)
        if done < len(asks):
            with self._lock:
                self._ahead.refused(advice, max(asks[done].offset, advice.start))

    def _asks(self, offset: int, length: int) -> list[Ask]:
        return list(self._units(offset, length))

    def _units(self, offset: int, length: int) -> Iterator[Ask]:
        """The units of a range: a million where it is a terabyte."""
        unit = self._source.unit_bytes
        end = min(offset + length, self._source.size_bytes)
        first = offset // unit * unit
        for start in range(first, end, unit):
            yield Ask(Key(self.number, start), start, min(unit, self._source.size_bytes - start))

    def _read_local(self, offset: int, length: int, done: Callable[[Answer], None], room: memoryview | None) -> bool:
        """Answer from this node's disk, if all of it is there."""
        source, unit, end = self._source, self._source.unit_bytes, offset + length
        starts = range(offset // unit * unit, end, unit)
        if not all(source.is_local(start) for start in starts):
            return False
        # Fresh memory costs as much as reading into it.
        data = memoryview(bytearray(length)) if room is None else room[:length]
        for start in starts:
            low, high = max(start, offset), min(start + unit, end)
            if not source.read_local(low, data[low - offset : high - offset]):
                return False
        done(data)
        return True

    def _load(self, pieces: Sequence[BufferedPiece], urgent: bool) -> None:
        buffer = self._engine.buffer
        ordered = sorted(pieces, key=lambda piece: piece.offset)
        jobs = self._source.jobs(
            [
                Want(piece.offset, memoryview(piece.data), partial(buffer.finish, piece), partial(buffer.hold, piece))
                for piece in ordered
            ]
        )
        for piece, job in zip(ordered, jobs, strict=True):
            piece.job = job
        for job in jobs:
            job.start(urgent=urgent)

    def _fetch(self, slices: Sequence[_Slice], gather: Gather, local: list[_Slice] | None) -> None:
        """Read slices that do not overlap, in the order of the file; `local` gets what is on this node's disk.

        Whole units go straight into the caller's memory; others, and those at hand, are copied from the buffer.
        """
        direct: list[_Slice] = []
        shared: dict[Ask, list[_Slice]] = {}
        source, buffer = self._source, self._engine.buffer
        for offset, into in slices:
            end = offset + len(into)
            if not source.whole_units and not buffer.has(self.number):
                step = self._engine.settings.piece_bytes
                starts = [offset, *range((offset // step + 1) * step, end, step), end]
                direct += [(low, into[low - offset : high - offset]) for low, high in pairwise(starts)]
                continue
            for ask in self._asks(offset, end - offset):
                low, high = max(ask.offset, offset), min(ask.offset + ask.length, end)
                part = (low, into[low - offset : high - offset])
                if local is not None and source.is_local(ask.offset):
                    local.append(part)
                elif buffer.holds(ask.key) or (source.whole_units and high - low < ask.length):
                    shared.setdefault(ask, []).append(part)
                else:
                    direct.append(part)
        if shared:
            gather.expect(len(shared))
            asks = {ask.key: parts for ask, parts in shared.items()}

            def arrived(piece: BufferedPiece) -> None:
                if piece.error is None and not gather.has_failed:
                    data = memoryview(piece.data)
                    for offset, into in asks[piece.key]:
                        into[:] = data[offset - piece.offset : offset - piece.offset + len(into)]
                self._engine.buffer.let_go(piece)
                gather.ended(piece.error)

            self._engine.buffer.want(list(shared), self._load, arrived)
        if not direct:
            return
        settings = self._engine.settings
        transfer = Transfer(
            self._source,
            direct,
            max_bytes=settings.direct_bytes if self._source.whole_units else settings.direct_ordinary_bytes,
            max_lane_bytes=settings.direct_lane_bytes,
            moved=gather.moved,
            then=gather.ended,
            position=self._engine.peers.position if self._engine.peers is not None else 0.0,
        )
        gather.begin(transfer)


Buffer = bytearray | memoryview


class CheckpointFile:
    """One version of a file: every byte that is read is of this version and verified, or there is an error.

    Safe to use from many threads, and in a child after `fork`. All reads raise `BootseerError`.
    """

    def __init__(self, shared: SharedFile, *, is_striped: bool, release: Callable[[], None]) -> None:
        self.path = shared.path
        self.size_bytes = shared.size_bytes
        self.version = shared.version
        """Differs whenever the content may differ."""
        self.is_striped = is_striped
        self._shared = shared
        self._release = release
        self._closed = False

    def read(self, offset: int, length: int) -> bytes:
        """A range of the file, cut at its end."""
        length = self._length(offset, length)
        if length >= self._shared.direct_min_bytes:
            data = bytearray(length)
            self.readinto(offset, data)
            return bytes(data)
        return bytes(self._small(offset, length)) if length else b""

    def readinto(self, offset: int, buffer: Buffer) -> int:
        """Fill the buffer from `offset` on: the number of bytes, less than its size only at the end of the file.

        Large reads go straight into the buffer; it may hold anything when one fails.
        """
        view = memoryview(buffer).cast("B")
        length = self._length(offset, len(view))
        view = view[:length]
        if length >= self._shared.direct_min_bytes:
            self._wait_for(lambda gather: self._shared.read_large(offset, view, gather))
        elif length:
            view[:] = self._small(offset, length)
        return length

    def read_ranges(self, ranges: Sequence[tuple[int, Buffer]]) -> None:
        """Fill each buffer from its offset on, many at once and in the best order. All must lie inside the file.

        They go straight into the buffers, and what several have in common is read once. The buffers may hold anything
        when one fails.
        """
        self._check_open()
        views = [(offset, memoryview(buffer).cast("B")) for offset, buffer in ranges]
        for offset, view in views:
            if offset < 0 or offset + len(view) > self.size_bytes:
                raise PermanentError(
                    f"{self.path}: bytes {offset} to {offset + len(view)} of a file of {self.size_bytes}"
                )
        self._wait_for(lambda gather: self._shared.read_ranges(views, gather))

    def read_async(
        self, offset: int, length: int, done: Callable[[Answer], None], room: memoryview | None = None
    ) -> None:
        """Read a range, cut at the end of the file: `done` is called once, from any thread. It is waited for when the
        range is all of a small file; call this without locks.

        It gets the bytes, which do not change any more, or the error, and must return soon. With `room`, of `length`
        bytes, they may lie there when `done` is called before this returns. What will probably be read next is brought
        meanwhile.
        """
        try:
            length = self._length(offset, length)
        except BootseerError as error:
            done(error)
            return
        if length:
            self._shared.read_async(offset, length, done, room)
        else:
            done(b"")

    def prefetch(self, offset: int, length: int) -> None:
        """Bring a range into the node's cache without waiting, or into memory when there is no cache.

        Gives way to all that readers wait for. Its errors are not reported: what it did not bring is read when it is
        wanted.
        """
        length = self._length(offset, length)
        if length:
            self._shared.prefetch(offset, length)

    def close(self) -> None:
        """Not read any more. Reads that were begun still end. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._release()

    def __enter__(self) -> CheckpointFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _small(self, offset: int, length: int) -> bytes | memoryview:
        answers: list[Answer] = []
        waiting = Waiting()

        def done(answer: Answer) -> None:
            answers.append(answer)
            waiting.ended(answer if isinstance(answer, BootseerError) else None)

        self._shared.read_async(offset, length, done)
        waiting.wait(f"{self.path}: bytes {offset} to {offset + length}", self._shared.lost_s)
        answer = answers[0]
        if isinstance(answer, BootseerError):
            raise answer
        return answer

    def _wait_for(self, begin: Callable[[Gather], None]) -> None:
        waiting = Waiting()
        try:
            begin(waiting.gather)
            waiting.wait(self.path, self._shared.lost_s)
        except BaseException:
            if not waiting.is_over:  # a signal, or a part that never ends: what runs still writes into their memory
                waiting.gather.cancel(TransientError(f"{self.path}: the read was interrupted"))
                waiting.wait_over()
            raise

    def _length(self, offset: int, length: int) -> int:
        self._check_open()
        if offset < 0 or length < 0:
            raise PermanentError(f"{self.path}: there are no {length} bytes at {offset}")
        return max(min(length, self.size_bytes - offset), 0)

    def _check_open(self) -> None:
        if self._closed:
            raise PermanentError(f"{self.path}: this file was closed")


class Positioned(io.RawIOBase):
    """Give `readinto`; it reads at `_at` and moves it. Not safe for several threads at once."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("negative position")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

"""An open file of a checkpoint, striped or ordinary: the interface for readers.

The way of one read: `CheckpointFile` passes it to the `SharedFile` of its version. A small one takes pieces from the
`ChunkBuffer`, which loads missing ones (`_load`); a large one is a `Transfer` into the caller's memory (`_fetch`). Both
get their `Job`s from the `Source` in `reading.reading`: of an ordinary file a `_Piece`, of a striped one a `ChunkRead`,
which tries the node's cache, peers and its part, in a `Row` if there is parity. Each job ends with
`RangeRequest.done`, from there the piece or the transfer ends, and with the last one its `Gather`.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import count, pairwise

from msgspec.structs import replace

from bootseer.checkpoint.read_ahead import Advice, ReadAhead
from bootseer.checkpoint.reading.buffer import BufferedPiece, ChunkBuffer, Key, PieceRequest
from bootseer.checkpoint.reading.context import Engine
from bootseer.checkpoint.reading.transfer import Gather, RangeRequest, Source, Transfer, Waiting, failure
from bootseer.errors import BootseerError, PermanentError, TransientError

Answer = bytes | memoryview | BootseerError


def assembly(
    buffer: ChunkBuffer, offset: int, length: int, num_pieces: int, done: Callable[[Answer], None]
) -> Callable[[BufferedPiece], None]:
    """What takes the pieces of one read, and answers when all are there. With several pieces, each is copied and
    released at once: readers that hold some pieces while they wait for memory could wait for each other."""
    end = offset + length
    whole = memoryview(bytearray(length if num_pieces > 1 else 0))
    gather = Gather(lambda error: done(error or whole))
    gather.expect(num_pieces - 1)

    def arrived(piece: BufferedPiece) -> None:
        low, high = max(offset, piece.offset), min(end, piece.offset + piece.length)
        part = memoryview(piece.data)[low - piece.offset : high - piece.offset]
        try:
            if num_pieces == 1:
                done(piece.error or part)
            elif piece.error is None:
                whole[low - offset : high - offset] = part
        finally:
            buffer.release(piece, consumed=end >= piece.offset + piece.length)
        if num_pieces > 1:
            gather.ended(piece.error)

    return arrived


_Slice = tuple[int, memoryview]
"""Bytes of the file from an offset on, and their destination."""


_PREFETCHED_BYTES = 32 << 20
"""In flight of earlier prefetches, which will need room in the queue of the cache writer too."""


class SharedFile:
    """One version of a file, shared by all its handles. Safe to use from many threads."""

    def __init__(self, number: int, path: str, engine: Engine, make_source: Callable[[Engine], Source]) -> None:
        """`number` identifies it within the engine. `make_source` is called again after a fork."""
        self.number = number
        self.path = path
        self.users = 0
        """Open handles; the `Reading` counts them."""
        self._make_source = make_source
        self.renew(engine)
        self.size_bytes = self._source.size_bytes
        self.version = self._source.version
        self.direct_min_bytes = engine.settings.direct_min_bytes
        """Reads of this size and more go straight into the caller's memory."""
        self.stall_s = engine.settings.deadline_s + engine.settings.stall_s
        """If no part of a read has ended for so long, its end was lost."""

    def renew(self, engine: Engine) -> None:
        """Start with no state except what was opened; called again in a forked child."""
        self._engine = engine
        self._source = self._make_source(engine)
        self.__dict__.pop("_ahead", None)
        self._lock = threading.Lock()
        self._private_numbers = count(1)
        self._closed = False
        self.large_reads: set[Waiting] = set()
        """Reads into their callers' memory that have not ended: `close` cancels them."""

    @cached_property
    def _ahead(self) -> ReadAhead:
        """Created on first use: small files are read at once, without it."""
        settings = replace(self._engine.settings.ahead, max_bytes=self._source.max_ahead_bytes)
        row_bytes = max(self._source.row_bytes, self._source.unit_bytes)
        return ReadAhead(self._source.size_bytes, settings, row_bytes=row_bytes)

    def read_async(
        self, offset: int, length: int, done: Callable[[Answer], None], room: memoryview | None = None
    ) -> None:
        """See `CheckpointFile.read_async`; the range lies inside the file and is not empty."""
        engine = self._engine
        if length >= self.direct_min_bytes:
            whole = memoryview(bytearray(length))
            self.read_large(offset, whole, Gather(lambda error: done(error or whole)))
            return
        engine.facts.add("reads")
        if length == self.size_bytes <= engine.settings.at_once_bytes and not self._source.whole_units:
            data = memoryview(bytearray(length))
            self._source.jobs([RangeRequest(0, data, lambda error: done(error or data), inline=True)])[0].start(
                urgent=True
            )
            return
        advice = self._advise(offset, length)
        if not self._read_local(offset, length, done, room):
            requests = self._requests(offset, length)
            if not (
                advice.sequential
                or self._source.whole_units
                or any(engine.buffer.contains(request.key) for request in requests)
            ):
                requests = [PieceRequest(Key(self.number, -next(self._private_numbers)), offset, length)]
            engine.buffer.acquire(requests, self._load, assembly(engine.buffer, offset, length, len(requests), done))
        self._read_ahead(advice)

    def read_large(self, offset: int, into: memoryview, gather: Gather) -> None:
        """As `read_ranges`, for one range, with read-ahead."""
        self._engine.facts.add("reads")
        advice = self._advise(offset, len(into))
        self.read_ranges([(offset, into)], gather)
        self._read_ahead(advice)

    def read_ranges(self, ranges: Sequence[_Slice], gather: Gather) -> None:
        """Fill memory with ranges inside the file, which are in order and do not overlap. `gather` ends when no thread
        writes into any of it any more.

        Blocks for reads from this node's cache.
        """
        try:
            if self._closed:  # `close` cancels earlier reads only
                raise PermanentError(f"{self.path}: this file was closed")
            local: list[_Slice] = []
            self._fetch(ranges, gather, local)
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

    def prefetch(self, offset: int, length: int, ended: Callable[[int], None]) -> int:
        """See `CheckpointFile.prefetch`."""
        cache_writer = self._engine.cache_writer if self._source.whole_units else None
        if self._closed or (cache_writer is not None and not cache_writer.has_room(length + _PREFETCHED_BYTES)):
            ended(0)
            return 0
        requests = [request for request in self._requests(offset, length) if not self._source.is_local(request.offset)]
        loaded: list[int] = []
        gather = Gather(lambda _: ended(sum(loaded)))

        def arrived(piece: BufferedPiece) -> None:
            loaded.append(piece.length)
            # What the cache has now is of no further use in memory.
            self._engine.buffer.release(piece, consumed=cache_writer is not None)
            gather.ended()

        # All of them are expected before the first one can end; those that are not begun are taken back.
        gather.expect(len(requests))
        num_settled, num_begun = self._engine.buffer.read_ahead(requests, self._load, waiter=arrived)
        gather.ended(count=len(requests) - num_begun + 1)
        if num_settled < len(requests):
            return max(requests[num_settled].offset - offset, 0)
        return length

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for waiting in list(self.large_reads):
            waiting.cancel(PermanentError(f"{self.path}: this file was closed"))
        self._engine.buffer.drop(self.number)
        self._source.close()

    def _advise(self, offset: int, length: int) -> Advice:
        with self._lock:
            limit = self._engine.share_bytes(self.number, max(self._ahead.num_streams, 1))
            return self._ahead.on_read(offset, length, limit)

    def _read_ahead(self, advice: Advice) -> None:
        if advice.start >= advice.end or self._closed:
            return
        requests = [
            request
            for request in self._requests(advice.start, advice.end - advice.start)
            if not self._engine.buffer.contains(request.key) and not self._source.is_local(request.offset)
        ]
        done, _ = self._engine.buffer.read_ahead(requests, self._load)
        if done < len(requests):
            with self._lock:
                self._ahead.refused(advice, max(requests[done].offset, advice.start))

    def _requests(self, offset: int, length: int) -> list[PieceRequest]:
        """The units of a range."""
        unit, size_bytes = self._source.unit_bytes, self._source.size_bytes
        starts = range(offset // unit * unit, min(offset + length, size_bytes), unit)
        return [PieceRequest(Key(self.number, start), start, min(unit, size_bytes - start)) for start in starts]

    def _read_local(self, offset: int, length: int, done: Callable[[Answer], None], room: memoryview | None) -> bool:
        """Answer from this node's cache, if all of the range is there."""
        source, unit, end = self._source, self._source.unit_bytes, offset + length
        starts = range(offset // unit * unit, end, unit)
        if not all(source.is_local(start) for start in starts):
            return False
        # Allocating fresh memory costs as much as reading into it.
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
                RangeRequest(
                    piece.offset, memoryview(piece.data), partial(buffer.finish, piece), partial(buffer.retain, piece)
                )
                for piece in ordered
            ]
        )
        for piece, job in zip(ordered, jobs, strict=True):
            piece.job = job
        for job in jobs:
            job.start(urgent=urgent)

    def _fetch(self, slices: Sequence[_Slice], gather: Gather, local: list[_Slice] | None) -> None:
        """Read slices that do not overlap, in the order of the file; those in this node's cache are appended to
        `local`.

        Whole units go straight into the caller's memory; others, and those in the buffer, are copied from there.
        """
        direct: list[_Slice] = []
        shared: dict[PieceRequest, list[_Slice]] = {}
        source, buffer = self._source, self._engine.buffer
        is_buffered = source.whole_units or buffer.has(self.number)
        for offset, into in slices:
            end = offset + len(into)
            if not is_buffered:
                step = self._engine.settings.piece_bytes
                starts = [offset, *range((offset // step + 1) * step, end, step), end]
                direct += [(low, into[low - offset : high - offset]) for low, high in pairwise(starts)]
                continue
            for request in self._requests(offset, end - offset):
                low, high = max(request.offset, offset), min(request.offset + request.length, end)
                part = (low, into[low - offset : high - offset])
                if local is not None and source.is_local(request.offset):
                    local.append(part)
                elif buffer.contains(request.key) or (source.whole_units and high - low < request.length):
                    shared.setdefault(request, []).append(part)
                else:
                    direct.append(part)
        if shared:
            gather.expect(len(shared))
            requests = {request.key: parts for request, parts in shared.items()}

            def arrived(piece: BufferedPiece) -> None:
                if piece.error is None and not gather.has_failed:
                    data = memoryview(piece.data)
                    for offset, into in requests[piece.key]:
                        into[:] = data[offset - piece.offset : offset - piece.offset + len(into)]
                self._engine.buffer.release(piece)
                gather.ended(piece.error)

            self._engine.buffer.acquire(list(shared), self._load, arrived)
        if not direct:
            return
        settings = self._engine.settings
        ordinary_bytes = max(settings.direct_ordinary_bytes, self._engine.place.queue_bytes)
        transfer = Transfer(
            self._source,
            direct,
            gather,
            max_bytes=settings.direct_bytes if self._source.whole_units else ordinary_bytes,
            max_lane_bytes=settings.direct_lane_bytes,
            position=self._engine.peers.position if self._engine.peers is not None else 0.0,
        )
        gather.begin(transfer)


Buffer = bytearray | memoryview


class CheckpointFile:
    """One version of a file: reads return verified bytes of this version, or an error.

    Safe to use from many threads, and in a child after `fork`. All reads raise `BootseerError`.
    """

    def __init__(self, shared: SharedFile, release: Callable[[], None]) -> None:
        self.path = shared.path
        self.size_bytes = shared.size_bytes
        self.version = shared.version
        """Differs whenever the content may differ."""
        self._shared = shared
        self._release = release
        self._lock = threading.Lock()
        self._holders = 1

    def read(self, offset: int, length: int) -> bytes:
        """A range of the file, cut at its end."""
        length = self._length(offset, length)
        if length >= self._shared.direct_min_bytes:
            data = bytearray(length)
            self.readinto(offset, data)
            return bytes(data)
        return bytes(self._read_small(offset, length)) if length else b""

    def readinto(self, offset: int, buffer: Buffer) -> int:
        """Fill the buffer from `offset` on; returns the number of bytes, less than its size only at the end of the
        file.

        Large reads go straight into the buffer; its content is undefined after an error.
        """
        view = memoryview(buffer).cast("B")
        length = self._length(offset, len(view))
        view = view[:length]
        if length >= self._shared.direct_min_bytes:
            self._wait_for(lambda gather: self._shared.read_large(offset, view, gather))
        elif length:
            view[:] = self._read_small(offset, length)
        return length

    def read_ranges(self, ranges: Sequence[tuple[int, Buffer]]) -> None:
        """Fill each buffer from its offset on, concurrently and in the best order. The ranges lie inside the file and
        do not overlap.

        Reads go straight into the buffers, whose contents are undefined after an error.
        """
        self._check_open()
        views = [(offset, memoryview(buffer).cast("B")) for offset, buffer in ranges]
        views = sorted((one for one in views if len(one[1])), key=lambda one: one[0])
        end = 0
        for offset, view in views:
            if offset < end or offset + len(view) > self.size_bytes:
                raise PermanentError(
                    f"{self.path}: bytes {offset} to {offset + len(view)} after {end}, of a file of {self.size_bytes}"
                )
            end = offset + len(view)
        self._wait_for(lambda gather: self._shared.read_ranges(views, gather))

    def read_async(
        self, offset: int, length: int, done: Callable[[Answer], None], room: memoryview | None = None
    ) -> None:
        """Read a range, cut at the end of the file; `done` is called once, from any thread, with the bytes, which do
        not change any more, or the error. It must return quickly. All of a small file is read in this call: hold no
        locks.

        With `room`, of `length` bytes, the bytes may lie there when `done` is called before this returns. What will
        probably be read next is read ahead.
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

    def prefetch(self, offset: int, length: int, ended: Callable[[int], None] = lambda _: None) -> int:
        """Load a range of a few MiB into the node's cache in the background, or into memory without a cache.

        Readers come first: returns how many bytes from `offset` on are there, or are being loaded; the others found no
        room in memory or in the queue of the cache writer, and may be requested again later. Errors are not reported:
        what was not loaded is read on demand. `ended` is called once, from any thread, when no piece of the range is in
        flight any more, with the bytes that were requested: none of what was there, or found no room.
        """
        inside = self._length(offset, length)  # a file may be shorter than its hot list says
        num_bytes = self._shared.prefetch(offset, inside, ended)
        return num_bytes if num_bytes < inside else length

    def retain(self) -> CheckpointFile:
        """Add a holder of the handle. Called by a holder; each calls `close`, and the last one closes it."""
        with self._lock:
            self._holders += 1
        return self

    def close(self) -> None:
        """Close the handle. Reads in flight still end; large ones are cancelled, so that their callers' memory is soon
        free, unless another handle of this version is open. With a single holder, it may be called twice."""
        with self._lock:
            self._holders -= 1
            is_over = self._holders == 0
        if is_over:
            self._release()

    def __enter__(self) -> CheckpointFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_small(self, offset: int, length: int) -> bytes | memoryview:
        answers: list[Answer] = []
        waiting = Waiting()

        def done(answer: Answer) -> None:
            answers.append(answer)
            waiting.ended(answer if isinstance(answer, BootseerError) else None)

        self._shared.read_async(offset, length, done)
        waiting.wait(f"{self.path}: bytes {offset} to {offset + length}", self._shared.stall_s)
        answer = answers[0]
        if isinstance(answer, BootseerError):
            raise answer
        return answer

    def _wait_for(self, begin: Callable[[Gather], None]) -> None:
        waiting = Waiting()
        self._shared.large_reads.add(waiting)
        try:
            begin(waiting)
            waiting.wait(self.path, self._shared.stall_s)
        except BaseException:  # a signal perhaps, or a read whose end was lost
            waiting.stop(TransientError(f"{self.path}: the read was interrupted"))
            raise
        finally:
            self._shared.large_reads.discard(waiting)

    def _length(self, offset: int, length: int) -> int:
        self._check_open()
        if offset < 0 or length < 0:
            raise PermanentError(f"{self.path}: there are no {length} bytes at {offset}")
        return max(min(length, self.size_bytes - offset), 0)

    def _check_open(self) -> None:
        if self._holders <= 0:
            raise PermanentError(f"{self.path}: this file was closed")


class PositionedRawIO(io.RawIOBase):
    """Base of raw files that only implement `readinto`, at position `_at`. Not safe for concurrent use."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readall(self) -> bytes:
        """The rest of the file at once, for `read()`; Python's own way is pieces of 8 KiB."""
        rest = bytearray(max(self._length - self._at, 0))
        return bytes(memoryview(rest)[: self.readinto(rest)])

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("negative position")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

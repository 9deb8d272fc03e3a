"""Pieces of files in memory: read ahead of their readers, shared by all readers of the same file, bounded for all
files.

A piece is waiting for memory, loading, or ready; a ready one never changes. A reader holds the pieces that it uses, and
nothing that is held is dropped. Memory is taken before it is allocated. When there is none left, reads that a reader
waits for drop what was read ahead and not used for longest, or wait in turn until others let go; reads ahead drop only
what is used up or idle, and else are refused.

`Prefetch` brings a part of a file into the node's cache, or into memory, before it is read. It keeps a bounded number
of pieces under way, gives way to all that wait for a read, for memory or for the disk, and its failure does no harm:
what it did not bring is read when it is wanted.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from itertools import islice
from typing import NamedTuple

from bootseer.checkpoint.reading.source import Counters, Effect, Job, carry_out, failure
from bootseer.errors import BootseerError, TransientError
from bootseer.io.timer import Timer

MIN_BYTES = 8 << 20
"""With less, the largest pieces would hardly fit."""
_FOR_DEMAND = 4
"""One of so many bytes is left by reads ahead to reads that a reader waits for."""


class Key(NamedTuple):
    """Which piece: of which file, and from where on. Pieces that no other read can use have a `start` below zero."""

    file: int
    start: int


class Ask(NamedTuple):
    """A piece that is wanted: `length` bytes of the file from `offset` on."""

    key: Key
    offset: int
    length: int


class _State(Enum):
    QUEUED = 1
    LOADING = 2
    READY = 3


class BufferedPiece:
    """One piece. `data` may be read while it is held and `error` is None."""

    __slots__ = (
        "data", "dropped", "error", "job", "key", "length", "load", "offset", "spent", "state", "used_s", "users",
        "waiters",
    )  # fmt: skip

    def __init__(self, ask: Ask, load: Load) -> None:
        self.key, self.offset, self.length = ask
        self.data = bytearray()
        self.error: BootseerError | None = None
        self.job: Job | None = None
        """The read that loads it. Set by `load`."""
        self.load = load
        self.state = _State.QUEUED
        self.users = 0
        self.waiters: list[Waiter] = []
        self.used_s = 0.0
        self.dropped = False
        self.spent = False
        """Whether it was read to its end."""


Waiter = Callable[[BufferedPiece], None]
"""Called when a piece is ready or has failed, with the piece held: `let_go` when it is not used any more."""
Load = Callable[[Sequence[BufferedPiece], bool], None]
"""Reads pieces into their `data`; True when a reader waits. Calls `finish` for each of them when it has ended."""


class ChunkBuffer:
    """All pieces of all files. Makes no calls while it holds its lock: see `carry_out`."""

    def __init__(self, limit_bytes: int, idle_s: float, timer: Timer, facts: Counters) -> None:
        if limit_bytes < MIN_BYTES:
            raise ValueError(f"{limit_bytes} bytes of memory; reading needs {MIN_BYTES} at least")
        self._limit = limit_bytes
        self._idle_s = idle_s
        self._timer = timer
        self._facts = facts
        self._lock = threading.Lock()
        self._emptied = threading.Condition(self._lock)
        self._pieces: dict[Key, BufferedPiece] = {}
        self._files: dict[int, set[Key]] = {}
        # Ready and not held, the one that was used longest ago first; those that were read to their ends apart.
        self._idle: OrderedDict[Key, BufferedPiece] = OrderedDict()
        self._spent: OrderedDict[Key, BufferedPiece] = OrderedDict()
        self._queue: deque[BufferedPiece] = deque()
        self._sweeping = False
        self._overdrawn = False
        self.taken_bytes = 0
        """Memory in use now."""
        self.most_bytes = 0
        """The most memory that was ever in use."""

    def take(self, num_bytes: int, *, demand: bool) -> bool:
        """Whether so many bytes are the caller's, for a purpose of its own. `demand`: a reader waits for that."""
        with self._lock:
            return self._take(num_bytes, demand=demand)

    def overdraw(self, num_bytes: int) -> bool:
        """Take memory whether there is any or not, for a rebuild without which no memory would come back: one at a
        time."""
        with self._lock:
            if self._overdrawn:
                return False
            self._overdrawn = True
            self._add_taken(num_bytes)
            return True

    def give(self, num_bytes: int, *, overdrawn: bool = False) -> None:
        """Give back what was taken; `overdrawn`: some of it by `overdraw`."""
        with self._lock:
            self._overdrawn = self._overdrawn and not overdrawn
            self._give(num_bytes)
            effects = self._serve()
        carry_out(effects)

    def has(self, file: int) -> bool:
        return file in self._files

    def holds(self, key: Key) -> bool:
        """Whether there is this piece, or it is on its way."""
        return key in self._pieces

    def want(self, asks: Sequence[Ask], load: Load, waiter: Waiter) -> None:
        """Hold pieces, loading those that are not there: `waiter` is called for each of them, sooner or later."""
        ready, begun, late = [], [], []
        with self._lock:
            for ask in asks:
                piece = self._pieces.get(ask.key) or self._add(ask, load)
                piece.users += 1
                if piece.state is _State.READY:
                    piece.spent = False
                    self._idle.pop(ask.key, None)
                    self._spent.pop(ask.key, None)
                    ready.append(piece)
                    continue
                if piece.waiters or piece.state is _State.LOADING:
                    late.append(piece)
                elif not self._queue and self._take(piece.length, demand=True):
                    begun.append(piece)
                    piece.state = _State.LOADING
                else:
                    self._queue.append(piece)
                    self._facts.add("waited_for_room")
                piece.waiters.append(waiter)
        hurries: list[Effect] = [job.hurry for piece in late if (job := piece.job) is not None]
        carry_out([*hurries, *self._loads(begun, demand=True), *(partial(waiter, piece) for piece in ready)])

    def ahead(self, asks: Sequence[Ask], load: Load, *, waiter: Waiter | None = None) -> tuple[int, int]:
        """Load pieces before a reader wants them, as far as there is room.

        Returns how many of them need no more asking, and the bytes of those that were begun. With a `waiter`, these are
        held for it.
        """
        begun: list[BufferedPiece] = []
        done = 0
        with self._lock:
            for ask in asks:
                if ask.key not in self._pieces:
                    if self._queue or not self._take(ask.length, demand=False):
                        break
                    piece = self._add(ask, load)
                    piece.state = _State.LOADING
                    if waiter is not None:
                        piece.users += 1
                        piece.waiters.append(waiter)
                    begun.append(piece)
                done += 1
        carry_out(self._loads(begun, demand=False))
        return done, sum(piece.length for piece in begun)

    def finish(self, piece: BufferedPiece, error: BootseerError | None) -> None:
        """A piece was loaded, or could not be: then it is as if it had not been asked for, and the next reader tries
        again. The second time, nothing happens."""
        with self._lock:
            if piece.state is _State.READY:
                return
            piece.job = None
            waiters, piece.waiters = piece.waiters, []
            if error is not None:
                piece.error = error
                self._remove(piece)
            elif not piece.users:
                self._rest(piece)
            piece.state = _State.READY
            effects: list[Effect] = [*(partial(waiter, piece) for waiter in waiters), *self._serve()]
        carry_out(effects)

    def hold(self, piece: BufferedPiece) -> Callable[[], None]:
        """Hold a piece that is held already once more; call what is returned to let go."""
        with self._lock:
            piece.users += 1
        return lambda: self.let_go(piece)

    def let_go(self, piece: BufferedPiece, *, spent: bool = False) -> None:
        """A piece is not used any more by one of its holders. `spent`: it was read to its end."""
        with self._lock:
            piece.users -= 1
            piece.spent = piece.spent or spent
            # What the cache alone holds may be let go while it is loading, as far as this knows: `finish` lays it down.
            if piece.users or piece.state is not _State.READY or piece.error is not None:
                return
            self._rest(piece)
            effects = self._serve()
        carry_out(effects)

    def drop(self, file: int) -> None:
        """The file is not read any more: cancel what is on its way, and drop what is not held."""
        with self._lock:
            jobs = []
            for key in list(self._files.get(file, ())):
                piece = self._pieces[key]
                piece.dropped = True
                if piece.users == 0 and piece.state is _State.READY:
                    self._remove(piece)
                elif piece.users == 0 and piece.job is not None:
                    jobs.append(piece.job)
            effects = [*(job.cancel for job in jobs), *self._serve()]
        carry_out(effects)

    def cancel(self, error: BootseerError) -> None:
        """End all reads that are on their way or wait for memory; their readers get an error."""
        with self._lock:
            queued = list(self._queue)
            self._queue.clear()
            jobs = [piece.job for piece in self._pieces.values() if piece.job is not None]
        carry_out([*(partial(self.finish, piece, error) for piece in queued), *(job.cancel for job in jobs)])

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until nothing is held or on its way: whether it is so."""
        with self._lock:
            return self._emptied.wait_for(lambda: not self.taken_bytes, timeout_s)

    def _loads(self, pieces: Iterable[BufferedPiece], *, demand: bool) -> list[Effect]:
        """The loading of pieces whose state says already that they are loading: those of the same file together."""
        groups: dict[Load, list[BufferedPiece]] = {}
        for piece in pieces:
            groups.setdefault(piece.load, []).append(piece)
        return [partial(self._load, load, group, demand) for load, group in groups.items()]

    def _load(self, load: Load, pieces: Sequence[BufferedPiece], demand: bool) -> None:
        try:
            for piece in pieces:
                piece.data = bytearray(piece.length)
            load(pieces, demand)
        except BaseException as error:
            # Nothing else would ever end these pieces, and every later reader would wait for them.
            for piece in pieces:
                self.finish(piece, failure(error, f"bytes {piece.offset} to {piece.offset + piece.length}"))
            if not isinstance(error, Exception):
                raise

    def _add(self, ask: Ask, load: Load) -> BufferedPiece:
        piece = self._pieces[ask.key] = BufferedPiece(ask, load)
        self._files.setdefault(ask.key.file, set()).add(ask.key)
        return piece

    def _remove(self, piece: BufferedPiece) -> None:
        del self._pieces[piece.key]
        keys = self._files[piece.key.file]
        keys.discard(piece.key)
        if not keys:
            del self._files[piece.key.file]
        self._idle.pop(piece.key, None)
        self._spent.pop(piece.key, None)
        if piece.state is not _State.QUEUED:
            self._give(piece.length)
        piece.data = bytearray()

    def _give(self, num_bytes: int) -> None:
        self.taken_bytes -= num_bytes
        if not self.taken_bytes:
            self._emptied.notify_all()

    def _rest(self, piece: BufferedPiece) -> None:
        """This piece is not held now."""
        if piece.dropped or piece.key.start < 0:
            self._remove(piece)
            return
        piece.used_s = time.monotonic()
        (self._spent if piece.spent else self._idle)[piece.key] = piece
        if not self._sweeping:
            self._sweeping = True
            self._sweep_in(self._idle_s)

    def _take(self, num_bytes: int, *, demand: bool) -> bool:
        limit = self._limit if demand else self._limit - self._limit // _FOR_DEMAND
        idle_before = time.monotonic() - self._idle_s
        while self.taken_bytes + num_bytes > limit:
            if self._spent:
                self._remove(next(iter(self._spent.values())))
                continue
            oldest = next(iter(self._idle.values()), None)
            if oldest is None or (not demand and oldest.used_s > idle_before):
                return False
            self._remove(oldest)
        self._add_taken(num_bytes)
        return True

    def _add_taken(self, num_bytes: int) -> None:
        self.taken_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.taken_bytes)

    def _serve(self) -> list[Effect]:
        """Give room to the pieces that wait for it, in their order. Returns how they are loaded."""
        served: list[BufferedPiece] = []
        while self._queue and self._take(self._queue[0].length, demand=True):
            piece = self._queue.popleft()
            piece.state = _State.LOADING
            served.append(piece)
        return self._loads(served, demand=True)

    def _sweep(self) -> None:
        """Drop what has been idle for long enough."""
        with self._lock:
            before = time.monotonic() - self._idle_s
            for pieces in (self._spent, self._idle):
                while pieces and (oldest := next(iter(pieces.values()))).used_s <= before:
                    self._remove(oldest)
            self._sweeping = bool(self._spent or self._idle)
            if self._sweeping:
                self._sweep_in(self._idle_s / 2)
            effects = self._serve()
        carry_out(effects)

    def _sweep_in(self, delay_s: float) -> None:
        try:
            self._timer.after(delay_s, self._sweep)
        except TransientError:  # no thread can be started: what rests next tries again
            self._sweeping = False


_PAUSE_S = 0.05
_AT_ONCE = 8


class Prefetch:
    """One range that is being brought. Ends by itself, or by `cancel`."""

    def __init__(
        self,
        asks: Iterable[Ask],
        *,
        buffer: ChunkBuffer,
        timer: Timer,
        load: Load,
        is_wanted: Callable[[Ask], bool],
        has_room: Callable[[int], bool],
        max_bytes: int,
        spent: bool,
        ended: Callable[[Prefetch], None],
    ) -> None:
        """`is_wanted`: asked before a piece is brought. `has_room`: whether so much could be kept now. `spent`: pieces
        are kept elsewhere, and their memory is of no more use.
        """
        self._coming = iter(asks)
        self._left: deque[Ask] = deque()  # the next of them
        self._buffer = buffer
        self._timer = timer
        self._load = load
        self._is_wanted = is_wanted
        self._has_room = has_room
        self._max_bytes = max_bytes
        self._spent = spent
        self._ended = ended
        self._lock = threading.Lock()
        self._in_flight = 0
        self._working = False
        self._pausing = False
        self._over = False

    def go_on(self) -> None:
        """Bring more, as far as there is room. Called again whenever a piece has ended."""
        with self._lock:
            if self._working:
                return
            self._working = True
        try:
            while (batch := self._next()) is not None:
                # Outside of the lock: this looks into the node's cache.
                asks = [ask for ask in batch if self._is_wanted(ask)]
                done, begun_bytes = self._buffer.ahead(asks, self._load, waiter=self._arrived)
                with self._lock:
                    self._in_flight -= sum(ask.length for ask in batch) - begun_bytes
                    if done < len(asks):  # no memory for these now
                        self._left.extendleft(reversed(asks[done:]))
                        self._pause()
        except BaseException:
            with self._lock:
                self._working = False
            raise

    def cancel(self) -> None:
        with self._lock:
            self._coming = iter(())
            self._left.clear()

    def _next(self) -> list[Ask] | None:
        """The next pieces; None when there is no room for any, or none is left. Several at once belong to one row."""
        batch: list[Ask] = []
        with self._lock:
            while self._has_more() and len(batch) < _AT_ONCE and not self._pausing:
                ask = self._left[0]
                if self._in_flight + ask.length > self._max_bytes or not self._has_room(self._in_flight + ask.length):
                    break
                batch.append(self._left.popleft())
                self._in_flight += ask.length
            if batch:
                return batch
            self._working = False
            if self._left and not self._in_flight:
                self._pause()
            over = not self._left and not self._in_flight and not self._over
            self._over = self._over or over
        if over:
            self._ended(self)
        return None

    def _has_more(self) -> bool:
        if not self._left:
            self._left.extend(islice(self._coming, _AT_ONCE))
        return bool(self._left)

    def _pause(self) -> None:
        if not self._pausing:
            try:
                self._timer.after(_PAUSE_S, self._resume)
                self._pausing = True
            except TransientError:  # no thread can be started to go on: readers bring what they want
                self._coming = iter(())
                self._left.clear()

    def _resume(self) -> None:
        with self._lock:
            self._pausing = False
        self.go_on()

    def _arrived(self, piece: BufferedPiece) -> None:
        self._buffer.let_go(piece, spent=self._spent)
        with self._lock:
            self._in_flight -= piece.length
        self.go_on()

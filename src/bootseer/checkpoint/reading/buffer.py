"""Pieces of files in memory: read ahead of their readers, shared by all readers of a file, within one memory budget.

A piece is queued for memory, loading, or ready; a ready piece never changes. Pieces are reference-counted, and a piece
in use is never dropped. Memory is reserved before it is allocated. When the budget is exhausted, demand reads evict
pieces that were read ahead, least recently used first, or queue until others are released; read-ahead only evicts
consumed or idle pieces, and is refused otherwise.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

from msgspec import Struct, field

from bootseer.checkpoint.reading.transfer import Counters, Effect, Job, failure, run_effects
from bootseer.errors import BootseerError, TransientError, UsageError
from bootseer.io.timer import Timer
from bootseer.units import format_bytes

MIN_BYTES = 8 << 20
"""With less memory, the largest pieces would hardly fit."""
_DEMAND_SHARE = 4
"""Read-ahead leaves 1/4 of the memory to demand reads."""


class Key(NamedTuple):
    """Identity of a piece: its file and start. Pieces that no other read can share have a negative `start`."""

    file: int
    start: int


class PieceRequest(NamedTuple):
    """A piece that is wanted: `length` bytes of the file from `offset` on."""

    key: Key
    offset: int
    length: int


class _State(Enum):
    QUEUED = 1
    LOADING = 2
    READY = 3


class BufferedPiece(Struct, eq=False):
    """One piece. `data` may be read by holders while `error` is None."""

    key: Key
    offset: int
    length: int
    load: Load
    data: bytearray = field(default_factory=bytearray)
    error: BootseerError | None = None
    job: Job | None = None
    """The read in flight that loads it. Set by `load`."""
    state: _State = _State.QUEUED
    users: int = 0
    waiters: list[Waiter] = field(default_factory=list)
    used_s: float = 0.0
    dropped: bool = False
    consumed: bool = False
    """Whether it was read to its end."""


Waiter = Callable[[BufferedPiece], None]
"""Called when a piece is ready or has failed. The callee holds the piece, and must `release` it."""
Load = Callable[[Sequence[BufferedPiece], bool], None]
"""Reads pieces into their `data`; the flag says whether a reader waits. Calls `finish` once for each of them."""


class ChunkBuffer:
    """All pieces of all files. Calls nothing while its lock is held: see `run_effects`."""

    def __init__(self, limit_bytes: int, idle_s: float, timer: Timer, facts: Counters) -> None:
        if limit_bytes < MIN_BYTES:
            raise UsageError(f"{format_bytes(limit_bytes)} of memory: reading needs at least {format_bytes(MIN_BYTES)}")
        self._limit = limit_bytes
        self._idle_s = idle_s
        self._timer = timer
        self._facts = facts
        self._lock = threading.Lock()
        self._emptied = threading.Condition(self._lock)
        self._pieces: dict[Key, BufferedPiece] = {}
        # Ready and unused, in the order of eviction: those that were read to their ends, then the least recently used.
        self._idle: OrderedDict[Key, BufferedPiece] = OrderedDict()
        self._queue: deque[BufferedPiece] = deque()
        self._sweeping = False
        self._overdrawn = False
        self.used_bytes = 0
        """Memory in use now."""
        self.peak_bytes = 0
        """The highest memory use so far."""

    def reserve(self, num_bytes: int, *, demand: bool) -> bool:
        """Reserve memory for the caller's own use; returns whether it was granted. `demand`: a reader waits for it."""
        with self._lock:
            return self._reserve(num_bytes, demand=demand)

    def overdraw(self, num_bytes: int) -> bool:
        """Reserve beyond the budget, for a rebuild without which no memory would be released; one at a time."""
        with self._lock:
            if self._overdrawn:
                return False
            self._overdrawn = True
            self._add_used(num_bytes)
            return True

    def free(self, num_bytes: int, *, overdrawn: bool = False) -> None:
        """Free reserved memory; `overdrawn`: some of it was reserved by `overdraw`."""
        with self._lock:
            self._overdrawn = self._overdrawn and not overdrawn
            self._free(num_bytes)
            effects = self._start_queued()
        run_effects(effects)

    def has(self, file: int) -> bool:
        return any(key.file == file for key in list(self._pieces))

    def contains(self, key: Key) -> bool:
        """Whether the piece exists, loading or ready."""
        return key in self._pieces

    def acquire(self, requests: Sequence[PieceRequest], load: Load, waiter: Waiter) -> None:
        """Hold pieces, loading missing ones; `waiter` is called once for each of them."""
        ready, begun, late = [], [], []
        with self._lock:
            for request in requests:
                piece = self._pieces.get(request.key) or self._add(request, load)
                piece.users += 1
                if piece.state is _State.READY:
                    piece.consumed = False
                    self._idle.pop(request.key, None)
                    ready.append(piece)
                    continue
                if piece.waiters or piece.state is _State.LOADING:
                    late.append(piece)
                elif not self._queue and self._reserve(piece.length, demand=True):
                    begun.append(piece)
                    piece.state = _State.LOADING
                else:
                    self._queue.append(piece)
                    self._facts.add("waited_for_room")
                piece.waiters.append(waiter)
        hurries: list[Effect] = [job.prioritize for piece in late if (job := piece.job) is not None]
        run_effects([*hurries, *self._loads(begun, demand=True), *(partial(waiter, piece) for piece in ready)])

    def read_ahead(
        self, requests: Sequence[PieceRequest], load: Load, *, waiter: Waiter | None = None
    ) -> tuple[int, int]:
        """Load pieces before a reader needs them, as far as memory allows.

        Returns how many of the requests are settled, and how many of these were started now. With a `waiter`, the
        started pieces are held for it.
        """
        begun: list[BufferedPiece] = []
        done = 0
        with self._lock:
            for request in requests:
                if request.key not in self._pieces:
                    if self._queue or not self._reserve(request.length, demand=False):
                        break
                    piece = self._add(request, load)
                    piece.state = _State.LOADING
                    if waiter is not None:
                        piece.users += 1
                        piece.waiters.append(waiter)
                    begun.append(piece)
                done += 1
        run_effects(self._loads(begun, demand=False))
        return done, len(begun)

    def finish(self, piece: BufferedPiece, error: BootseerError | None) -> None:
        """A piece was loaded, or failed and is forgotten: the next reader tries again. A second call has no effect."""
        with self._lock:
            if piece.state is _State.READY:
                return
            piece.job = None
            waiters, piece.waiters = piece.waiters, []
            if error is not None:
                piece.error = error
                self._remove(piece)
            elif not piece.users:
                self._make_idle(piece)
            piece.state = _State.READY
            effects: list[Effect] = [*(partial(waiter, piece) for waiter in waiters), *self._start_queued()]
        run_effects(effects)

    def retain(self, piece: BufferedPiece) -> Callable[[], None]:
        """Add a holder to a piece in use; call the returned function to release it."""
        with self._lock:
            piece.users += 1
        return lambda: self.release(piece)

    def release(self, piece: BufferedPiece, *, consumed: bool = False) -> None:
        """Drop a holder of a piece. `consumed`: the piece was read to its end."""
        with self._lock:
            piece.users -= 1
            piece.consumed = piece.consumed or consumed
            # The cache writer may release a piece that still counts as loading here: then `finish` makes it idle.
            if piece.users or piece.state is not _State.READY or piece.error is not None:
                return
            self._make_idle(piece)
            effects = self._start_queued()
        run_effects(effects)

    def drop(self, file: int) -> None:
        """The file was closed: cancel its reads in flight, and drop its unused pieces."""
        with self._lock:
            jobs = []
            for piece in [piece for key, piece in self._pieces.items() if key.file == file]:
                piece.dropped = True
                if piece.users == 0 and piece.state is _State.READY:
                    self._remove(piece)
                elif piece.users == 0 and piece.job is not None:
                    jobs.append(piece.job)
            effects = [*(job.cancel for job in jobs), *self._start_queued()]
        run_effects(effects)

    def cancel(self, error: BootseerError) -> None:
        """End all queued and in-flight reads; their readers get `error`."""
        with self._lock:
            queued = list(self._queue)
            self._queue.clear()
            jobs = [piece.job for piece in self._pieces.values() if piece.job is not None]
        run_effects([*(partial(self.finish, piece, error) for piece in queued), *(job.cancel for job in jobs)])

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until no memory is in use. Returns whether that was so in time."""
        with self._lock:
            return self._emptied.wait_for(lambda: not self.used_bytes, timeout_s)

    def _loads(self, pieces: Iterable[BufferedPiece], *, demand: bool) -> list[Effect]:
        """Effects that load pieces in the state LOADING, grouped by file."""
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
            # Nothing else would end these pieces, and every later reader would wait forever.
            for piece in pieces:
                self.finish(piece, failure(error, f"bytes {piece.offset} to {piece.offset + piece.length}"))
            if not isinstance(error, Exception):
                raise

    def _add(self, request: PieceRequest, load: Load) -> BufferedPiece:
        piece = self._pieces[request.key] = BufferedPiece(*request, load)
        return piece

    def _remove(self, piece: BufferedPiece) -> None:
        del self._pieces[piece.key]
        self._idle.pop(piece.key, None)
        if piece.state is not _State.QUEUED:
            self._free(piece.length)
        piece.data = bytearray()

    def _free(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes
        if not self.used_bytes:
            self._emptied.notify_all()

    def _make_idle(self, piece: BufferedPiece) -> None:
        if piece.dropped or piece.key.start < 0:
            self._remove(piece)
            return
        piece.used_s = time.monotonic()
        self._idle[piece.key] = piece
        self._idle.move_to_end(piece.key, last=not piece.consumed)
        if not self._sweeping:
            self._sweeping = True
            self._sweep_in(self._idle_s)

    def _reserve(self, num_bytes: int, *, demand: bool) -> bool:
        limit = self._limit if demand else self._limit - self._limit // _DEMAND_SHARE
        idle_before = time.monotonic() - self._idle_s
        while self.used_bytes + num_bytes > limit:
            oldest = next(iter(self._idle.values()), None)
            if oldest is None or not (demand or oldest.consumed or oldest.used_s <= idle_before):
                return False
            self._remove(oldest)
        self._add_used(num_bytes)
        return True

    def _add_used(self, num_bytes: int) -> None:
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _start_queued(self) -> list[Effect]:
        """Start queued pieces, in order, as far as memory allows. Returns effects that load them."""
        served: list[BufferedPiece] = []
        while self._queue and self._reserve(self._queue[0].length, demand=True):
            piece = self._queue.popleft()
            piece.state = _State.LOADING
            served.append(piece)
        return self._loads(served, demand=True)

    def _sweep(self) -> None:
        with self._lock:
            before = time.monotonic() - self._idle_s
            for piece in [piece for piece in self._idle.values() if piece.used_s <= before]:
                self._remove(piece)
            self._sweeping = bool(self._idle)
            if self._sweeping:
                self._sweep_in(self._idle_s / 2)
            effects = self._start_queued()
        run_effects(effects)

    def _sweep_in(self, delay_s: float) -> None:
        try:
            self._timer.after(delay_s, self._sweep)
        except TransientError:  # no thread can be started: the next idle piece tries again
            self._sweeping = False

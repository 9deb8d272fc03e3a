"""Materializer part of a file into the node's cache, or into memory, before it is read.

It keeps a bounded number of pieces under way, gives way to all that wait for a read, for memory or for the disk,
and its failure does no harm: what it did not bring is read when it is wanted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from bootseer.checkpoint.reading.buffer import Ask, BufferedPiece, ChunkBuffer, Load
from bootseer.errors import TransientError
from bootseer.io.timer import Timer

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
        """Bring nothing more."""
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

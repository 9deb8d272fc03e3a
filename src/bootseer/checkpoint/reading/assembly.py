"""The answer to one small read, from the pieces that hold it. Made by `shared_file`."""

from __future__ import annotations

import threading
from collections.abc import Callable

from bootseer.checkpoint.reading.buffer import ChunkBuffer, Held
from bootseer.errors import BootseerError

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

    def arrived(self, piece: Held) -> None:
        """A piece is ready, or has failed."""
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

    def _let_go(self, piece: Held) -> None:
        self._buffer.let_go(piece, spent=self._end >= piece.offset + piece.length)

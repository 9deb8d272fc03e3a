"""The answer to one small read, from the pieces that hold it. Made by `shared_file`."""

from __future__ import annotations

import threading
from collections.abc import Callable

from bootseer.checkpoint.reading.buffer import ChunkBuffer, Held
from bootseer.errors import BootseerError

Answer = bytes | memoryview | BootseerError


class Assembly:
    """Waits for pieces, and answers when the last is there."""

    def __init__(
        self, buffer: ChunkBuffer, offset: int, length: int, num_pieces: int, done: Callable[[Answer], None]
    ) -> None:
        self._buffer = buffer
        self._offset = offset
        self._end = offset + length
        self._missing = num_pieces
        self._done = done
        self._lock = threading.Lock()
        self._pieces: list[Held] = []

    def arrived(self, piece: Held) -> None:
        """A piece is ready, or has failed."""
        with self._lock:
            self._pieces.append(piece)
            self._missing -= 1
            if self._missing:
                return
        try:
            self._done(self._answer())
        finally:
            for one in self._pieces:
                self._buffer.let_go(one, spent=self._end >= one.offset + one.length)

    def _answer(self) -> Answer:
        for piece in self._pieces:
            if piece.error is not None:
                return piece.error
        views = [
            memoryview(piece.data)[max(self._offset - piece.offset, 0) : self._end - piece.offset]
            for piece in sorted(self._pieces, key=lambda piece: piece.offset)
        ]
        return views[0] if len(views) == 1 else b"".join(views)

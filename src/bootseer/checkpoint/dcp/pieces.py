"""A file that lies in memory in pieces, as torch.load and zipfile take it.

A tensor is read straight into its place, what surrounds it into a buffer: together they are the file again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING

from bootseer.checkpoint.positioned import Positioned

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class MissingError(OSError):
    """Bytes are asked for that were not read."""


class Pieces(Positioned):
    """`length` bytes, of which some are there. Not safe for several threads at once."""

    def __init__(self, length: int, pieces: Iterable[tuple[int, memoryview]]) -> None:
        super().__init__(length)
        self._pieces = sorted(((at, view) for at, view in pieces if view), key=lambda piece: piece[0])
        self._starts = [at for at, _ in self._pieces]

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        into = memoryview(buffer).cast("B")
        done = 0
        wanted = min(len(into), self._length - self._at)
        while done < wanted:
            found = self.view(self._at, wanted - done)
            into[done : done + len(found)] = found
            done += len(found)
            self._at += len(found)
        return max(done, 0)

    def view(self, at: int, length: int) -> memoryview:
        """Up to `length` bytes from `at` on, as far as one piece goes. Raises `MissingError`."""
        number = bisect_right(self._starts, at) - 1
        if number >= 0:
            start, piece = self._pieces[number]
            if at - start < len(piece):
                return piece[at - start : at - start + length]
        raise MissingError(f"byte {at} of {self._length} was not read")

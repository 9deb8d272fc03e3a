"""Ranges that several readers want at once, so that no byte is read twice. Decides and touches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """Bytes `start` to `end` of the file, to be read for range number `number`."""

    start: int
    end: int
    number: int


class Copy(NamedTuple):
    """Bytes `start` to `end` of the file, which range `number` has in common with range `source`."""

    start: int
    end: int
    number: int
    source: int


def apart(ranges: Sequence[tuple[int, int]]) -> tuple[list[Piece], list[Copy]]:
    """Ranges (start, end) as pieces that do not overlap, in the order of the file, and what is copied between them."""
    pieces: list[Piece] = []
    copies: list[Copy] = []
    for number in sorted(range(len(ranges)), key=lambda number: (ranges[number][0], -ranges[number][1])):
        start, end = ranges[number]
        # Ranges come in the order of their starts: what overlaps this one is the end of what was read so far.
        for piece in reversed(pieces):
            if piece.end <= start:
                break
            low, high = max(piece.start, start), min(piece.end, end)
            if low < high:
                copies.append(Copy(low, high, number, piece.number))
        read_to = pieces[-1].end if pieces else 0
        if max(start, read_to) < end:
            pieces.append(Piece(max(start, read_to), end, number))
    return pieces, copies

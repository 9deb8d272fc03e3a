"""Which bytes of a file are there: ranges that do not touch each other, in order.

Sequential writers have one range; one that writes all over the place has as many as it leaves gaps. Called by
`sending`. Decides and touches nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class Ranges:
    """A set of offsets, kept as half-open ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._ends, strict=True)))

    def add(self, start: int, end: int) -> int:
        """Put a range in: how many offsets are new."""
        if end <= start:
            return 0
        # What touches it becomes one with it.
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        known = 0
        for at in range(first, last):
            known += max(min(self._ends[at], end) - max(self._starts[at], start), 0)
        fresh = end - start - known
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        return fresh

    def remove(self, start: int, end: int) -> int:
        """Take a range out: how many offsets were in."""
        if end <= start:
            return 0
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if first >= last:
            return 0
        count = sum(min(self._ends[at], end) - max(self._starts[at], start) for at in range(first, last))
        rests = [(self._starts[first], start), (end, self._ends[last - 1])]
        rests = [(begin, stop) for begin, stop in rests if begin < stop]
        self._starts[first:last] = [begin for begin, _ in rests]
        self._ends[first:last] = [stop for _, stop in rests]
        return count

    def missing(self, start: int, end: int) -> int:
        """How many offsets of a range are not in."""
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        known = sum(min(self._ends[at], end) - max(self._starts[at], start) for at in range(first, last))
        return max(end - start, 0) - known

    def end_from(self, start: int) -> int:
        """Where the range that `start` lies in ends; `start` itself when it is not in."""
        at = bisect_right(self._starts, start) - 1
        return max(self._ends[at], start) if at >= 0 else start

    def total(self) -> int:
        """How many offsets are in."""
        return sum(self._ends) - sum(self._starts)

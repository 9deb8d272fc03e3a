"""Byte ranges of files: joined into spans over small gaps, collected in sets. Decides and touches nothing."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Generic, TypeVar

T = TypeVar("T")

GAP_BYTES = 1 << 20
"""Reading so many unwanted bytes costs about as much as another request."""
_STRETCH_BYTES = 64 << 20
"""Spans within so many bytes of a file are probably on the same disk."""
_STRETCHES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Range(Generic[T]):
    """Bytes `start` to `end` of a file, and what they are for."""

    start: int
    end: int
    item: T


@dataclass(frozen=True, slots=True)
class Span(Generic[T]):
    """Bytes `start` to `end` of a file, read at once; the ranges in it are in order and do not overlap."""

    start: int
    end: int
    ranges: tuple[Range[T], ...]


def join(ranges: Iterable[Range[T]], *, max_bytes: int, gap_bytes: int = GAP_BYTES) -> list[Span[T]]:
    """Join ranges of one file into spans, in order. A range of more than `max_bytes` is a span of its own."""
    spans: list[Span[T]] = []
    joined: list[Range[T]] = []
    for one in sorted(ranges, key=lambda one: (one.start, one.end)):
        if joined and not (0 <= one.start - joined[-1].end <= gap_bytes and one.end - joined[0].start <= max_bytes):
            spans.append(Span(joined[0].start, joined[-1].end, tuple(joined)))
            joined = []
        joined.append(one)
    if joined:
        spans.append(Span(joined[0].start, joined[-1].end, tuple(joined)))
    return spans


def spread(spans: Mapping[str, Iterable[Span[T]]]) -> Iterator[tuple[str, Span[T]]]:
    """The spans of many files, in an order in which neighbours tend to lie on different disks.

    The blocks of an ordinary file follow each other, each on one disk: read in order, one disk would work while the
    others idle.
    """
    stretches: dict[tuple[int, str], list[Span[T]]] = {}
    for file, of_file in spans.items():
        for span in of_file:
            stretches.setdefault((span.start // _STRETCH_BYTES, file), []).append(span)
    order = sorted(stretches)
    for first in range(0, len(order), _STRETCHES_AT_ONCE):
        group = order[first : first + _STRETCHES_AT_ONCE]
        for row in zip_longest(*(stretches[key] for key in group)):
            yield from ((file, span) for (_, file), span in zip(group, row, strict=True) if span is not None)


class Ranges:
    """A set of integers, stored as half-open ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Add a range."""
        if end <= start:
            return
        # Ranges that touch it are merged with it.
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def remove(self, start: int, end: int) -> int:
        """Remove a range; returns how many integers were removed."""
        if end <= start:
            return 0
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if first >= last:
            return 0
        count = sum(high - low for low, high in self.within(start, end))
        rests = [(self._starts[first], start), (end, self._ends[last - 1])]
        rests = [(begin, stop) for begin, stop in rests if begin < stop]
        self._starts[first:last] = [begin for begin, _ in rests]
        self._ends[first:last] = [stop for _, stop in rests]
        return count

    def within(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """What of a range is in the set."""
        for at in range(bisect_right(self._ends, start), bisect_left(self._starts, end)):
            yield max(self._starts[at], start), min(self._ends[at], end)

    def missing(self, start: int, end: int) -> int:
        """How many integers of a range are not in the set."""
        return max(end - start, 0) - sum(high - low for low, high in self.within(start, end))

    def end_from(self, start: int) -> int:
        """The end of the stored range that contains `start`; `start` itself if none does."""
        at = bisect_right(self._starts, start) - 1
        return max(self._ends[at], start) if at >= 0 else start

    def total(self) -> int:
        return sum(self._ends) - sum(self._starts)

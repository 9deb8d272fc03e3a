"""Which reads to make for many wanted ranges of files: sorted, joined over small gaps, spread over the files.

Called by the readers of PyTorch checkpoints and of safetensors, and by the fsspec file system. Decides and touches
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Generic, TypeVar

T = TypeVar("T")

GAP_BYTES = 1 << 20
"""Reading so much that nobody wants costs about as much as one more request."""
_STRETCH_BYTES = 64 << 20
"""Within so much of a file the next span is probably on the same disk as the last."""
_STRETCHES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Range(Generic[T]):
    """Bytes `start` to `end` of a file, and what they are wanted for."""

    start: int
    end: int
    what: T


@dataclass(frozen=True, slots=True)
class Span(Generic[T]):
    """Bytes `start` to `end` of a file, read at once; the ranges in it are in order and do not overlap."""

    start: int
    end: int
    ranges: tuple[Range[T], ...]


def join(ranges: Iterable[Range[T]], *, max_bytes: int, gap_bytes: int = GAP_BYTES) -> list[Span[T]]:
    """Ranges of one file as spans, in order. A range of more than `max_bytes` is a span of its own."""
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

    A file without stripes has its blocks one after the other, each on one disk: read in order, one disk would work
    while all others wait.
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

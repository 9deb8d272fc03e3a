"""Which part of a stored tensor a target wants, as bytes in a row, and where they probably lie.

Decides and reads nothing.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import ReadItem

from bootseer.checkpoint.dcp.items import Stored
from bootseer.checkpoint.dcp.saved import Pieces, layout_of
from bootseer.checkpoint.tensors import is_plain


class Part(NamedTuple):
    """Bytes of the elements that a target takes as they are."""

    start: int
    length: int
    total: int
    """Of all elements."""


def part_for(item: Stored, request: ReadItem, target: torch.Tensor) -> Part | None:
    """What to read straight into `target`, if what is stored has its type and the elements are in a row."""
    if not is_plain(target) or tuple(target.shape) != tuple(request.lengths):
        return None
    row = _row(item.sizes, request.storage_offsets, request.lengths)
    if row is None:
        return None
    size = target.element_size()
    return Part(row * size, target.numel() * size, math.prod(item.sizes) * size)


def _row(sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> int | None:
    """Index of the first element of a box in a tensor, or None when its elements are not in a row."""
    inner = 1  # elements in one step of this dimension
    first = 0
    ended = False  # a dimension was cut: those further out must be of one step
    for size, offset, length in zip(reversed(sizes), reversed(offsets), reversed(lengths), strict=True):
        if ended and length != 1:
            return None
        ended = ended or length != size
        first += offset * inner
        inner *= size
    return first


class Expected:
    """Where `torch.save` puts elements: it depends on the lengths of numbers in its pickle, so that tensors of one
    kind have them at one place. What is wrong costs time and is noticed: `layout_of` has the last word."""

    def __init__(self) -> None:
        sample = io.BytesIO()
        torch.save(torch.zeros(1), sample)
        layout = layout_of(Pieces(len(sample.getbuffer()), [(0, sample.getbuffer())]))
        self._first = layout.at if layout else 0
        self._seen: dict[tuple[object, ...], int] = {}
        self.again = threading.Lock()
        """Held while an item is read as a whole that could not be taken straight: no budget counts that memory."""

    def of(self, item: Stored) -> int:
        """Where in the item its elements begin, by experience; 0 when they cannot be taken as they are."""
        return self._seen.get(_kind(item), self._first)

    def note(self, item: Stored, at: int) -> None:
        """Remember where they began, or 0. Safe from any thread: a lost note costs a little time."""
        self._seen[_kind(item)] = at
        self._first = at or self._first


def _kind(item: Stored) -> tuple[object, ...]:
    return (item.file, item.dtype, *(size.bit_length() // 8 for size in item.sizes))

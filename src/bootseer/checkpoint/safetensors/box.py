"""Which bytes to read for a slice of a tensor: few requests, without reading much more than is needed.

Decides and reads nothing.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from types import EllipsisType
from typing import NamedTuple, SupportsIndex, cast

from bootseer.checkpoint.ranges import GAP_BYTES

Index = int | slice | EllipsisType


class Box(NamedTuple):
    """A slice of a tensor: start and count in each dimension, and an index to apply afterwards."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    then: tuple[int | slice, ...]
    """Index into the box: steps, and dimensions that an int removes."""


def is_box(index: object) -> bool:
    """Whether an index consists of numbers and slices, with at most one `...`, so that it has a box."""
    given = index if isinstance(index, tuple) else (index,)
    return sum(one is ... for one in given) <= 1 and all(
        isinstance(one, slice | EllipsisType) or _is_number(one) for one in given
    )


def _is_number(index: object) -> bool:
    if isinstance(index, bool):
        return False
    try:
        operator.index(cast(SupportsIndex, index))
    except (TypeError, ValueError):
        return False
    return not getattr(index, "shape", ())  # an array of one number is an array


def box_of(shape: Sequence[int], index: Index | tuple[Index, ...]) -> Box:
    """The box of such an index. Raises `IndexError` as PyTorch does."""
    given = list(index) if isinstance(index, tuple) else [index]
    if ... not in given:
        given.append(...)
    at = given.index(...)
    if len(given) - 1 > len(shape):
        raise IndexError(f"{len(given) - 1} indexes for a tensor of {len(shape)} dimensions")
    given[at : at + 1] = [slice(None)] * (len(shape) - len(given) + 1)
    boxes = [_of_one(size, one) for size, one in zip(shape, given, strict=True)]
    return Box(tuple(one[0] for one in boxes), tuple(one[1] for one in boxes), tuple(one[2] for one in boxes))


def _of_one(size: int, index: Index) -> tuple[int, int, int | slice]:
    if isinstance(index, slice):
        start, stop, step = index.indices(size)
        if step < 1:
            raise IndexError("a step must be positive")
        chosen = range(start, stop, step)
        return (start, chosen[-1] - start + 1, slice(None, None, step)) if chosen else (0, 0, slice(None))
    number = operator.index(cast(SupportsIndex, index))
    if not -size <= number < size:
        raise IndexError(f"index {number} in a dimension of {size}")
    return number % size, 1, 0


class Runs(NamedTuple):
    """Byte runs of equal length, one for each index of the outer dimensions of a box."""

    starts: list[int]
    """Start of each run, in bytes from the tensor's first element, in the order of the outer indexes."""
    length: int
    num_outer: int
    """The number of outer dimensions."""


def runs_of(shape: Sequence[int], box: Box, itemsize: int, gap_bytes: int = GAP_BYTES) -> Runs:
    """The runs of a non-empty box. Gaps that cost less than a request are read too."""
    strides = strides_of(shape)
    length = itemsize
    outer = len(shape)
    while outer:
        step = strides[outer - 1] * itemsize
        count = box.counts[outer - 1]
        if count > 1 and step - length > gap_bytes:
            break
        length += (count - 1) * step
        outer -= 1
    first = sum(start * stride for start, stride in zip(box.starts, strides, strict=True)) * itemsize
    starts = [
        first + sum(number * stride for number, stride in zip(numbers, strides[:outer], strict=True)) * itemsize
        for numbers in itertools.product(*map(range, box.counts[:outer]))
    ]
    return Runs(starts, length, outer)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    return tuple(itertools.accumulate(reversed(shape), operator.mul, initial=1))[-2::-1] if shape else ()

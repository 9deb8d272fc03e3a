"""Histograms of durations, as in the table `stage_day`: 96 classes, from 0.05 s to 8 days; earlier services wrote 64.

Sums of days are histograms because medians of days cannot be combined. Decides and touches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import zip_longest
from typing import Final

CLASSES: Final = 96
_FIRST_S: Final = 0.05
_PER_DOUBLING: Final = 4


def class_of(value_s: float) -> int:
    """The class of a duration: the upper bounds of classes grow by 2 ** 0.25."""
    if value_s <= _FIRST_S:
        return 0
    return min(math.ceil(_PER_DOUBLING * math.log2(value_s / _FIRST_S)), CLASSES - 1)


def bound_s(number: int) -> float:
    """The upper bound of a class."""
    return _FIRST_S * math.pow(2.0, number / _PER_DOUBLING)


def sum_of(*hists: Iterable[int]) -> list[int]:
    """The sum of histograms."""
    return list(map(sum, zip_longest(*hists, fillvalue=0)))


def quantile_s(hist: Iterable[int], share: float) -> float | None:
    """An upper bound of a quantile of a histogram, at most 19 % above it; None if it is empty."""
    counts = list(hist)
    wanted, seen = share * sum(counts), 0
    for number, count in enumerate(counts):
        seen += count
        if count and seen >= wanted:
            return bound_s(number)
    return None


def middle_s(hist: Iterable[int], share: float) -> float | None:
    """The quantile, within 9 %: the middle of its class."""
    bound = quantile_s(hist, share)
    return None if bound is None else bound / math.pow(2.0, 0.5 / _PER_DOUBLING)

"""Which chunk of a row to compute from the others and parity, instead of waiting for its own part.

Decides and touches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from bootseer.checkpoint.reading.settings import ReadingSettings

_WORTH = 1.5
_WORTH_S = 0.05
"""Rebuilding costs some time of the processor: parity must come so much earlier."""
_ALONE_WORTH = 2.0
_ALONE_WORTH_S = 0.25
"""... and much earlier where the other chunks of the row must be read for it, which were not asked for."""


def chunk_to_skip(delays: Mapping[int, float], wanted: frozenset[int], parity_s: float) -> int | None:
    """Which chunk of a row not to ask its own part for; None: none of them.

    `delays`: when each chunk of the row would be here; `wanted`: those that were asked for.
    """
    last = max(wanted, key=lambda chunk: delays[chunk])
    others = [delay_s for chunk, delay_s in delays.items() if chunk not in wanted]
    return last if _pays(delays[last], max([parity_s, *others]), alone=bool(others)) else None


def chunk_to_replace(left: Mapping[int, float], others_s: float, parity_s: float, *, alone: bool) -> int | None:
    """Which of the chunks that are on their way to give up for parity; None: none of them.

    `left`: when each of them will be here; `others_s`: when the rest of the row will be; `alone`: some of that would be
    read for it alone.
    """
    if not left:
        return None
    last = max(left, key=lambda chunk: left[chunk])
    rest_s = max((left_s for chunk, left_s in left.items() if chunk != last), default=0.0)
    return last if _pays(left[last], max(rest_s, others_s, parity_s), alone=alone) else None


def parity_no_longer_pays(own_s: float, parity_s: float) -> bool:
    """Whether a chunk that parity is on its way for, instead of its own part, would come sooner from that by now."""
    return _pays(parity_s, own_s, alone=False)


def is_late(waited_s: float, expected_s: float, settings: ReadingSettings) -> bool:
    """Whether a read has taken so long that something must be wrong, whatever the place knows of it."""
    # Of what was not expected at all, and asked for all the same, nothing is known.
    times = settings.late_factor * expected_s if expected_s < math.inf else 0.0
    return waited_s >= max(settings.late_s, times)


def _pays(own_s: float, instead_s: float, *, alone: bool) -> bool:
    worth, worth_s = (_ALONE_WORTH, _ALONE_WORTH_S) if alone else (_WORTH, _WORTH_S)
    return own_s > instead_s * worth + worth_s

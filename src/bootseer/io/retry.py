"""Retries after transient errors: exponential backoff with full jitter.

A retry storm harms a server that is already in trouble, so waits are random, grow, and are never shorter than the
server asked for.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from bootseer.errors import TransientError
from bootseer.logs import logger

_LOG = logger(__name__)
T = TypeVar("T")

BASE_S = 0.1
"""The first wait is random up to this, the next up to twice this, and so on."""
CAP_S = 10.0
_SHORTEST_S = 1.0
"""An attempt with less time would only time out, and its error would hide the one that says what is wrong."""


def pause_s(
    failures: int, error: Exception | None = None, rng: random.Random | None = None, cap_s: float = CAP_S
) -> float:
    """Seconds to wait after so many consecutive failures; `error` is the last one."""
    rng = rng or random.Random()  # noqa: S311 - spreads requests, keeps no secret
    wait_s = rng.uniform(0, min(BASE_S * 2 ** (failures - 1), cap_s))
    # All clients may have got the same time: spread them.
    return wait_s + (getattr(error, "retry_after_s", None) or 0.0)


def retrying(
    call: Callable[[float], T],
    *,
    attempts: int | None = 5,
    deadline_s: float = 60.0,
    cap_s: float = CAP_S,
    rng: random.Random | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """The result of `call`, retried after each `TransientError`.

    `call` gets the remaining seconds of `deadline_s` and must keep to them. The last error is raised after the last
    attempt (None: no limit of attempts), or if the next one would get less than a second, or a tenth of a shorter
    `deadline_s`.
    """
    until = clock() + deadline_s
    latest = until - min(_SHORTEST_S, deadline_s / 10)
    attempt = 0
    while True:
        attempt += 1
        try:
            return call(max(until - clock(), 0.0))
        except TransientError as error:
            wait_s = pause_s(attempt, error, rng, cap_s)
            if attempt == attempts or clock() + wait_s >= latest:
                raise
            _LOG.info("attempt %d failed, the next one in %.1f s: %s", attempt, wait_s, error)
            sleep(wait_s)

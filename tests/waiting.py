"""Waiting for what threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 120.0


def until(condition: Callable[[], object]) -> None:
    """Wait until it holds."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)

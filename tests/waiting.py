"""Waiting for what threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 300.0
"""A busy machine may take long; what happens in time is never waited for longer than it takes."""


def until(condition: Callable[[], object], what: str = "what is waited for") -> None:
    """Wait until it holds. `what` describes it for the message of a failure."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.005)

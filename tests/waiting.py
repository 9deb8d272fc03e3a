"""Waiting for what threads and processes do, and the processes that run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

DEADLINE_S = 300.0
"""A busy machine may take long; what happens in time is never waited for longer than it takes."""


def until(condition: Callable[[], object], what: str = "what is waited for") -> None:
    """Wait until it holds. `what` describes it for the message of a failure."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.005)


def processes() -> Iterator[tuple[int, bytes]]:
    """Number and command line, with null bytes between the words, of the processes of this machine, also of containers.
    Some may end meanwhile, for which `Path.glob` has an error."""
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            yield int(path.name), (path / "cmdline").read_bytes()

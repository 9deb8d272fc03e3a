"""Waiting for conditions, and listing the running processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

DEADLINE_S = 300.0
"""Long, for busy machines; waits end as soon as the condition holds."""


def until(condition: Callable[[], object], what: str = "what is waited for") -> None:
    """Wait until the condition holds. `what` describes it in the message of a failure."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.005)


def processes() -> Iterator[tuple[int, bytes]]:
    """Ids and command lines, separated by null bytes, of the processes of this machine, including those in containers.
    Processes may end meanwhile, with which `Path.glob` would fail."""
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            yield int(path.name), (path / "cmdline").read_bytes()

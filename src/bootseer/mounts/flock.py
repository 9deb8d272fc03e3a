"""Locks between processes that are waited for with an end: a holder that hangs must not hold up a start for ever.

A lock falls with its holder. Who calls: `kept`, and whoever shares folders with other starts on this machine.
"""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

from bootseer.errors import TransientError

_POLL_S = 0.01


def lock(descriptor: int, path: Path, deadline_s: float) -> None:
    """Lock an open file or folder. `TransientError`, with `path`, when another process holds it for too long."""
    end = time.monotonic() + deadline_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise TransientError(f"{path}: another process has held it for {deadline_s:g} s") from None
            time.sleep(_POLL_S)
        else:
            return

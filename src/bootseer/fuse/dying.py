"""Whether whoever made a request is being killed, so that nobody waits for the answer.

The kernel tells with INTERRUPT of the first signal only, and not whether it ends the process. Most do not, and a
program must not be told EINTR for these: on a disk it never is, and a page fault that is told so is a SIGBUS. /proc
shows a thread that is to die: SIGKILL is pending, whatever signal it was that kills. Called by `writable_session` and
`checkpoint.mount`.
"""

from __future__ import annotations

import signal
from pathlib import Path

_PENDING = "SigPnd:"


def is_dying(thread: int) -> bool:
    """Whether a thread is being killed. One that cannot be seen is not."""
    if thread <= 0:
        return False
    try:
        status = Path(f"/proc/{thread}/status").read_text("utf-8", "replace")
        pending = next(line for line in status.splitlines() if line.startswith(_PENDING))
        return bool(int(pending.removeprefix(_PENDING), 16) >> (signal.SIGKILL - 1) & 1)
    except (OSError, ValueError, StopIteration):
        return False

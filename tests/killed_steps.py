"""Kill a process at one of its steps, for tests that try all steps one after the other.

place.before = kill_at(3)  # `StepwisePlace`
killed = is_killed(lambda: work(place))
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


def kill_at(number: int) -> Callable[[str, str], None]:
    """A function that kills this process at its `number`-th call, or never if 0. Thread-safe."""
    left = [number]
    lock = threading.Lock()

    def count(step: str, path: str) -> None:
        with lock:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return count


def is_killed(work: Callable[[], None]) -> bool:
    """Run `work` in a child process; returns False if it ended without being killed."""
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code != 0

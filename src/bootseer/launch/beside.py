"""What goes on beside the command: threads that the end of the run waits for, but not long.

Imported by `launch.session` only when there is something to do beside the command.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Beside:
    """Threads that are told by `ended` that the command is over."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[[threading.Event], None]) -> None:
        """Run `work(ended)` in a thread of its own. Signals are blocked in it, as they are in ours."""
        thread = threading.Thread(target=work, args=(self.ended,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def finish(self, timeout_s: float) -> None:
        """Tell all threads that the command is over, and wait for them together no longer than this."""
        self.ended.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))

"""One read that is made of several: it ends when all of them have ended, with the first error if there was one."""

from __future__ import annotations

import threading

from bootseer.checkpoint.reading.source import Done
from bootseer.errors import BootseerError


class Gather:
    """Counts what is under way. `then` is called once, by whoever ends last."""

    def __init__(self, then: Done) -> None:
        """It begins with one that is under way: whoever adds the others. So it cannot end before they are there."""
        self._then = then
        self._lock = threading.Lock()
        self._left = 1
        self._error: BootseerError | None = None

    def expect(self, count: int = 1) -> None:
        """So many more will end."""
        with self._lock:
            self._left += count

    def ended(self, error: BootseerError | None = None) -> None:
        """One has ended."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if self._left:
                return
        self._then(self._error)


class Waiting:
    """For a thread that waits for one thing."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BootseerError | None = None

    def ended(self, error: BootseerError | None = None) -> None:
        """It has ended."""
        self._error = error
        self._over.set()

    def wait(self) -> None:
        """Wait for it, and raise its error. No deadline here: each read has one, and a large one has many reads."""
        self._over.wait()
        if self._error is not None:
            raise self._error

    def wait_over(self, timeout_s: float = 5.0) -> None:
        """Wait a little for its end, whatever that is."""
        self._over.wait(timeout_s)

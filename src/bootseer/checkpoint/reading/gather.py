"""One read that is made of several: it ends when all of them have ended, with the first error if there was one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from bootseer.checkpoint.reading.source import Done
from bootseer.checkpoint.reading.transfer import Transfer
from bootseer.errors import BootseerError, TransientError
from bootseer.io.executor import show_threads


class Gather:
    """Counts what is under way. `then` is called once, by the thread in which the last one ends."""

    def __init__(self, then: Done) -> None:
        """It begins with one that is under way: that which adds the others. So it cannot end before they are there."""
        self.moved_s = time.monotonic()
        """When something ended last."""
        self.copy: Callable[[], None] = lambda: None
        """Called before `then` when all has ended well."""
        self._then = then
        self._lock = threading.Lock()
        self._left = 1
        self._error: BootseerError | None = None
        self._transfers: list[Transfer] = []

    @property
    def has_failed(self) -> bool:
        """Whether what comes now is of no use: it is not copied into the caller's memory any more."""
        return self._error is not None

    def expect(self, count: int = 1) -> None:
        """So many more will end."""
        with self._lock:
            self._left += count

    def begin(self, transfer: Transfer) -> None:
        """A transfer, which calls `ended`, starts now."""
        with self._lock:
            self._left += 1
            self._transfers.append(transfer)
        transfer.start()

    def moved(self) -> None:
        """A part of a transfer has ended."""
        self.moved_s = time.monotonic()

    def ended(self, error: BootseerError | None = None) -> None:
        """One has ended."""
        with self._lock:
            self.moved_s = time.monotonic()
            self._left -= 1
            self._error = self._error or error
            if self._left:
                return
        if self._error is None:
            self.copy()
        self._then(self._error)

    def cancel(self, error: BootseerError) -> None:
        """Nobody wants it any more. It ends with this error, soon, when nobody writes into the caller's memory."""
        with self._lock:
            self._error = self._error or error
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.cancel(error)


class Waiting:
    """For a thread that waits for one read."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BootseerError | None = None
        self.gather = Gather(self.ended)
        """Of a read that is made of several."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._over.is_set()

    def ended(self, error: BootseerError | None = None) -> None:
        """It has ended."""
        self._error = error
        self._over.set()

    def wait(self, what: str, limit_s: float) -> None:
        """Wait for it, and raise its error; `what` is read, in an error's words.

        The parts of a read have deadlines of their own. When none has ended for `limit_s`, which is more, an answer was
        lost by a mistake in this program: then all threads are shown on standard error, and `TransientError` is raised.
        """
        while not self._over.wait(max(self.gather.moved_s + limit_s - time.monotonic(), 0.0)):
            if time.monotonic() >= self.gather.moved_s + limit_s:
                show_threads(f"{what}: no answer within {limit_s:g} s")
                raise TransientError(
                    f"{what}: no answer within {limit_s:g} s, although each part has a deadline: this is a bug of "
                    "BootSeer; try again, and report what standard error shows"
                )
        if self._error is not None:
            raise self._error

    def wait_over(self, timeout_s: float = 5.0) -> None:
        """Wait a little for its end, whatever that is."""
        self._over.wait(timeout_s)

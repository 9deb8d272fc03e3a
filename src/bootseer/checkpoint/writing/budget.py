"""Room on the local disk for what is not safe elsewhere yet, shared by all files of a `Writing`.

Called by `file_writer`, which takes room before it writes to a spool, and by `sending`, which gives it back when a
segment has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from bootseer.errors import PermanentError, TransientError

_LOOK_S = 0.5
"""Other files may have become able to give room back; so often a waiter looks."""


class TooLargeError(PermanentError):
    """More bytes than fit on the local disk would have to wait there (EFBIG)."""


class Budget:
    """Bytes of room. Safe to use from many threads.

    What is on its way gives its room back soon, and writers wait for that. When nothing is, because files were written
    out of order and nothing of them can be sent before they are committed, `random_bytes` more may be used.
    """

    def __init__(self, spool_bytes: int, random_bytes: int) -> None:
        self._soft = spool_bytes
        self._hard = spool_bytes + random_bytes
        self._used = 0
        self._freed = 0
        self._change = threading.Condition()

    @property
    def used_bytes(self) -> int:
        """What is taken."""
        return self._used

    def take(self, length: int, *, free_some: Callable[[], bool], stuck_s: float) -> None:
        """Take room, waiting for it as long as `free_some` says that some will come back.

        Raises `TooLargeError`, or `TransientError` when for `stuck_s` none came back.
        """
        freed, until = self._freed, time.monotonic() + stuck_s
        while not self._try(length):
            if not free_some():
                self.take_more(length)
                return
            if freed != self._freed:
                freed, until = self._freed, time.monotonic() + stuck_s
            elif time.monotonic() >= until:
                raise TransientError(f"no room on the local disk came back within {stuck_s:.0f} s: writes are stuck")
            with self._change:
                self._change.wait_for(lambda: self._used + length <= self._soft, timeout=_LOOK_S)

    def take_more(self, length: int) -> None:
        """Take room without waiting, of what is kept for files that are written out of order."""
        with self._change:
            if self._used + length > self._hard:
                raise TooLargeError(
                    f"{self._used + length} bytes that cannot be sent yet do not fit into the spool's {self._hard}: "
                    "the file is too large to be written out of order"
                )
            self._used += length

    def give_back(self, length: int) -> None:
        """Room is free again."""
        with self._change:
            self._used -= length
            self._freed += length
            self._change.notify_all()

    def _try(self, length: int) -> bool:
        with self._change:
            if self._used + length > self._soft:
                return False
            self._used += length
            return True

"""What was written and is not safe elsewhere yet, on the local disk: a file without a name for each written file, and
the budget that all of them share.

A spool is as long as its file, and has holes where nothing was written or everything was sent, so that it takes as much
room as is needed and vanishes with its process.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bootseer.cache.disk import punch
from bootseer.checkpoint.places.place import NoSpaceError
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


class Spool:
    """A file of holes. Raises `NoSpaceError`, and `PermanentError` for all else that a local disk may say."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            raise self._mapped(error) from error

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Put bytes there."""
        rest = memoryview(data).cast("B")
        try:
            while rest:
                count = os.pwrite(self._descriptor, rest, offset)
                rest, offset = rest[count:], offset + count
        except OSError as error:
            raise self._mapped(error) from error

    def read(self, offset: int, length: int) -> bytes:
        """The bytes there: zeros where nothing was written."""
        try:
            data = os.pread(self._descriptor, length, offset)
            while len(data) < length:
                more = os.pread(self._descriptor, length - len(data), offset + len(data))
                if not more:
                    return data + bytes(length - len(data))
                data += more
        except OSError as error:
            raise self._mapped(error) from error
        return data

    def punch(self, offset: int, length: int) -> bool:
        """Give the room of a range back, whose bytes are lost then: whether the file system can do that."""
        try:
            punch(self._descriptor, offset, length)
        except OSError:
            return False
        return True

    def truncate(self, size_bytes: int) -> None:
        """Forget what lies behind."""
        try:
            os.ftruncate(self._descriptor, size_bytes)
        except OSError as error:
            raise self._mapped(error) from error

    def close(self) -> None:
        """Forget everything."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _mapped(self, error: OSError) -> PermanentError:
        said = f"the spool folder {self._folder}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return NoSpaceError(f"{said}; give it room, or name another folder")
        return PermanentError(said)

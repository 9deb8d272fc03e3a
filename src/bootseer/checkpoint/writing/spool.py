"""Where the bytes of a file that is written come from: a local file, or the spool.

The spool holds, on the local disk, what cannot be read again elsewhere and is not durable in the place yet. `Budget`
is its space, which all files of a `Writing` share.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from bootseer.errors import NoSpaceError, NotFoundError, PermanentError, TransientError
from bootseer.io.files import punch, write_all

Read = Callable[[int, int], bytes]
"""Returns bytes of a file by offset and length; called repeatedly, and by many threads."""
_LOOK_S = 0.5


class TooLargeError(PermanentError):
    """More bytes than the spool can hold would have to wait in it (EFBIG)."""


class Budget:
    """Spool space. Safe to use from many threads.

    Writers wait while data in flight will free space soon. If none is in flight, because files were written out of
    order and cannot be sent before their commit, up to `random_bytes` more may be used.
    """

    def __init__(self, spool_bytes: int, random_bytes: int) -> None:
        self._soft = spool_bytes
        self._hard = spool_bytes + random_bytes
        self._used = 0
        self._freed = 0
        self._lock = threading.RLock()  # taken by blocks, as in `io.executor`
        self._change = threading.Condition(self._lock)

    @property
    def used_bytes(self) -> int:
        return self._used

    def reserve(self, length: int, *, free_some: Callable[[], bool], stuck_s: float) -> None:
        """Reserve space, waiting as long as `free_some` returns that some will be freed. Raises as `repeat`, and
        `TooLargeError`."""
        if not self.repeat(lambda: self._try_reserve(length, self._soft), free_some=free_some, stuck_s=stuck_s):
            self.reserve_extra(length)

    def repeat(self, step: Callable[[], bool], *, free_some: Callable[[], bool], stuck_s: float) -> bool:
        """Call `step` until it succeeds, waiting as long as `free_some` returns that space will be freed. Returns
        whether it did. Raises `TransientError` when none was freed for `stuck_s`."""
        freed, until = self._freed, time.monotonic() + stuck_s
        while not step():
            if not free_some():
                return False
            with self._lock:
                if freed == self._freed:
                    self._change.wait(_LOOK_S)
                if freed != self._freed:
                    freed, until = self._freed, time.monotonic() + stuck_s
                elif time.monotonic() >= until:
                    raise TransientError(f"no spool space was freed within {stuck_s:.0f} s: writes are stuck")
        return True

    def reserve_extra(self, length: int) -> None:
        """Reserve space without waiting, out of the extra space for files that are written out of order."""
        if not self._try_reserve(length, self._hard):
            raise TooLargeError(
                f"{self._used + length} bytes that cannot be sent yet do not fit into the spool's {self._hard}: "
                "the file is too large to be written out of order"
            )

    def free(self, length: int) -> None:
        with self._lock:
            self._used -= length
            self._freed += length
            self._change.notify_all()

    def _try_reserve(self, length: int, limit: int) -> bool:
        with self._lock:
            if self._used + length > limit:
                return False
            self._used += length
            return True


class Spool:
    """A sparse local file. Raises `NoSpaceError`, and `PermanentError` for all other errors of the local disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            raise self._mapped(error) from error

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        try:
            write_all(self._descriptor, memoryview(data).cast("B"), offset)
        except OSError as error:
            raise self._mapped(error) from error

    def read(self, offset: int, length: int) -> bytes:
        """A range; zeros where nothing was written."""
        try:
            data = os.pread(self._descriptor, length, offset)  # of a local file: short only at its end
        except OSError as error:
            raise self._mapped(error) from error
        return data + bytes(length - len(data)) if len(data) < length else data

    def punch(self, offset: int, length: int) -> bool:
        """Deallocate a range, whose bytes are lost. Returns whether the file system supports it."""
        try:
            punch(self._descriptor, offset, length)
        except OSError:
            return False
        return True

    def truncate(self, size_bytes: int) -> None:
        try:
            os.ftruncate(self._descriptor, size_bytes)
        except OSError as error:
            raise self._mapped(error) from error

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _mapped(self, error: OSError) -> PermanentError:
        message = f"the spool folder {self._folder}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return NoSpaceError(f"{message}; give it room, or name another folder")
        return PermanentError(message)


class Replayed(Spool):
    """In place of a spool, for a file whose bytes can be read again and again: nothing is kept or changed."""

    def __init__(self, read: Read) -> None:
        self._source: Read | None = read

    def read(self, offset: int, length: int) -> bytes:
        if self._source is None:
            raise PermanentError("read after the end of its file")
        return self._source(offset, length)

    def punch(self, offset: int, length: int) -> bool:
        return False

    def close(self) -> None:
        """Forget the source, which may be a checkpoint in memory: segments and parts refer to each other, so that they
        stay until the garbage collection."""
        self._source = None


class FileSource:
    """A local file, of the length that it has now. Use it as a context manager."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFoundError(f"there is no file {path}") from error
        except OSError as error:
            raise PermanentError(f"{path} cannot be read: {error.strerror}") from error
        self._path = path
        self.size_bytes = os.fstat(self._descriptor).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes. Raises `PermanentError` when the file has become shorter."""
        try:
            data = os.pread(self._descriptor, length, offset)
            while len(data) < length:
                more = os.pread(self._descriptor, length - len(data), offset + len(data))
                if not more:
                    raise PermanentError(f"{self._path} became shorter while it was read")
                data += more
        except OSError as error:
            raise PermanentError(f"{self._path} cannot be read: {error.strerror}") from error
        return data

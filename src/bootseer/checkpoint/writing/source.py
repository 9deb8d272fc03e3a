"""What is written, in a form that can be read again: a part that failed is sent a second time.

Called by `segment`, from many threads at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from bootseer.errors import NotFoundError, PermanentError


class Replayable(Protocol):
    """Bytes of a known number that can be read anywhere and more than once, by many threads."""

    @property
    def size_bytes(self) -> int:
        """How many there are."""

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes, which are there. Raises `PermanentError` when they are not any more."""


class BytesSource:
    """A `Replayable` of bytes in memory, which must not change meanwhile."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data).cast("B")

    @property
    def size_bytes(self) -> int:
        """See `Replayable.size_bytes`."""
        return len(self._data)

    def read(self, offset: int, length: int) -> bytes:
        """See `Replayable.read`."""
        return bytes(self._data[offset : offset + length])


class FileSource:
    """A `Replayable` of a local file as long as it was when this was made. Use it as a context manager."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFoundError(f"there is no file {path}") from error
        except OSError as error:
            raise PermanentError(f"{path} cannot be read: {error.strerror}") from error
        self._path = path
        self._size_bytes = os.fstat(self._descriptor).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    @property
    def size_bytes(self) -> int:
        """See `Replayable.size_bytes`."""
        return self._size_bytes

    def read(self, offset: int, length: int) -> bytes:
        """See `Replayable.read`."""
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

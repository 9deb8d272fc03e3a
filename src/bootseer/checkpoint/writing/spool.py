"""What was written to a file and is not safe elsewhere yet, in a local file without a name.

It is as long as the file, and has holes where nothing was written or everything was sent, so that it takes as much
room as is needed and vanishes with its process. Called by `file_writer`.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from bootseer.cache.holes import punch
from bootseer.checkpoint.places.place import NoSpaceError
from bootseer.errors import PermanentError


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

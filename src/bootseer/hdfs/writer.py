"""One new file in HDFS, written from its beginning to its end. Made by `client`; `placing` chooses where it lies.

hdfs-native's writes fail or hang when a DataNode dies that the NameNode still counts as live: each step has a deadline
here, and after the first error the writer is of no use. Whoever writes begins again under a new name.

Belongs to one thread at a time, and to the process that made it.
"""

from __future__ import annotations

import contextlib
import enum
import io
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hdfs_native import FileWriter, WriteOptions

from bootseer.errors import BootseerError, TransientError, UsageError
from bootseer.hdfs.status import FileStatus

if TYPE_CHECKING:
    from bootseer.hdfs.native import Native

_NOT_YET = "Failed to complete file in time"
_DELETE_S = 10.0
_HANG_UP_S = 0.5


class _State(enum.Enum):
    OPEN = enum.auto()
    SPOILED = enum.auto()
    """Of no use, and not removed yet."""
    ENDED = enum.auto()


class HdfsWriter:
    """A file that is being written: visible under its name from the beginning, complete after `close`."""

    def __init__(
        self,
        native: Native,
        path: str,
        *,
        block_size: int | None = None,
        replication: int | None = None,
        mode: int = 0o644,
        overwrite: bool = False,
        parents: bool = True,
    ) -> None:
        """Begin the file, and with `parents` its folder when that is missing. Raises `TakenError` for a taken name."""
        self.path = path
        self.nodes: tuple[str, ...] = ()
        """Nobody knows."""
        self.status: FileStatus | None = None
        """Not asked for."""
        self.size_bytes = 0
        """What was written so far."""
        self._native = native
        self._what = f"{native.uri}{path}"
        options = WriteOptions(
            block_size=block_size, replication=replication, permission=mode, overwrite=overwrite, create_parent=parents
        )
        self._file = native.call(self._what, lambda client: client.create(path, options))
        # Python's finalizer of files calls close(), which may hang whoever happens to hold the last reference; what
        # is closed for Python has none. The library's own methods do not ask.
        io.RawIOBase.close(self._file)
        self._state = _State.OPEN

    def write(self, data: bytes | bytearray) -> None:
        """Append. Blocks while HDFS is slower, at most `write_s`."""
        # Views of memory would take a path of the library that is 10 times slower.
        self._step(lambda file: file.write(data), self._native.settings.write_s)
        self.size_bytes += len(data)

    def close(self) -> tuple[str, ...]:
        """End the file: all DataNodes have confirmed it, and the NameNode knows its length; nobody knows where."""
        close_s = self._native.settings.close_s
        self._step(lambda file: _complete(file, close_s), close_s)
        self._state = _State.SPOILED
        found = self._native.call(self._what, lambda client: client.get_file_info(self.path).length)
        if found != self.size_bytes:
            raise TransientError(f"{self._what} has {found} bytes after {self.size_bytes} were written")
        self._state = _State.ENDED
        return ()

    def abort(self) -> None:
        """Drop the file. Never raises, and does nothing after `close`; what cannot be removed stays."""
        if self._state is _State.ENDED:
            return
        self._state = _State.ENDED
        with contextlib.suppress(BootseerError):
            self._native.call(self._what, lambda client: client.delete(self.path), _DELETE_S)
        # Ends the connection, which would stay for ever; at once, for the NameNode does not wait for what is removed.
        # One that hangs is left to its thread.
        with contextlib.suppress(BootseerError):
            self._native.call(self._what, lambda _: self._file.close(), _HANG_UP_S)

    def _step(self, step: Callable[[FileWriter], object], timeout_s: float) -> None:
        """One call of the library; after an error there is no second."""
        if self._state is not _State.OPEN:
            raise UsageError(f"{self._what}: this file is not written any more", hint="begin another one")
        try:
            self._native.call(self._what, lambda _: step(self._file), timeout_s)
        except BaseException:
            self._state = _State.SPOILED
            raise


def _complete(file: FileWriter, timeout_s: float) -> None:
    """End the file. The library waits 15 s for DataNodes to tell the NameNode of its blocks, and can be asked again."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            file.close()
            return
        except Exception as error:
            if _NOT_YET not in str(error) or time.monotonic() >= until:
                raise

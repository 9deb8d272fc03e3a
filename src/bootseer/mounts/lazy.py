"""The FUSE tree of lazy mounts: one folder, in it one file per block file, read through a fetcher.

The kernel mounts EROFS from these files, so that it alone knows names and inodes, and asks here for blocks only.
Who calls: `serve` shows it; whoever fills a `DaemonSpec` makes it.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from bootseer.errors import BootseerError
from bootseer.fuse.filesystem import Attributes, Cancel, Data, Entry, Reply

Done = Callable[[Data | BootseerError], None]
_FIRST = 2


class Ticket(Protocol):
    """A read on its way."""

    def cancel(self) -> None:
        """Nobody waits for it any more."""


class Source(Protocol):
    """What lazy mounts need of `fetch.Fetcher`: files by number."""

    def read(self, file: int, offset: int, length: int, done: Done, deadline_s: float | None = None) -> Ticket | None:
        """Read a range; `done` gets it, or why not, once and from any thread, perhaps before this returns."""

    def read_blocking(self, file: int, offset: int, length: int) -> Data:
        """Read a range and wait for it."""

    def close(self) -> None:
        """Stop all work."""


class LazyFile(NamedTuple):
    """A file as it is shown: `number` is the source's."""

    name: str
    size_bytes: int
    number: int


class LazyFiles:
    """A tree of one folder. Immutable, so that any thread may ask."""

    def __init__(self, source: Source, files: Sequence[LazyFile], on_error: Callable[[str], None]) -> None:
        self._source = source
        self._files = tuple(files)
        self._on_error = on_error
        self._root = Attributes(1, stat.S_IFDIR | 0o555, nlink=2)
        self._attributes = [
            Attributes(_FIRST + place, stat.S_IFREG | 0o444, file.size_bytes) for place, file in enumerate(files)
        ]
        self._by_name = {file.name.encode(): place for place, file in enumerate(files)}
        self._entries = [Entry(name, _FIRST + place, stat.S_IFREG) for name, place in self._by_name.items()]

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        place = self._by_name.get(name) if parent == 1 else None
        return None if place is None else self._attributes[place]

    def attributes(self, inode: int) -> Attributes:
        return self._root if inode == 1 else self._attributes[inode - _FIRST]

    def entries(self, inode: int) -> Sequence[Entry]:
        if inode != 1:
            raise OSError(errno.ENOTDIR, "not a folder")
        return self._entries

    def readlink(self, inode: int) -> bytes:
        raise OSError(errno.EINVAL, "not a symbolic link")

    def xattrs(self, inode: int) -> Mapping[bytes, bytes]:
        return {}

    def total(self) -> tuple[int, int]:
        return sum(file.size_bytes for file in self._files), len(self._files)

    def read(self, inode: int, offset: int, length: int, reply: Reply) -> Cancel | None:
        file = self._files[inode - _FIRST]
        return start_read(self._source, file.number, offset, length, reply, self._on_error)


def start_read(
    source: Source, file: int, offset: int, length: int, reply: Reply, on_error: Callable[[str], None]
) -> Cancel | None:
    """Begin a read whose failure is an I/O error for the reader and a line in the log."""

    def done(result: Data | BootseerError) -> None:
        if isinstance(result, BootseerError):
            on_error(str(result))
            reply(errno.EIO)
        else:
            reply(result)

    ticket = source.read(file, offset, length, done)
    return None if ticket is None else ticket.cancel

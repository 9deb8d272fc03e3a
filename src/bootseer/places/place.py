"""A file system that checkpoints and objects lie in, as these need it: HDFS (`hdfs`) or a folder (`folder`).

Paths are relative to the place's root: names joined by "/", none in front, "" is the root itself. Nothing here knows
stripes or objects: those are files of a place (`bootseer.checkpoint.head`, `bootseer.store.file`).

All methods raise `BootseerError`s only: `NotFoundError`, `AccessError`, `TransientError` for what may work later (an
overrun deadline too), `PermanentError` for the rest, with subclasses here for what a file system has an error number
for. Safe to use from many threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from bootseer.errors import NotFoundError, PermanentError, TransientError

if TYPE_CHECKING:
    from bootseer.hdfs.requests import ReadOutcome

OWN_NAMES = (".stripes", ".attempts")
"""What is BootSeer's own begins so: users neither see nor make such names (`bootseer.checkpoint.head.is_hidden`)."""
TEMPORARY = ".attempts-"
"""Names of files on their way begin so."""
SMALL_COPIES = 3
"""Copies of a small file, at least, where a place keeps any: one that cannot be read, as a head or a checkpoint's
metadata, makes all others useless."""


_REPLACED = 4
"""So often a small file may be replaced while it is read."""


class ChangedError(TransientError):
    """The file was replaced or changed since it was opened: open it again."""


def names_of(path: str) -> list[str]:
    """The names that a path consists of; none for the root. Raises `NotFoundError` for a path that leads elsewhere."""
    names = path.split("/") if path else []
    if "" in names or "." in names or ".." in names or "\0" in path:
        raise NotFoundError(f"{path!r} is not a valid path")
    return names


def join(folder: str, name: str) -> str:
    """The path of a name in a folder."""
    return f"{folder}/{name}" if folder else name


def folder_of(path: str) -> str:
    """The folder that a path lies in; "" for the root."""
    return path.rpartition("/")[0]


def name_of(path: str) -> str:
    """The last name of a path."""
    return path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Entry:
    """What a place says of a name."""

    path: str
    is_folder: bool
    size_bytes: int
    """Of the file as it lies there; 0 for folders."""
    mtime_ns: int
    mode: int
    """Permission bits."""
    owner: str
    group: str
    version: str
    """Differs whenever the content of a file may differ."""


class Ticket(Protocol):
    """A read on its way."""

    def cancel(self) -> None:
        """It is not wanted any more. `done` is still called, with whatever happened."""

    def hurry(self) -> None:
        """A reader waits for it now: serve it before those that no reader waits for."""

    def left_s(self) -> float:
        """Seconds until it will have ended, by estimate; 0 if unknown, infinity while its node is not asked.
        Asked under locks: calls no `done`, and waits for nothing."""


class OpenFile(Protocol):
    """One version of one file: what is read from it is of this version, or an error."""

    @property
    def size_bytes(self) -> int:
        """Its length."""

    @property
    def version(self) -> str:
        """Differs from that of every other content of the file."""

    def nodes(self, offset: int) -> tuple[str, ...]:
        """The nodes that have the byte at `offset`; empty where unknown."""

    def delay_s(self, offset: int, length: int) -> float:
        """Seconds until this range would be here if it was asked for now, by estimate; 0 where unknown, infinity
        when no node is expected to give it. Asked under locks: calls no `done`, and waits for nothing."""

    def read_into(
        self,
        offset: int,
        into: memoryview,
        done: Callable[[ReadOutcome], None],
        *,
        check: bool = True,
        urgent: bool = True,
        avoid: frozenset[str] = frozenset(),
        deadline_s: float = 60.0,
        here: bool = False,
    ) -> Ticket:
        """Fill `into` with the bytes from `offset` on, which lie inside the file.

        `done` is called once, from any thread, and must return soon; from then on no thread writes to `into`. `check`:
        compare with the place's own checksums, which callers with better ones can do without. `urgent`: a reader
        waits. `avoid`: nodes that gave wrong bytes. Safe to call from `done`, unless `here`: the caller holds no lock,
        and its thread may read before this returns, which for a few bytes takes less than waking another one.
        """

    def close(self) -> None:
        """Not read any more."""


class PartWriter(Protocol):
    """A new file that is written from its beginning to its end. Others see it grow: write it under a hidden name."""

    @property
    def path(self) -> str:
        """Its name in the place."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Where its bytes go, as far as is known: with HDFS from the first `write` on."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append. Blocks while the place is slower."""

    def close(self) -> tuple[str, ...]:
        """End the file: durable, and of the length that was written; returns where it lies."""

    def abort(self) -> None:
        """Drop it. Safe to call at any time, also after `close`, when it does nothing."""


class Place(Protocol):
    """A file system that checkpoints lie in."""

    uri: str
    """Where the root is, without credentials; `open_place` takes it."""
    is_local: bool
    """Whether a read is a call to this machine's kernel: then asking for much at a time gains nothing."""

    def refusal(self, name: str) -> str:
        """Why nothing here can have this name, "" when something can: known before hours of writing, without a
        request."""

    def stat(self, path: str) -> Entry:
        """What is known of a name."""

    def list(self, path: str) -> Iterator[Entry]:
        """What lies in a folder, in any order."""

    def open(self, path: str, *, deadline_s: float = 60.0) -> OpenFile:
        """Begin to read a file as it is now."""

    def delay_s(self, nodes: Sequence[str], length: int) -> float:
        """As `OpenFile.delay_s`, for what is known to lie on these nodes."""

    def read_bytes(self, path: str, limit: int, *, start: int = 0) -> bytes:
        """The bytes of a small file from `start` on. Raises `PermanentError` when they are more than `limit`."""

    def read_first(self, path: str, length: int) -> bytes:
        """The first `length` bytes, or all of a shorter file."""

    def write_bytes(self, path: str, data: bytes, *, mode: int = 0o644) -> Entry:
        """Write a small file: whole or not at all, durable, over what was there. The folder must be there. Returns what
        it is then.

        Places that keep copies keep `SMALL_COPIES` of it or more.
        """

    def create_bytes(self, path: str, data: bytes, *, mode: int = 0o644) -> bool:
        """Write a small file unless there is one: whether it was written. Of many writers, one gets True."""

    def begin_parts(
        self, paths: Sequence[str], *, part_bytes: int, mode: int = 0o644, replication: int | None = None,
        avoid: frozenset[str] = frozenset(), spare: Sequence[str] = (),
    ) -> Sequence[PartWriter]:  # fmt: skip
        """Begin new files of at most `part_bytes` each, on different nodes as far as there are any.

        `avoid`: nodes that other parts lie on, or that failed. `spare`: nodes that have more of the file than others,
        the first the least; better one of these than two parts on one node. Makes the folder when it is missing.
        Raises `AlreadyExistsError`.
        """

    def rename(self, source: str, target: str, *, replace: bool = True) -> None:
        """Give a file or folder another name, in one step. A file replaces a file, a folder only an empty folder.

        Without `replace` nothing is: raises `AlreadyExistsError`; of many callers that want a file's name, one gets it.
        """

    def delete(self, path: str, *, recursive: bool = False, is_file: bool = False) -> None:
        """Remove. Raises `NotFoundError`, and `PermanentError` for a folder that is not empty. `is_file`: it was a
        file a moment ago, which need not be asked again."""

    def make_folder(self, path: str, *, mode: int = 0o755, parents: bool = False) -> None:
        """Make a folder. Raises `PermanentError` when the name is taken, unless `parents` and it is a folder."""

    def set_mode(self, path: str, mode: int) -> None:
        """Set the permission bits."""

    def set_owner(self, path: str, owner: str | None, group: str | None) -> None:
        """Set owner and group, by name."""

    def set_mtime(self, path: str, mtime_ns: int) -> None:
        """Set the time of the last change; places may round it to milliseconds."""

    def now_s(self) -> float:
        """The place's own clock, in seconds since 1970: what `mtime_ns` of a file written now would say."""

    def space(self) -> tuple[int, int]:
        """Bytes in all, bytes free."""

    def facts(self) -> Mapping[str, object]:
        """Figures of all reads so far: for each node bytes, requests and seconds, then retries and hedges."""

    def close(self) -> None:
        """Give back connections. The place is not used afterwards."""


class SmallReads:
    """Reading small files, for a place."""

    uri: str

    def open(self, path: str, *, deadline_s: float = 60.0) -> OpenFile:
        raise NotImplementedError

    def read_bytes(self, path: str, limit: int, *, start: int = 0) -> bytes:
        def length_of(size_bytes: int) -> int:
            if size_bytes - start > limit:
                raise PermanentError(
                    f"{self.uri}/{path} has {size_bytes - start} bytes, more than the {limit} that it may have"
                )
            return size_bytes - start

        return self._read_small(path, start, length_of)

    def read_first(self, path: str, length: int) -> bytes:
        return self._read_small(path, 0, lambda size_bytes: min(length, size_bytes))

    def _read_small(self, path: str, start: int, length_of: Callable[[int], int]) -> bytes:
        """Read once more where the file was replaced after it was opened."""
        for _ in range(_REPLACED):
            with closing(self.open(path)) as file, suppress(ChangedError):
                return self._read(file, path, start, length_of(file.size_bytes))
        raise ChangedError(f"{self.uri}/{path} is being replaced all the time")

    def _read(self, file: OpenFile, path: str, start: int, length: int) -> bytes:
        if length <= 0:
            return b""
        return bytes(read_now(file, start, length, f"{self.uri}/{path}"))


def read_now(file: OpenFile, offset: int, length: int, uri: str, deadline_s: float = 60.0) -> bytearray:
    """The bytes of a range inside the file, waited for. `what` is read, in an error's words."""
    data = bytearray(length)
    ended = threading.Event()
    outcomes: list[ReadOutcome] = []

    def done(outcome: ReadOutcome) -> None:
        outcomes.append(outcome)
        ended.set()

    ticket = file.read_into(offset, memoryview(data), done, deadline_s=deadline_s)
    if not ended.wait(2 * deadline_s):
        ticket.cancel()
        raise TransientError(f"{uri}: not read within {2 * deadline_s:.0f} s")
    if outcomes[0].error is not None:
        raise outcomes[0].error
    return data


def make_alike(place: Place, path: str) -> None:
    """Make a folder, and those above it, with the rights of the folder that it lies in, so that its users share it."""
    try:
        place.stat(path)
    except NotFoundError:
        above = path.rpartition("/")[0]
        place.make_folder(above, parents=True)
        place.make_folder(path, mode=place.stat(above).mode, parents=True)

"""The `Place` protocol: a file system for checkpoints and objects. Implementations: `hdfs`, `folder`, `objects`.

Paths are relative to the place's root: names joined by "/", no leading slash, "" is the root itself. A place knows
nothing of stripes or stored objects: those are files of a place (`bootseer.checkpoint.head`, `bootseer.store.file`).

All methods raise `BootseerError`s only: `TransientError` for what may succeed later (an exceeded deadline too),
`NotFoundError`, `AccessError` and the other subclasses of `PermanentError` for the rest. Safe to use from many threads.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from typing import Protocol, Unpack

from msgspec import Struct

from bootseer.errors import AccessError, NoSpaceError, NotFoundError, PermanentError, TransientError
from bootseer.io.pooled_reads import ReadOptions, ReadOutcome

RESERVED_PREFIXES = (".stripes", ".attempts")
"""Prefixes of BootSeer's own names, which users neither see nor can create (`bootseer.checkpoint.head.is_hidden`)."""
TEMPORARY_PREFIX = ".attempts-"
"""Prefix of temporary files: written under such a name, then renamed."""
SMALL_FILE_REPLICAS = 3
"""Minimum replicas of a small file, where a place replicates: losing a head or a checkpoint's metadata would make all
other files useless."""
_MAX_REOPENS = 4
"""How often a read of a small file that is being replaced starts over."""
_CLOCK_S = 60.0
"""How long a measured offset between a server's clock and the local one is trusted."""


class ChangedError(TransientError):
    """The file was replaced or changed since it was opened: open it again."""


def names_of(path: str) -> list[str]:
    """The components of a path; none for the root. Raises `NotFoundError` for an invalid path."""
    names = path.split("/") if path else []
    if "" in names or "." in names or ".." in names or "\0" in path:
        raise NotFoundError(f"{path!r} is not a valid path")
    return names


def join(folder: str, name: str) -> str:
    """The path of an entry of a folder."""
    return f"{folder}/{name}" if folder else name


def folder_of(path: str) -> str:
    """The parent folder; "" for the root."""
    return path.rpartition("/")[0]


def name_of(path: str) -> str:
    return path.rpartition("/")[2]


def is_utf8(name: str) -> bool:
    """Whether a name is UTF-8: Python decodes other bytes of local names to surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


class Entry(Struct, frozen=True):
    """Attributes of a file or folder."""

    path: str
    is_folder: bool
    size_bytes: int
    """Length as stored; 0 for folders."""
    mtime_ns: int
    mode: int
    """Permission bits."""
    owner: str
    group: str
    version: str
    """Changes whenever the content of a file may have changed."""


class Ticket(Protocol):
    """A read in flight."""

    def cancel(self) -> None:
        """Cancels the read. `done` is still called, with any outcome."""

    def prioritize(self) -> None:
        """Raises the read's priority: a reader waits for it now."""

    def remaining_s(self) -> float:
        """Estimated seconds until the read ends; 0 if unknown, infinity while its node is excluded. May be called under
        locks: neither blocks nor calls `done`."""


class OpenFile(Protocol):
    """One version of one file: reads return bytes of this version or an error."""

    @property
    def size_bytes(self) -> int:
        """Length in bytes."""

    @property
    def version(self) -> str:
        """Differs from that of any other content of the file."""

    def nodes(self, offset: int) -> tuple[str, ...]:
        """The nodes that hold the byte at `offset`; empty if unknown."""

    def delay_s(self, offset: int, length: int) -> float:
        """Estimated seconds until a read of this range, submitted now, would end; 0 if unknown, infinity if no node is
        expected to serve it. May be called under locks: neither blocks nor calls `done`."""

    def read_into(
        self, offset: int, into: memoryview, done: Callable[[ReadOutcome], None], **options: Unpack[ReadOptions]
    ) -> Ticket:
        """Fill `into` with the bytes from `offset` on, which lie inside the file.

        `done` is called once, from any thread, and must return quickly; from then on no thread writes to `into`. May be
        called from `done`, unless `inline`.
        """

    def close(self) -> None:
        """Closes the file; reads in flight still end."""


class PartWriter(Protocol):
    """A new file, written sequentially. It is visible while it grows: write it under a hidden name."""

    @property
    def path(self) -> str:
        """Its path, which ends with the path in the place."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that store it, as far as known: with HDFS from the first `write` on."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Appends. Blocks while the storage is slower."""

    def close(self) -> tuple[str, ...]:
        """Completes the file: it is durable and has the length that was written. Returns the nodes that store it."""

    def abort(self) -> None:
        """Discards the file. May be called at any time; does nothing after `close`."""


class Place(Protocol):
    """A file system that stores checkpoints. Implementations derive from this, which has what most have in common."""

    uri: str
    """Address of the root, without credentials; `open_place` accepts it."""
    is_local: bool = False
    """Whether reads are calls to the local kernel: then many concurrent requests gain nothing."""
    shows_unfinished: bool = True
    """Whether a `PartWriter`'s file is visible before it is closed: then it is written under a hidden name."""
    queue_bytes: int = 0
    """How much of a large read is worth passing on at once, since the place joins what waits into larger requests; 0
    where it joins nothing."""
    _clock: tuple[float, float] | None = None

    def uri_of(self, path: str) -> str:
        """The address of a path, for messages."""
        return f"{self.uri}/{path}" if path else self.uri

    def name_problem(self, name: str) -> str:
        """Why this name is invalid here, "" if it is valid. Needs no request: known before hours of writing."""

    def stat(self, path: str) -> Entry:
        """Attributes of a path."""

    def list(self, path: str) -> Iterator[Entry]:
        """The entries of a folder, in any order."""

    def open(self, path: str, *, deadline_s: float = 60.0) -> OpenFile:
        """Open the current version of a file for reading."""

    def delay_s(self, nodes: Sequence[str], length: int) -> float:
        """As `OpenFile.delay_s`, for data known to lie on these nodes."""
        return 0.0

    def read_bytes(self, path: str, limit: int) -> bytes:
        """All of a small file. Raises `PermanentError` if that is more than `limit` bytes."""
        data = self.read_first(path, limit + 1)
        if len(data) > limit:
            raise PermanentError(f"{self.uri}/{path} has more than the {limit} bytes allowed")
        return data

    def read_first(self, path: str, length: int) -> bytes:
        """The first `length` bytes, or all of a shorter file. Starts over when the file is replaced after it was
        opened."""
        for _ in range(_MAX_REOPENS):
            with closing(self.open(path)) as file, suppress(ChangedError):
                return self._read(file, path, min(length, file.size_bytes))
        raise ChangedError(f"{self.uri}/{path} is being replaced all the time")

    def _read(self, file: OpenFile, path: str, length: int) -> bytes:
        return bytes(read_blocking(file, 0, length, f"{self.uri}/{path}")) if length > 0 else b""

    def write_bytes(self, path: str, data: bytes, *, mode: int = 0o644) -> Entry:
        """Write a small file atomically and durably, replacing an existing one. The folder must exist. Returns its new
        attributes.

        Places that replicate keep at least `SMALL_FILE_REPLICAS` replicas.
        """

    def create_bytes(self, path: str, data: bytes, *, mode: int = 0o644) -> bool:
        """Create a small file unless it exists; returns whether it was created. Of concurrent callers one gets True."""

    def begin_parts(
        self, paths: Sequence[str], *, part_bytes: int, mode: int = 0o644, replication: int | None = None,
        avoid: frozenset[str] = frozenset(), last_resort: Sequence[str] = (),
    ) -> Sequence[PartWriter]:  # fmt: skip
        """Create files of at most `part_bytes` each, on distinct nodes as far as possible. Creates a missing folder.

        `avoid`: nodes of other parts. `last_resort`: nodes that already carry more of the file than others, the least
        loaded first; using one is still better than two parts on one node. Raises `AlreadyExistsError`.
        """

    def exclude(self, nodes: Iterable[str]) -> None:
        """A part on these nodes has failed: for a minute, new ones go to others if there are any."""
        return  # most places know no nodes

    def rename(self, source: str, target: str, *, replace: bool = True) -> None:
        """Rename a file or folder atomically. A file replaces a file, a folder only an empty folder.

        Without `replace`, raises `AlreadyExistsError` if the target exists; of concurrent callers one succeeds.
        """

    def max_rename_bytes(self, *, replace: bool) -> int | None:
        """The largest file that `rename` accepts; None: any."""
        return None

    def delete(self, path: str, *, recursive: bool = False, is_file: bool = False) -> None:
        """Remove. Raises `NotFoundError`, and `PermanentError` for a folder that is not empty. `is_file`: known to be a
        file, which saves a request."""

    def make_folder(self, path: str, *, mode: int = 0o755, parents: bool = False) -> None:
        """Create a folder. Raises `AlreadyExistsError` if the name is taken, unless `parents` and it is a folder."""

    def set_mode(self, path: str, mode: int) -> None:
        """Set the permission bits."""

    def set_owner(self, path: str, owner: str | None, group: str | None) -> None:
        """Set owner and group, by name."""

    def set_mtime(self, path: str, mtime_ns: int) -> None:
        """Set the modification time; places may round it to milliseconds."""

    def now_s(self, folder: str = "") -> float:
        """The place's own clock in seconds since 1970: the `mtime_ns` that a file written into `folder` now would get.
        This machine's clock where the caller may not write there, or there is no room."""
        clock = self._clock
        if clock is None or time.monotonic() - clock[1] > _CLOCK_S:
            try:
                clock = self._clock = (self._measure_s(folder), time.monotonic())
            except (AccessError, NoSpaceError):
                return time.time()  # a caller without write access holds no lease there, and one without room removes
        return clock[0] + time.monotonic() - clock[1]

    def _measure_s(self, folder: str) -> float:
        """The time of a file that is written now: no storage has a request for its clock."""
        path = join(folder, f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}")
        written = self.write_bytes(path, b"")
        self.delete(path, is_file=True)
        return written.mtime_ns / 1e9

    def space(self) -> tuple[int, int]:
        """Total and free bytes."""

    def facts(self) -> Mapping[str, object]:
        """Statistics of all reads so far: bytes, requests and seconds of each node, then retries and hedges."""

    def close(self) -> None:
        """Release connections. The place must not be used afterwards."""


def read_blocking(
    file: OpenFile, offset: int, length: int, uri: str, deadline_s: float = 60.0, *, wait_s: float | None = None
) -> bytearray:
    """Read a range inside the file and wait for it, for `wait_s` at most, or else twice `deadline_s`, since a place may
    extend that while bytes arrive. `uri` names the file in errors."""
    wait_s = 2 * deadline_s if wait_s is None else wait_s
    data, ended = bytearray(length), Future[ReadOutcome]()
    ticket = file.read_into(offset, memoryview(data), ended.set_result, deadline_s=deadline_s)
    try:
        error = ended.result(wait_s).error
    except TimeoutError:
        ticket.cancel()
        raise TransientError(f"{uri}: not read within {wait_s:.0f} s") from None
    if error is not None:
        raise error
    return data


def exists(stat: Callable[[str], object], path: str) -> bool:
    """Whether there is something at `path`, by the `stat` of a place or another tree."""
    try:
        stat(path)
    except NotFoundError:
        return False
    return True


def make_folder_like_parent(place: Place, path: str) -> None:
    """Create a folder and missing parents, with the mode of the parent folder, so that its users share it."""
    try:
        place.stat(path)
    except NotFoundError:
        above = path.rpartition("/")[0]
        place.make_folder(above, parents=True)
        place.make_folder(path, mode=place.stat(above).mode, parents=True)

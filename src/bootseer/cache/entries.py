"""The entries of a cache, for `cache show` and for planning evictions.

An entry is in use while a process has it open, which holds a lease, or the kernel has it mounted. A mount has no lease,
and may be in any mount namespace, but it has the data file open, which the kernel tells (`disk.has_other_users`).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bootseer.blocks.index import MAX_INDEX_BYTES, Index
from bootseer.cache import disk
from bootseer.cache.disk import Damaged
from bootseer.cache.eviction_plan import Candidate
from bootseer.cache.states import MISSING, Durable, LiveMap, StatIdentity
from bootseer.errors import PermanentError
from bootseer.io import locks

_BLOCK = 512  # the unit of st_blocks, whatever the file system


class Entry(Candidate, frozen=True, kw_only=True):
    """One cached file."""

    path: Path
    leases: tuple[int, ...]
    """Pids that have it open, as far as visible here."""
    damaged: bool = False
    """Its content is unknown: it is replaced at its next use."""
    size_bytes: int = 0
    ready_bytes: int = 0
    trusted: bool = False
    """See `CachedFile.trusted`."""


def examine(path: Path, boot: str) -> Entry | None:
    """Examine one entry; None if it is gone."""
    disk_bytes = 0
    try:
        for file in list(path.iterdir()):
            with contextlib.suppress(FileNotFoundError):  # a temporary name, whose file has its own by now
                disk_bytes += file.lstat().st_blocks * _BLOCK
    except (FileNotFoundError, NotADirectoryError):
        return None
    leases = tuple(locks.holders(path / disk.LEASE))
    entry = partial(Entry, path.name, last_use_ns(path), is_in_use(path), disk_bytes, path=path, leases=leases)
    try:
        index = read_index_of(path)
        states, trusted = states_of(path, index, boot)
    except Damaged:
        return entry(damaged=True) if os.path.lexists(path) else None
    return entry(size_bytes=index.size_bytes, ready_bytes=_ready_bytes(index, states), trusted=trusted)


def read_index_of(path: Path) -> Index:
    """The index of an entry. Raises `Damaged`."""
    try:
        index = Index.parse(disk.read_file(path / disk.INDEX, MAX_INDEX_BYTES))
    except (OSError, PermanentError) as error:
        raise Damaged(f"{path}: {error}") from error
    if index.identity != path.name:
        raise Damaged(f"{path} has the index of another file")
    return index


def states_of(path: Path, index: Index, boot: str) -> tuple[bytes, bool]:
    """States of an entry's blocks, and whether it is trusted. Raises `Damaged`."""
    try:
        data = disk.open_file(path / disk.DATA, os.O_RDONLY)
    except OSError as error:
        raise Damaged(f"{path}: {error}") from error
    try:
        stat_identity = StatIdentity.of(data)
    finally:
        os.close(data)
    if stat_identity.size != index.size_bytes:
        raise Damaged(f"{path} has data of another size")
    durable = Durable.load(path, index)
    live = LiveMap.open(path, index, boot)
    if live is not None:
        try:
            states = live.get_all()
        finally:
            os.close(live.fd)
    else:
        states = (durable or Durable.of_new(index)).states
    return states, durable is not None and durable.whole == stat_identity and MISSING not in states


def is_in_use(path: Path) -> bool:
    """Whether a process has the entry open, or the kernel has it mounted; True if that cannot be determined."""
    return _applies(path / disk.LEASE, lambda fd: not locks.try_flock(fd)) or is_open(path)


def is_open(path: Path) -> bool:
    """Whether anything has the data of an entry open, as a mount has; True if that cannot be determined."""
    return _applies(path / disk.DATA, disk.has_other_users)


def _applies(path: Path, question: Callable[[int], bool]) -> bool:
    try:
        fd = disk.open_file(path)
    except (FileNotFoundError, Damaged):
        return False
    except OSError:
        return True
    try:
        return question(fd)
    except OSError:
        return True
    finally:
        os.close(fd)


def last_use_ns(path: Path) -> int:
    """Time of the last use; 0 if unknown."""
    try:
        return (path / disk.LAST_USE).lstat().st_mtime_ns
    except OSError:
        return 0


def note_use(path: Path) -> None:
    """Now is the time of the last use. Only a hint for eviction: a full disk prevents no start, and after a jump of
    the clock the wrong entries are evicted for a while."""
    with contextlib.suppress(OSError, Damaged):
        fd, now_ns = disk.open_file(path / disk.LAST_USE, os.O_RDWR | os.O_CREAT), time.time_ns()
        try:
            os.utime(fd, ns=(now_ns, now_ns))  # the kernel's own time of a change is exact to milliseconds only
        finally:
            os.close(fd)


def _ready_bytes(index: Index, states: bytes) -> int:
    """Bytes of the file in present blocks; only the last block may be shorter."""
    if not states:
        return 0
    whole = (len(states) - states.count(MISSING)) * index.block_size
    return whole if states[-1] == MISSING else whole - index.block_size + index.length(len(states) - 1)

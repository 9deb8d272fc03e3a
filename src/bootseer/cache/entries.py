"""The entries of a cache, for `cache show` and for planning evictions; pins, and usage flags of blocks.

A lease ends with its process, and a file mounted directly by the kernel has none. A *pin* is a small file in the entry
with the boot id: it protects the entry until it is removed or the machine reboots, when the mount is gone too. *Use* is
a byte per block: whether it is in a hot set, and whether it was read. It is a hint for eviction, written without a
sync; an update lost in a race of two processes only makes a block look colder than it is.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from pathlib import Path

from bootseer.blocks.codec import ZERO
from bootseer.blocks.index import MAX_INDEX_BYTES, Index
from bootseer.cache import disk
from bootseer.cache.disk import Damaged
from bootseer.cache.eviction_plan import Candidate
from bootseer.cache.states import MISSING, Durable, LiveMap, StatIdentity
from bootseer.errors import PermanentError
from bootseer.io import locks

HOT = 1
READ = 2
_BLOCK = 512  # the unit of st_blocks, whatever the file system
_PIN = "mounted"

# Flag columns are processed as whole byte strings: entries have hundreds of thousands of blocks.
_ANY = bytes(value != 0 for value in range(256))
_NONE = bytes(value == 0 for value in range(256))
_HOT = bytes(value & HOT != 0 for value in range(256))
_TAKES_ROOM = bytes(value != ZERO for value in range(256))


class Entry(Candidate, frozen=True, kw_only=True):
    """One cached file."""

    path: Path
    leases: tuple[int, ...]
    """Pids that have it open, as far as visible here."""
    pins: tuple[str, ...]
    damaged: bool = False
    """Its content is unknown: it is replaced at its next use."""
    size_bytes: int = 0
    ready_bytes: int = 0
    hot_bytes: int = 0
    """Ready bytes that are in a hot set."""
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
    holding = tuple(pins_of(path, boot))
    in_use, leases = bool(holding) or is_leased(path), tuple(locks.holders(path / disk.LEASE))
    entry = partial(Entry, path.name, last_use_ns(path), in_use, disk_bytes, path=path, leases=leases, pins=holding)
    try:
        index = read_index_of(path)
        states, trusted = states_of(path, index, boot)
    except Damaged:
        return entry(damaged=True) if os.path.lexists(path) else None
    flags = use_of(path, index.num_blocks)
    ready = states.translate(_ANY)
    cold = _both(_both(ready, flags.translate(_NONE)), index.codecs().translate(_TAKES_ROOM))
    return entry(
        size_bytes=index.size_bytes,
        ready_bytes=_bytes_of(index, ready),
        hot_bytes=_bytes_of(index, _both(ready, flags.translate(_HOT))),
        cold_bytes=min(_bytes_of(index, cold), disk_bytes),
        trusted=trusted,
    )


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


def is_leased(path: Path) -> bool:
    """Whether a process has the entry open; True if that cannot be determined."""
    try:
        fd = disk.open_file(path / disk.LEASE)
    except (FileNotFoundError, Damaged):
        return False
    except OSError:
        return True
    try:
        return not locks.try_flock(fd, shared=False)
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


def _both(one: bytes, two: bytes) -> bytes:
    return (int.from_bytes(one, "little") & int.from_bytes(two, "little")).to_bytes(len(one), "little")


def _bytes_of(index: Index, chosen: bytes) -> int:
    """Bytes of the file in the chosen blocks; only the last block may be shorter."""
    if not chosen:
        return 0
    last = index.num_blocks - 1
    return chosen.count(1) * index.block_size - chosen[last] * (index.block_size - index.length(last))


def add_pin(entry: Path, boot: str) -> None:
    folder = entry / disk.PINS
    folder.mkdir(mode=0o700, exist_ok=True)
    disk.write_file(folder / _PIN, boot.encode())


def remove_pin(entry: Path) -> None:
    """Undo `add_pin`. Nothing happens if there is no pin. Raises `OSError`."""
    (entry / disk.PINS / _PIN).unlink(missing_ok=True)


def pins_of(entry: Path, boot: str) -> list[str]:
    """Names of the valid pins; an unreadable one counts as valid."""
    try:
        paths = sorted((entry / disk.PINS).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path.name for path in paths if _is_pinned(path, boot)]


def _is_pinned(path: Path, boot: str) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return True
    # Boot ids have equal length: a shorter content was truncated by a crash, after which no mount exists.
    return content == boot.encode()


def use_of(entry: Path, num_blocks: int) -> bytes:
    """The flags of all blocks; zero where unknown."""
    try:
        data = disk.read_file(entry / disk.USE, num_blocks)
    except (OSError, Damaged):
        data = b""
    return data.ljust(num_blocks, b"\0")


def add_use(entry: Path, flags: bytes | bytearray) -> None:
    """Add flags, one byte per block, to those that are stored. Raises `OSError`."""
    # As two large integers: a loop over a million blocks would take longer than writing them.
    merged = int.from_bytes(use_of(entry, len(flags)), "little") | int.from_bytes(flags, "little")
    disk.write_file(entry / disk.USE, merged.to_bytes(len(flags), "little"))

"""What becomes of times, and of the `.pyc` files that depend on them, in a snapshot. ADR 16 has the reasons.

*Times:* two runs of one setup give one snapshot, and nothing looks out of date. Times from before the setup come out of
archives (dpkg, tar) and are the same in each run: they are kept. What the setup itself wrote gets one time, which is
not older than any of those: `make` and `ninja` rebuild what is older than that from which it was made. Below a folder
with ninja's log all times stay, because the log repeats them.

*Bytecode* stays valid. Python believes a file in `__pycache__` when its header repeats time and size of the source, or
a digest of it. A snapshot changes times, so the headers are changed with them; code is never touched. Bytecode of a
source that lies in the snapshot names the time that the source has there: it is the same in each run of the setup, and
Python still sees when a job changes the source. Bytecode of other sources, which may differ from node to node, gets a
digest that Python compares (PEP 552). What Python would not believe is dropped.

Decides and touches nothing.
"""

from __future__ import annotations

import _imp
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

NS = 1_000_000_000
EARLIEST_S = 1_735_689_600
"""1 January 2025: what the setup wrote is not shown as older, so that it is newer than the headers of a base system."""
_BUILD_LOG = b"/.ninja_log"


class Times:
    """The times of one snapshot. `began_s` is when the setup began; `files` are paths and times of all that is kept."""

    def __init__(self, began_s: float, files: Iterable[tuple[bytes, int]]) -> None:
        # File systems stamp with a clock that runs a few milliseconds behind.
        self._began_ns = int((began_s - 1.0) * NS)
        newest = EARLIEST_S * NS
        build_folders = set()
        for path, mtime_ns in files:
            if newest < mtime_ns < self._began_ns:
                newest = mtime_ns
            if path.endswith(_BUILD_LOG):
                build_folders.add(path.removesuffix(_BUILD_LOG))
        self.written_ns = -(-newest // NS) * NS
        """What everything has that the setup wrote; a whole second."""
        self._build_folders = frozenset(build_folders)

    def of(self, path: bytes, mtime_ns: int) -> int:
        """The time that a file with this time gets."""
        if mtime_ns < self._began_ns or (self._build_folders and self._below_build(path)):
            return mtime_ns
        return self.written_ns

    def _below_build(self, path: bytes) -> bool:
        while path := path.rpartition(b"/")[0]:
            if path in self._build_folders:
                return True
        return False


HEADER_BYTES = 16
_HEADER = struct.Struct("<4sI8s")
_STAMP = struct.Struct("<II")
_MASK = 0xFFFFFFFF
_TIMESTAMP, _UNCHECKED, _CHECKED = 0, 1, 3
_OLDEST_MAGIC = 3394  # Python 3.7: the first with flags in the header
_OLDEST_DIGEST = 3450  # Python 3.11: from here on all digests are SipHash-1-3, as in the Python that runs this
_CACHED = re.compile(
    r"(?P<folder>.*/)__pycache__/(?P<stem>[^/]+?)\.(?:cpython-|pypy|graalpy)[0-9][^/]*\.pyc", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Source:
    """The `.py` file that a `.pyc` was made from."""

    mtime_ns: int
    size: int
    shown_ns: int | None
    """Its time in the snapshot; None when it is not part of it."""
    read: Callable[[], bytes]
    """Its content. Called only where a digest of it is needed."""


def source_of(path: str) -> str | None:
    """Where the source of a file in `__pycache__` is to be found. None for all other files.

    A `.pyc` beside or without a source is loaded whatever its header says about one: it is not a cache.
    """
    found = _CACHED.fullmatch(path)
    return f"{found['folder']}{found['stem']}.py" if found else None


def settled(data: bytes, source: Source | None) -> bytes | None:
    """The content of a file in `__pycache__` as the snapshot has it; None when it is of no use."""
    if len(data) < HEADER_BYTES or source is None:
        return None
    magic, flags, stamp = _HEADER.unpack_from(data)
    version = int.from_bytes(magic[:2], "little")
    if version < _OLDEST_MAGIC or magic[2:] != b"\r\n":
        return None
    if version < _OLDEST_DIGEST and flags in {_UNCHECKED, _CHECKED}:
        return data  # Python compares it itself
    if not _believed(magic, flags, stamp, source):
        return data if flags == _UNCHECKED else None  # unchecked: Python would load it, right or not
    if source.shown_ns is not None:
        head = _HEADER.pack(magic, _TIMESTAMP, _stamp(source.shown_ns, source.size))
    elif version < _OLDEST_DIGEST:
        return data
    else:
        head = _HEADER.pack(magic, _CHECKED, _digest(magic, source.read()))
    return head + data[HEADER_BYTES:]


def _believed(magic: bytes, flags: int, stamp: bytes, source: Source) -> bool:
    """Whether the header refers to this source."""
    if flags == _TIMESTAMP:
        return stamp == _stamp(source.mtime_ns, source.size)
    return flags in {_UNCHECKED, _CHECKED} and stamp == _digest(magic, source.read())


def _stamp(mtime_ns: int, size: int) -> bytes:
    return _STAMP.pack(mtime_ns // 1_000_000_000 & _MASK, size & _MASK)


def _digest(magic: bytes, source: bytes) -> bytes:
    return _imp.source_hash(int.from_bytes(magic, "little"), source)

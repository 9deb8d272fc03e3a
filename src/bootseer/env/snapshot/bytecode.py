"""File times in a snapshot, and the `.pyc` headers that depend on them. ADR 16 has the reasons.

*Times:* two runs of a setup must give the same snapshot, and nothing in it may look outdated. Times before the setup
come from archives (dpkg, tar) and are the same in each run: they are kept. Files that the setup wrote get one common
time, not older than any of the others, as `make` and `ninja` rebuild targets that are older than their sources. Below a
folder with ninja's log all times are kept, as the log repeats them.

*Bytecode* stays valid. Python accepts a file in `__pycache__` if its header has the time and size of the source, or a
digest of it. As a snapshot changes times, it rewrites these headers; code is not changed. Bytecode of a source in the
snapshot gets the source's time there, so that Python notices when a job changes the source. Bytecode of other sources,
which may differ between nodes, gets a checked digest (PEP 552). Bytecode that Python would reject is dropped.

Does no I/O.
"""

from __future__ import annotations

import _imp
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

NS = 1_000_000_000
EARLIEST_S = 1_735_689_600
"""1 January 2025: lower bound of the common time, so that it is newer than the headers of a base system."""
_BUILD_LOG = b"/.ninja_log"


class Times:
    """The times of one snapshot. `began_s` is when the setup began; `files` are paths and times of all its files."""

    def __init__(self, began_s: float, files: Iterable[tuple[bytes, int]]) -> None:
        # Timestamps of file systems are a few milliseconds behind the clock.
        self._began_ns = int((began_s - 1.0) * NS)
        newest = EARLIEST_S * NS
        build_folders = set()
        for path, mtime_ns in files:
            if newest < mtime_ns < self._began_ns:
                newest = mtime_ns
            if path.endswith(_BUILD_LOG):
                build_folders.add(path.removesuffix(_BUILD_LOG))
        self.written_ns = -(-newest // NS) * NS
        """The common time of files that the setup wrote; a whole second."""
        self._build_folders = frozenset(build_folders)

    def shown_ns(self, path: bytes, mtime_ns: int) -> int:
        """The time in the snapshot of a file with this time."""
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
    """The `.py` file of a `.pyc`."""

    mtime_ns: int
    size: int
    shown_ns: int | None
    """Its time in the snapshot; None if it is not in it."""
    read: Callable[[], bytes]
    """Returns its content; called only if a digest is needed."""


def source_of(path: str) -> str | None:
    """The path of the source of a file in `__pycache__`; None for other files.

    A `.pyc` elsewhere is not a cache: Python loads it without checking a source.
    """
    found = _CACHED.fullmatch(path)
    return f"{found['folder']}{found['stem']}.py" if found else None


def settle_header(data: bytes, source: Source | None) -> bytes | None:
    """The content of a file in `__pycache__` in the snapshot, with its new header; None if Python would reject it."""
    if len(data) < HEADER_BYTES or source is None:
        return None
    magic, flags, stamp = _HEADER.unpack_from(data)
    version = int.from_bytes(magic[:2], "little")
    if version < _OLDEST_MAGIC or magic[2:] != b"\r\n":
        return None
    if version < _OLDEST_DIGEST and flags in {_UNCHECKED, _CHECKED}:
        return data  # of another digest algorithm; Python checks it itself
    if not _is_valid(magic, flags, stamp, source):
        return data if flags == _UNCHECKED else None  # unchecked: Python loads it in any case
    if source.shown_ns is not None:
        head = _HEADER.pack(magic, _TIMESTAMP, _stamp(source.shown_ns, source.size))
    elif version < _OLDEST_DIGEST:
        return data
    else:
        head = _HEADER.pack(magic, _CHECKED, _digest(magic, source.read()))
    return head + data[HEADER_BYTES:]


def _is_valid(magic: bytes, flags: int, stamp: bytes, source: Source) -> bool:
    if flags == _TIMESTAMP:
        return stamp == _stamp(source.mtime_ns, source.size)
    return flags in {_UNCHECKED, _CHECKED} and stamp == _digest(magic, source.read())


def _stamp(mtime_ns: int, size: int) -> bytes:
    return _STAMP.pack(mtime_ns // 1_000_000_000 & _MASK, size & _MASK)


def _digest(magic: bytes, source: bytes) -> bytes:
    return _imp.source_hash(int.from_bytes(magic, "little"), source)

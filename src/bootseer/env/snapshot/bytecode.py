"""Bytecode that stays valid: what becomes of the `.pyc` files of a setup in its snapshot.

Python believes a file in `__pycache__` when its header repeats time and size of the source, or a digest of it. A
snapshot changes times, so the headers are changed with them; code is never touched. Bytecode of a source that lies in
the snapshot names the time that the source has there: it is the same in each run of the setup, and Python still sees
when a job changes the source. Bytecode of other sources, which may differ from node to node, gets a digest that Python
compares (PEP 552). What Python would not believe is dropped. ADR 16 has the reasons.

Decides and touches nothing. Called by `items` and `contents`.
"""

from __future__ import annotations

import _imp
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

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

    A `.pyc` beside or without a source is loaded whatever its header says about one: it is no cache.
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
    """Whether the header speaks of this source."""
    if flags == _TIMESTAMP:
        return stamp == _stamp(source.mtime_ns, source.size)
    return flags in {_UNCHECKED, _CHECKED} and stamp == _digest(magic, source.read())


def _stamp(mtime_ns: int, size: int) -> bytes:
    return _STAMP.pack(mtime_ns // 1_000_000_000 & _MASK, size & _MASK)


def _digest(magic: bytes, source: bytes) -> bytes:
    return _imp.source_hash(int.from_bytes(magic, "little"), source)

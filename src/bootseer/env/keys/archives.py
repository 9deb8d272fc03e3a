"""The list of contents at the end of a zip archive: names, sizes and checksums of all files, some hundred kilobytes for
a wheel of gigabytes.

It changes with any file of the archive, among them the wheel's `RECORD` with a SHA-256 for each. Called by `files`.
"""

from __future__ import annotations

import os
import struct

_END = struct.Struct("<4s4H2IH")
_END64_PLACE = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_MAX_COMMENT = 65_535
_MAX_DIRECTORY_BYTES = 64 << 20


def directory(number: int, size: int) -> bytes | None:
    """The central directory of the zip archive of `size` bytes behind a descriptor; None when it is no such archive."""
    try:
        start = max(size - _END.size - _MAX_COMMENT - _END64_PLACE.size, 0)
        tail = os.pread(number, size - start, start)
        at = tail.rfind(b"PK\x05\x06")
        if at < 0 or at + _END.size > len(tail):
            return None
        end = _END.unpack_from(tail, at)
        length, offset = end[5], end[6]
        if offset == 0xFFFF_FFFF or length == 0xFFFF_FFFF:
            place = at - _END64_PLACE.size
            if place < 0 or tail[place : place + 4] != b"PK\x06\x07":
                return None
            data = os.pread(number, _END64.size, _END64_PLACE.unpack_from(tail, place)[2])
            if len(data) < _END64.size or data[:4] != b"PK\x06\x06":
                return None
            length, offset = _END64.unpack(data)[8:10]
        if not 0 < length <= _MAX_DIRECTORY_BYTES or offset + length > size:
            return None
        found = os.pread(number, length, offset)
    except (OSError, OverflowError):
        return None
    return found if len(found) == length and found[:4] == b"PK\x01\x02" else None

"""Find the lines of a block of log bytes that hold a needle.

A log that says nothing of startups costs one pass for each needle, and this pass is the speed of the whole scan. The C
library's `memmem` makes it about three times as fast as `bytes.find`; `make bench` (scan_foreign) measures the whole.
Called by `analysis.scan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

Find = Callable[[bytes, bytes, int], int]
"""`find(text, needle, begin)`: offset of the first needle at or behind `begin`, -1 when there is none."""


def _find(text: bytes, needle: bytes, begin: int) -> int:
    return text.find(needle, begin)


def _c_library_find() -> Find:
    """`memmem` as a `Find`; raises `ImportError`, `OSError` or `AttributeError` where Python or libc lack it."""
    import ctypes

    memmem = ctypes.CDLL(None).memmem
    memmem.restype = ctypes.c_void_p
    memmem.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]

    def find(text: bytes, needle: bytes, begin: int) -> int:
        # The caller holds `text`, and nothing writes to bytes: the address stays good during the call.
        base = ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value
        found = memmem(base + begin, len(text) - begin, needle, len(needle)) if base is not None else None
        return -1 if found is None or base is None else int(found) - base

    return find


try:
    fastest_find = _c_library_find()
except (ImportError, OSError, AttributeError):
    fastest_find = _find


def line_starts(text: bytes, needle: bytes, find: Find = fastest_find) -> Iterator[int]:
    """Offsets of the lines that hold the needle, each once. `needle` must not be empty."""
    place = find(text, needle, 0)
    while place >= 0:
        yield text.rfind(b"\n", 0, place) + 1
        after = text.find(b"\n", place)
        if after < 0:
            return
        place = find(text, needle, after)

"""How this process allocates memory.

By default glibc returns large freed blocks to the kernel, and each new block then costs a page fault for every 4 KiB.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_MIB = 1 << 20


def keep_freed_memory() -> None:
    """Have malloc keep up to 64 MiB of freed memory, if it is glibc's."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        # One arena: several would each keep memory, and Python's lock lets only one thread allocate at a time anyway.
        set_option(_ARENA_MAX, 1)
        set_option(_MMAP_THRESHOLD, 32 * _MIB)
        set_option(_TRIM_THRESHOLD, 64 * _MIB)
        set_option(_TOP_PAD, 16 * _MIB)

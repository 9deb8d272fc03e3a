"""How this process allocates memory.

By default glibc returns large freed blocks to the kernel, and each new block then costs a page fault for every 4 KiB.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_MIB = 1 << 20


def keep_freed_memory() -> bool:
    """Have malloc keep up to 64 MiB of freed memory. Returns False without glibc."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    options = (
        # One arena: several would each keep memory, and Python's lock lets only one thread allocate at a time anyway.
        (_ARENA_MAX, 1),
        (_MMAP_THRESHOLD, 32 * _MIB),
        (_TRIM_THRESHOLD, 64 * _MIB),
        (_TOP_PAD, 16 * _MIB),
    )
    return all(set_option(option, value) == 1 for option, value in options)

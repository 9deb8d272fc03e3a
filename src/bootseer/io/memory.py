"""How this process allocates memory, and how much there is.

By default glibc returns large freed blocks to the kernel, and each new block then costs a page fault for every 4 KiB.
"""

from __future__ import annotations

import contextlib
import ctypes

from bootseer.io import proc

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


# By version of cgroups: the limit, the usage, and the part of the usage that the kernel gives back
_CGROUP_FILES = {
    "": ("memory.max", "memory.current", (b"inactive_file", b"active_file")),
    "/memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", (b"total_inactive_file", b"total_active_file")),
}


def available_bytes() -> int:
    """Memory that this process can still get: the machine's and that of its cgroups, page cache included."""
    machine = dict(line.split(":") for line in proc.read("", "meminfo").decode().splitlines())
    found = [int(machine.get("MemAvailable", f"{1 << 50}").split()[0]) << 10]
    for line in proc.read("self", "cgroup").decode().splitlines():
        _, kinds, path = line.split(":", 2)
        kind = "/memory" if "memory" in kinds.split(",") else kinds
        limit_name, used_name, cache = _CGROUP_FILES.get(kind, ("", "", ()))
        # Of a container's cgroup only the lower folders are visible: the names above do not exist.
        above = [path[:end] for end, letter in enumerate(path + "/") if letter == "/"] if cache else []
        for folder in {f"/sys/fs/cgroup{kind}{name}" for name in above}:
            texts = (proc.read("self", f"root{folder}/{name}") for name in (limit_name, used_name, "memory.stat"))
            with contextlib.suppress(ValueError):  # it is not visible, or has no limit ("max")
                limit, used, rows = texts
                fields = dict(row.split() for row in rows.splitlines())
                found.append(int(limit) - int(used) + sum(int(fields.get(name, 0)) for name in cache))
    return min(found)

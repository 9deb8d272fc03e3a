"""Facts about this machine for the result files of benchmarks.

They describe the kind of machine, and do not identify it: no host name, path or user.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any


def facts(folder: str = ".") -> dict[str, Any]:
    """CPU, memory, kernel, Python, distribution and the kind of disk below `folder`. Unknown facts are None."""
    return {
        "cpu": _cpu_model(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _memory_bytes(),
        "kernel": os.uname().release,
        "machine": os.uname().machine,
        "python": platform.python_version(),
        "distribution": _distribution(),
        "disk": disk_kind(folder),
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _cpu_model() -> str | None:
    # ARM kernels give no model name, only the number of the part.
    match = re.search(r"^(?:model name|CPU part)\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else None


def _memory_bytes() -> int | None:
    """Memory that this process may use: that of the machine, or the limit of its cgroup."""
    match = re.search(r"^MemTotal:\s*(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE)
    total = int(match[1]) * 1024 if match else None
    limit = _text("/sys/fs/cgroup/memory.max").strip()
    if total is not None and limit.isdecimal():
        return min(total, int(limit))
    return total


def _distribution() -> str | None:
    match = re.search(r'^PRETTY_NAME="?([^"\n]+)"?$', _text("/etc/os-release"), re.MULTILINE)
    return match[1] if match else None


def disk_kind(folder: str) -> str | None:
    """`ssd`, `hdd`, `nvme` or `virtual` for a block device, else the type of the file system (`tmpfs`, `overlay`)."""
    try:
        device = Path(folder).stat().st_dev
    except OSError:
        return None
    number = f"{os.major(device)}:{os.minor(device)}"
    block = Path("/sys/dev/block", number).resolve()
    if not block.is_dir():
        return _filesystem(number)
    # A partition has no queue of its own; its disk is the folder above.
    disk = block if (block / "queue").is_dir() else block.parent
    if disk.name.startswith("nvme"):
        return "nvme"
    if disk.name.startswith(("vd", "xvd")):
        return "virtual"
    return {"0": "ssd", "1": "hdd"}.get(_text(f"{disk}/queue/rotational").strip())


def _filesystem(number: str) -> str | None:
    """The type of the mounted file system with this device number."""
    for line in _text("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2:3] == [number]:
            return right.split()[0]
    return None

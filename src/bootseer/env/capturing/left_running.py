"""Processes that a setup left behind: whatever still runs in its mount namespace, or has its mark in its environment.

Neither depends on who the parent of a process is now: a daemon has none. They are looked at and left alone, as the job
may need them. In a mount namespace none can hide; without one (a capture by comparing) those go unseen that drop or
overwrite their environment. What another program starts for the setup (systemd, a container engine) is not the setup's
and never seen. Who calls: `effects`.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Collection, Iterator
from pathlib import Path

MARK = "BOOTSEER_SETUP"
"""The environment variable that tells the setup's processes."""
_POLL_S = 0.02
# Servers that build tools and version control keep for their own speed; they start again by themselves.
_HARMLESS = frozenset((
    "dirmngr", "gpg-agent", "keyboxd", "scdaemon", "sccache", "ccache", "dbus-launch", "watchman",
))  # fmt: skip
_MAX_NAMED = 5


def new_mark() -> str:
    """A value that nobody else has."""
    return secrets.token_hex(8)


def processes(mark: str, namespace: int | None, *, but: Collection[int] = ()) -> dict[int, str]:
    """Names of the processes that are the setup's, by process id. `namespace`: the inode of its mount namespace."""
    needle = f"{MARK}={mark}".encode()
    found = {}
    for pid in _pids():
        if pid != os.getpid() and pid not in but and _is_of_setup(pid, needle, namespace):
            name = _name(pid)
            if name and name not in _HARMLESS:
                found[pid] = name
    return found


def left_running(mark: str, namespace: int | None, *, but: Collection[int] = (), grace_s: float = 1.0) -> list[str]:
    """What the setup left running, for people. Processes that are just ending are waited for, at most `grace_s`."""
    end = time.monotonic() + grace_s
    while (found := processes(mark, namespace, but=but)) and time.monotonic() < end:
        time.sleep(_POLL_S)
    named = [f"it left a process running: {name} ({pid})" for pid, name in sorted(found.items())]
    if len(named) > _MAX_NAMED:
        named[_MAX_NAMED:] = [f"it left {len(named) - _MAX_NAMED} more processes running"]
    return named


def _is_of_setup(pid: int, needle: bytes, namespace: int | None) -> bool:
    try:
        if namespace is not None and os.stat(f"/proc/{pid}/ns/mnt").st_ino == namespace:  # noqa: PTH116
            return True
        return needle in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or belongs to somebody else
        return False


def _name(pid: int) -> str:
    """Empty for a process that has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    name, _, rest = stat.partition(b"(")[2].rpartition(b")")
    return "" if rest.split()[0] in (b"Z", b"X") else os.fsdecode(name)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208 - numbers, not paths

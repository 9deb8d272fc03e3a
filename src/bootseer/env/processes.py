"""Processes as shown by /proc: process trees, and addresses on which they listen.

An address is `tcp 127.0.0.1:6379`, `tcp [::]:80`, `udp 0.0.0.0:8125`, `unix /run/x.sock` or `unix @abstract`. Processes
that ended meanwhile, or belong to another user, are left out.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Iterator

from msgspec import Struct

from bootseer.io import proc
from bootseer.io.files import lines_of

_TABLES = (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07"))
"""Tables of the kernel, and the state of a socket that listens (TCP) or is not connected (UDP)."""
_ACCEPTS, _DATAGRAMS = "00010000", "0002"
_FORK_NO_EXEC = 0x40  # PF_FORKNOEXEC of the kernel
_TICKS = os.sysconf("SC_CLK_TCK")
_WILDCARDS = ("0.0.0.0", "[::]")  # noqa: S104 - compared, nothing listens


class Process(Struct, frozen=True):
    """A running process."""

    pid: int
    parent: int
    name: str
    forked: bool
    """Whether it has not called exec since its fork."""
    began_s: float
    """Start time on the monotonic clock."""


def process(pid: int) -> Process | None:
    """The process, or None if it has ended."""
    name, _, rest = proc.read(pid, "stat").partition(b"(")[2].rpartition(b")")
    fields = rest.split()
    if not fields or fields[0] in (b"Z", b"X"):
        return None
    # The kernel counts from boot including suspended time, which the monotonic clock excludes.
    asleep_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    began_s = int(fields[19]) / _TICKS - asleep_s
    return Process(pid, int(fields[1]), os.fsdecode(name), bool(int(fields[6]) & _FORK_NO_EXEC), began_s)


def processes() -> dict[int, Process]:
    return {pid: found for pid in proc.pids() if (found := process(pid)) is not None}


def below(pid: int, table: dict[int, Process]) -> set[int]:
    children: dict[int, list[int]] = {}
    for one in table.values():
        children.setdefault(one.parent, []).append(one.pid)
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        new = [child for child in children.get(waiting.pop(), ()) if child not in found]
        found.update(new)
        waiting += new
    return found


def listening() -> dict[int, str]:
    """Addresses on which processes of this network namespace listen, by the inode of the socket."""
    found = {}
    for table, state in _TABLES:
        # Only few of thousands of rows listen: the others are skipped before they are parsed.
        for fields in (row.split() for row in lines_of(f"/proc/net/{table}") if f" {state} " in row):
            with contextlib.suppress(IndexError, ValueError, struct.error):
                if fields[3] == state:
                    found[int(fields[9])] = f"{table[:3]} {_address(fields[1])}"
    for line in lines_of("/proc/net/unix")[1:]:
        fields = line.rstrip("\n").split(None, 7)
        if len(fields) == 8 and (fields[3] == _ACCEPTS or fields[4] == _DATAGRAMS):
            found[int(fields[6])] = f"unix {fields[7]}"
    return found


def sockets_of(pids: Iterable[int]) -> set[int]:
    """Inodes of the sockets opened by these processes."""
    return {int(target[8:-1]) for pid in pids for target in open_files(pid) if target.startswith("socket:[")}


def open_files(pid: int) -> Iterator[str]:
    """Names of a process's open files as the kernel shows them."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - numbers, not paths
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115 - many


def clash(one: str, other: str) -> bool:
    """Whether sockets on both addresses would conflict. Pure."""
    if one == other:
        return True
    (kind, place), (other_kind, other_place) = (text.split(" ", 1) for text in (one, other))
    if kind == "unix" or kind != other_kind:
        return False
    (host, _, port), (other_host, _, other_port) = place.rpartition(":"), other_place.rpartition(":")
    return port == other_port and (host in _WILDCARDS or other_host in _WILDCARDS)


def pid_in(path: str) -> int | None:
    """The process id in a pid file; None for any other file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            found = re.fullmatch(rb"\s*([1-9][0-9]{0,9})\s*", file.read(64))
    except OSError:
        return None
    return int(found[1]) if found else None


def _address(text: str) -> str:
    host, _, port = text.partition(":")
    # 32-bit words in this machine's byte order.
    data = b"".join(struct.pack("=I", int(host[at : at + 8], 16)) for at in range(0, len(host), 8))
    if len(data) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, data)}:{int(port, 16)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, data)}]:{int(port, 16)}"

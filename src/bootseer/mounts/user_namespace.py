"""User namespaces: what this process may do, and how one without root comes to mounts of its own.

In a user namespace of its own a process is root, over mounts that no other process sees and over files of its own user.
It has one user there: everything that belongs to it outside belongs to root inside.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from bootseer.errors import AccessError, BootseerError
from bootseer.fuse.syscalls import check, libc, number_of
from bootseer.mounts import kernel

ALL_IDS = (1 << 32) - 1
_CLONE_NEWUSER = 0x1000_0000
_CAP_SYS_ADMIN = 21
_THREADS_END_S = 1.0


def may_mount() -> bool:
    """Whether mount(2) is open to this process: on the host, or in the user namespace that it is in."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return False


def is_host() -> bool:
    """Whether this is the host's user namespace, or one that has all its ids."""
    return _mapped("uid_map") == ALL_IDS


def num_owners() -> int:
    """How many owners files of ours can have, counted from id 0: all for root, none but ourselves (0) for others."""
    return min(_mapped("uid_map"), _mapped("gid_map")) if os.geteuid() == 0 else 0


def _mapped(name: str) -> int:
    """How many ids this namespace has, from 0 on without a gap."""
    rows = sorted(tuple(map(int, line.split())) for line in Path("/proc/self", name).read_text().splitlines())
    end = 0
    for inside, _, count in rows:
        if inside == end:
            end += count
    return end


def enter() -> None:
    """Become root of a new user namespace with mounts of its own; nothing happens where mounting is open already.

    Only a process of one thread may; threads that are just ending are waited for. Raises `AccessError` where it is
    forbidden. There is no way back.
    """
    if not may_mount():
        enter_new()


def enter_new(map_ids: Callable[[], bool] = lambda: False) -> None:
    """The same where mounting is open already: from now on only what belongs to this user can be changed.

    `map_ids` asks a process outside for `map_all`, and tells whether that gave this one all ids.
    """
    uid, gid = os.geteuid(), os.getegid()
    try:
        _unshare()
        if not map_ids():
            # Without this no map of groups may be written: it keeps groups that take rights away.
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        kernel.unshare_mounts()
    except (BootseerError, OSError) as error:
        raise AccessError(f"cannot become root of a user namespace: {error}") from error


def map_all(pid: int) -> bool:
    """Give a process in a new user namespace, which is a child of ours, all ids that we have, under the same numbers.

    Root may, also without the right to mount, as in most containers. False where it may not: nothing is mapped then.
    """
    if os.geteuid() != 0:
        return False
    try:
        for name in ("gid_map", "uid_map"):
            rows = [line.split() for line in Path("/proc/self", name).read_text().splitlines()]
            Path(f"/proc/{pid}", name).write_text("".join(f"{inside} {inside} {count}\n" for inside, _, count in rows))
    except OSError:
        return False
    return True


def _unshare() -> None:
    end = time.monotonic() + _THREADS_END_S
    while True:
        try:
            check(libc.unshare(_CLONE_NEWUSER), "make a user namespace")
            return
        except BootseerError as error:
            # EINVAL: a second thread. Joined ones are still there for a moment.
            if number_of(error) != errno.EINVAL or time.monotonic() > end:
                raise
        time.sleep(0.001)

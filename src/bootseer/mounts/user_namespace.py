"""User namespaces: which mounts this process may make, and how an unprivileged process gets its own.

In its own user namespace a process is root over a private mount namespace and over files of its own user, which is
mapped to root; no other user exists there.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from bootseer.errors import AccessError, BootseerError
from bootseer.fuse.syscalls import CLONE_NEWUSER, check, libc, number_of
from bootseer.io import proc
from bootseer.mounts import kernel

ALL_IDS = (1 << 32) - 1
_CAP_SYS_ADMIN = 21
_THREADS_END_S = 1.0


def may_mount() -> bool:
    """Whether this process has CAP_SYS_ADMIN: on the host, or in its user namespace."""
    return bool(int(proc.status().get("CapEff", "0"), 16) >> _CAP_SYS_ADMIN & 1)


def is_host() -> bool:
    """Whether this is the initial user namespace, or one with all ids mapped."""
    return _mapped("uid_map") == ALL_IDS


def num_owners() -> int:
    """How many file owners this process can set, counted from id 0; 0 for unprivileged processes (their own only)."""
    return min(_mapped("uid_map"), _mapped("gid_map")) if os.geteuid() == 0 else 0


def _mapped(name: str) -> int:
    """How many ids this namespace maps, contiguously from 0."""
    rows = sorted(tuple(map(int, line.split())) for line in Path("/proc/self", name).read_text().splitlines())
    end = 0
    for inside, _, count in rows:
        if inside == end:
            end += count
    return end


def enter() -> None:
    """Become root of a new user and mount namespace, unless this process may mount already. Irreversible.

    Requires a single thread (ending threads are waited for). Raises `AccessError` where it is forbidden.
    """
    if not may_mount():
        enter_new()


def enter_new(map_ids: Callable[[], bool] = lambda: False) -> None:
    """As `enter`, unconditionally: afterwards only this user's files can be changed.

    `map_ids` asks a process outside to call `map_all`, and returns whether all ids were mapped.
    """
    uid, gid = os.geteuid(), os.getegid()
    try:
        _unshare()
        if not map_ids():
            # Required before an unprivileged gid_map: setgroups could otherwise drop groups that deny access.
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        kernel.unshare_mounts()
    except (BootseerError, OSError) as error:
        raise AccessError(f"cannot become root of a user namespace: {error}") from error


def map_all(pid: int) -> bool:
    """Map all our ids one to one into the new user namespace of a child process.

    Possible for root, also without CAP_SYS_ADMIN as in most containers; False where not, and then nothing is mapped.
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
            check(libc.unshare(CLONE_NEWUSER), "make a user namespace")
            return
        except BootseerError as error:
            # EINVAL: there is a second thread. The kernel counts joined threads for a moment longer.
            if number_of(error) != errno.EINVAL or time.monotonic() > end:
                raise
        time.sleep(0.001)

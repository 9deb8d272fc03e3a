"""Owners by name, as places have them, and by number, as the kernel has them.

A name that this machine does not know is shown as the user who mounted: what he may do is decided by the place, which
knows him by the mount's own identity and nobody else.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd

_KNOWN = 4096


@functools.lru_cache(_KNOWN)
def uid_of(owner: str) -> int:
    """The number of a user."""
    try:
        return pwd.getpwnam(owner).pw_uid
    except KeyError:
        return int(owner) if owner.isdecimal() else os.geteuid()


@functools.lru_cache(_KNOWN)
def gid_of(group: str) -> int:
    """The number of a group."""
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        return int(group) if group.isdecimal() else os.getegid()


@functools.lru_cache(_KNOWN)
def owner_of(uid: int) -> str:
    """The name of a user; his number when he has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@functools.lru_cache(_KNOWN)
def group_of(gid: int) -> str:
    """The name of a group; its number when it has none."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)

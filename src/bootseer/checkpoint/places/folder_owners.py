"""Users and groups by name, as this machine knows them; by number when it does not. Called by `folder`."""

from __future__ import annotations

import functools
import grp
import pwd

from bootseer.errors import PermanentError


@functools.lru_cache(maxsize=1024)
def owner_of(uid: int) -> str:
    """The name of a user."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@functools.lru_cache(maxsize=1024)
def group_of(gid: int) -> str:
    """The name of a group."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def uid_of(name: str | None) -> int:
    """The number of a user; -1 for None. Raises `PermanentError` for a name that nobody has."""
    if name is None:
        return -1
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return _number(name, "user")


def gid_of(name: str | None) -> int:
    """The same for a group."""
    if name is None:
        return -1
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return _number(name, "group")


def _number(name: str, kind: str) -> int:
    if not name.isdecimal():
        raise PermanentError(f"this machine knows no {kind} {name!r}")
    return int(name)

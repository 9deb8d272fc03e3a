"""Operations on local file systems for `folder`: names relative to a directory descriptor, no step following a symbolic
link; `OSError`s mapped to BootSeer's errors; users and groups by name, as known to this machine."""

from __future__ import annotations

import contextlib
import errno
import functools
import grp
import os
import pwd
import secrets
import stat
from collections.abc import Callable, Sequence
from typing import Any

from bootseer.errors import (
    AccessError,
    AlreadyExistsError,
    BootseerError,
    IsFolderError,
    NoSpaceError,
    NotEmptyError,
    NotFolderError,
    NotFoundError,
    PermanentError,
    TransientError,
)
from bootseer.io.files import write_all
from bootseer.io.trusted_folder import NEW
from bootseer.places.place import RESERVED_PREFIXES, TEMPORARY_PREFIX, ChangedError, name_of

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
"""EXDEV: AFS has no links from one folder into another."""


def write_temporary(folder: int, data: bytes, mode: int) -> str:
    """Write a small file under a temporary name, and return the name; durable, except for its directory entry."""
    name = f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    descriptor = os.open(name, NEW, mode, dir_fd=folder)
    try:
        os.fchmod(descriptor, mode)
        write_all(descriptor, data, 0)
        os.fsync(descriptor)
    except OSError:
        drop(name, folder)
        raise
    finally:
        os.close(descriptor)
    return name


def rename_new(name: str, folder: int, new_name: str, new_folder: int) -> None:
    """Rename unless the target exists. Raises `FileExistsError`."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        try:
            # link(2) is atomic everywhere; renameat2 with RENAME_NOREPLACE is not supported by all file systems.
            os.link(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder, follow_symlinks=False)
        except FileExistsError:
            # An NFS client whose answer was lost repeats the request, and then finds the link that it made itself.
            own = os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino
            with contextlib.suppress(FileNotFoundError):  # another process created it, and has removed it since
                if os.stat(new_name, dir_fd=new_folder, follow_symlinks=False).st_ino == own:
                    drop(name, folder)
                    return
            raise
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        else:
            drop(name, folder)
            return
    with contextlib.suppress(FileNotFoundError):
        os.stat(new_name, dir_fd=new_folder, follow_symlinks=False)
        raise FileExistsError(errno.EEXIST, new_name)
    try:
        os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):  # another process was faster
            raise FileExistsError(errno.EEXIST, new_name) from None
        raise


def drop(name: str, folder: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)


def sync(folder: int) -> None:
    """Sync the entries of a directory to disk."""
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a directory; there a rename is durable by itself.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


_KINDS: dict[int, type[BootseerError]] = {
    errno.EEXIST: AlreadyExistsError,
    errno.ENOTEMPTY: NotEmptyError,
    errno.EISDIR: IsFolderError,
    errno.ENOTDIR: NotFolderError,
    errno.EACCES: AccessError,
    errno.EPERM: AccessError,
    errno.EROFS: AccessError,
    errno.ENAMETOOLONG: PermanentError,
    errno.EINVAL: PermanentError,
    errno.EXDEV: PermanentError,
    errno.ENOTSUP: PermanentError,
    errno.ESTALE: ChangedError,  # NFS: another machine has replaced or removed the file
}


def mapped(error: OSError, subject: str) -> BootseerError:
    """The BootSeer error for an `OSError` about `subject`."""
    if error.errno == errno.ENOENT:
        return NotFoundError(f"there is no {subject}")
    if error.errno == errno.ELOOP:
        return NotFoundError(f"{subject}: symbolic links are not followed")
    text = f"{subject}: {os.strerror(error.errno) if error.errno else error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpaceError(f"{text}; nothing was stored, make room and try again")
    if error.errno == errno.EPERM and name_of(subject).startswith(RESERVED_PREFIXES):
        text += "; in a checkpoint mount, use the address that `bootseer ckpt mounted` shows"
    return _KINDS.get(error.errno or 0, TransientError)(text)


@functools.lru_cache(maxsize=1024)
def owner_of(uid: int) -> str:
    """The name of a user, or the uid as a string."""
    return _name(pwd.getpwuid, uid)


@functools.lru_cache(maxsize=1024)
def group_of(gid: int) -> str:
    """The name of a group, or the gid as a string."""
    return _name(grp.getgrgid, gid)


def uid_of(name: str | None) -> int:
    """The uid of a user; -1 for None. Raises `PermanentError` for an unknown name."""
    return _number(pwd.getpwnam, name, "user")


def gid_of(name: str | None) -> int:
    """The gid of a group; as `uid_of`."""
    return _number(grp.getgrnam, name, "group")


@functools.lru_cache(maxsize=4096)
def shown_uid(owner: str) -> int:
    """The uid that a mount shows for an owner. Unknown owners are shown as the mounting user: the place checks access
    by that one identity."""
    try:
        return uid_of(owner)
    except PermanentError:
        return os.geteuid()


@functools.lru_cache(maxsize=4096)
def shown_gid(group: str) -> int:
    """The gid that a mount shows; as `shown_uid`."""
    try:
        return gid_of(group)
    except PermanentError:
        return os.getegid()


def _name(find: Callable[[int], Sequence[Any]], number: int) -> str:
    try:
        return str(find(number)[0])
    except KeyError:
        return str(number)


def _number(find: Callable[[str], Sequence[Any]], name: str | None, kind: str) -> int:
    if name is None:
        return -1
    try:
        return int(find(name)[2])
    except KeyError:
        if name.isdecimal():
            return int(name)
        raise PermanentError(f"this machine has no {kind} {name!r}") from None

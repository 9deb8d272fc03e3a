"""Names in a folder that is known by its descriptor: no step here follows a symbolic link. Called by `folder`."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat

from bootseer.checkpoint.places.place import TEMPORARY
from bootseer.io.trusted_folder import NEW
from bootseer.store.file import sync_folder

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


def write_temporary(folder: int, data: bytes, mode: int) -> str:
    """Write a small hidden file, durable, and return its name."""
    name = f"{TEMPORARY}{secrets.token_hex(8)}"
    create(folder, name, data, mode)
    return name


def rename_new(name: str, folder: int, new_name: str, new_folder: int) -> None:
    """Rename unless the new name is taken. Raises `FileExistsError`."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        try:
            # A link is made or not in one step, which a rename that replaces nothing is not everywhere.
            os.link(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder, follow_symlinks=False)
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
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):  # another one was faster
            raise FileExistsError(errno.EEXIST, new_name) from None
        raise


def create(folder: int, name: str, data: bytes, mode: int) -> None:
    """Write a small file, durable but for its name. Raises `FileExistsError`."""
    descriptor = os.open(name, NEW, mode, dir_fd=folder)
    try:
        os.fchmod(descriptor, mode)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    except OSError:
        drop(name, folder)
        raise
    finally:
        os.close(descriptor)


def drop(name: str, folder: int) -> None:
    """Remove a file, if that can be."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)


def sync(folder: int) -> None:
    """Wait until the names in a folder are on the disk."""
    sync_folder(".", dir_fd=folder)

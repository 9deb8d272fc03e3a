"""Objects as files in a folder, `file:///dir`: a disk, NFS, Lustre. Made by `open.open_store`.

    <dir>/images/sha256-…            objects with path names
    <dir>/sha256/ab/abcdef…          objects with content names
    <dir>/.uploads/<random>          objects on their way; renamed into their place when they are durable

Because a file system knows files and folders, `a` and `a/b` cannot both be objects here. Deadlines are checked between
pieces; a file system that hangs cannot be interrupted.

Several users may write to a store: what lies below its folder is opened from descriptor to descriptor, follows no
symbolic link and waits for no pipe. Objects have mode 0640 and the group of the store's folder, or the one that is
asked for; folders have mode 2750, or 2770 where the group may write to the store's own. The umask plays no part.

No shared state but the file system: any number of threads, processes and nodes may use one folder.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from bootseer.errors import AccessError, BootseerError, NotFoundError, PermanentError, TransientError, UsageError
from bootseer.io.trusted_folder import FOLDER, NEW, enter
from bootseer.store.store import (
    PIECE_BYTES,
    Stored,
    check_name,
    check_new,
    check_range,
    content_path,
    name_of_upload,
    range_end,
    upload_ended,
)

T = TypeVar("T")

STORE_GROUP = "BOOTSEER_STORE_GROUP"
"""Environment variable: the group that may read what is written into a store in a folder."""
_UPLOADS = ".uploads"
# A killed writer leaves its file; one that nobody wrote to for a day has no writer any more.
_ABANDONED_S = 24 * 3600
_UPLOAD = re.compile(r"[0-9a-f]{32}")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_IN_THE_WAY = (errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST)


class FileStore:
    """A `Store` in a folder, which is made when the first object is written."""

    def __init__(self, root: Path, *, group: str = "") -> None:
        """`group` is the name or number of the group that may read new objects; empty: that of the folder."""
        self._root = root.absolute()
        self._uri = f"file://{self._root}"
        self._group = _gid_of(group) if group else None

    @property
    def uri(self) -> str:
        """`file://` and the absolute path of the folder."""
        return self._uri

    def read(
        self, name: str, start: int = 0, length: int | None = None, *, timeout_s: float = 60.0
    ) -> Generator[bytes, None, None]:
        """See `Store.read`."""
        check_range(start, length)
        until = time.monotonic() + timeout_s
        try:
            with self._parent(name) as (folder, last):
                descriptor = os.open(last, _READ, dir_fd=folder)
            try:
                size_bytes = self._size(os.fstat(descriptor), name)
                at, end = start, range_end(f"{self._uri}: {name}", size_bytes, start, length)
                while at < end:
                    if time.monotonic() > until:
                        raise TransientError(f"{self._uri}: reading {name} took longer than {timeout_s:g} s")
                    piece = os.pread(descriptor, min(PIECE_BYTES, end - at), at)
                    if not piece:
                        raise TransientError(f"{self._uri}: {name} became shorter while it was read")
                    at += len(piece)
                    yield piece
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._mapped(error, name) from error

    def upload(self) -> FileUpload:
        """See `Store.upload`."""
        return FileUpload(self._root, self._uri, self._group)

    def create(self, name: str, data: bytes, *, refs: Sequence[Stored] = (), timeout_s: float = 60.0) -> bool:
        """See `Store.create`. A file system that hangs cannot be interrupted, so that `timeout_s` does not matter."""
        check_new(name, data)
        with contextlib.suppress(NotFoundError):
            self.stat(name)
            return False  # what most who ask get to know costs no write
        upload = self.upload()
        try:
            upload.write(data)
            return upload.commit_new(name)
        finally:
            upload.abort()

    def stat(self, name: str) -> Stored:
        """See `Store.stat`."""
        try:
            with self._parent(name) as (folder, last):
                return Stored(name, self._size(os.stat(last, dir_fd=folder, follow_symlinks=False), name))
        except OSError as error:
            raise self._mapped(error, name) from error

    def list(self, prefix: str = "") -> Iterator[Stored]:
        """See `Store.list`."""
        return self._walk(self._root, None, "", prefix)

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        try:
            with self._parent(name) as (folder, last):
                os.unlink(last, dir_fd=folder)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return  # the name of another object's folder, or below another object: no object itself
        except OSError as error:
            raise self._mapped(error, name) from error

    def close(self) -> None:
        """Nothing is kept open."""

    @contextlib.contextmanager
    def _parent(self, name: str) -> Iterator[tuple[int, str]]:
        """The folder that an object lies in, and its name there."""
        *folders, last = content_path(check_name(name)).split("/")
        folder = os.open(self._root, FOLDER & ~os.O_NOFOLLOW)
        try:
            for step in folders:
                above, folder = folder, enter(step, folder)
                os.close(above)
            yield folder, last
        finally:
            os.close(folder)

    def _walk(self, path: Path | str, above: int | None, name: str, prefix: str) -> Iterator[Stored]:
        """The objects in the folder `path` below `above`, whose names begin with `name`."""
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if above is None else os.O_NOFOLLOW)
            folder = os.open(path, flags, dir_fd=above)
        except (FileNotFoundError, NotADirectoryError):
            return  # nothing was written yet, or the folder was removed meanwhile
        except OSError as error:
            raise self._mapped(error, name) from error
        try:
            with os.scandir(folder) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
            for entry in entries:
                found = name + entry.name
                if entry.name.startswith(".") or found == "sha256":
                    continue
                if entry.is_dir(follow_symlinks=False):
                    below = found + "/"
                    if below.startswith(prefix) or prefix.startswith(below):
                        yield from self._walk(entry.name, folder, below, prefix)
                elif found.startswith(prefix) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        yield Stored(found, entry.stat(follow_symlinks=False).st_size)
        except OSError as error:
            raise self._mapped(error, name) from error
        finally:
            os.close(folder)

    def _size(self, status: os.stat_result, name: str) -> int:
        if not stat.S_ISREG(status.st_mode):
            raise NotFoundError(f"{self._uri} has no object {name}")
        return status.st_size

    def _mapped(self, error: OSError, name: str) -> BootseerError:
        if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            return NotFoundError(f"{self._uri} has no object {name}")
        if error.errno == errno.EACCES:
            return AccessError(
                f"{self._uri}: {name}: {error.strerror}; objects are for the store's group ({STORE_GROUP})"
            )
        return mapped(error, self._uri, name)


class FileUpload:
    """An `Upload` into a folder. Belongs to one thread at a time."""

    def __init__(self, root: Path, uri: str, group: int | None) -> None:
        self._uri = uri
        self._group = group
        self._hash = hashlib.sha256()
        self._size = 0
        self._root = self._uploads = self._descriptor = -1
        self._name = secrets.token_hex(16)
        self._open = contextlib.ExitStack()
        with self._open as opened:
            try:
                root.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    root.mkdir(mode=0o700)
                    self._share(root, None)
                self._root = os.open(root, FOLDER & ~os.O_NOFOLLOW)
                opened.callback(os.close, self._root)
                self._uploads = self._folder(_UPLOADS, self._root)
                opened.callback(os.close, self._uploads)
                _remove_abandoned(self._uploads)
                self._descriptor = os.open(self._name, NEW, 0o600, dir_fd=self._uploads)
                opened.callback(os.close, self._descriptor)
                self._give(self._descriptor, 0o640)
            except OSError as error:
                if self._descriptor >= 0:
                    os.unlink(self._name, dir_fd=self._uploads)
                raise mapped(error, uri, "") from error
            self._open = opened.pop_all()

    def write(self, data: bytes | memoryview) -> None:
        """See `Upload.write`."""
        if self._descriptor < 0:
            raise upload_ended(self._uri)
        self._hash.update(data)
        rest = memoryview(data).cast("B")
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            self.abort()
            raise mapped(error, self._uri, "") from error
        self._size += memoryview(data).nbytes

    def commit(self, name: str | None = None, *, refs: Sequence[Stored] = (), subject: str | None = None) -> Stored:
        """See `Upload.commit`."""
        name = name_of_upload(self._uri, name, self._hash.hexdigest())
        self._place(name, self._rename)
        self._close()
        return Stored(name, self._size)

    def commit_new(self, name: str) -> bool:
        """Make the object visible under a path name that nothing has yet: whether it was free."""
        made = self._place(name, self._link)
        self.abort()
        return made

    def _place(self, name: str, put: Callable[[str, int], T]) -> T:
        if self._descriptor < 0:
            raise upload_ended(self._uri)
        *folders, last = content_path(name).split("/")
        try:
            os.fsync(self._descriptor)
            folder = os.dup(self._root)
            try:
                for step in folders:
                    above, folder = folder, self._folder(step, folder)
                    os.close(above)
                done = put(last, folder)
                sync_folder(".", dir_fd=folder)
            finally:
                os.close(folder)
        except OSError as error:
            self.abort()
            raise mapped(error, self._uri, name) from error
        return done

    def _rename(self, name: str, folder: int) -> None:
        os.rename(self._name, name, src_dir_fd=self._uploads, dst_dir_fd=folder)

    def _link(self, name: str, folder: int) -> bool:
        try:
            os.link(self._name, name, src_dir_fd=self._uploads, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                raise
            # A file server whose answer was lost is asked again, and then finds what it had made itself.
            return os.fstat(self._descriptor).st_nlink > 1
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            with contextlib.suppress(FileNotFoundError):
                os.stat(name, dir_fd=folder, follow_symlinks=False)
                return False
            self._rename(name, folder)
        return True

    def _folder(self, name: str, above: int) -> int:
        """A folder of the store, which is made when it is missing, so that it survives a power failure."""
        try:
            return enter(name, above)
        except FileNotFoundError:
            try:
                os.mkdir(name, 0o700, dir_fd=above)
            except FileExistsError:
                if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
                    raise OSError(errno.ELOOP, f"{name} is a symbolic link, which is not followed: delete it") from None
            else:
                self._share(name, above)
                sync_folder(".", dir_fd=above)
            return enter(name, above)

    def _share(self, folder: Path | str, above: int | None) -> None:
        """Let the group into a new folder, and write there if it may write to the folder of the store."""
        writable = above is not None and os.fstat(self._root).st_mode & stat.S_IWGRP
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
        try:
            self._give(opened, 0o2770 if writable else 0o2750)
        finally:
            os.close(opened)

    def _give(self, descriptor: int, mode: int) -> None:
        if self._group is not None:
            try:
                os.fchown(descriptor, -1, self._group)
            except PermissionError as error:
                why = f"this user does not belong to group {self._group} ({STORE_GROUP})"
                raise PermissionError(error.errno, why) from error
        elif self._root >= 0:
            # A group that this user does not belong to: then the object's readers are those of the user's own.
            with contextlib.suppress(OSError):
                os.fchown(descriptor, -1, os.fstat(self._root).st_gid)
        os.fchmod(descriptor, mode)

    def abort(self) -> None:
        """See `Upload.abort`."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self._uploads)
            self._close()

    def _close(self) -> None:
        self._descriptor = -1
        # What matters was synced before; a late error of close has nothing to add.
        with contextlib.suppress(OSError):
            self._open.close()


def mapped(error: OSError, where: str, name: str) -> BootseerError:
    """An error of the file system as one of ours."""
    what = f"{where}: {name}: {error.strerror}" if name else f"{where}: {error.strerror}"
    if error.errno == errno.ENOENT:
        return NotFoundError(f"{where} has no object {name}")
    if error.errno in _FULL:
        return PermanentError(f"{what}; nothing was stored, make room and try again")
    if error.errno in _REFUSED:
        return AccessError(what)
    if error.errno in _IN_THE_WAY:
        return PermanentError(f"{what}; in a folder, one object's name cannot be the folder of another's")
    return TransientError(what)


def sync_folder(folder: Path | str, *, dir_fd: int | None = None) -> None:
    """Wait until the names in a folder are on the disk. `dir_fd`: what the folder is relative to."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder; there the rename is durable by itself.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _remove_abandoned(uploads: int) -> None:
    oldest = time.time() - _ABANDONED_S
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=uploads)
    try:
        with os.scandir(folder) as scan:
            for entry in scan:
                # Another process may remove or rename it first.
                with contextlib.suppress(FileNotFoundError):
                    if _UPLOAD.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_mtime < oldest:
                        os.unlink(entry.name, dir_fd=folder)
    finally:
        os.close(folder)


def _gid_of(group: str) -> int:
    if group.isdecimal():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise UsageError(
            f"there is no group {group!r}", hint=f"{STORE_GROUP} names the group that reads the store"
        ) from None

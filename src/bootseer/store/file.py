"""Objects as files in a folder, `file:///dir`: a disk, NFS, Lustre. Made by `open.open_store`.

    <dir>/images/sha256-…            objects with path names
    <dir>/sha256/ab/abcdef…          objects with content names
    <dir>/.uploads/<random>          objects on their way; renamed into their place when they are durable

Because a file system knows files and folders, `a` and `a/b` cannot both be objects here. Deadlines are checked between
pieces; a file system that hangs cannot be interrupted.

No shared state but the file system: any number of threads, processes and nodes may use one folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from bootseer.errors import AccessError, BootseerError, NotFoundError, PermanentError, TransientError
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

_UPLOADS = ".uploads"
# A killed writer leaves its file; one that nobody wrote to for a day has no writer any more.
_ABANDONED_S = 24 * 3600
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_IN_THE_WAY = (errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST)


class FileStore:
    """A `Store` in a folder, which is made when the first object is written."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._uri = f"file://{self._root}"

    @property
    def uri(self) -> str:
        """`file://` and the absolute path of the folder."""
        return self._uri

    def read(
        self, name: str, start: int = 0, length: int | None = None, *, timeout_s: float = 60.0
    ) -> Generator[bytes, None, None]:
        """See `Store.read`."""
        check_range(start, length)
        path = self._path(name)
        until = time.monotonic() + timeout_s
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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
        return FileUpload(self._root, self._uri)

    def create(self, name: str, data: bytes, *, refs: Sequence[Stored] = (), timeout_s: float = 60.0) -> bool:
        """See `Store.create`. A file system that hangs cannot be interrupted, so that `timeout_s` does not matter."""
        check_new(name, data)
        if self._path(name).is_file():
            return False  # what most who ask get to know costs no write
        upload = FileUpload(self._root, self._uri)
        try:
            upload.write(data)
            return upload.commit_new(name)
        finally:
            upload.abort()

    def stat(self, name: str) -> Stored:
        """See `Store.stat`."""
        try:
            return Stored(name, self._size(self._path(name).stat(), name))
        except OSError as error:
            raise self._mapped(error, name) from error

    def list(self, prefix: str = "") -> Iterator[Stored]:
        """See `Store.list`."""
        return self._walk("", prefix)

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        try:
            self._path(name).unlink(missing_ok=True)
        except (NotADirectoryError, IsADirectoryError):
            return  # the name of another object's folder, or below another object: no object itself
        except OSError as error:
            raise self._mapped(error, name) from error

    def close(self) -> None:
        """Nothing is kept open."""

    def _path(self, name: str) -> Path:
        return self._root / content_path(check_name(name))

    def _walk(self, folder: str, prefix: str) -> Iterator[Stored]:
        try:
            with os.scandir(self._root / folder) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except FileNotFoundError:
            return  # nothing was written yet, or the folder was removed meanwhile
        except OSError as error:
            raise self._mapped(error, folder) from error
        for entry in entries:
            name = folder + entry.name
            if entry.name.startswith(".") or name == "sha256":
                continue
            if entry.is_dir(follow_symlinks=False):
                below = name + "/"
                if below.startswith(prefix) or prefix.startswith(below):
                    yield from self._walk(below, prefix)
            elif name.startswith(prefix):
                with contextlib.suppress(FileNotFoundError):
                    yield Stored(name, entry.stat().st_size)

    def _size(self, status: os.stat_result, name: str) -> int:
        if not stat.S_ISREG(status.st_mode):
            raise NotFoundError(f"{self._uri} has no object {name}")
        return status.st_size

    def _mapped(self, error: OSError, name: str) -> BootseerError:
        if error.errno == errno.ENOTDIR:
            return NotFoundError(f"{self._uri} has no object {name}")
        return mapped(error, self._uri, name)


class FileUpload:
    """An `Upload` into a folder. Belongs to one thread at a time."""

    def __init__(self, root: Path, uri: str) -> None:
        self._root = root
        self._uri = uri
        self._hash = hashlib.sha256()
        self._size = 0
        self._descriptor = -1
        self._path = root / _UPLOADS / secrets.token_hex(16)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(self._path.parent)
            # The process's umask decides who may read it: a store is often shared by users.
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise mapped(error, uri, "") from error

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
        self._place(name, self._path.rename)
        self._close()
        return Stored(name, self._size)

    def commit_new(self, name: str) -> bool:
        """Make the object visible under a path name that nothing has yet: whether it was free."""
        made = self._place(name, self._link)
        self.abort()
        return made

    def _place(self, name: str, put: Callable[[Path], T]) -> T:
        if self._descriptor < 0:
            raise upload_ended(self._uri)
        target = self._root / content_path(name)
        try:
            os.fsync(self._descriptor)
            _make_folders(self._root, target.parent)
            done = put(target)
            sync_folder(target.parent)
        except OSError as error:
            self.abort()
            raise mapped(error, self._uri, name) from error
        return done

    def _link(self, target: Path) -> bool:
        try:
            os.link(self._path, target)
        except FileExistsError:
            if target.is_dir():
                raise
            # A file server whose answer was lost is asked again, and then finds what it had made itself.
            return os.fstat(self._descriptor).st_nlink > 1
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            if os.path.lexists(target):
                return False
            self._path.rename(target)
        return True

    def abort(self) -> None:
        """See `Upload.abort`."""
        if self._descriptor >= 0:
            self._close()
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        # What matters was synced before; a late error of close has nothing to add.
        with contextlib.suppress(OSError):
            os.close(descriptor)


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


def _make_folders(root: Path, folder: Path) -> None:
    """Make the folders below the root so that they survive a power failure, as the object in them shall."""
    missing = []
    while folder != root and not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        sync_folder(new.parent)


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


def _remove_abandoned(uploads: Path) -> None:
    oldest = time.time() - _ABANDONED_S
    with os.scandir(uploads) as scan:
        for entry in scan:
            # Another process may remove or rename it first.
            with contextlib.suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_mtime < oldest:
                    Path(entry.path).unlink()

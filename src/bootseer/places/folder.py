"""A local folder as a `Place`: on a disk, NFS, Lustre, or whatever the kernel has mounted.

Every path is walked from the root by file descriptors without following symbolic links: nothing outside can be reached,
whatever other users put into the folder meanwhile. Symbolic links and special files are not shown.

A write returns when the data and the directory entry are synced to disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Unpack

from bootseer.errors import (
    AlreadyExistsError,
    IsFolderError,
    NotFoundError,
    PermanentError,
)
from bootseer.io.pooled_reads import FileWithoutNodes, PooledRead, PooledReads, ReadOptions, ReadOutcome
from bootseer.io.trusted_folder import FOLDER, NEW, enter
from bootseer.places.local_files import (
    drop,
    gid_of,
    group_of,
    mapped,
    owner_of,
    rename_new,
    sync,
    uid_of,
    write_temporary,
)
from bootseer.places.place import (
    ChangedError,
    Entry,
    OpenFile,
    PartWriter,
    Place,
    is_utf8,
    join,
    make_folder_like_parent,
    names_of,
)

# Non-blocking: opening a FIFO must not wait for its other end. No effect on files.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAX_NAME_BYTES = 255
_NUM_THREADS = 8


def version_of(status: os.stat_result) -> str:
    """Differs for every other file, and changes with every write."""
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


class FolderPlace(Place):
    """A `Place` in an existing folder. Symbolic links in the root's own path are followed."""

    is_local = True

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.realpath(root))
        self.uri = f"file://{self._root}".removesuffix("/")
        self._reads = PooledReads("bootseer-folder", _NUM_THREADS, self.uri)

    def name_problem(self, name: str) -> str:
        if not is_utf8(name):
            return "it is not UTF-8, and could not be opened through a mount"
        return "" if len(os.fsencode(name)) <= _MAX_NAME_BYTES else f"it has more than {_MAX_NAME_BYTES} bytes"

    def stat(self, path: str) -> Entry:
        with self._parent(path) as (folder, name):
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                status = None
        if status is None:
            # Raised here: from Python 3.12 on, an exception that passes a context manager of contextlib is in a
            # reference cycle, and the callers' memory, such as a file to write here, would not be free at once.
            raise mapped(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)), self.uri_of(path))
        entry = _entry(path, status)
        if entry is None:
            raise NotFoundError(f"{self.uri_of(path)} is a symbolic link or special file, which is not read")
        return entry

    def list(self, path: str) -> Iterator[Entry]:
        entries = []
        with self._parent(path) as (folder, name):
            descriptor = os.open(name, _READ | os.O_DIRECTORY, dir_fd=folder)
            try:
                with os.scandir(descriptor) as scan:
                    for found in scan:
                        with contextlib.suppress(FileNotFoundError):
                            entries.append(_entry(join(path, found.name), found.stat(follow_symlinks=False)))
            finally:
                os.close(descriptor)
        return (entry for entry in entries if entry is not None)

    def open(self, path: str, *, deadline_s: float = 60.0) -> FolderFile:
        with self._parent(path) as (folder, name):
            return FolderFile(os.open(name, _READ, dir_fd=folder), self.uri_of(path), self._reads)

    def write_bytes(self, path: str, data: bytes, *, mode: int = 0o644) -> Entry:
        with self._parent(path) as (folder, name):
            temporary = write_temporary(folder, data, mode)
            try:
                entry = _entry(path, os.stat(temporary, dir_fd=folder, follow_symlinks=False))
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                drop(temporary, folder)
                raise
            sync(folder)
        assert entry is not None  # noqa: S101 - it is a file
        return entry

    def create_bytes(self, path: str, data: bytes, *, mode: int = 0o644) -> bool:
        with self._parent(path) as (folder, name):
            temporary = write_temporary(folder, data, mode)
            try:
                rename_new(temporary, folder, name, folder)
            except FileExistsError:
                return False
            finally:
                drop(temporary, folder)
            sync(folder)
        return True

    def begin_parts(
        self, paths: Sequence[str], *, part_bytes: int, mode: int = 0o644, replication: int | None = None,
        avoid: frozenset[str] = frozenset(), last_resort: Sequence[str] = (),
    ) -> Sequence[PartWriter]:  # fmt: skip
        """See `Place.begin_parts`. A folder has one disk: there is no placement."""
        begun: list[PartWriter] = []
        try:
            for path in paths:
                folder = path.rpartition("/")[0]
                make_folder_like_parent(self, folder.rpartition("/")[0])
                self.make_folder(folder, parents=True)
                begun.append(_FolderWriter(self, path, part_bytes, mode))
        except BaseException:
            for writer in begun:
                writer.abort()
            raise
        return begun

    def rename(self, source: str, target: str, *, replace: bool = True) -> None:
        with self._parent(source) as (old, name):
            os.stat(name, dir_fd=old, follow_symlinks=False)  # errors below are about the target
            with self._parent(target) as (new, new_name):
                if replace:
                    os.rename(name, new_name, src_dir_fd=old, dst_dir_fd=new)
                else:
                    rename_new(name, old, new_name, new)
                sync(new)
                sync(old)

    def delete(self, path: str, *, recursive: bool = False, is_file: bool = False) -> None:
        if not path:
            raise PermanentError(f"{self.uri} is the root and cannot be removed")
        with self._parent(path) as (folder, name):
            if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=folder)
            elif recursive:
                try:
                    _check_deletable(name, folder)
                    shutil.rmtree(name, dir_fd=folder)
                except RecursionError:
                    raise PermanentError(f"{self.uri_of(path)} has folders nested too deeply") from None
            else:
                os.rmdir(name, dir_fd=folder)
            sync(folder)

    def make_folder(self, path: str, *, mode: int = 0o755, parents: bool = False) -> None:
        if parents:
            with contextlib.suppress(NotFoundError):
                if self.stat(path).is_folder:
                    return
            if not path:
                with self._mapping(path):
                    self._root.mkdir(mode, parents=True, exist_ok=True)
                return
            self.make_folder(path.rpartition("/")[0], mode=mode, parents=True)
        try:
            with self._parent(path) as (folder, name):
                os.mkdir(name, mode, dir_fd=folder)
                # What is in the new folder belongs to the same group: parts, as the head that lists them.
                inherited = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode & stat.S_ISGID
                self._chmod(name, mode | inherited, folder)
                sync(folder)
        except AlreadyExistsError:
            if not (parents and self.stat(path).is_folder):
                raise

    def set_mode(self, path: str, mode: int) -> None:
        with self._parent(path) as (folder, name):
            self._chmod(name, mode, folder)

    def set_owner(self, path: str, owner: str | None, group: str | None) -> None:
        with self._parent(path) as (folder, name):
            os.chown(name, uid_of(owner), gid_of(group), dir_fd=folder, follow_symlinks=False)

    def set_mtime(self, path: str, mtime_ns: int) -> None:
        with self._parent(path) as (folder, name):
            read_ns = os.stat(name, dir_fd=folder, follow_symlinks=False).st_atime_ns
            os.utime(name, ns=(read_ns, mtime_ns), dir_fd=folder, follow_symlinks=False)

    def space(self) -> tuple[int, int]:
        with self._mapping(""):
            status = os.statvfs(self._root)
        return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize

    def facts(self) -> dict[str, object]:
        return {
            "nodes": self._reads.nodes(), "retries": 0, "hedges": 0, "hedges_won": 0, "refreshes": 0, "fallback": "",
        }  # fmt: skip

    def close(self) -> None:
        self._reads.close()

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """The parent folder's descriptor and the last component, "." for the root. Maps `OSError`s raised inside."""
        *folders, name = names_of(path) or ["."]
        with self._mapping(path):
            descriptor = os.open(self._root, FOLDER & ~os.O_NOFOLLOW)
            try:
                for folder in folders:
                    below = enter(folder, descriptor)
                    os.close(descriptor)
                    descriptor = below
                yield descriptor, name
            finally:
                os.close(descriptor)

    def _read(self, file: OpenFile, path: str, length: int) -> bytes:
        return file.read_here(0, length) if isinstance(file, FolderFile) and length > 0 else b""

    def _chmod(self, name: str, mode: int, folder: int) -> None:
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            # Through /proc: fchmod needs a readable descriptor, which the file's mode may forbid.
            Path(f"/proc/self/fd/{descriptor}").chmod(mode)
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _mapping(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise mapped(error, self.uri_of(path)) from error


class _FolderWriter:
    """A `PartWriter` in a folder. Used by one thread at a time."""

    nodes: tuple[str, ...] = ()

    def __init__(self, place: FolderPlace, path: str, part_bytes: int, mode: int) -> None:
        self.path = path
        self._place = place
        self._left = part_bytes
        self._folder = -1
        with place._parent(path) as (folder, self._name):
            self._descriptor = os.open(self._name, NEW, mode, dir_fd=folder)
            os.fchmod(self._descriptor, mode)
            self._folder = os.dup(folder)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._descriptor < 0:
            raise PermanentError(f"{self.path}: written to after its end")
        if len(data) > self._left:
            raise PermanentError(f"{self.path}: {len(data)} more bytes than the part was to have")
        self._left -= len(data)
        remaining = memoryview(data)
        with self._place._mapping(self.path):
            while remaining:
                remaining = remaining[os.write(self._descriptor, remaining) :]

    def close(self) -> tuple[str, ...]:
        with self._place._mapping(self.path):
            os.fsync(self._descriptor)
            sync(self._folder)
        self._release()
        return ()

    def abort(self) -> None:
        if self._descriptor >= 0:
            drop(self._name, self._folder)
            self._release()

    def _release(self) -> None:
        for descriptor in (self._descriptor, self._folder):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._descriptor = self._folder = -1


def _check_deletable(name: str, folder: int) -> None:
    """Raise `OSError` if the user may not delete all that is in a folder: as in HDFS, then none of it is deleted."""

    def refuse(error: OSError) -> None:
        raise error

    for _, folders, files, below in os.fwalk(name, dir_fd=folder, onerror=refuse):
        if not folders and not files:
            continue
        status, user = os.fstat(below), os.geteuid()
        is_refused = not os.access(".", os.W_OK | os.X_OK, dir_fd=below, effective_ids=True)
        if status.st_mode & stat.S_ISVTX and user not in (0, status.st_uid):  # only entries of one's own
            is_refused |= any(os.lstat(one, dir_fd=below).st_uid != user for one in (*folders, *files))
        if is_refused:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _entry(path: str, status: os.stat_result) -> Entry | None:
    is_folder = stat.S_ISDIR(status.st_mode)
    if not is_folder and not stat.S_ISREG(status.st_mode):
        return None
    return Entry(
        path=path,
        is_folder=is_folder,
        size_bytes=0 if is_folder else status.st_size,
        mtime_ns=status.st_mtime_ns,
        mode=stat.S_IMODE(status.st_mode),
        owner=owner_of(status.st_uid),
        group=group_of(status.st_gid),
        version=version_of(status),
    )


class _Descriptor:
    """A file descriptor, closed with its last reference: the open file's, or that of the last read in flight."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.number)


class FolderFile(FileWithoutNodes):
    """An `OpenFile` in a folder. Takes over the descriptor."""

    def __init__(self, descriptor: int, uri: str, reads: PooledReads) -> None:
        try:
            status = os.fstat(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise (
                IsFolderError(f"{uri} is a folder") if stat.S_ISDIR(status.st_mode) else NotFoundError(f"no file {uri}")
            )
        self.uri = uri
        self.size_bytes = status.st_size
        self.version = version_of(status)
        self._descriptor: _Descriptor | None = _Descriptor(descriptor)
        self._reads = reads

    def read_into(
        self, offset: int, into: memoryview, done: Callable[[ReadOutcome], None], **options: Unpack[ReadOptions]
    ) -> PooledRead:
        """See `OpenFile.read_into`. The file system does its own checks, and there is only one copy."""
        if offset < 0 or offset + len(into) > self.size_bytes:
            raise PermanentError(f"{self.uri}: bytes {offset} to {offset + len(into)} of {self.size_bytes}")
        fill = partial(self._fill, self._opened(), offset, into)
        return self._reads.begin(self.uri, len(into), fill, done, options)

    def read_here(self, offset: int, length: int) -> bytes:
        """A range inside the file, read by the calling thread."""
        data = bytearray(length)
        self._fill(self._opened(), offset, memoryview(data))
        return bytes(data)

    def close(self) -> None:
        self._descriptor = None

    def _opened(self) -> _Descriptor:
        if (descriptor := self._descriptor) is None:
            raise PermanentError(f"{self.uri}: read after it was closed")
        return descriptor

    def _fill(self, descriptor: _Descriptor, offset: int, into: memoryview) -> None:
        try:
            while into:
                count = os.preadv(descriptor.number, [into], offset)
                if count == 0:
                    raise ChangedError(f"{self.uri} became shorter while it was read")
                offset, into = offset + count, into[count:]
            # Checked after the read: bytes read before a change belong to this version.
            if version_of(os.fstat(descriptor.number)) != self.version:
                raise ChangedError(f"{self.uri} was changed while it was read")
        except OSError as error:
            raise mapped(error, self.uri) from error
        finally:
            del descriptor  # an error keeps this frame

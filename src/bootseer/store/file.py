"""Objects as files of a place: a folder, `file:///dir`, or HDFS, `hdfs://host:port/dir` (which needs the extra `hdfs`).

    <dir>/images/sha256-…            objects with path names
    <dir>/sha256/ab/abcdef…          objects with content names
    <dir>/.uploads/<random>          uploads; renamed to the object's path when they are durable

Because of the file system, `a` and `a/b` cannot both be objects. Symbolic links, pipes, deadlines and `fork` are
handled by the places (`bootseer.places`).

Several users may write to a store in a folder: objects have mode 0640 and the group of the store's folder; folders have
mode 2750, or 2770 if the group may write to the store's root. The umask is not applied.

The only shared state is the file system: any number of threads, processes and nodes may use one folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import stat
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from bootseer.errors import (
    AccessError,
    AlreadyExistsError,
    BootseerError,
    IsFolderError,
    NotEmptyError,
    NotFolderError,
    NotFoundError,
    PermanentError,
    TransientError,
)
from bootseer.io.deadline import within
from bootseer.logs import logger
from bootseer.places.folder import FolderFile, FolderPlace
from bootseer.places.place import Entry, PartWriter, Place, folder_of, name_of, read_blocking
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

_LOG = logger(__name__)
_UPLOADS = ".uploads"
_UPLOAD = re.compile(r"[0-9a-f]{32}")
# The file of a killed writer stays; it counts as abandoned after a day.
_ABANDONED_S = 24 * 3600
_READ_BYTES = 4 * 1024 * 1024
"""Requested at once from HDFS: enough that several DataNodes send."""
_ANY_LENGTH = 1 << 62
_SMALL_BYTES = 1 << 20
"""Objects of up to this size are sent in one piece, at their commit."""
_IN_THE_WAY = (AlreadyExistsError, IsFolderError, NotFolderError, NotEmptyError)
_FILE_MODE, _FOLDER_MODE = 0o640, 0o2750
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""A folder without these has been created by a process that was killed before it shared it with the group."""


class PlaceStore:
    """A `Store` in a place. In HDFS, writes are as durable as HDFS makes them: acknowledged by its DataNodes."""

    def __init__(self, place: Place, uri: str = "") -> None:
        self.place = place
        self.uri = uri or place.uri
        self._swept = False

    def read(
        self, name: str, start: int = 0, length: int | None = None, *, timeout_s: float = 60.0
    ) -> Generator[bytes, None, None]:
        check_range(start, length)
        path = content_path(check_name(name))
        what = f"{self.uri}: {name}"
        until = time.monotonic() + timeout_s
        with self._naming(name), contextlib.closing(self.place.open(path, deadline_s=max(timeout_s, 0.0))) as file:
            end = range_end(what, file.size_bytes, start, length)
            step = PIECE_BYTES if isinstance(file, FolderFile) else _READ_BYTES
            for at in range(start, end, step):
                left_s, size_bytes = until - time.monotonic(), min(step, end - at)
                if left_s <= 0:
                    raise TransientError(f"{what}: reading it took longer than {timeout_s:g} s")
                if isinstance(file, FolderFile):
                    yield file.read_here(at, size_bytes)
                else:
                    data = memoryview(read_blocking(file, at, size_bytes, what, left_s, wait_s=left_s))
                    yield from (bytes(data[first : first + PIECE_BYTES]) for first in range(0, len(data), PIECE_BYTES))

    def upload(self) -> PlaceUpload:
        return PlaceUpload(self)

    def create(self, name: str, data: bytes, *, refs: Sequence[Stored] = (), timeout_s: float = 60.0) -> bool:
        """See `Store.create`. Not interruptible on a hanging local file system."""
        check_new(name, data)

        def make() -> bool:
            with contextlib.suppress(NotFoundError):
                self.stat(name)
                return False  # the usual result, without a write
            upload = self.upload()
            try:
                upload.write(data)
                return upload.commit_new(name)
            finally:
                upload.abort()

        return make() if self.place.is_local else within(timeout_s, f"{self.uri}: {name}", make)

    def stat(self, name: str) -> Stored:
        with self._naming(name):
            found = self.place.stat(content_path(check_name(name)))
            if found.is_folder:
                raise NotFoundError(name)
        return Stored(name, found.size_bytes)

    def list(self, prefix: str = "") -> Iterator[Stored]:
        folders = [""]
        while folders:
            for entry in self._listed(folders.pop()):
                below = entry.path + "/"
                if name_of(entry.path).startswith(".") or entry.path == "sha256":
                    continue
                if entry.is_folder and (below.startswith(prefix) or prefix.startswith(below)):
                    folders.append(entry.path)
                elif not entry.is_folder and entry.path.startswith(prefix):
                    yield Stored(entry.path, entry.size_bytes)

    def delete(self, name: str) -> None:
        # `stat` first: a folder is not an object and must not be removed.
        with contextlib.suppress(NotFoundError):
            self.stat(name)
            self.place.delete(content_path(name))

    def close(self) -> None:
        self.place.close()

    def make_folder(self, path: str) -> None:
        """Create the folder of an object with its parents. In HDFS it gets the permissions of HDFS."""
        self.place.make_folder(path, parents=True)

    def share(self, path: str, mode: int) -> None:
        """Set group and mode as the store requires."""

    def new_path(self) -> str:
        if not self._swept:
            self._swept = not self.place.is_local
            self._sweep()
        return f"{_UPLOADS}/{secrets.token_hex(16)}"

    def in_the_way(self, name: str) -> PermanentError:
        """The error for a name that conflicts with another object."""
        return PermanentError(f"{self.uri}: {name}: in a folder, one object's name cannot be the folder of another's")

    def _sweep(self) -> None:
        found = [entry for entry in self._listed(_UPLOADS) if _UPLOAD.fullmatch(name_of(entry.path))]
        # By the server's clock: one machine with a wrong clock must not remove what others are writing.
        oldest_ns = (self.place.now_s(_UPLOADS) - _ABANDONED_S) * 1e9 if found else 0
        for entry in found:
            if entry.mtime_ns < oldest_ns:
                _LOG.info("%s: removing the abandoned upload %s", self.uri, entry.path)
                # Another process removed it, or another user's may not be removed by this one.
                with contextlib.suppress(NotFoundError, AccessError):
                    self.place.delete(entry.path)

    def _listed(self, folder: str) -> Iterator[Entry]:
        """The entries of a folder; empty if it does not exist."""
        with contextlib.suppress(NotFoundError):
            yield from sorted(self.place.list(folder), key=lambda entry: entry.path)

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except (NotFoundError, IsFolderError) as error:
            raise NotFoundError(f"{self.uri} has no object {name}") from error
        except AccessError as error:
            if not self.place.is_local:
                raise
            raise AccessError(f"{error}; objects are for the group of the store's folder") from error


class FileStore(PlaceStore):
    """A `Store` in a folder, which is created with the first object."""

    def __init__(self, root: Path) -> None:
        super().__init__(FolderPlace(root), f"file://{root.absolute()}")

    def make_folder(self, path: str) -> None:
        """See `PlaceStore.make_folder`: group-writable if the store's root is."""
        with contextlib.suppress(NotFoundError):
            entry = self.place.stat(path)
            if entry.is_folder and (not path or entry.mode & _OTHERS):
                return
        if path:
            self.make_folder(folder_of(path))
        try:
            self.place.make_folder(path, mode=0o700, parents=not path)
        except AlreadyExistsError:
            try:
                entry = self.place.stat(path)
            except NotFoundError:
                raise AccessError(f"{self.uri}/{path} is a symbolic link, which is not followed: delete it") from None
            if not entry.is_folder:
                raise NotFolderError(f"{self.uri}/{path} is not a folder") from None
            if entry.mode & _OTHERS:
                return
        writable = path and self.place.stat("").mode & stat.S_IWGRP
        self.share(path, _FOLDER_MODE | 0o20 if writable else _FOLDER_MODE)

    def share(self, path: str, mode: int) -> None:
        if path:
            # Fails for a group that this user does not belong to: then the object keeps the user's own group.
            with contextlib.suppress(BootseerError):
                self.place.set_owner(path, None, self.place.stat("").group)
        self.place.set_mode(path, mode)

    def new_path(self) -> str:
        self.make_folder(_UPLOADS)
        return super().new_path()


class PlaceUpload:
    """An `Upload` into a place. Belongs to one thread at a time."""

    def __init__(self, store: PlaceStore) -> None:
        self._store = store
        self._place = store.place
        self._hash = hashlib.sha256()
        self._size_bytes = 0
        self._is_open = True
        self._path = ""
        self._head = bytearray()
        """What was written before the file is begun."""
        self._writer: PartWriter | None = None
        if self._place.is_local:
            self._begin(_ANY_LENGTH)

    def write(self, data: bytes | memoryview) -> None:
        if not self._is_open:
            raise upload_ended(self._store.uri)
        self._hash.update(data)
        self._size_bytes += memoryview(data).nbytes
        if self._writer is None and self._size_bytes <= _SMALL_BYTES:
            self._head += data
            return
        with self._aborting():
            (self._writer or self._begin(_ANY_LENGTH)).write(data)

    def _begin(self, size_bytes: int) -> PartWriter:
        """Begin the file, with what was written so far.

        While a block is written, HDFS's quotas count all of it: a small object gets a small block instead of 128 MiB,
        so that objects can be removed from a store that is nearly full.
        """
        self._path = self._store.new_path()
        mode = _FILE_MODE if self._place.is_local else 0o644
        (writer,) = self._place.begin_parts([self._path], part_bytes=size_bytes, mode=mode)
        self._writer = writer
        with self._aborting():
            self._store.share(self._path, _FILE_MODE)
            if self._head:
                writer.write(self._head)
        return writer

    def commit(self, name: str | None = None, *, refs: Sequence[Stored] = (), subject: str | None = None) -> Stored:
        if not self._is_open:
            raise upload_ended(self._store.uri)
        name = name_of_upload(self._store.uri, name, self._hash.hexdigest())
        self._publish(name, replace=True)
        return Stored(name, self._size_bytes)

    def commit_new(self, name: str) -> bool:
        """Publish under an unused path name; False if the name is taken."""
        try:
            self._publish(name, replace=False)
        except AlreadyExistsError:
            with contextlib.suppress(NotFoundError):  # removed again meanwhile
                if self._place.stat(name).is_folder:
                    raise self._store.in_the_way(name) from None
            return False
        return True

    def abort(self) -> None:
        if self._is_open:
            self._is_open = False
            if self._writer is not None:
                self._writer.abort()

    def _publish(self, name: str, *, replace: bool) -> None:
        path = content_path(name)
        with self._aborting():
            (self._writer or self._begin(max(self._size_bytes, 1))).close()
            try:
                self._show(name, path, replace=replace)
            except BaseException:
                with contextlib.suppress(BootseerError):
                    self._place.delete(self._path)
                raise
        self._is_open = False
        _LOG.debug("%s: %s is published, %d bytes", self._store.uri, name, self._size_bytes)

    def _show(self, name: str, path: str, *, replace: bool) -> None:
        """Rename the upload to its path. Raises `AlreadyExistsError` if that exists and is not to be replaced."""
        try:
            self._store.make_folder(folder_of(path))
        except _IN_THE_WAY as error:
            raise self._store.in_the_way(name) from error
        try:
            self._place.rename(self._path, path, replace=replace)
        except _IN_THE_WAY as error:
            if isinstance(error, AlreadyExistsError) and not replace:
                raise
            raise self._store.in_the_way(name) from error

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abort()
            raise

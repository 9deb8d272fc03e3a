"""The fsspec file systems `bootseer+hdfs://`, `bootseer+s3://` and others, and their open files.

Reads use read-ahead and concurrent requests, writes create striped files by the folder's policy, names and sizes are
those of a mount. Instances hold no connection: they can be pickled, and used after a fork.
"""

from __future__ import annotations

import contextlib
import errno
import io
import posixpath
import sys
import warnings
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]
from fsspec.core import get_compression  # type: ignore[import-untyped]

from bootseer.checkpoint.files import FileInfo
from bootseer.checkpoint.locations import FileSystem, resolve_below
from bootseer.checkpoint.os_errors import os_errors
from bootseer.checkpoint.reading.file import CheckpointFile, PositionedRawIO
from bootseer.checkpoint.writing.writing import FileWriter
from bootseer.errors import NotFoundError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


_BUFFER_BYTES = 1 << 17
"""For reads of lines and single numbers; larger reads bypass the buffer."""


class ReadFile(io.BufferedReader):
    """A file to read, with the attributes of fsspec's own open files."""

    mode = "rb"

    def __init__(self, file: CheckpointFile, path: str) -> None:
        super().__init__(_RawFile(file, path), _BUFFER_BYTES)
        self.path = path
        self.size = file.size_bytes

    @property
    def name(self) -> str:
        return self.path


class _RawFile(PositionedRawIO):
    def __init__(self, file: CheckpointFile, path: str) -> None:
        super().__init__(file.size_bytes)
        self._file = file
        self._path = path

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        into = memoryview(buffer).cast("B")
        with os_errors(self._path):
            length = self._file.readinto(self._at, into)
        self._at += length
        return length

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class WriteFile(io.RawIOBase):
    """A new file, written sequentially. It is published when it is closed; never if its `with` block ends in an error,
    or if it is garbage-collected unclosed.

    Wrappers (`fsspec.open`, text, compression) only call `close` when their `with` block ends in an error. So a `close`
    during the handling of an exception that was raised after the opening discards the file too.
    """

    mode = "wb"

    def __init__(self, writer: FileWriter, path: str, *, autocommit: bool) -> None:
        super().__init__()
        self.path = path
        self._writer: FileWriter | None = writer
        self._at = 0
        self._autocommit = autocommit
        self._handled = sys.exception()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def write(self, data: ReadableBuffer, /) -> int:
        if self.closed or self._writer is None:
            raise ValueError(f"{self.path}: the file is closed")
        view = memoryview(data).cast("B")
        with os_errors(self.path):
            self._writer.write_at(self._at, view)
        self._at += len(view)
        return len(view)

    def close(self) -> None:
        if not self.closed and self._autocommit:
            try:
                if self._is_failing():
                    self.discard()
                self.commit()
            finally:
                super().close()
        super().close()

    def commit(self) -> None:
        """Publish the file: for fsspec's transactions, and for `close`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with os_errors(self.path):
                writer.commit()

    def discard(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.abort()

    def _is_failing(self) -> bool:
        error = sys.exception()
        # StopIteration is not an error: `except StopIteration: file.close()` publishes.
        return not (error is None or error is self._handled or isinstance(error, StopIteration | StopAsyncIteration))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_writer", None) is None:
            return
        self.discard()
        if not self._is_failing():
            warnings.warn(
                f"{self.path}: not saved, because the file was never closed; open it in a `with` statement",
                RuntimeWarning,
                stacklevel=2,
            )


_COPY_BYTES = 8 << 20


class CheckpointFileSystem(AbstractFileSystem):  # type: ignore[misc] # fsspec has no types
    """Base of the file systems. Paths begin with `/`, the root of the file system."""

    root_marker = "/"

    def __init__(self, authority: str = "", **storage_options: Any) -> None:
        """`authority`: host and port of the NameNode, a nameservice, or a bucket; "" for folders."""
        super().__init__(authority=authority, **storage_options)
        self.authority = authority
        self.scheme = self.protocol.removeprefix("bootseer+")

    @property
    def fsid(self) -> str:
        """Identifies the file system, not the class."""
        return f"{self.scheme}://{self.authority}"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        path = str(path)
        if path.startswith(f"{cls.protocol}://"):
            path = "/" + path.partition("://")[2].partition("/")[2]
        return posixpath.normpath("/" + path.lstrip("/"))

    @classmethod
    def _get_kwargs_from_urls(cls, path: str) -> dict[str, str]:
        if not path.startswith(f"{cls.protocol}://"):
            return {}
        return {"authority": path.partition("://")[2].partition("/")[0]}

    def unstrip_protocol(self, name: str) -> str:
        return f"{self.protocol}://{self.authority}{self._strip_protocol(name)}"

    # --- names ---

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Name, size, type, mode, owner, group, time of the last change and version of a file or folder."""
        with self._at(path) as (system, below):
            return _info(system.files.stat(below), self._strip_protocol(path))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """What is in a folder, or the file itself: as `info` has it, or with `detail=False` the names."""
        with self._at(path) as (system, below):
            itself = system.files.stat(below)
            name = self._strip_protocol(path)
            if itself.is_folder:
                found = sorted(system.files.list(below), key=lambda one: one.path)
                infos = [_info(one, posixpath.join(name, posixpath.basename(one.path))) for one in found]
            else:
                infos = [_info(itself, name)]
        return infos if detail else [one["name"] for one in infos]

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether the path exists. Raises `OSError` if that is unknown."""
        try:
            self.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def modified(self, path: str) -> datetime:
        """The modification time of the content."""
        return datetime.fromtimestamp(self.info(path)["mtime"], UTC)

    created = modified
    """As `modified`: files are written once."""

    def ukey(self, path: str) -> str:
        """Differs whenever the content may differ."""
        return str(self.info(path)["version"])

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.mkdir(path, exist_ok=exist_ok)

    def mkdir(self, path: str, create_parents: bool = True, *, exist_ok: bool = False, **kwargs: Any) -> None:
        if not exist_ok and self.exists(path):
            raise FileExistsError(errno.EEXIST, "it already exists", path)
        with self._at(path) as (system, below):
            system.files.make_folder(below, mode=system.mode(0o777), parents=create_parents)

    def rmdir(self, path: str) -> None:
        with self._at(path, follow=False) as (system, below):
            system.files.remove_folder(below)

    def rm_file(self, path: str) -> None:
        with self._at(path, follow=False) as (system, below):
            system.files.remove(below)

    _rm = rm_file

    def rm(self, path: str | Iterable[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove files, and with `recursive` folders with all that is in them."""
        for one in [path] if isinstance(path, str) else path:
            for found in self.expand_path(one, recursive=False):
                if self.isdir(found):
                    if not recursive:
                        raise IsADirectoryError(errno.EISDIR, "this is a folder", found)
                    with self._at(found, follow=False) as (system, below):
                        system.files.remove_folder(below, recursive=True)
                else:
                    self.rm_file(found)

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Rename a file or folder atomically; a striped file is copied into another folder.

        Into `path2` if that is a folder, as in all file systems of fsspec.
        """
        if self.isdir(path2):
            path2 = posixpath.join(path2, posixpath.basename(self._strip_protocol(path1)))
        try:
            with self._at(path1, follow=False) as (system, source), self._at(path2, follow=False) as (_, target):
                system.files.rename(source, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self.cp_file(path1, path2)
            self.rm_file(path1)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy a file, or create the folder for a folder."""
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
            return
        with self._open(path1) as source, self._open(path2, "wb") as target:
            while data := source.read(_COPY_BYTES):
                target.write(data)

    # --- content ---

    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: Any = None,
        cache_options: Any = None,
        compression: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Open a file for reading or writing, as text without `b` in `mode`. Creates a missing folder of a new file."""
        if get_compression(path, compression) is not None and "r" not in mode:
            # Closing the compressor would not close the file, which would not be published.
            raise ValueError(f"{path}: open a file that is compressed with fsspec.open, which closes it")
        return super().open(path, mode, block_size, cache_options, compression, **kwargs)

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, autocommit: bool = True, **kwargs: Any) -> Any:
        if mode == "rb":
            with self._at(path) as (system, below):
                return ReadFile(system.reading.open(below), path)
        if mode == "xb" and self.exists(path):
            raise FileExistsError(errno.EEXIST, "it already exists", path)
        if mode not in ("wb", "xb"):
            raise OSError(errno.EOPNOTSUPP, f"files are read or written whole, not opened with {mode!r}", path)
        with self._at(path) as (system, below):
            if reason := system.place.name_problem(posixpath.basename(below)):
                raise OSError(errno.EINVAL, reason, path)
            try:
                writer = system.writing.open(below, mode=system.mode(0o666))
            except NotFoundError:
                system.files.make_folder(posixpath.dirname(below), mode=system.mode(0o777), parents=True)
                writer = system.writing.open(below, mode=system.mode(0o666))
        return WriteFile(writer, path, autocommit=autocommit)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """The bytes of a file from `start` to `end`; negative ones count from its end."""
        with self._at(path) as (system, below), system.reading.open(below) as file:
            first, last, _ = slice(start, end).indices(file.size_bytes)
            return file.read(first, last - first) if last > first else b""

    @contextlib.contextmanager
    def _at(self, path: str, *, follow: bool = True) -> Iterator[tuple[FileSystem, str]]:
        """The file system and the path in it; maps its errors to those that callers of fsspec expect."""
        stripped = self._strip_protocol(path)
        with os_errors(stripped):
            found = resolve_below(f"{self.scheme}://{self.authority}/", stripped, follow=follow)
            yield found.system, found.path


class HdfsFileSystem(CheckpointFileSystem):
    """`bootseer+hdfs://NAMENODE/PATH`."""

    protocol = "bootseer+hdfs"


class S3FileSystem(CheckpointFileSystem):
    """`bootseer+s3://BUCKET/PATH`."""

    protocol = "bootseer+s3"


class GoogleFileSystem(CheckpointFileSystem):
    """`bootseer+gs://BUCKET/PATH`."""

    protocol = "bootseer+gs"


class AzureFileSystem(CheckpointFileSystem):
    """`bootseer+az://CONTAINER/PATH`."""

    protocol = "bootseer+az"


class FolderFileSystem(CheckpointFileSystem):
    """`bootseer+file:///PATH`: any folder, for example one shared by many nodes."""

    protocol = "bootseer+file"


def _info(info: FileInfo, name: str) -> dict[str, Any]:
    entry = info.entry
    return {
        "name": name,
        "size": info.size_bytes,
        "type": "directory" if info.is_folder else "file",
        "mtime": entry.mtime_ns / 1e9,
        "mode": entry.mode,
        "owner": entry.owner,
        "group": entry.group,
        "version": entry.version,
        "striped": info.is_striped,
    }

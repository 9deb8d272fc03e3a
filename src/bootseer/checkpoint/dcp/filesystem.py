"""Folders and small files of checkpoints, as PyTorch's own writer asks for them."""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.filesystem import FileSystemBase

from bootseer.checkpoint.opened import is_uri, opened
from bootseer.checkpoint.writing.file_writer import FileWriter
from bootseer.errors import NotFoundError, PermanentError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Streamed(io.RawIOBase):
    """Appends to a `FileWriter`. Closing it ends nothing: the caller commits or drops the writer."""

    def __init__(self, writer: FileWriter) -> None:
        super().__init__()
        self._writer = writer

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._writer.size_bytes

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data).cast("B")
        self._writer.write_at(self._writer.size_bytes, view)
        return len(view)


Path = str | os.PathLike[str]


class StripedFileSystem(FileSystemBase):
    """Paths are URIs."""

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Generator[io.IOBase, None, None]:
        """A new file, which appears when the block ends without an error."""
        if mode != "wb":
            raise PermanentError(f"{path}: this opens files to be written only, not {mode!r}")
        target = opened(path)
        writer = target.system.writing.open(target.path)
        try:
            yield Streamed(writer)
        except BaseException:
            writer.abort()
            raise
        writer.commit()

    def concat_path(self, path: Path, suffix: str) -> str:
        """A name in a folder."""
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def rename(self, path: Path, new_path: Path) -> None:
        """Give a file another name, over what is there."""
        source, target = opened(path), opened(new_path)
        source.system.files.rename(source.path, target.path)

    def init_path(self, path: Path) -> str:
        """The address of a checkpoint, as it is used from now on."""
        return os.fspath(path)

    def mkdir(self, path: Path) -> None:
        """Make a folder, and those above it."""
        target = opened(path)
        target.system.files.make_folder(target.path, parents=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Whether checkpoints can be written there."""
        return is_uri(os.fspath(checkpoint_id))

    def exists(self, path: Path) -> bool:
        """Whether there is a file or folder."""
        target = opened(path)
        try:
            target.system.files.stat(target.path)
        except NotFoundError:
            return False
        return True

    def rm_file(self, path: Path) -> None:
        """Remove a file."""
        target = opened(path)
        target.system.files.remove(target.path)

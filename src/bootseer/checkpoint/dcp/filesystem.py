"""Folders and small files of checkpoints, as PyTorch's own writer asks for them.

Called by `writer` and by the base class that it shares with PyTorch's `FileSystemWriter`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager

from torch.distributed.checkpoint.filesystem import FileSystemBase

from bootseer.checkpoint.dcp.streamed import Streamed
from bootseer.checkpoint.opened import is_uri, opened
from bootseer.errors import NotFoundError, PermanentError

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

"""Open files as fsspec hands them out: buffered readers, and writers whose file appears when they are closed."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any

from bootseer.checkpoint.os_errors import os_errors
from bootseer.checkpoint.reading.file import CheckpointFile, Positioned
from bootseer.checkpoint.writing.file_writer import FileWriter

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_BUFFER_BYTES = 1 << 17
"""For readers of lines and of single numbers; larger reads pass it by."""


class ReadFile(io.BufferedReader):
    """A file to read, with what fsspec's own open files have besides."""

    mode = "rb"

    def __init__(self, file: CheckpointFile, path: str) -> None:
        super().__init__(_RawFile(file, path), _BUFFER_BYTES)
        self.path = path
        self.size = file.size_bytes

    @property
    def name(self) -> str:
        """The path, as of Python's own files."""
        return self.path


class _RawFile(Positioned):
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
    """A new file, written from its beginning to its end. It appears, whole and durable, when this is closed; it never
    does when a `with` block ends in an error, or when this is forgotten.

    What fsspec and Python put around it (`fsspec.open`, text, compression) only call `close` when their `with` block
    ends in an error. So a `close` while an error is on its way that was not at the opening drops the file too.
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
        """Make the file appear: for fsspec's transactions, and for `close`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with os_errors(self.path):
                writer.commit()

    def discard(self) -> None:
        """Drop what was written."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.abort()

    def _is_failing(self) -> bool:
        error = sys.exception()
        # The end of an iteration is no error: `except StopIteration: file.close()` means what it says.
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


def closing_both(compressed: Any, file: ReadFile | WriteFile) -> Any:
    """Let the closing of a compressor close the file that it writes to; most leave it open, and it would be lost."""
    close = compressed.close

    def close_both() -> None:
        try:
            close()
        finally:
            file.close()

    with contextlib.suppress(AttributeError):  # zstandard's, which closes the file itself
        compressed.close = close_both
    return compressed

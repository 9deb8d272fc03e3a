"""A file that is being written, as `torch.save` takes it."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from bootseer.checkpoint.writing.file_writer import FileWriter

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class Streamed(io.RawIOBase):
    """Appends to a `FileWriter`. Closing it ends nothing: whoever made the writer commits it or drops it."""

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

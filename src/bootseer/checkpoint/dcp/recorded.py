"""What `torch.save` writes, kept as it lies in memory: the elements of tensors are not copied, and can be read again.

A part of a striped file that fails is sent a second time from here.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from typing import IO, TYPE_CHECKING

import torch

from bootseer.checkpoint.tensors import memory_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_MIN_BYTES = 1 << 16
"""No record but one of elements is so long."""
_COMPARED_BYTES = 4096


class Recorded(io.RawIOBase):
    """A file that is written once and then read, by many threads."""

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = 0
        self._starts: list[int] = []
        self._pieces: list[memoryview] = []
        self._saved: memoryview | None = None

    def save(self, tensor: torch.Tensor, to: IO[bytes]) -> None:
        """`torch.save` to `to`, which writes here. The tensor must not change before the last read."""
        if tensor.nbytes < _MIN_BYTES:  # it makes forty writes of a few bytes
            whole = io.BytesIO()
            torch.save(tensor, whole)
            to.write(whole.getbuffer())
            return
        self._saved = memory_of(tensor)
        try:
            torch.save(tensor, to)
        finally:
            self._saved = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size_bytes

    def write(self, data: ReadableBuffer, /) -> int:
        view = memoryview(data).cast("B")
        if view:
            self._starts.append(self.size_bytes)
            self._pieces.append(self._kept(view))
            self.size_bytes += len(view)
        return len(view)

    def replay(self, offset: int, length: int) -> bytes:
        """These bytes, which must be there. Safe from many threads, once all is written."""
        pieces = []
        number = bisect_right(self._starts, offset) - 1
        while length:
            begin = offset - self._starts[number]
            piece = self._pieces[number][begin : begin + length]
            pieces.append(piece)
            offset += len(piece)
            length -= len(piece)
            number += 1
        return b"".join(pieces)

    def _kept(self, view: memoryview) -> memoryview:
        """The same bytes, which stay: those of the tensor that is being saved, or a copy."""
        saved = self._saved
        if (
            saved is not None
            and len(view) == len(saved) >= _MIN_BYTES
            and view[:_COMPARED_BYTES] == saved[:_COMPARED_BYTES]
            and view[-_COMPARED_BYTES:] == saved[-_COMPARED_BYTES:]
        ):
            return saved
        return memoryview(bytes(view))


class RecordedSource:
    """What was recorded, as a `Replayable`."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    @property
    def size_bytes(self) -> int:
        """How many bytes there are."""
        return self._recorded.size_bytes

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes."""
        return self._recorded.replay(offset, length)

"""A raw file of known length with a position: what all files have in common that are read at any offset.

Called by `dcp.pieces` and `fsspec.open_files`, which say where the bytes are.
"""

from __future__ import annotations

import io
import os


class Positioned(io.RawIOBase):
    """Give `readinto`; it reads at `_at` and moves it. Not safe for several threads at once."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("negative position")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

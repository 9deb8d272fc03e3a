"""An open file of a checkpoint, striped or ordinary: what readers work with."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence

from bootseer.checkpoint.reading.shared_file import Answer, SharedFile
from bootseer.checkpoint.reading.transfer import Gather, Waiting
from bootseer.errors import BootseerError, PermanentError, TransientError

Buffer = bytearray | memoryview


class CheckpointFile:
    """One version of a file: every byte that is read is of this version and verified, or there is an error.

    Safe to use from many threads, and in a child after `fork`. All reads raise `BootseerError`.
    """

    def __init__(self, shared: SharedFile, *, is_striped: bool, release: Callable[[], None]) -> None:
        self.path = shared.path
        self.size_bytes = shared.size_bytes
        self.version = shared.version
        """Differs whenever the content may differ."""
        self.is_striped = is_striped
        self._shared = shared
        self._release = release
        self._closed = False

    def read(self, offset: int, length: int) -> bytes:
        """A range of the file, cut at its end."""
        length = self._length(offset, length)
        if length >= self._shared.direct_min_bytes:
            data = bytearray(length)
            self.readinto(offset, data)
            return bytes(data)
        return bytes(self._small(offset, length)) if length else b""

    def readinto(self, offset: int, buffer: Buffer) -> int:
        """Fill the buffer from `offset` on: the number of bytes, less than its size only at the end of the file.

        Large reads go straight into the buffer; it may hold anything when one fails.
        """
        view = memoryview(buffer).cast("B")
        length = self._length(offset, len(view))
        view = view[:length]
        if length >= self._shared.direct_min_bytes:
            self._wait_for(lambda gather: self._shared.read_large(offset, view, gather))
        elif length:
            view[:] = self._small(offset, length)
        return length

    def read_ranges(self, ranges: Sequence[tuple[int, Buffer]]) -> None:
        """Fill each buffer from its offset on, many at once and in the best order. All must lie inside the file.

        They go straight into the buffers, and what several have in common is read once. The buffers may hold anything
        when one fails.
        """
        self._check_open()
        views = [(offset, memoryview(buffer).cast("B")) for offset, buffer in ranges]
        for offset, view in views:
            if offset < 0 or offset + len(view) > self.size_bytes:
                raise PermanentError(
                    f"{self.path}: bytes {offset} to {offset + len(view)} of a file of {self.size_bytes}"
                )
        self._wait_for(lambda gather: self._shared.read_ranges(views, gather))

    def read_async(
        self, offset: int, length: int, done: Callable[[Answer], None], room: memoryview | None = None
    ) -> None:
        """Read a range, cut at the end of the file: `done` is called once, from any thread. It is waited for when the
        range is all of a small file; call this without locks.

        It gets the bytes, which do not change any more, or the error, and must return soon. With `room`, of `length`
        bytes, they may lie there when `done` is called before this returns. What will probably be read next is brought
        meanwhile.
        """
        try:
            length = self._length(offset, length)
        except BootseerError as error:
            done(error)
            return
        if length:
            self._shared.read_async(offset, length, done, room)
        else:
            done(b"")

    def prefetch(self, offset: int, length: int) -> None:
        """Bring a range into the node's cache without waiting, or into memory when there is no cache.

        Gives way to all that readers wait for. Its errors are not reported: what it did not bring is read when it is
        wanted.
        """
        length = self._length(offset, length)
        if length:
            self._shared.prefetch(offset, length)

    def close(self) -> None:
        """Not read any more. Reads that were begun still end. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._release()

    def __enter__(self) -> CheckpointFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _small(self, offset: int, length: int) -> bytes | memoryview:
        answers: list[Answer] = []
        waiting = Waiting()

        def done(answer: Answer) -> None:
            answers.append(answer)
            waiting.ended(answer if isinstance(answer, BootseerError) else None)

        self._shared.read_async(offset, length, done)
        waiting.wait(f"{self.path}: bytes {offset} to {offset + length}", self._shared.lost_s)
        answer = answers[0]
        if isinstance(answer, BootseerError):
            raise answer
        return answer

    def _wait_for(self, begin: Callable[[Gather], None]) -> None:
        waiting = Waiting()
        try:
            begin(waiting.gather)
            waiting.wait(self.path, self._shared.lost_s)
        except BaseException:
            if not waiting.is_over:  # a signal, or a part that never ends: what runs still writes into their memory
                waiting.gather.cancel(TransientError(f"{self.path}: the read was interrupted"))
                waiting.wait_over()
            raise

    def _length(self, offset: int, length: int) -> int:
        self._check_open()
        if offset < 0 or length < 0:
            raise PermanentError(f"{self.path}: there are no {length} bytes at {offset}")
        return max(min(length, self.size_bytes - offset), 0)

    def _check_open(self) -> None:
        if self._closed:
            raise PermanentError(f"{self.path}: this file was closed")


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

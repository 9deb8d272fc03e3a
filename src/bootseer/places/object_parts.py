"""A new object that is written from its beginning to its end: in one request, or as an upload in parts."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import obstore

from bootseer.errors import BootseerError, TransientError
from bootseer.io.executor import Executor
from bootseer.places.bucket import MAX_PARTS, PART_BYTES, PARTS_AT_ONCE, WRITE_S, Bucket

_MAX_OBJECT_BYTES = 5 << 40
_MAX_AHEAD = 2
"""Pieces of a part that wait for being sent."""


class ObjectPart:
    """A `PartWriter`. Small ones are put at their end, by one request; larger ones go in parts while they are written.
    Nothing is there before the end, and nothing is left of one that was dropped."""

    nodes: tuple[str, ...] = ()

    def __init__(self, bucket: Bucket, path: str, key: str, most_bytes: int = 0) -> None:
        self.path = path
        # An upload has at most MAX_PARTS parts. Of unknown length: parts of the usual size.
        self._part_bytes = max(PART_BYTES, -(-most_bytes // MAX_PARTS) if most_bytes <= _MAX_OBJECT_BYTES else 0)
        self._bucket = bucket
        self._key = key
        self._buffer = bytearray()
        self._pieces: queue.Queue[bytes | None] = queue.Queue(_MAX_AHEAD)
        self._is_sending = False
        self._outcome: queue.Queue[BaseException | None] = queue.Queue()
        self._is_dropped = False
        self._ended = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer += data
        while len(self._buffer) > self._part_bytes:
            if not self._is_sending:
                _uploads.submit(self._send)
                self._is_sending = True
            self._give(bytes(memoryview(self._buffer)[: self._part_bytes]))
            del self._buffer[: self._part_bytes]

    def _give(self, piece: bytes | None) -> None:
        until_s = time.monotonic() + WRITE_S
        while time.monotonic() < until_s and self._outcome.empty():
            with suppress(queue.Full):
                self._pieces.put(piece, timeout=0.5)
                return
        self._check()
        raise TransientError(f"{self._bucket.uri}/{self.path}: the server took nothing for {WRITE_S:.0f} s")

    def _check(self) -> None:
        with suppress(queue.Empty):
            error = self._outcome.get_nowait()
            if error is not None:
                self._outcome.put(error)
                raise error

    def _send(self) -> None:
        def pieces() -> Iterator[bytes]:
            while (piece := self._pieces.get()) is not None:
                yield piece
            if self._is_dropped:  # obstore ends the upload then, and the server forgets its parts
                raise TransientError("dropped")

        try:
            with self._bucket.mapping(self.path):
                obstore.put(
                    self._bucket.writer, self._key, pieces(), use_multipart=True, chunk_size=self._part_bytes,
                    max_concurrency=PARTS_AT_ONCE,
                )  # fmt: skip
            self._outcome.put(None)
        except BaseException as error:  # panics of Rust code are not Exceptions
            self._outcome.put(error if isinstance(error, BootseerError) else TransientError(str(error)))

    def close(self) -> tuple[str, ...]:
        self._ended = True
        if not self._is_sending:
            data = bytes(self._buffer)
            put = partial(obstore.put, self._bucket.writer, self._key, data, use_multipart=False)
            self._bucket.call(self.path, put, WRITE_S)
            return ()
        if self._buffer:
            self._give(bytes(self._buffer))
        self._give(None)
        try:
            error = self._outcome.get(timeout=WRITE_S)
        except queue.Empty:
            raise TransientError(
                f"{self._bucket.uri}/{self.path}: the server did not end the upload within {WRITE_S:.0f} s"
            ) from None
        if error is not None:
            raise error
        return ()

    def abort(self) -> None:
        if self._ended:
            return
        self._ended = self._is_dropped = True
        if self._is_sending:
            with suppress(BootseerError):
                self._give(None)
                self._outcome.get(timeout=WRITE_S)


_uploads = Executor("bootseer-upload")

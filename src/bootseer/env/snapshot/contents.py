"""Read the files of a setup in their order, several at once, and say what each of them holds.

Most files are small, and what they cost is opening them: a few threads read ahead, as far as a bounded number of bytes.
Large files are handed out piece by piece, without their holes. A file that changes while it is read is an error: what
is published must be what the setup left.

Called by `write`, which alone sees the order.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from blake3 import blake3

from bootseer.env.snapshot.bytecode import Source, settled
from bootseer.env.snapshot.items import Item, changed, mapped
from bootseer.env.snapshot.secret_check import SecretCheck
from bootseer.errors import PermanentError
from bootseer.io.tasks import Tasks

SMALL_BYTES = 1 << 20
_PIECE = 1 << 20
_ZEROS = bytes(_PIECE)
_BATCH_FILES = 64
_BATCH_BYTES = 4 << 20
_BATCHES_PER_THREAD = 3


@dataclass(frozen=True, slots=True)
class Content:
    """What a small file holds: data and digest. None instead of data: bytecode that is of no use."""

    data: bytes | None
    digest: str
    secret: str = ""
    """What was found in it that must not be published (`SecretCheck.content`)."""


class Contents:
    """Reads ahead in a few threads, as a context manager. `source_of` tells the source of a file in `__pycache__`."""

    def __init__(
        self, items: Sequence[Item], source_of: Callable[[Item], Source | None], check: SecretCheck, threads: int
    ) -> None:
        self._batches = _batches(items)
        self._source_of = source_of
        self._check = check
        self._pool = Tasks("bootseer-read", threads)
        self._max_ahead = threads * _BATCHES_PER_THREAD
        self._ahead: deque[Future[list[tuple[Item, Content]]]] = deque()
        self._ready: deque[tuple[Item, Content]] = deque()

    def __enter__(self) -> Contents:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def small(self, item: Item) -> Content:
        """The content of `item`, the next small file. Raises `PermanentError`."""
        while not self._ready:
            while len(self._ahead) < self._max_ahead and (batch := next(self._batches, None)):
                self._ahead.append(self._pool.submit(self._read, batch))
            self._ready.extend(self._ahead.popleft().result())
        found, content = self._ready.popleft()
        assert found is item  # noqa: S101 - both sides go through the same list
        return content

    def _read(self, batch: list[Item]) -> list[tuple[Item, Content]]:
        return [(item, self._content(item)) for item in batch]

    def _content(self, item: Item) -> Content:
        data: bytes | None = mapped(item.change.path, lambda: read_whole(item))
        if item.python_source:
            data = mapped(item.change.path, lambda: settled(data or b"", self._source_of(item)))
        secret = "" if item.python_source else self._check.content(item.change.path, data or b"")
        return Content(data, digest_of(data or b""), secret)


def is_small(item: Item) -> bool:
    """Whether a file is read as a whole."""
    return item.size <= SMALL_BYTES or bool(item.python_source)


def _batches(items: Sequence[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    size = 0
    for item in items:
        if not is_small(item):
            continue
        batch.append(item)
        size += item.size
        if len(batch) >= _BATCH_FILES or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def digest_of(data: bytes) -> str:
    """The digest of a file's content, as manifests have it."""
    return f"blake3:{blake3(data).hexdigest()}"


def read_whole(item: Item) -> bytes:
    """All bytes of a small file. Raises `OSError`, and `PermanentError` when it is not what was looked at."""
    descriptor = _open(item)
    try:
        data = os.read(descriptor, item.size + 1)
        while len(data) < item.size and (piece := os.read(descriptor, item.size - len(data))):
            data += piece
        if len(data) != item.size:
            raise changed(item.change.path)
        _check_same(item, descriptor)
    finally:
        os.close(descriptor)
    return data


def read_pieces(item: Item, write: Callable[[bytes], object], write_zeros: Callable[[int], object]) -> str:
    """Hand out a large file, holes as a number of zeros; its digest. Raises as `read_whole` does."""
    found = blake3()
    descriptor = _open(item)
    try:
        at = 0
        for begin, end in _extents(descriptor, item.size):
            write_zeros(begin - at)
            _digest_zeros(found, begin - at)
            at = begin
            while at < end:
                piece = os.pread(descriptor, min(_PIECE, end - at), at)
                if not piece:
                    raise changed(item.change.path)
                found.update(piece)
                write(piece)
                at += len(piece)
        write_zeros(item.size - at)
        _digest_zeros(found, item.size - at)
        _check_same(item, descriptor)
    finally:
        os.close(descriptor)
    return f"blake3:{found.hexdigest()}"


def _open(item: Item) -> int:
    # O_NONBLOCK: what was a file a moment ago may be a pipe now.
    descriptor = os.open(item.change.source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_same(item, descriptor)
    except PermanentError:
        os.close(descriptor)
        raise
    return descriptor


def _check_same(item: Item, descriptor: int) -> None:
    status = os.fstat(descriptor)
    if (status.st_mode, status.st_size, status.st_mtime_ns) != (item.mode, item.size, item.mtime_ns):
        raise changed(item.change.path)


def _extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Where a file has data."""
    at = 0
    while at < size:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return  # a hole up to the end
        at = min(os.lseek(descriptor, begin, os.SEEK_HOLE), size)
        if begin < at:
            yield begin, at


def _digest_zeros(digest: blake3, count: int) -> None:
    while count > 0:
        piece = min(count, _PIECE)
        digest.update(memoryview(_ZEROS)[:piece])
        count -= piece

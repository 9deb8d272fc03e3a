"""Reading and writing whole files through the interfaces that callers of `bootseer.hdfs` use."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from bootseer.errors import NotFoundError

if TYPE_CHECKING:
    from bootseer.hdfs.block_locations import FileStatus
    from bootseer.hdfs.client import HdfsClient

_WAIT_S = 150.0


def read_ranges(file: Any, ranges: Sequence[tuple[int, int]], **options: Any) -> list[tuple[bytes, Any]]:
    """Read ranges of one file concurrently; returns the bytes and the outcome of each."""
    buffers = [bytearray(length) for _, length in ranges]
    outcomes: list[Any] = [None] * len(ranges)
    left = threading.Semaphore(0)

    def ended(number: int, outcome: Any) -> None:
        assert outcomes[number] is None, "a read ends once"
        outcomes[number] = outcome
        left.release()

    for number, ((start, _), buffer) in enumerate(zip(ranges, buffers, strict=True)):
        file.read_into(start, memoryview(buffer), lambda outcome, number=number: ended(number, outcome), **options)
    for _ in ranges:
        assert left.acquire(timeout=_WAIT_S), "a read does not end"
    return [(bytes(buffer), outcome) for buffer, outcome in zip(buffers, outcomes, strict=True)]


def read_all(client: HdfsClient, path: str) -> bytes:
    """All bytes of a file. Raises the error of the read."""
    file = client.reads().open(path)
    ((data, outcome),) = read_ranges(file, [(0, file.size_bytes)])
    file.close()
    if outcome.error is not None:
        raise outcome.error
    return data


def put_over(client: HdfsClient, path: str, data: bytes, **options: Any) -> None:
    """Write a file, replacing an existing one."""
    with suppress(NotFoundError):
        client.delete(path)
    client.put(path, data, **options)


def below(client: HdfsClient, folder: str) -> Iterator[FileStatus]:
    """Everything below a folder."""
    for entry in client.list(folder):
        yield entry
        if entry.is_folder:
            yield from below(client, entry.path)

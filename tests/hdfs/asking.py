"""Writing files, and reading them through `HdfsReads`."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

from bootseer.errors import BootseerError, TransientError
from bootseer.hdfs.client import HdfsClient
from bootseer.hdfs.reads import HdfsFile, HdfsReads
from bootseer.io.pooled_reads import ReadOutcome
from hdfs.whole_files import put_over

MIB = 1024 * 1024
DEADLINE_S = 120.0


class Waiting:
    """A `done` callback whose calls can be waited for."""

    def __init__(self) -> None:
        self.outcomes: list[ReadOutcome] = []
        self._arrived = threading.Condition()

    def __call__(self, outcome: ReadOutcome) -> None:
        with self._arrived:
            self.outcomes.append(outcome)
            self._arrived.notify_all()

    def wait(self, number: int = 1, *, deadline_s: float = DEADLINE_S) -> list[ReadOutcome]:
        """All outcomes, as soon as there are this many."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.outcomes) >= number, deadline_s), "a read did not end"
        return self.outcomes


def put(uri: str, path: str, data: bytes, *, block_size: int = MIB, replication: int = 1) -> None:
    """Write a file. Retries, because on a busy machine servers report finished blocks late to each other."""
    with closing(HdfsClient(uri.removeprefix("hdfs://"))) as client:
        for _ in range(8):
            try:
                put_over(client, path, data, block_size=block_size, replication=replication)
            except TransientError as error:
                problem = error
            else:
                return
    raise AssertionError(f"{path} cannot be written: {problem}")


def read(file: HdfsFile, offset: int = 0, length: int | None = None, *, piece: int = 0, **options: Any) -> bytes:
    """Bytes of a file, requested at once or in pieces. Raises the first error of any piece."""
    length = file.size_bytes - offset if length is None else length
    into = bytearray(length)
    done = Waiting()
    starts = range(0, length, piece or length or 1)
    for start in starts:
        file.read_into(offset + start, memoryview(into)[start : start + (piece or length)], done, **options)
    for outcome in done.wait(len(starts)):
        if outcome.error is not None:
            raise outcome.error
    return bytes(into)


def error_of(file: HdfsFile, **options: Any) -> BootseerError:
    """The error of reading a file."""
    try:
        read(file, **options)
    except BootseerError as error:
        return error
    raise AssertionError("the read succeeded")


def failures(reads: HdfsReads) -> dict[str, int]:
    """How often each DataNode failed."""
    nodes: Any = reads.facts()["nodes"]
    return {node: counts["failures"] for node, counts in nodes.items()}

"""Reading whole files through `HdfsReads`, as the tests of faults do."""

from __future__ import annotations

import threading
from typing import Any

from bootseer.errors import BootseerError
from bootseer.hdfs.outcome import ReadOutcome
from bootseer.hdfs.reads import HdfsFile, HdfsReads

MIB = 1024 * 1024
DEADLINE_S = 60.0


class Waiting:
    """A `done` that can be waited for."""

    def __init__(self) -> None:
        self.outcomes: list[ReadOutcome] = []
        self._arrived = threading.Condition()

    def __call__(self, outcome: ReadOutcome) -> None:
        with self._arrived:
            self.outcomes.append(outcome)
            self._arrived.notify_all()

    def wait(self, number: int = 1) -> list[ReadOutcome]:
        """All outcomes, when there are this many."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.outcomes) >= number, DEADLINE_S), "a read did not end"
        return self.outcomes


def read(file: HdfsFile, offset: int = 0, length: int | None = None, *, piece: int = 0, **options: Any) -> bytes:
    """Bytes of a file, asked for at once or in pieces. Raises the first error of any of them."""
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
    """The error that reading a file ends with."""
    try:
        read(file, **options)
    except BootseerError as error:
        return error
    raise AssertionError("the read ended well")


def failures(reads: HdfsReads) -> dict[str, int]:
    """How often each DataNode failed."""
    nodes: Any = reads.facts()["nodes"]
    return {node: told["failures"] for node, told in nodes.items()}

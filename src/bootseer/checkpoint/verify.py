"""Reading a checkpoint to its last byte and comparing it with what was written.

Of striped files, each chunk is compared with its digest and each row with its parity, not as readers do it: a chunk is
asked from one node only, and what that node gives is judged. Of ordinary files, a place with checksums compares those;
elsewhere it can only be said that they can be read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Protocol, TypeVar

from bootseer.blocks.codec import digest_of
from bootseer.checkpoint.catalog import lost_parts, walk
from bootseer.checkpoint.files import FileInfo, Files
from bootseer.checkpoint.head import Head, Part, Segment, part_path
from bootseer.checkpoint.layout import chunk_place, row_of, xor_into
from bootseer.errors import BootseerError, CorruptError, TransientError
from bootseer.io.pooled_reads import ReadOutcome
from bootseer.io.tasks import Count, Tasks
from bootseer.places.place import OpenFile

_ROWS_AT_ONCE = 8
"""Or pieces, or small files."""
_CHUNKS_AT_ONCE = 96
"""In memory: rows of many stripes are not looked at so many at once."""
_PIECE_BYTES = 4 << 20
_READ_S = 120.0


@dataclass(frozen=True, slots=True)
class Problem:
    """Bytes that are not what they were, or that cannot be read."""

    path: str
    offset: int
    length: int
    part: str
    """Of a striped file, its part; "" otherwise."""
    node: str
    """The node that gave the bytes, as far as is known."""
    what: str
    repairable: bool
    """Whether parity and the other parts give the bytes that were written."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found in a checkpoint."""

    num_files: int
    num_striped: int
    size_bytes: int
    problems: Sequence[Problem]


A = TypeVar("A")
B = TypeVar("B")


class Map(Protocol):
    """`map`, or that of a pool of threads."""

    def __call__(self, function: Callable[[A], B], of: Iterable[A], /) -> Iterator[B]: ...


def verify(files: Files, path: str, *, progress: Callable[[int, int], None] | None = None) -> Verdict:
    """Read all files of a checkpoint, or one file. Raises only what makes looking impossible, as `NotFoundError`."""
    infos = sorted(walk(files, path), key=lambda info: info.path)
    size_bytes = sum(info.size_bytes for info in infos)
    count = Count(size_bytes, progress)
    problems: list[Problem] = []
    with Tasks("bootseer-verify", _ROWS_AT_ONCE) as threads:

        def look(info: FileInfo, each: Map) -> list[Problem]:
            try:
                head = files.head(info.path) if info.is_striped else None
                if head is None:
                    return _ordinary(files, info.path, count, each)
                return _Striped(files, info.path, head, count).problems(each)
            except BootseerError as error:
                return [Problem(info.path, 0, info.size_bytes, "", "", str(error), repairable=False)]

        def is_small(info: FileInfo) -> bool:
            return not info.is_striped and info.size_bytes <= _PIECE_BYTES

        # Files side by side when they are small; otherwise what each consists of.
        for found in threads.map(lambda info: look(info, map), filter(is_small, infos)):
            problems += found
        for info in infos:
            if not is_small(info):
                problems += look(info, threads.map)
    problems.sort(key=lambda problem: (problem.path, problem.offset))
    return Verdict(len(infos), sum(info.is_striped for info in infos), size_bytes, problems)


def _ordinary(files: Files, path: str, count: Count, each: Map) -> list[Problem]:
    with contextlib.closing(files.place.open(path)) as file:

        def look(offset: int) -> Problem | None:
            length = min(_PIECE_BYTES, file.size_bytes - offset)
            ((_, outcome),) = _read([(file, offset, length)], check=True)
            count.add(length)
            if outcome.error is None:
                return None
            return Problem(path, offset, length, "", outcome.node, str(outcome.error), repairable=False)

        return [found for found in each(look, range(0, file.size_bytes, _PIECE_BYTES)) if found]


class _Striped:
    def __init__(self, files: Files, path: str, head: Head, count: Count) -> None:
        self._place = files.place
        self._path = path
        self._head = head
        self._count = count
        self._lost = set(lost_parts(files, path, head))

    def problems(self, each: Map) -> list[Problem]:
        found: list[Problem] = []
        for segment in self._head.segments:
            with contextlib.ExitStack() as stack:
                opened = [self._open(part, stack) for part in segment.parts]
                parity = self._open(segment.parity, stack) if segment.parity else None
                row = _Row(self._path, segment, opened, parity)
                firsts = range(0, segment.index.num_blocks, segment.stripes)
                for problems, length in each(row.problems, firsts):
                    found += problems
                    self._count.add(length)
        return found

    def _open(self, part: Part, stack: contextlib.ExitStack) -> OpenFile | BootseerError:
        path = part_path(self._path, self._head.id, part.name)
        if part.name in self._lost:
            return CorruptError(f"{self._place.uri}/{path} is missing, or not of {part.size_bytes} bytes")
        try:
            return stack.enter_context(contextlib.closing(self._place.open(path)))
        except BootseerError as error:
            return error


class _Row:
    """Judges the rows of one segment."""

    def __init__(
        self,
        path: str,
        segment: Segment,
        parts: Sequence[OpenFile | BootseerError],
        parity: OpenFile | BootseerError | None,
    ) -> None:
        self._path = path
        self._segment = segment
        self._parts = parts
        self._parity = parity
        self._turns = threading.Semaphore(max(1, _CHUNKS_AT_ONCE // (segment.stripes + 2)))

    def problems(self, first: int) -> tuple[list[Problem], int]:
        """What is wrong in the row that begins with a chunk, and how many bytes of the file it holds."""
        with self._turns:
            return self._problems(first)

    def _problems(self, first: int) -> tuple[list[Problem], int]:
        index, stripes = self._segment.index, self._segment.stripes
        row = row_of(first, index.num_blocks, stripes)
        length = sum(index.length(chunk) for chunk in row)
        wanted = [(self._parts[chunk % stripes], chunk_place(chunk, stripes)[1], index.length(chunk)) for chunk in row]
        if self._parity is not None:
            wanted.append((self._parity, chunk_place(first, stripes)[1], index.length(first)))
        results = _read(wanted, check=False)
        bad: dict[int, tuple[str, str]] = {}
        for chunk, (data, outcome) in zip(row, results, strict=False):
            if outcome.error is not None:
                bad[chunk] = (str(outcome.error), outcome.node)
            elif digest_of(data) != index.digest(chunk):
                bad[chunk] = ("these are not the bytes that were written", outcome.node)
        if self._parity is None:
            return [self._problem(chunk, *bad[chunk], repairable=False) for chunk in bad], length
        parity, parity_outcome = results[-1]
        rest = bytearray(parity)
        for chunk, (data, _) in zip(row, results, strict=False):
            if chunk not in bad:
                xor_into(rest, data)
        if not bad:
            if parity_outcome.error is not None:
                return [self._parity_problem(first, str(parity_outcome.error), parity_outcome.node)], length
            if any(rest):
                return [self._parity_problem(first, "the parity does not fit the bytes", parity_outcome.node)], length
            return [], length
        (one, *more) = bad
        repairable = (
            not more and parity_outcome.error is None and digest_of(rest[: index.length(one)]) == index.digest(one)
        )
        return [self._problem(chunk, *bad[chunk], repairable=repairable) for chunk in bad], length

    def _problem(self, chunk: int, reason: str, node: str, *, repairable: bool) -> Problem:
        index = self._segment.index
        part = self._segment.parts[chunk % self._segment.stripes]
        offset = self._segment.start + chunk * index.block_size
        return Problem(
            self._path, offset, index.length(chunk), part.name, node or ",".join(part.nodes), reason, repairable
        )

    def _parity_problem(self, first: int, reason: str, node: str) -> Problem:
        parity = self._segment.parity
        assert parity is not None  # noqa: S101 - it was read
        offset = self._segment.start + first * self._segment.index.block_size
        length = self._segment.index.length(first)
        return Problem(self._path, offset, length, parity.name, node or ",".join(parity.nodes), reason, repairable=True)


def _read(
    wanted: Sequence[tuple[OpenFile | BootseerError, int, int]], *, check: bool
) -> list[tuple[bytearray, ReadOutcome]]:
    """Read side by side; what could not be opened gives its error. Returns when all reads have ended, or should have by
    their deadlines."""
    reads: list[tuple[bytearray, Future[ReadOutcome]]] = []
    for file, offset, length in wanted:
        buffer, ended = bytearray(length), Future[ReadOutcome]()
        reads.append((buffer, ended))
        try:
            if isinstance(file, BootseerError):
                raise file
            file.read_into(offset, memoryview(buffer), ended.set_result, check=check, deadline_s=_READ_S)
        except BootseerError as error:
            ended.set_result(ReadOutcome(error, ""))
    wait([ended for _, ended in reads], 2 * _READ_S)
    late = ReadOutcome(TransientError(f"not read within {2 * _READ_S:.0f} s"), "")
    return [(buffer, ended.result() if ended.done() else late) for buffer, ended in reads]

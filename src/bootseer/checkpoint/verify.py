"""Reading a checkpoint to its last byte and comparing it with what was written.

Of striped files, each chunk is compared with its digest and each row with its parity, not as readers do it: a chunk is
asked from one node only, and what that node gives is judged. Of ordinary files, a place with checksums compares those;
elsewhere it can only be said that they can be read.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from bootseer.blocks.codec import digest_of
from bootseer.checkpoint.catalog import walk
from bootseer.checkpoint.files import FileInfo, Files
from bootseer.checkpoint.head import Head, Part, Segment, part_path
from bootseer.checkpoint.layout import chunk_place, make_ready, row_of, xor_into
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


Map = Callable[..., Iterator[Any]]
"""`map`, or that of a pool of threads."""


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
                return _striped(files, info.path, head, count, each)
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


def _striped(files: Files, path: str, head: Head, count: Count, each: Map) -> list[Problem]:
    lost = set(files.lost_parts(path, head))
    make_ready()

    def opened(part: Part, stack: contextlib.ExitStack) -> OpenFile | BootseerError:
        at = part_path(path, head.id, part.name)
        if part.name in lost:
            return CorruptError(f"{files.place.uri}/{at} is missing, or not of {part.size_bytes} bytes")
        try:
            return stack.enter_context(contextlib.closing(files.place.open(at)))
        except BootseerError as error:
            return error

    found: list[Problem] = []
    for segment in head.segments:
        with contextlib.ExitStack() as stack:
            rows = _Rows(path, segment, [opened(part, stack) for part in segment.all_parts])
            for problems, length in each(rows.problems, range(0, segment.index.num_blocks, segment.stripes)):
                found += problems
                count.add(length)
    return found


class _Rows:
    """Judges the rows of one segment, whose `files` are its parts, the parity last."""

    def __init__(self, path: str, segment: Segment, files: Sequence[OpenFile | BootseerError]) -> None:
        self._path = path
        self._segment = segment
        self._files = files
        self._turns = threading.Semaphore(max(1, _CHUNKS_AT_ONCE // (segment.stripes + 2)))

    def problems(self, first: int) -> tuple[list[Problem], int]:
        """What is wrong in the row that begins with a chunk, and how many bytes of the file it holds."""
        index = self._segment.index
        row = row_of(first, index.num_blocks, self._segment.stripes)
        with self._turns:
            return self._problems(row), sum(index.length(chunk) for chunk in row)

    def _problems(self, row: range) -> list[Problem]:
        index, stripes, parity = self._segment.index, self._segment.stripes, self._segment.parity
        wanted = [(self._files[chunk % stripes], chunk_place(chunk, stripes)[1], index.length(chunk)) for chunk in row]
        if parity is not None:
            wanted.append((self._files[-1], chunk_place(row[0], stripes)[1], index.length(row[0])))
        results = _read(wanted, check=False)
        bad: dict[int, tuple[str, str]] = {}
        for chunk, (data, outcome) in zip(row, results, strict=False):
            if outcome.error is not None:
                bad[chunk] = (str(outcome.error), outcome.node)
            elif digest_of(data) != index.digest(chunk):
                bad[chunk] = ("these are not the bytes that were written", outcome.node)
        repairable = False
        if parity is not None:
            rest, outcome = results[-1]
            for chunk, (data, _) in zip(row, results, strict=False):
                if chunk not in bad:
                    xor_into(rest, data)
            if not bad:
                if outcome.error is None and rest == bytes(len(rest)):  # `any` takes 6 ms for each MiB
                    return []
                reason = str(outcome.error or "the parity does not fit the bytes")
                return [self._problem(parity, row[0], reason, outcome.node, repairable=True)]
            one = min(bad)
            is_right = digest_of(rest[: index.length(one)]) == index.digest(one)
            repairable = len(bad) == 1 and outcome.error is None and is_right
        parts = self._segment.parts
        return [self._problem(parts[chunk % stripes], chunk, *bad[chunk], repairable=repairable) for chunk in bad]

    def _problem(self, part: Part, chunk: int, reason: str, node: str, *, repairable: bool) -> Problem:
        index = self._segment.index
        offset = self._segment.start + chunk * index.block_size
        node = node or ",".join(part.nodes)
        return Problem(self._path, offset, index.length(chunk), part.name, node, reason, repairable)


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

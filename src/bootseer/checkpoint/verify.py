"""Reading a checkpoint to its last byte and comparing it with what was written.

Each chunk of a striped file is compared with its digest, each parity part with its SHA-256. Unlike a reader, this reads
each byte from one node only, and reports that node's errors. Ordinary files are compared with the place's own
checksums; without any, this only shows that they can be read.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Any

from bootseer.blocks.codec import digest_of
from bootseer.checkpoint.catalog import FILE_AND_FOLDER, UNSAVED, also_folders, unsaved, walk
from bootseer.checkpoint.files import FileInfo, Files
from bootseer.checkpoint.head import Head, Part, Segment, part_path
from bootseer.checkpoint.layout import CHUNK_BYTES
from bootseer.checkpoint.reading.reading import Reading
from bootseer.errors import BootseerError, CorruptError, TransientError
from bootseer.io.pooled_reads import ReadOutcome
from bootseer.io.tasks import Count, Tasks
from bootseer.places.place import OpenFile

_AT_ONCE = 16
"""Parts, pieces of ordinary files, or small files."""
_PIECE_BYTES = 4 << 20
_READ_S = 120.0


@dataclass(frozen=True, slots=True)
class Problem:
    """Bytes that differ from what was written, or that cannot be read."""

    path: str
    offset: int
    length: int
    part: str
    """The part of a striped file; "" for an ordinary file."""
    node: str
    """The node that returned the bytes; "" if unknown."""
    what: str
    repairable: bool
    """Whether the bytes can be rebuilt from parity and the other parts."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a verification."""

    num_files: int
    num_striped: int
    size_bytes: int
    problems: Sequence[Problem]


Map = Callable[..., Iterator[Any]]
"""`map`, or that of a pool of threads."""


def verify(files: Files, path: str, *, progress: Callable[[int, int], None] | None = None) -> Verdict:
    """Read all files of a checkpoint, or one file. A save of PyTorch's DCP that did not end is a problem of its folder,
    without bytes. Raises only errors of listing it, such as `NotFoundError`."""
    all_infos = list(walk(files, path, folders=True))
    infos = sorted((info for info in all_infos if not info.is_folder), key=lambda info: info.path)
    size_bytes = sum(info.size_bytes for info in infos)
    count = Count(size_bytes, progress)
    problems: list[Problem] = []
    with Tasks("bootseer-verify", _AT_ONCE) as threads:

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
    if not any(info.path == path for info in infos):  # a folder
        unfinished = unsaved(info.path for info in infos)
        problems += [Problem(folder, 0, 0, "", "", UNSAVED, repairable=False) for folder in unfinished]
    problems += [Problem(name, 0, 0, "", "", FILE_AND_FOLDER, repairable=False) for name in also_folders(all_infos)]
    problems.sort(key=lambda problem: (problem.path, problem.offset))
    return Verdict(len(infos), sum(info.is_striped for info in infos), size_bytes, problems)


def _ordinary(files: Files, path: str, count: Count, each: Map) -> list[Problem]:
    with contextlib.closing(files.place.open(path)) as file:

        def look(offset: int) -> Problem | None:
            length = min(_PIECE_BYTES, file.size_bytes - offset)
            _, outcome = _read(file, offset, length, check=True)
            count.add(length)
            if outcome.error is None:
                return None
            return Problem(path, offset, length, "", outcome.node, str(outcome.error), repairable=False)

        return [found for found in each(look, range(0, file.size_bytes, _PIECE_BYTES)) if found]


_Bad = tuple[int, str, str]
"""A chunk of a segment, what is wrong with it, and the node that returned it."""


def _striped(files: Files, path: str, head: Head, count: Count, each: Map) -> list[Problem]:
    lost = set(files.lost_parts(path, head))

    def look(segment: Segment, part: Part, chunks: range) -> list[_Bad]:
        at = part_path(path, head.id, part.name)
        try:
            if part.name in lost:
                raise CorruptError(f"{files.place.uri}/{at} is missing, or not of {part.size_bytes} bytes")
            with contextlib.closing(files.place.open(at)) as file:
                return list(_bad(file, segment, part, chunks))
        except BootseerError as error:
            return [(chunk, str(error), "") for chunk in chunks]
        finally:
            if part is not segment.parity:
                count.add(part.size_bytes)

    jobs = [  # of the parity, the chunks stand for their rows
        (segment, part, range(number % segment.stripes, segment.index.num_blocks, segment.stripes))
        for segment in head.segments
        for number, part in enumerate(segment.all_parts)
    ]
    results = each(lambda job: look(*job), jobs)
    found: list[Problem] = []
    for segment in head.segments:
        index, stripes, parts = segment.index, segment.stripes, segment.all_parts
        bad = list(islice(results, len(parts)))
        in_row = Counter(chunk // stripes for of_part in bad[:stripes] for chunk, _, _ in of_part)
        for part, of_part in zip(parts, bad, strict=True):
            for chunk, what, sender in of_part:
                others = in_row[chunk // stripes] - (part is not segment.parity)
                offset, length = segment.start + chunk * CHUNK_BYTES, index.length(chunk)
                node = sender or ",".join(part.nodes)
                repairable = segment.parity is not None and not others
                if repairable and part is not segment.parity and bad[-1]:
                    # A parity that was read to its end with wrong bytes may still be right in this row.
                    repairable = len(bad[-1]) == 1 and _is_readable(files, path, offset, length)
                found.append(Problem(path, offset, length, part.name, node, what, repairable))
    return found


def _is_readable(files: Files, path: str, offset: int, length: int) -> bool:
    reading = Reading(files.place)
    with contextlib.suppress(BootseerError), contextlib.closing(reading), reading.open(path) as file:
        return len(file.read(offset, length)) == length
    return False


def _bad(file: OpenFile, segment: Segment, part: Part, chunks: range) -> Iterator[_Bad]:
    """Read a part to its end, or to the first piece that cannot be read: then the rest counts as bad."""
    sha256, node = hashlib.sha256(), ""
    for offset in range(0, part.size_bytes, _PIECE_BYTES):
        data, outcome = _read(file, offset, min(_PIECE_BYTES, part.size_bytes - offset), check=False)
        left, node = chunks[offset // CHUNK_BYTES :], outcome.node
        if outcome.error is not None:
            yield from ((chunk, str(outcome.error), node) for chunk in left)
            return
        if part is segment.parity:
            sha256.update(data)
            continue
        for start, chunk in zip(range(0, len(data), CHUNK_BYTES), left, strict=False):
            if digest_of(memoryview(data)[start : start + CHUNK_BYTES]) != segment.index.digest(chunk):
                yield chunk, "these are not the bytes that were written", node
    if part is segment.parity and sha256.hexdigest() != part.sha256:
        yield 0, "the parity does not fit the bytes", node


def _read(file: OpenFile, offset: int, length: int, *, check: bool) -> tuple[bytearray, ReadOutcome]:
    """Returns when the read has ended, or should have by its deadline."""
    data, ended = bytearray(length), Future[ReadOutcome]()
    try:
        file.read_into(offset, memoryview(data), ended.set_result, check=check, deadline_s=_READ_S)
        return data, ended.result(2 * _READ_S)
    except BootseerError as error:
        return data, ReadOutcome(error, "")
    except TimeoutError:
        return data, ReadOutcome(TransientError(f"not read within {2 * _READ_S:.0f} s"), "")

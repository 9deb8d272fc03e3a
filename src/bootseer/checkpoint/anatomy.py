"""What one file of a checkpoint consists of, and where that lies now.

A head says where its parts were put; HDFS moves blocks when nodes come and go. Both are shown, for they explain the
speed of reading.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bootseer.checkpoint.catalog import lost_parts
from bootseer.checkpoint.files import FileInfo, Files
from bootseer.checkpoint.head import Head, Part, part_path
from bootseer.checkpoint.layout import CHUNK_BYTES
from bootseer.checkpoint.places.place import IsFolderError
from bootseer.errors import BootseerError
from bootseer.io.tasks import Tasks

_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class PartFound:
    """One part."""

    part: Part
    kind: str
    """`data` or `parity`."""
    nodes: tuple[str, ...]
    """Where it lies now; empty where unknown."""
    problem: str
    """"" when it is there and as long as it was."""


@dataclass(frozen=True, slots=True)
class SegmentFound:
    """One segment."""

    start: int
    size_bytes: int
    parts: Sequence[PartFound]


@dataclass(frozen=True, slots=True)
class Anatomy:
    """One file."""

    info: FileInfo
    id: str
    """Of a striped file; "" of an ordinary one."""
    segments: Sequence[SegmentFound]
    """Empty for an ordinary file."""
    bytes_by_node: Mapping[str, int]
    """Bytes of the file and its parity that each node has; with several copies, each counts."""


def anatomy(files: Files, path: str) -> Anatomy:
    """Look at one file. Raises `NotFoundError`, `IsFolderError`, and `CorruptError` for a damaged head."""
    info = files.stat(path)
    if info.is_folder:
        raise IsFolderError(f"{files.place.uri}/{path} is a folder; name one of its files")
    head = files.head(path)
    if head is None:
        return Anatomy(info, "", [], _ordinary_nodes(files, path))
    lost = set(lost_parts(files, path, head))
    with Tasks("bootseer-stat", _AT_ONCE) as threads:

        def look(part: Part, kind: str) -> PartFound:
            return _part(files, path, head, part, kind, part.name in lost)

        pending = [
            (segment, [threads.submit(look, part, "data") for part in segment.parts],
             [threads.submit(look, part, "parity") for part in segment.all_parts[segment.stripes :]])
            for segment in head.segments
        ]  # fmt: skip
        segments = [
            SegmentFound(segment.start, segment.size_bytes, [found.result() for found in (*data, *parity)])
            for segment, data, parity in pending
        ]
    by_node: Counter[str] = Counter()
    for found in segments:
        for part in found.parts:
            by_node.update(dict.fromkeys(part.nodes, part.part.size_bytes))
    return Anatomy(info, head.id, segments, by_node)


def _part(files: Files, path: str, head: Head, part: Part, kind: str, is_lost: bool) -> PartFound:
    if is_lost:
        return PartFound(part, kind, (), "not there, or not as long as it was")
    try:
        with contextlib.closing(files.place.open(part_path(path, head.id, part.name))) as file:
            return PartFound(part, kind, file.nodes(0), "")
    except BootseerError as error:
        return PartFound(part, kind, (), str(error))


def _ordinary_nodes(files: Files, path: str) -> Mapping[str, int]:
    by_node: Counter[str] = Counter()
    with contextlib.closing(files.place.open(path)) as file:
        # Blocks end at whole MiB everywhere but at the end of a file.
        for offset in range(0, file.size_bytes, CHUNK_BYTES):
            by_node.update(dict.fromkeys(file.nodes(offset), min(CHUNK_BYTES, file.size_bytes - offset)))
    return by_node

"""A folder as a place, a `Writing` for it, and a reader of written files by the format, independent of `reading`."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.checkpoint.files import Files
from bootseer.checkpoint.head import STRIPES, part_path
from bootseer.checkpoint.layout import CHUNK_BYTES, Policy, chunk_place
from bootseer.checkpoint.writing.lane import WritingSettings
from bootseer.checkpoint.writing.writing import Writing
from bootseer.places.folder import FolderPlace
from stepwise_place import StepwisePlace

MIB = 1 << 20
SMALL = Policy(stripes=2, part_bytes=2 * MIB, min_bytes_per_stripe=MIB)
"""Segments of 4 MiB, so that small files have several."""
QUICK = WritingSettings(retry_s=0.01)
Restarts = Callable[[], int]
"""Returns the number of parts and steps that were retried so far."""


@pytest.fixture
def restarts(caplog: pytest.LogCaptureFixture) -> Restarts:
    caplog.set_level(logging.INFO, "bootseer")
    again = re.compile("starts over|attempt . failed")
    return lambda: sum(bool(again.search(record.getMessage())) for record in caplog.records)


class Desk:
    """A place, its files and a `Writing`."""

    def __init__(self, root: Path, spool: Path, settings: WritingSettings = QUICK) -> None:
        self.root = root
        (root / "job").mkdir(parents=True, exist_ok=True)
        self.place = StepwisePlace(FolderPlace(root))
        self.files = Files(self.place)  # type: ignore[arg-type]
        self.writing = Writing(self.files, spool=spool, settings=settings)

    def read(self, path: str) -> bytes:
        """The content of a file, with all digests verified."""
        return read_by_format(self.files, path)

    def leftovers(self) -> list[str]:
        """Hidden files below the root that do not belong to a visible file."""
        found = {str(path.relative_to(self.root)) for path in self.root.rglob("*") if not path.is_dir()}
        for path in list(found):
            if STRIPES not in path and not path.rpartition("/")[2].startswith("."):
                found.discard(path)
                head = self.files.head(path)
                if head is not None:
                    parts = [part for segment in head.segments for part in segment.all_parts]
                    found -= {part_path(path, head.id, part.name) for part in parts}
        return sorted(found)


def read_by_format(files: Files, path: str) -> bytes:
    head = files.head(path)
    if head is None:
        return files.place.read_bytes(path, 1 << 40)
    content = bytearray()
    for segment in head.segments:
        parts = []
        for part in segment.all_parts:
            parts.append(files.place.read_bytes(part_path(path, head.id, part.name), 1 << 40))
            assert len(parts[-1]) == part.size_bytes
            assert hashlib.sha256(parts[-1]).hexdigest() == part.sha256
        for chunk in range(segment.index.num_blocks):
            stripe, offset = chunk_place(chunk, segment.stripes)
            content += parts[stripe][offset : offset + CHUNK_BYTES]
    assert len(content) == head.size_bytes
    return bytes(content)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path / "root", tmp_path / "spool")
    with contextlib.closing(desk.writing):
        yield desk

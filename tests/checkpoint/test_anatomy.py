"""The segments and parts of a file (`anatomy`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.checkpoint.catalog import anatomy
from bootseer.checkpoint.files import Files
from bootseer.errors import IsFolderError
from bootseer.places.folder import FolderPlace
from checkpoint.striped_files import content_of, part_paths, put_striped

_MIB = 1 << 20


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    place = FolderPlace(tmp_path)
    yield Files(place)
    place.close()


def test_segments_parts_and_lost_parts_are_listed(files: Files, tmp_path: Path) -> None:
    head = put_striped(files.place, "model", content_of(7 * _MIB), stripes=2, parity=True, segment_rows=2)
    found = anatomy(files, "model")
    assert (found["id"], found["size_bytes"]) == (head.id, 7 * _MIB)
    assert [(segment["start"], segment["size_bytes"]) for segment in found["segments"]] == [
        (0, 4 * _MIB),
        (4 * _MIB, 3 * _MIB),
    ]
    assert [part["kind"] for part in found["segments"][0]["parts"]] == ["data", "data", "parity"]
    parts = [part for segment in found["segments"] for part in segment["parts"]]
    assert [(part["name"], part["size_bytes"], part["sha256"]) for part in parts] == [
        (part.name, part.size_bytes, part.sha256) for part in head.parts
    ]
    assert not any(part["problem"] for part in parts)
    (tmp_path / part_paths("model", head)[1]).unlink()
    problems = [bool(part["problem"]) for segment in anatomy(files, "model")["segments"] for part in segment["parts"]]
    assert problems == [False, True, False, False, False, False]


def test_an_ordinary_file_has_no_segments_and_a_folder_is_refused(files: Files) -> None:
    files.place.write_bytes("file", b"123")
    found = anatomy(files, "file")
    assert (found["id"], found["segments"], found["bytes_by_node"]) == ("", [], {})
    files.make_folder("folder")
    with pytest.raises(IsFolderError):
        anatomy(files, "folder")

"""Fixtures: the folder of a job on a disk, and the `Files` in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.checkpoint.files import Files
from bootseer.places.folder import FolderPlace


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


@pytest.fixture
def files(job: Path) -> Iterator[Files]:
    place = FolderPlace(job)
    yield Files(place)
    place.close()

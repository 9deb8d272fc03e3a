"""A machine for captures, without remaining mounts after the test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.mounts import kernel
from env.capturing.captured import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    work, home = tmp_path / "work", tmp_path / "homes"
    work.mkdir()
    (home / "user").mkdir(parents=True)
    yield Machine(tmp_path, work, home)
    assert not [point for point in kernel.mount_points() if point.startswith(f"{tmp_path}/")]

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from image_node import unmount_below
from restoring import Setup, new_setup


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return new_setup(tmp_path)


@pytest.fixture
def as_root(tmp_path: Path) -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    yield
    unmount_below(tmp_path)

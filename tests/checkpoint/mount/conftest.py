"""Mounted places that are unmounted at the end of the test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoint.mounted_place import MountedPlace

Mounts = Callable[..., MountedPlace]


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    """Mounts the test's folder `place`, with a new mount for each call, like on another machine."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened by this user")
    root = tmp_path / "place"
    root.mkdir()
    made: list[MountedPlace] = []

    def mount(**options: object) -> MountedPlace:
        made.append(MountedPlace(root, tmp_path / f"mount{len(made)}", **options))
        return made[-1]

    yield mount
    for one in made:
        one.close()


@pytest.fixture
def one(mounts: Mounts) -> MountedPlace:
    """A mounted place."""
    return mounts()


@pytest.fixture
def other(mounts: Mounts, one: MountedPlace) -> MountedPlace:
    """A second mount of the same place."""
    return mounts()

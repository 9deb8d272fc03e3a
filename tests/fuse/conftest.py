"""Mounted trees that are removed after each test, however it ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.errors import BootseerError
from bootseer.fuse.filesystem import Tree
from bootseer.fuse.session import Session, mount

Mount = Callable[[Tree], Session]


@pytest.fixture
def faults() -> list[str]:
    """Errors reported by mounted trees."""
    return []


@pytest.fixture
def mounted(tmp_path: Path, faults: list[str]) -> Iterator[Mount]:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened by this user")
    sessions: list[Session] = []

    def show(tree: Tree) -> Session:
        target = tmp_path / f"mount {len(sessions)}"
        target.mkdir()
        sessions.append(mount(tree, target, on_error=faults.append))
        return sessions[-1]

    yield show
    for session in sessions:
        with contextlib.suppress(BootseerError):
            session.close(force=True)

"""A fixture for tests of the adapters: the file systems that they open, and the node's cache, are the test's own.

Each conftest of the adapters' tests imports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.checkpoint import locations


def close_all() -> None:
    """End what the adapters have opened in this process."""
    process = locations._processes[-1]
    with process.lock:
        systems = list(process.systems.values())
        process.systems.clear()
    for system in systems:
        system.close()


@pytest.fixture(autouse=True)
def own_file_systems(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The node's cache, of this test alone."""
    cache = tmp_path_factory.mktemp("node-cache")
    monkeypatch.setenv("BOOTSEER_CACHE", str(cache))
    yield cache
    close_all()

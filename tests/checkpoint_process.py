"""A fixture for tests of the adapters: each test has its own node cache and opens its own file systems.

Imported by the conftests of the adapters' tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.checkpoint import locations


def close_all() -> None:
    """Close the file systems that the adapters have opened in this process."""
    process = locations._processes[-1]
    with process.lock:
        systems = list(process.systems.values())
        process.systems.clear()
    for system in systems:
        system.close()


@pytest.fixture(autouse=True)
def own_file_systems(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The node cache of this test."""
    cache = tmp_path_factory.mktemp("node-cache")
    monkeypatch.setenv("BOOTSEER_CACHE", str(cache))
    yield cache
    close_all()

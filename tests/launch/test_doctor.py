"""The doctor's line about environments: tried for real, and nothing of it stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.launch.doctor import ENVIRONMENTS, check_environments
from bootseer.mounts import kernel


@pytest.mark.root
def test_what_works_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    found = check_environments(tmp_path / "cache")
    assert (found.name, found.status) == (ENVIRONMENTS, "ok")
    assert "overlay" in found.found
    assert not list(tmp_path.iterdir())
    assert not [point for point in kernel.mount_points() if point.startswith(f"{tmp_path}/")]

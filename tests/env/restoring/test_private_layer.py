"""What becomes of what a job wrote into mounted folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.env.restoring.private_layer import PrivateFolder


def settled(changes: Path, root: str, *files: str) -> list[str]:
    """What is said at the end of a job that wrote these files into the root."""
    said: list[str] = []
    folder = PrivateFolder(changes, [root])
    upper, _ = folder.folders(root)
    for name in files:
        path = upper / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    folder.close(said.append)
    assert list(changes.glob("*/*/upper")) == []
    return said


@pytest.mark.parametrize("root", ["/usr", "/etc", "/var/lib/app", "/usr/local"])
def test_files_that_are_lost_with_the_systems_folders_are_told(tmp_path: Path, root: str) -> None:
    (line,) = settled(tmp_path, root, "share/result.txt", "share/other.txt")
    assert f"2 files into {root}" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["ld.so.cache", "lib/__pycache__/a.pyc", "share/fontconfig/cache/x", "Cache/y"])
def test_caches_are_missed_by_nobody(tmp_path: Path, name: str) -> None:
    assert settled(tmp_path, "/usr", name) == []


def test_results_in_an_environment_are_kept(tmp_path: Path) -> None:
    (line,) = settled(tmp_path, "/home/u/venv", "results/x")
    assert "kept in" in line
    assert [path.read_text() for path in tmp_path.glob("*/files/home/u/venv/results/x")] == ["x"]

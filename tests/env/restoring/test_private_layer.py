"""Files that a job wrote into mounted folders, after its end."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

import pytest

from bootseer.env.restoring import private_layer
from bootseer.env.restoring.private_layer import PrivateFolder, settle_abandoned
from killed_steps import is_killed


def settled(changes: Path, root: str, *files: str) -> list[str]:
    """The messages at the end of a job that wrote these files into the root."""
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
def test_lost_caches_are_not_reported(tmp_path: Path, name: str) -> None:
    assert settled(tmp_path, "/usr", name) == []


def test_results_in_an_environment_are_kept(tmp_path: Path) -> None:
    (line,) = settled(tmp_path, "/home/u/venv", "results/x")
    assert "kept in" in line
    assert [path.read_text() for path in tmp_path.glob("*/files/home/u/venv/results/x")] == ["x"]


def test_a_start_searches_no_mounts_for_kept_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(tmp_path, "/home/u/venv", "results/x")
    searched: list[str] = []
    monkeypatch.setattr(private_layer, "is_mounted_anywhere", searched.append)
    settle_abandoned(tmp_path, lambda line: None)
    assert searched == []


@pytest.mark.parametrize("step", ["json.dumps", "delete_tree"])
def test_results_survive_a_kill_while_they_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    folder = PrivateFolder(tmp_path, ["/usr", "/home/u/a", "/home/u/b"])
    for root in folder.roots:
        (folder.folders(root)[0] / "result").write_text(root)
    monkeypatch.setattr(f"{private_layer.__name__}.{step}", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert is_killed(lambda: folder.close(lambda line: None))
    monkeypatch.undo()
    os.close(folder._lock)
    for _ in range(2):
        settle_abandoned(tmp_path, lambda line: None)
    assert {path.read_text() for path in tmp_path.glob("*/files/**/result")} == {"/home/u/a", "/home/u/b"}


def test_results_survive_two_processes_that_find_them_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PrivateFolder(tmp_path, ["/home/u/venv"])
    (folder.folders("/home/u/venv")[0] / "result").write_text("x")
    os.close(folder._lock)  # like after a kill
    flock = fcntl.flock

    def after_another(lock: int, how: int) -> None:
        monkeypatch.undo()
        settle_abandoned(tmp_path, lambda line: None)
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", after_another)
    settle_abandoned(tmp_path, lambda line: None)
    assert [path.read_text() for path in tmp_path.glob("*/files/home/u/venv/result")] == ["x"]

"""Files that a job wrote into mounted folders, after its end."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bootseer.env.restoring import private_layer
from bootseer.env.restoring.private_layer import MountPoints, PrivateFolder, settle_abandoned
from killed_steps import is_killed


@contextmanager
def full_disk() -> Iterator[None]:
    """Files can be made, and nothing can be written to them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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
def test_files_that_are_lost_with_the_systems_folders_are_reported(tmp_path: Path, root: str) -> None:
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


def test_what_a_full_disk_kept_from_being_recorded_is_reported_by_the_next_run(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path, ["/home/u/venv"])
    (folder.folders("/home/u/venv")[0] / "result").write_text("x")
    with full_disk(), pytest.raises(OSError, match="too large"):
        folder.close(lambda line: None)
    said: list[str] = []
    settle_abandoned(tmp_path, said.append)
    assert [line for line in said if "kept in" in line]
    settle_abandoned(tmp_path, said.append)
    assert len(said) == 1


def test_a_folder_of_the_user_is_no_mount_point_that_a_full_disk_kept_from_being_recorded(tmp_path: Path) -> None:
    points = MountPoints(tmp_path / "changes")
    root = tmp_path / "venv"
    with points.locked():
        with full_disk(), pytest.raises(OSError, match="too large"):
            points.ensure(str(root), Path)
        assert not root.exists()
        root.mkdir()
        assert not points.ensure(str(root), Path)


def test_folders_of_a_mount_point_are_removed_if_not_all_of_them_could_be_made(tmp_path: Path) -> None:
    points = MountPoints(tmp_path / "changes")
    with points.locked():
        assert points.ensure(str(tmp_path / "opt/env/venv"), Path)
    (tmp_path / "opt/env/venv").rmdir()  # as after a kill before it was made
    points.remove_unused()
    assert not (tmp_path / "opt").exists()

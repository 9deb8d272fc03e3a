"""Files that a job wrote into mounted folders, after its end."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bootseer.artifact import owned_folder
from bootseer.env.restoring import private_layer
from bootseer.env.restoring.private_layer import MountPoints, PrivateFolder, is_root_in_use
from bootseer.io.locks import try_flock
from deep_trees import make_deep
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
    folder = PrivateFolder(changes, said.append)
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
    assert [path.read_text() for path in tmp_path.glob("kept/*/home/u/venv/results/x")] == ["x"]


def next_run(changes: Path) -> list[str]:
    """The messages of a run that does nothing."""
    said: list[str] = []
    PrivateFolder(changes, said.append).close(said.append)
    return said


def test_a_start_searches_no_mounts_for_kept_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled(tmp_path, "/home/u/venv", "results/x")
    searched: list[str] = []
    monkeypatch.setattr(private_layer, "is_mounted_anywhere", searched.append)
    folder = PrivateFolder(tmp_path, searched.append)
    assert searched == []
    folder.close(searched.append)


@pytest.mark.parametrize("place", ["kept/run-a", "0123456789ab"])
def test_kept_files_are_deleted_after_a_week(tmp_path: Path, place: str) -> None:
    folder = tmp_path / place
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")  # of version 0.2
    next_run(tmp_path)
    assert folder.exists()
    os.utime(folder, (0, time.time() - 8 * 86_400))
    next_run(tmp_path)
    assert not folder.exists()


def test_what_a_job_wrote_is_deleted_at_any_depth(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path, lambda line: None)
    make_deep(folder.folders("/usr")[0], 1200)
    lines: list[str] = []
    folder.close(lines.append)
    assert "wrote 3600 files" in "".join(lines)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["_written", "delete_tree"])
def test_results_survive_a_kill_while_they_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    folder = PrivateFolder(tmp_path, lambda line: None)
    for root in ("/usr", "/home/u/a", "/home/u/b"):
        (folder.folders(root)[0] / "result").write_text(root)
    counted = private_layer._written

    def written(upper: Path) -> int:
        if upper.name == "a":  # all are kept
            os.kill(os.getpid(), signal.SIGKILL)
        return counted(upper)

    kill = written if step == "_written" else lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    monkeypatch.setattr(private_layer, step, kill)
    assert is_killed(lambda: folder.close(lambda line: None))
    monkeypatch.undo()
    os.close(folder._lock)
    (line,) = [line for line in next_run(tmp_path) if "kept in" in line]
    assert "2 files" in line
    assert {path.read_text() for path in tmp_path.glob("kept/*/**/result")} == {"/home/u/a", "/home/u/b"}
    assert next_run(tmp_path) == []


def test_results_survive_two_processes_that_find_them_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PrivateFolder(tmp_path, lambda line: None)
    (folder.folders("/home/u/venv")[0] / "result").write_text("x")
    os.close(folder._lock)  # like after a kill

    def after_another(lock: int) -> bool:
        monkeypatch.undo()
        assert [line for line in next_run(tmp_path) if "kept in" in line]
        return try_flock(lock)

    monkeypatch.setattr(owned_folder, "try_flock", after_another)
    assert next_run(tmp_path) == []
    assert [path.read_text() for path in tmp_path.glob("kept/*/home/u/venv/result")] == ["x"]


def test_what_a_full_disk_keeps_from_being_moved_stays_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = PrivateFolder(tmp_path, lambda line: None)
    (folder.folders("/home/u/venv")[0] / "result").write_text("x")

    def full(upper: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(private_layer, "_keep", full)
    with pytest.raises(OSError, match="No space"):
        folder.close(lambda line: None)
    monkeypatch.undo()
    assert [line for line in next_run(tmp_path) if "kept in" in line]
    assert next_run(tmp_path) == []


def test_a_root_is_in_use_as_long_as_its_run(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path, lambda line: None)
    folder.add("/opt/venv")
    assert is_root_in_use(tmp_path, "/opt/venv")
    assert not is_root_in_use(tmp_path, "/opt/other")
    os.close(folder._lock)  # like after a kill
    assert not is_root_in_use(tmp_path, "/opt/venv")


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

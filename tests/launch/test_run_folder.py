"""Folders of starts: whose they are, and who cleans up behind a killed one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bootseer.errors import PermanentError
from bootseer.launch.environment.task import RunFolder, clean_up


def test_a_folder_goes_with_all_that_is_in_it(tmp_path: Path) -> None:
    folder = RunFolder.made(tmp_path)
    closed = folder.path / "work" / "work"
    closed.mkdir(parents=True)
    (closed / "file").touch()
    closed.chmod(0)
    folder.remove()
    assert not list(tmp_path.iterdir())


def test_what_a_living_start_holds_is_left_alone_and_what_a_dead_one_left_goes(tmp_path: Path) -> None:
    held, left = RunFolder.made(tmp_path), RunFolder.made(tmp_path)
    (left.path / "upper").mkdir()
    os.close(left.lock)  # as the kernel does for a killed process
    clean_up(tmp_path)
    assert list(tmp_path.iterdir()) == [held.path]
    held.remove()


def test_a_child_that_keeps_the_lock_keeps_the_folder(tmp_path: Path) -> None:
    folder = RunFolder.made(tmp_path)
    child = os.dup(folder.lock)
    os.close(folder.lock)
    clean_up(tmp_path)
    assert folder.path.exists()
    os.close(child)
    clean_up(tmp_path)
    assert not folder.path.exists()


def test_what_was_left_before_it_had_a_name_goes_when_it_is_old(tmp_path: Path) -> None:
    old, young = tmp_path / "new-old", tmp_path / "new-young"
    for path in (old, young):
        (path / "folder").mkdir(parents=True)
    os.utime(old, (0, 0))
    clean_up(tmp_path)
    assert list(tmp_path.iterdir()) == [young]


def test_a_folder_that_somebody_else_deleted_is_no_error(tmp_path: Path) -> None:
    folder = RunFolder.made(tmp_path)
    shutil.rmtree(folder.path)
    folder.remove()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(folder.lock)


@pytest.mark.root
def test_what_a_process_still_has_mounted_stays_until_it_ends(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    folder = RunFolder.made(tmp_path)
    for name in ("upper", "work", "root"):
        (folder.path / name).mkdir()
    (folder.path / "upper" / "file").touch()
    layers = f"lowerdir={tmp_path},upperdir={folder.path}/upper,workdir={folder.path}/work"
    mount = f"mount -t overlay overlay -o {layers} {folder.path}/root"
    script = f"{mount} && echo mounted && read line"
    argv = ["unshare", "--mount", "sh", "-c", script]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as survivor:
        assert survivor.stdout is not None
        assert survivor.stdout.readline() == "mounted\n"
        folder.remove()
        clean_up(tmp_path)
        assert (folder.path / "upper" / "file").exists()
        survivor.communicate("\n")
    clean_up(tmp_path)
    assert not folder.path.exists()


def test_a_place_that_takes_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PermanentError, match="BOOTSEER_CACHE"):
        RunFolder.made(tmp_path / "file" / "runs")

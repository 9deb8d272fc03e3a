"""Folders of starts: whose they are, and who cleans up behind a killed one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer.errors import PermanentError
from bootseer.launch.run_folder import RunFolder, clean_up


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


def test_a_place_that_takes_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PermanentError, match="BOOTSEER_CACHE"):
        RunFolder.made(tmp_path / "file" / "runs")

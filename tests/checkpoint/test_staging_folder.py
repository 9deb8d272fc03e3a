"""The hidden folder in which a copy is created, and its cleanup if the process is killed."""

from __future__ import annotations

import os
import platform
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bootseer.checkpoint.download import OLD, PREFIX, staging_folder
from bootseer.errors import Interrupted, TransientError


def killed_in(parent: Path) -> Path:
    """The staging folder of a process that was killed while it used it."""
    pid = os.fork()
    if pid == 0:
        with staging_folder(parent / "target", "what") as folder:
            (folder / "copy").mkdir()
            (folder / "copy" / "file").write_bytes(b"x" * 1000)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    (left,) = parent.glob(f"{PREFIX}*")
    assert (left / "copy" / "file").exists()
    return left


def test_nothing_is_left_after_success_or_failure(tmp_path: Path) -> None:
    with staging_folder(tmp_path / "target", "what") as folder:
        (folder / "copy").write_bytes(b"x")
        assert folder.parent == tmp_path
    with pytest.raises(ValueError, match="bad"), staging_folder(tmp_path / "target", "what") as folder:
        (folder / "copy").write_bytes(b"x")
        raise ValueError("bad")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path: Path) -> None:
    left = killed_in(tmp_path)
    with staging_folder(tmp_path / "another", "other"):
        assert not left.exists()


def test_an_interrupted_copy_is_resumed(tmp_path: Path) -> None:
    left = killed_in(tmp_path)
    for error in (TransientError("away"), Interrupted(2, "SIGINT")):
        with pytest.raises(type(error)), staging_folder(tmp_path / "target", "what") as folder:
            assert folder == left
            raise error
    with staging_folder(tmp_path / "target", "what") as folder:
        assert (folder / "copy" / "file").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_staging_folder_in_use_is_kept(tmp_path: Path) -> None:
    with staging_folder(tmp_path / "target", "what") as first, staging_folder(tmp_path / "target", "what") as second:
        assert first.exists()
        assert second.exists()


def test_a_target_moved_away_for_its_replacement_is_never_removed(tmp_path: Path) -> None:
    left = killed_in(tmp_path)
    (left / OLD).write_bytes(b"the only one")
    with staging_folder(tmp_path / "target", "what"):
        pass
    assert (left / OLD).read_bytes() == b"the only one"


def test_folders_of_other_machines_are_kept(tmp_path: Path) -> None:
    other = tmp_path / f"{PREFIX}{platform.node()}x-0123"
    other.mkdir()
    link = tmp_path / f"{PREFIX}{platform.node()}-0123"
    link.symlink_to(tmp_path)
    with staging_folder(tmp_path / "target", "what"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([other.name, link.name])


@pytest.mark.slow
def test_copies_that_begin_at_once_do_not_remove_each_others_folders(tmp_path: Path) -> None:
    def work(_: int) -> None:
        for _ in range(100):
            with staging_folder(tmp_path / "target", "this") as folder:
                (folder / "copy").write_bytes(b"x")

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert list(tmp_path.iterdir()) == []

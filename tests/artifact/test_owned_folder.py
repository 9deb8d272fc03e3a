"""Folders that belong to a process: kept while it runs, deleted after it was killed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bootseer.artifact import owned_folder
from bootseer.artifact.owned_folder import OwnedFolder, delete_abandoned, machine, one_at_a_time
from bootseer.errors import PermanentError, TransientError
from bootseer.io import locks


def test_a_folder_goes_with_all_that_is_in_it(tmp_path: Path) -> None:
    folder = OwnedFolder.made(tmp_path, "run-")
    closed = folder.path / "work" / "work"
    closed.mkdir(parents=True)
    (closed / "file").touch()
    closed.chmod(0)
    folder.remove()
    assert not list(tmp_path.iterdir())


def test_what_a_living_start_holds_is_left_alone_and_what_a_dead_one_left_goes(tmp_path: Path) -> None:
    held, left = OwnedFolder.made(tmp_path, "run-"), OwnedFolder.made(tmp_path, "run-")
    (left.path / "upper").mkdir()
    os.close(left.lock)  # like the kernel for a killed process
    delete_abandoned(tmp_path, "run-")
    assert list(tmp_path.iterdir()) == [held.path]
    held.remove()


def test_a_folder_of_another_machine_that_shares_the_cache_is_left_alone(tmp_path: Path) -> None:
    host, boot = os.uname().nodename, Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    for name in (f"{host}-2@00000000-a", f"{host}@00000000-before_a_boot", f"pod@{boot}-a"):
        (tmp_path / f"run-{name}").mkdir()
    OwnedFolder.made(tmp_path, "run-").remove()
    assert [path.name for path in tmp_path.iterdir()] == [f"run-{host}-2@00000000-a"]


def test_a_child_that_keeps_the_lock_keeps_the_folder(tmp_path: Path) -> None:
    folder = OwnedFolder.made(tmp_path, "run-")
    child = os.dup(folder.lock)
    os.close(folder.lock)
    delete_abandoned(tmp_path, "run-")
    assert folder.path.exists()
    os.close(child)
    delete_abandoned(tmp_path, "run-")
    assert not folder.path.exists()


def test_what_was_left_before_it_had_a_name_goes_when_it_is_old(tmp_path: Path) -> None:
    old, young = tmp_path / "new-old", tmp_path / "new-young"
    for path in (old, young):
        (path / "folder").mkdir(parents=True)
    os.utime(old, (0, 0))
    delete_abandoned(tmp_path, "run-")
    assert list(tmp_path.iterdir()) == [young]


def test_a_folder_already_deleted_is_no_error(tmp_path: Path) -> None:
    folder = OwnedFolder.made(tmp_path, "run-")
    shutil.rmtree(folder.path)
    folder.remove()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(folder.lock)


@pytest.mark.root
def test_what_a_process_still_has_mounted_stays_until_it_ends(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    folder = OwnedFolder.made(tmp_path, "run-")
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
        delete_abandoned(tmp_path, "run-")
        assert (folder.path / "upper" / "file").exists()
        survivor.communicate("\n")
    delete_abandoned(tmp_path, "run-")
    assert not folder.path.exists()


def test_a_place_that_takes_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PermanentError, match="BOOTSEER_CACHE"):
        OwnedFolder.made(tmp_path / "file" / "runs", "run-")


def test_the_process_waited_for_and_the_time_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_LONG_S", 0.0)
    monkeypatch.setattr(owned_folder, "_WORK_S", 0.05)
    path, said = tmp_path / "lock", list[str]()
    path.write_text(f"{machine()}\nother@00000000\n")
    with (
        one_at_a_time(path, "been converting it", said.append),
        pytest.raises(TransientError),
        one_at_a_time(path, "been converting it", said.append),
    ):
        pass
    who = f"process {os.getpid()} on {machine().partition('@')[0]} has been converting it since "
    assert len(said) == 1
    assert re.match(re.escape(who) + r"\d\d:\d\d:\d\d; waiting until", said[0]), said
    # Like on a network file system: the process is on another machine and not visible.
    monkeypatch.setattr(locks, "holders", lambda path: [])
    with path.open() as held:
        locks.try_flock(held.fileno())
        path.write_text(f"{machine()}\nother@00000000\n")
        with pytest.raises(TransientError), one_at_a_time(path, "been converting it", said.append):
            pass
    assert said[1].startswith("a process on other has been converting it since ")

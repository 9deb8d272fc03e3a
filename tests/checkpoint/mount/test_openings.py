"""Less common ways to open and to close files: they work like on a disk."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from checkpoint.mount.conftest import Mounts
from checkpoint.mounted_place import DEADLINE_S, MIB, MountedPlace, number_of
from waiting import until

pytestmark = pytest.mark.fuse

LARGE = 5 * MIB + 321


def finished(code: str, *paths: Path) -> int:
    """The exit code of a program. One that hangs exceeds the deadline, and ends when the place is unmounted."""
    program = subprocess.Popen([sys.executable, "-c", code, *paths])
    until(lambda: program.poll() is not None, "it has ended")
    return program.returncode


def test_a_program_that_executes_another_one_publishes_what_it_has_open(one: MountedPlace, other: MountedPlace) -> None:
    # The kernel closes the file while it blocks all readers of the process in /proc.
    code = """
import os, sys
handle = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)  # closed by exec, like all files that Python opens
os.write(handle, b"x" * 3_000_000)
check = "import sys; sys.exit(open(sys.argv[1], 'rb').read() != b'x' * 3_000_000)"
os.execv(sys.executable, [sys.executable, "-c", check, sys.argv[2]])
"""
    assert finished(code, one.target / "f", other.target / "f") == 0
    assert (other.target / "f").stat().st_size == 3_000_000


def test_starting_a_program_while_a_file_is_open_blocks_nothing(one: MountedPlace, other: MountedPlace) -> None:
    code = """
import subprocess, sys
with open(sys.argv[1], "wb") as file:
    for number in range(20):
        file.write(bytes([number]) * 100_000)
        file.flush()
        subprocess.run(["/bin/true"], close_fds=False, check=True)
"""
    assert finished(code, one.target / "f") == 0
    assert (other.target / "f").read_bytes() == b"".join(bytes([number]) * 100_000 for number in range(20))


@pytest.mark.parametrize("flags", [0, os.O_EXCL])
def test_a_file_is_created_by_an_open_for_reading(one: MountedPlace, other: MountedPlace, flags: int) -> None:
    handle = os.open(one.target / "lock", os.O_RDONLY | os.O_CREAT | flags, 0o640)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert os.read(handle, 10) == b""
    assert (other.target / "lock").stat().st_mode == 0o100640, "the mode of the create applies"
    assert number_of(lambda: os.open(one.target / "lock", os.O_RDONLY | os.O_CREAT | os.O_EXCL)) == errno.EEXIST
    (one.target / "lock").write_bytes(b"written")
    assert (other.target / "lock").read_bytes() == b"written"
    os.close(os.open(one.target / "lock", os.O_RDONLY | os.O_CREAT, 0o600))
    assert (one.target / "lock").read_bytes() == b"written"
    os.close(handle)


@pytest.mark.parametrize("size", [7, LARGE])
def test_a_file_is_emptied_by_an_open_for_reading(one: MountedPlace, other: MountedPlace, size: int) -> None:
    (one.target / "f").write_bytes(os.urandom(size))
    handle = os.open(one.target / "f", os.O_RDONLY | os.O_TRUNC)
    assert (os.read(handle, 10), os.fstat(handle).st_size) == (b"", 0)
    assert (other.target / "f").read_bytes() == b""
    os.close(handle)


def test_a_file_without_a_name_is_changed_like_any_other(one: MountedPlace) -> None:
    data = os.urandom(LARGE)
    with tempfile.TemporaryFile(dir=one.target) as file:
        file.write(data)
        file.truncate(LARGE - 1000)
        file.truncate(LARGE)
        os.fchmod(file.fileno(), 0o640)
        os.utime(file.fileno(), (0, 1_000_000_000))
        os.fsync(file.fileno())
        file.seek(0)
        assert file.read() == data[: LARGE - 1000] + bytes(1000)
        seen = os.fstat(file.fileno())
        assert (seen.st_size, seen.st_nlink, seen.st_mtime) == (LARGE, 0, 1_000_000_000)
        assert stat.S_IMODE(seen.st_mode) == 0o640
        assert os.listdir(one.target) == []  # noqa: PTH208
    until(lambda: not list(one.root.glob(".stripes/*")), "nothing of it is left")
    assert number_of(lambda: os.open(one.target, os.O_TMPFILE | os.O_RDWR)) == errno.EOPNOTSUPP


def test_writes_to_a_removed_file_are_visible_to_its_open_handles(one: MountedPlace, other: MountedPlace) -> None:
    (one.target / "f").write_bytes(b"published")
    with (one.target / "f").open("r+b", buffering=0) as file, (one.target / "f").open("rb", buffering=0) as reader:
        (one.target / "f").unlink()
        file.write(b"PUB")
        file.truncate(5)
        assert reader.read() == b"PUBli"
        (one.target / "f").write_bytes(b"another")
    assert (other.target / "f").read_bytes() == b"another"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to groups that it is not in")
def test_a_group_given_to_an_open_file_is_that_of_the_published_one(one: MountedPlace, other: MountedPlace) -> None:
    with (one.target / "f").open("wb") as file:
        file.write(b"x")
        os.fchown(file.fileno(), -1, 5)
    assert (other.target / "f").stat().st_gid == 5


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to groups that it is not in")
def test_files_created_in_a_setgid_folder_belong_to_its_group(one: MountedPlace, mounts: Mounts) -> None:
    folder = one.target / "shared"
    folder.mkdir()
    os.chown(folder, -1, 5)
    folder.chmod(0o2777)

    for user in (0, 1234):
        begin = f"import os; os.chdir('{folder}'); os.setgid({user}); os.setuid({user})"
        made = f"os.mkdir('{user}'); open('{user}/f', 'wb').write(bytes({LARGE}))"
        subprocess.run([sys.executable, "-c", f"{begin}; {made}"], check=True, timeout=DEADLINE_S)
        for root in (one.target, mounts().target):
            seen = (root / f"shared/{user}").stat()
            assert (seen.st_uid, seen.st_gid, seen.st_mode & 0o2000) == (user, 5, 0o2000)
            seen = (root / f"shared/{user}/f").stat()
            assert (seen.st_uid, seen.st_gid) == (user, 5)


@pytest.mark.parametrize("change", ["remove", "rename", "move", "replace"])
def test_a_file_that_is_opened_while_its_name_is_changed_is_written_like_on_a_disk(
    one: MountedPlace, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    f, step, opened = one.target / "f", "remove" if change == "remove" else "rename", []
    f.write_text("old")
    (one.target / "g").write_text("other")
    (one.target / "folder").mkdir()
    until(lambda: one.shown.facts()["open_files"] == 0, "the writer's end is told")
    in_place = getattr(one.files, step)

    def open_and_change(*arguments: object) -> object:
        before = one.shown.facts()["open_files"]
        opening.start()
        until(lambda: one.shown.facts()["open_files"] > before, "the file is being opened")
        return in_place(*arguments)

    opening = threading.Thread(target=lambda: opened.append(os.open(f, os.O_WRONLY | os.O_TRUNC)))
    monkeypatch.setattr(one.files, step, open_and_change)
    if change == "remove":
        f.unlink()
    elif change == "replace":
        (one.target / "g").rename(f)
    else:
        f.rename(one.target / ("g" if change == "rename" else "folder/f"))
    opening.join(DEADLINE_S)
    os.write(opened[0], b"new")
    os.close(opened[0])
    until(lambda: one.shown.facts()["open_files"] == 0, "the writer's end is told")
    there = {str(path.relative_to(one.root)): path.read_text() for path in one.root.rglob("*") if path.is_file()}
    expected = {
        "remove": {"g": "other"},
        "rename": {"g": "new"},
        "move": {"folder/f": "new", "g": "other"},
        "replace": {"f": "other"},
    }
    assert there == expected[change]
    assert (one.shown.lost(), one.said) == ([], [])

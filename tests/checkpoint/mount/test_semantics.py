"""The semantics for programs: each guarantee of docs/semantics.md on a real mount.

`one` and `other` are two mounts of the same place, like on two machines.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from checkpoint.mount.conftest import Mounts
from checkpoint.mounted_place import MIB, MountedPlace, number_of
from waiting import until

pytestmark = pytest.mark.fuse

LARGE = 8 * MIB + 12_345
"""More than one segment of three stripes, and not a whole number of chunks."""


# Writing and closing


@pytest.mark.parametrize("size", [0, 5, MIB, LARGE])
def test_a_closed_file_is_visible_to_all_and_an_open_one_only_on_this_mount(
    one: MountedPlace, other: MountedPlace, size: int
) -> None:
    data = os.urandom(size)
    with (one.target / "f").open("wb", buffering=0) as file:
        file.write(data)
        assert (one.target / "f").stat().st_size == size
        assert (one.target / "f").read_bytes() == data
        assert os.listdir(one.target) == ["f"]  # noqa: PTH208
        assert not (other.target / "f").exists()
    assert (other.target / "f").read_bytes() == data
    assert one.is_striped("f") == (size > MIB)
    assert one.said == []


def test_fsync_publishes_and_writing_may_continue(one: MountedPlace, other: MountedPlace) -> None:
    data = os.urandom(LARGE)
    with (one.target / "f").open("wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())
        assert (other.target / "f").read_bytes() == data
        with (other.target / "f").open("rb") as reader:
            assert reader.read(9) == data[:9]
            file.write(data)
            assert (one.target / "f").read_bytes() == data + data
            os.fsync(file.fileno())
            assert (other.target / "f").read_bytes() == data + data, "it is opened again"
    assert (other.target / "f").read_bytes() == data + data


def test_rewriting_a_file_replaces_it_when_it_is_closed(one: MountedPlace, other: MountedPlace) -> None:
    old, new = os.urandom(LARGE), os.urandom(LARGE - 1)
    (one.target / "f").write_bytes(old)
    with (one.target / "f").open("wb", buffering=0) as file:
        file.write(new[:MIB])
        assert (one.target / "f").read_bytes() == new[:MIB]
        assert (other.target / "f").read_bytes() == old
        file.write(new[MIB:])
    assert (other.target / "f").read_bytes() == new
    assert len(list((one.root / ".stripes").iterdir())) == 1, "the parts of the old content are gone"


def test_an_error_of_publishing_is_reported_by_close_and_the_old_content_is_kept(one: MountedPlace) -> None:
    (one.target / "folder").mkdir()
    (one.target / "folder/f").write_bytes(b"old")
    handle = os.open(one.target / "folder/f", os.O_WRONLY | os.O_TRUNC)
    os.write(handle, b"new")
    (one.root / "folder").rename(one.root / "elsewhere")
    with pytest.raises(OSError, match=r"No such file|Input/output"):
        os.close(handle)
    assert (one.root / "elsewhere/f").read_bytes() == b"old"


def test_a_file_is_published_by_the_last_of_its_descriptors(one: MountedPlace, other: MountedPlace) -> None:
    handle = os.open(one.target / "f", os.O_WRONLY | os.O_CREAT)
    copy = os.dup(handle)
    os.write(handle, b"first ")
    os.close(handle)
    assert not (other.target / "f").exists()
    os.write(copy, b"second")
    os.close(copy)
    assert (other.target / "f").read_bytes() == b"first second"


def test_a_shell_writes_with_several_programs_into_one_file(one: MountedPlace, other: MountedPlace) -> None:
    (one.target / "f").write_bytes(b"old")
    script = "{ /bin/echo one; /bin/echo two; cat other/f; /bin/echo three; } > one/f"
    script = script.replace("one/f", str(one.target / "f")).replace("other/f", str(other.target / "f"))
    subprocess.run(["/bin/bash", "-c", script], check=True)
    assert (other.target / "f").read_bytes() == b"one\ntwo\noldthree\n"


def test_data_written_by_a_child_process_is_published_when_it_has_ended(one: MountedPlace, other: MountedPlace) -> None:
    with (one.target / "f").open("wb") as file:
        child = subprocess.Popen(["/bin/sh", "-c", "read go; echo written"], stdin=subprocess.PIPE, stdout=file)
    child.communicate(b"go\n")
    assert child.returncode == 0
    until(lambda: (other.target / "f").exists() and (other.target / "f").read_bytes() == b"written\n", "published")


def test_two_writers_of_one_file_on_one_mount_write_the_same_file(one: MountedPlace, other: MountedPlace) -> None:
    first = os.open(one.target / "f", os.O_RDWR | os.O_CREAT)
    second = os.open(one.target / "f", os.O_RDWR)
    os.pwrite(first, b"aaaa", 0)
    os.pwrite(second, b"bb", 1)
    assert os.pread(first, 9, 0) == b"abba"
    os.close(first)
    os.close(second)
    assert (other.target / "f").read_bytes() == b"abba"


def test_of_two_mounts_the_later_close_wins(one: MountedPlace, other: MountedPlace) -> None:
    first, second = os.urandom(LARGE), os.urandom(LARGE)
    with (one.target / "f").open("wb") as file, (other.target / "f").open("wb") as file2:
        file.write(first)
        file2.write(second)
        file2.close()
        assert (other.target / "f").read_bytes() == second
    assert (other.target / "f").read_bytes() == first


# Changing files


@pytest.mark.parametrize("size", [10, LARGE])
def test_small_files_are_appended_to_and_changed_in_the_middle(
    one: MountedPlace, other: MountedPlace, size: int
) -> None:
    data = bytearray(os.urandom(size))
    (one.target / "f").write_bytes(data)
    with (one.target / "f").open("ab") as file:
        file.write(b"end")
    data += b"end"
    assert (other.target / "f").read_bytes() == data
    with (one.target / "f").open("r+b") as file:
        file.seek(size // 2)
        file.write(b"middle")
        file.seek(size + 100)
        file.write(b"behind a gap")
    data[size // 2 : size // 2 + 6] = b"middle"
    data += bytes(size + 100 - len(data)) + b"behind a gap"
    assert (other.target / "f").read_bytes() == data


def test_large_files_are_not_appended_to_or_changed(mounts: Mounts) -> None:
    one = mounts(rewrite_bytes=MIB)
    data = os.urandom(LARGE)
    (one.target / "f").write_bytes(data)
    # The kernel reports the close a moment later; until then appending continues the file that is being written.
    until(lambda: number_of(lambda: (one.target / "f").open("ab").close()) == errno.EOPNOTSUPP, "it is closed")
    with (one.target / "f").open("r+b", buffering=0) as file:
        assert file.read(5) == data[:5]
        assert number_of(lambda: file.write(b"x")) == errno.EOPNOTSUPP
    assert number_of(lambda: os.truncate(one.target / "f", LARGE - 1)) == errno.EOPNOTSUPP
    assert (one.target / "f").read_bytes() == data
    os.truncate(one.target / "f", 100)
    assert (one.target / "f").read_bytes() == data[:100]
    assert "too large" in one.said[0]


@pytest.mark.parametrize("size", [0, 3, LARGE - 1, LARGE + MIB])
def test_a_file_is_truncated_and_extended_with_zeros(one: MountedPlace, other: MountedPlace, size: int) -> None:
    data = os.urandom(LARGE)
    (one.target / "f").write_bytes(data)
    os.truncate(one.target / "f", size)
    assert (one.target / "f").stat().st_size == size
    wanted = (data + bytes(MIB))[:size]
    assert (other.target / "f").read_bytes() == wanted
    with (one.target / "f").open("r+b") as file:
        file.truncate(LARGE)
        assert file.read() == (wanted + bytes(LARGE))[:LARGE]
    assert (other.target / "f").read_bytes() == (wanted + bytes(LARGE))[:LARGE]


def test_a_file_may_be_written_out_of_order(one: MountedPlace, other: MountedPlace) -> None:
    data = os.urandom(LARGE)
    pieces = [(start, data[start : start + 300_000]) for start in range(0, LARGE, 300_000)]
    with (one.target / "f").open("wb", buffering=0) as file:
        for start, piece in reversed(pieces):
            file.seek(start)
            file.write(piece)
    assert (other.target / "f").read_bytes() == data


# Names


@pytest.mark.parametrize("size", [5, LARGE])
def test_a_rename_replaces_the_target(one: MountedPlace, other: MountedPlace, size: int) -> None:
    new = os.urandom(size)
    (one.target / "f").write_bytes(b"old")
    (one.target / "g").write_bytes(new)
    (one.target / "g").rename(one.target / "f")
    assert os.listdir(one.target) == ["f"]  # noqa: PTH208
    assert (one.target / "f").read_bytes() == new
    assert (other.target / "f").read_bytes() == new
    assert not (one.target / "g").exists()


def test_a_rename_before_the_close_publishes_the_written_data(one: MountedPlace, other: MountedPlace) -> None:
    data = os.urandom(LARGE)
    with (one.target / "f.tmp").open("wb", buffering=0) as file:
        file.write(data)
        (one.target / "f.tmp").rename(one.target / "f")
        assert (other.target / "f").read_bytes() == data
        file.write(b"more")
    assert (other.target / "f").read_bytes() == data + b"more"
    assert os.listdir(other.target) == ["f"]  # noqa: PTH208


def test_a_striped_file_can_be_copied_but_not_renamed_to_another_folder(one: MountedPlace, other: MountedPlace) -> None:
    data = os.urandom(LARGE)
    (one.target / "folder").mkdir()
    (one.target / "f").write_bytes(data)
    assert number_of(lambda: (one.target / "f").rename(one.target / "folder/f")) == errno.EXDEV
    assert (one.target / "f").read_bytes() == data
    shutil.move(one.target / "f", one.target / "folder/f")
    assert (other.target / "folder/f").read_bytes() == data
    subprocess.run(["mv", one.target / "folder/f", one.target / "g"], check=True)
    assert (other.target / "g").read_bytes() == data
    (one.target / "small").write_bytes(b"small")
    (one.target / "small").rename(one.target / "folder/small")
    assert (other.target / "folder/small").read_bytes() == b"small"


def test_writing_a_large_file_that_could_not_be_moved_continues(mounts: Mounts) -> None:
    one = mounts(rewrite_bytes=MIB)
    data = os.urandom(LARGE)
    (one.target / "folder").mkdir()
    with (one.target / "f").open("wb", buffering=0) as file:
        file.write(data)
        assert number_of(lambda: (one.target / "f").rename(one.target / "folder/f")) == errno.EXDEV
        file.write(b"more")
    assert (mounts().target / "f").read_bytes() == data + b"more"


def test_a_folder_is_renamed_with_all_its_content(one: MountedPlace, other: MountedPlace) -> None:
    data = os.urandom(LARGE)
    (one.target / "a/b").mkdir(parents=True)
    (one.target / "a/b/f").write_bytes(data)
    with (one.target / "a/b/f").open("rb") as file:
        assert file.read(MIB) == data[:MIB]
        (one.target / "a").rename(one.target / "c")
        assert (other.target / "c/b/f").read_bytes() == data
        assert (one.target / "c/b/f").read_bytes() == data
    assert not (one.target / "a").exists()


def test_reading_a_file_written_here_continues_after_its_folder_was_renamed(one: MountedPlace) -> None:
    """With a descriptor that was opened before the writer's was closed."""
    data = os.urandom(LARGE)
    (one.target / "a").mkdir()
    with (one.target / "a/f").open("wb") as written:
        written.write(data)
        written.flush()
        file = (one.target / "a/f").open("rb", buffering=0)
    with file:
        (one.target / "a").rename(one.target / "c")
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert b"".join(iter(lambda: file.read(MIB), b"")) == data
    assert (one.target / "c/f").read_bytes() == data


def test_a_folder_in_which_a_file_is_being_written_is_neither_renamed_nor_removed(one: MountedPlace) -> None:
    (one.target / "a").mkdir()
    with (one.target / "a/f").open("wb", buffering=0) as file:
        file.write(b"x")
        assert number_of(lambda: (one.target / "a").rename(one.target / "b")) == errno.EBUSY
        assert number_of((one.target / "a").rmdir) == errno.ENOTEMPTY
    (one.target / "a").rename(one.target / "b")
    assert (one.target / "b/f").read_bytes() == b"x"


def test_a_file_that_is_opened_while_its_folder_is_renamed_is_not_published_under_the_old_name(
    one: MountedPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one.target / "a").mkdir()
    rename, opened = one.files.rename, []

    def open_and_rename(source: str, target: str) -> None:
        opened.append((one.target / "a/f").open("wb", buffering=0))
        rename(source, target)

    monkeypatch.setattr(one.files, "rename", open_and_rename)
    (one.target / "a").rename(one.target / "b")
    opened[0].write(os.urandom(LARGE))
    number = number_of(opened[0].close)
    assert list(one.root.rglob("f")) == []
    assert number == errno.EIO
    assert "b/f: its folder was renamed while the file was opened; write it again" in "".join(one.said)


def test_only_empty_folders_are_removed(one: MountedPlace) -> None:
    (one.target / "a").mkdir()
    (one.target / "a/f").write_bytes(os.urandom(LARGE))
    assert number_of((one.target / "a").rmdir) == errno.ENOTEMPTY
    assert number_of((one.target / "a").unlink) == errno.EISDIR
    assert number_of((one.target / "a").mkdir) == errno.EEXIST
    (one.target / "a/f").unlink()
    (one.target / "a").rmdir()
    assert list(one.root.iterdir()) == [], "no parts are left"


def test_an_exclusive_create_succeeds_once_on_a_mount(one: MountedPlace) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    handle = os.open(one.target / "f", flags)
    assert number_of(lambda: os.open(one.target / "f", flags)) == errno.EEXIST
    os.close(handle)
    assert number_of(lambda: os.open(one.target / "f", flags)) == errno.EEXIST


def test_the_file_systems_own_names_are_hidden_and_cannot_be_created(one: MountedPlace) -> None:
    (one.target / "f").write_bytes(os.urandom(LARGE))
    assert (one.root / ".stripes").is_dir()
    assert os.listdir(one.target) == ["f"]  # noqa: PTH208
    assert not (one.target / ".stripes").exists()
    assert number_of((one.target / ".stripes").mkdir) == errno.EPERM
    assert number_of(lambda: (one.target / ".attempts").write_bytes(b"")) == errno.EPERM
    assert number_of(lambda: (one.target / "f").rename(one.target / ".stripes-x")) == errno.EPERM


def test_names_are_text_of_at_most_255_bytes(one: MountedPlace) -> None:
    (one.target / "ä ✓ \n'").write_bytes(b"x")
    assert os.listdir(one.target) == ["ä ✓ \n'"]  # noqa: PTH208
    assert number_of(lambda: os.open(os.fsencode(one.target) + b"/\xff", os.O_WRONLY | os.O_CREAT)) == errno.EILSEQ
    assert number_of(lambda: (one.target / ("x" * 256)).write_bytes(b"")) == errno.ENAMETOOLONG


# Attributes


@pytest.mark.parametrize("size", [5, LARGE])
def test_modes_owners_and_times_are_kept(one: MountedPlace, mounts: Mounts, size: int) -> None:
    path = one.target / "f"
    path.write_bytes(bytes(size))
    path.chmod(0o640)
    os.utime(path, ns=(0, 1_234_567_891_000_000_000))
    if os.geteuid() == 0:
        os.chown(path, 1, 2)
    seen = (mounts().target / "f").stat()
    assert seen.st_mode == 0o100640
    assert seen.st_mtime_ns == 1_234_567_891_000_000_000
    assert seen.st_nlink == 1
    if os.geteuid() == 0:
        assert (seen.st_uid, seen.st_gid) == (1, 2)
    assert path.read_bytes() == bytes(size)
    assert {part.stat().st_mode & 0o777 for part in one.root.glob(".stripes/*/*")} <= {0o640}


def test_attributes_set_before_the_close_apply_to_the_published_file(one: MountedPlace, other: MountedPlace) -> None:
    for size in (5, LARGE):
        with (one.target / "f").open("wb", buffering=0) as file:
            file.write(bytes(size))
            os.fchmod(file.fileno(), 0o604)
            os.utime(file.fileno(), ns=(0, 10**18))
            assert (one.target / "f").stat().st_mtime_ns == 10**18
        seen = (other.target / "f").stat()
        assert (seen.st_mode, seen.st_mtime_ns) == (0o100604, 10**18)
        (one.target / "f").unlink()


def test_attributes_set_after_the_close_are_visible_at_once(one: MountedPlace, other: MountedPlace) -> None:
    path = one.target / "f"
    held, end = socket.socketpair()
    with held, end:
        with path.open("wb", buffering=0) as file:
            file.write(bytes(LARGE))
            # It is closed in all processes, but the kernel does not report this: the file is in the socket's buffer.
            socket.send_fds(held, [b"f"], [file.fileno()])
        path.chmod(0o604)
        os.utime(path, ns=(0, 10**18))
        seen = (other.target / "f").stat()
        assert (seen.st_mode, seen.st_mtime_ns) == (0o100604, 10**18)
    assert path.read_bytes() == bytes(LARGE)
    assert (path.stat().st_mode, path.stat().st_mtime_ns) == (0o100604, 10**18)


def test_rewriting_keeps_the_mode(one: MountedPlace, other: MountedPlace) -> None:
    (one.target / "f").write_bytes(b"x")
    (one.target / "f").chmod(0o600)
    (one.target / "f").write_bytes(bytes(LARGE))
    assert (other.target / "f").stat().st_mode == 0o100600


def test_statfs_reports_the_space_of_the_place(one: MountedPlace) -> None:
    total, free = one.place.space()
    said = os.statvfs(one.target)
    assert said.f_blocks * said.f_frsize <= total
    assert said.f_bavail * said.f_frsize == pytest.approx(free, rel=0.1)


# Not supported


def test_links_pipes_and_extended_attributes_are_refused(one: MountedPlace) -> None:
    (one.target / "f").write_bytes(b"x")
    assert number_of(lambda: (one.target / "s").symlink_to("f")) == errno.EPERM
    assert number_of(lambda: (one.target / "l").hardlink_to(one.target / "f")) == errno.EPERM
    assert number_of(lambda: os.mkfifo(one.target / "p")) == errno.EPERM
    assert number_of(lambda: os.setxattr(one.target / "f", "user.a", b"b")) == errno.EOPNOTSUPP
    assert _exchange(one.target / "f", one.target / "f2") == errno.EINVAL
    with (one.target / "f").open("r+b") as file:
        assert number_of(lambda: _fallocate(file.fileno())) == errno.EOPNOTSUPP


def _exchange(first: Path, second: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    second.write_bytes(b"y")
    assert libc.renameat2(-100, os.fsencode(first), -100, os.fsencode(second), 2) < 0
    return ctypes.get_errno()


def _fallocate(handle: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate64(handle, 1, ctypes.c_int64(0), ctypes.c_int64(4096)) < 0:
        raise OSError(ctypes.get_errno(), "fallocate")


def test_locks_hold_on_this_machine(one: MountedPlace, other: MountedPlace) -> None:
    (one.target / "f").write_bytes(b"x")
    with (one.target / "f").open("r+b") as file, (one.target / "f").open("r+b") as again:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert number_of(lambda: fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)) == errno.EAGAIN
        with (other.target / "f").open("r+b") as elsewhere:
            fcntl.flock(elsewhere, fcntl.LOCK_EX | fcntl.LOCK_NB)

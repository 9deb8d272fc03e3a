"""Reading files that others change, and the kernel's page cache: docs/semantics.md, "Reading".

`one` and `other` are two mounts of the same place, like on two machines.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import textwrap
import threading
from io import FileIO
from pathlib import Path

import pytest

from bootseer.checkpoint.layout import Policy
from bootseer.fuse.filesystem import Caller
from bootseer.fuse.protocol import ROOT
from bootseer.fuse.requests import VALID_S
from checkpoint.mount.conftest import Mounts
from checkpoint.mounted_place import MIB, STRIPED, MountedPlace, number_of
from waiting import until

pytestmark = pytest.mark.fuse

LARGE = 8 * MIB + 12_345
"""More than one segment of three stripes, and not a whole number of chunks."""


def check_rest(reader: FileIO, data: bytes) -> None:
    """Assert that the rest of an open file is `data`, or a part of it followed by an error."""
    at = 0
    try:
        while piece := reader.read(MIB):
            assert piece == data[at : at + len(piece)]
            at += len(piece)
    except OSError as error:
        assert error.errno in (errno.EIO, errno.ESTALE, errno.ENOENT)
    else:
        assert at == len(data)


def test_a_file_that_was_replaced_elsewhere_is_never_mixed_with_its_old_content(
    one: MountedPlace, other: MountedPlace
) -> None:
    old, new = b"o" * LARGE, b"n" * LARGE
    (one.target / "f").write_bytes(old)
    until(lambda: one.shown.facts()["open_files"] == 0, "the writer's end is told")
    with (one.target / "f").open("rb", buffering=0) as reader:
        assert reader.read(MIB) == old[:MIB]
        (other.target / "f").write_bytes(new)
        assert (one.target / "f").read_bytes() == new, "opening checks the place"
        check_rest(reader, old[MIB:])
        assert (one.target / "f").read_bytes() == new


def test_opening_checks_the_place_while_a_reader_of_new_content_has_the_file_open(
    one: MountedPlace, other: MountedPlace
) -> None:
    old, new = b"o" * LARGE, b"n" * LARGE
    with (one.target / "f").open("wb", buffering=0) as writer:
        writer.write(old)
        reader = (one.target / "f").open("rb", buffering=0)
    with reader:
        until(lambda: one.shown.facts()["open_files"] == 1, "the writer's end is told")
        assert (one.target / "f").read_bytes() == old
        (other.target / "f").write_bytes(new)
        assert (one.target / "f").read_bytes() == new
        check_rest(reader, old)
        (one.target / "f").unlink()
        assert not (other.target / "f").exists()


def test_a_file_replaced_by_one_of_the_same_size_and_time_is_another_file(
    one: MountedPlace, other: MountedPlace
) -> None:
    for size in (1000, LARGE):
        (one.target / "f").write_bytes(b"o" * size)
        os.utime(one.target / "f", ns=(0, 10**18))
        assert (one.target / "f").read_bytes() == b"o" * size
        (other.target / "f.new").write_bytes(b"n" * size)
        os.utime(other.target / "f.new", ns=(0, 10**18))
        (other.target / "f.new").rename(other.target / "f")
        assert (one.target / "f").read_bytes() == b"n" * size


@pytest.mark.parametrize("size", [5, 2 * MIB])
def test_a_file_whose_length_changed_elsewhere_is_read_correctly(
    one: MountedPlace, other: MountedPlace, size: int
) -> None:
    for length in (size, size + 7, size - 3):
        (other.target / "f").write_bytes(bytes([length % 251]) * length)
        assert (one.target / "f").read_bytes() == bytes([length % 251]) * length


@pytest.mark.parametrize("held", [False, True])
def test_a_file_that_was_replaced_elsewhere_is_appended_to_and_truncated_correctly(
    one: MountedPlace, other: MountedPlace, held: bool
) -> None:
    for new in (b"new", b"new, longer"):
        (one.target / "f").write_bytes(b"old")
        with contextlib.ExitStack() as stack:
            until(lambda: one.shown.facts()["open_files"] == 0, "closed")
            for mounted in (one, other):
                reader = stack.enter_context((mounted.target / "f").open("rb"))
                assert reader.read() == b"old"
            if not held:
                stack.close()
            (one.target / "f").write_bytes(new)
            with (other.target / "f").open("ab") as file:
                file.write(b"+")
            os.truncate(one.target / "f", len(new) + 2)
            assert (other.target / "f").read_bytes() == new + b"+\0"


def test_a_file_written_by_another_node_right_after_a_close_is_appended_to_and_keeps_its_attributes(
    one: MountedPlace, other: MountedPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernel reports the end of a writer after close(2) has returned: here at the end of the test.
    may_end, release = threading.Event(), one.shown.release
    monkeypatch.setattr(one.shown, "release", lambda *handle: may_end.wait(60) and release(*handle))
    f = one.target / "f"
    try:
        f.write_bytes(b"one")
        f.chmod(0o640)
        os.utime(f, (0, 10**9))
        found = (other.target / "f").stat()
        assert (found.st_mode, found.st_mtime) == (0o100640, 10**9)
        for mounted, added in ((other, b"+other"), (one, b"+one"), (other, b"+again")):
            with (mounted.target / "f").open("ab") as file:
                file.write(added)
        os.truncate(f, 18)
        (other.target / "f").unlink()
        assert number_of(f.read_bytes) == errno.ENOENT
        (other.target / "f").write_bytes(b"anew")
        assert f.read_bytes() == b"anew"
    finally:
        may_end.set()
    until(lambda: one.shown.facts()["open_files"] == 0, "told")
    assert (one.root / "f").read_bytes() == b"anew"
    assert one.shown.lost() == []


@pytest.mark.parametrize("flags", [os.O_WRONLY | os.O_APPEND, os.O_RDWR])
def test_a_file_that_was_removed_elsewhere_is_created_again(one: MountedPlace, other: MountedPlace, flags: int) -> None:
    (one.target / "f").write_bytes(b"old")
    assert (other.target / "f").stat().st_size == 3
    (one.target / "f").unlink()
    handle = os.open(other.target / "f", flags | os.O_CREAT)
    os.write(handle, b"new")
    os.close(handle)
    assert (one.target / "f").read_bytes() == b"new"


def test_a_file_that_was_removed_elsewhere_is_not_truncated(one: MountedPlace, other: MountedPlace) -> None:
    for size in (0, 1):
        (one.target / "f").write_bytes(b"old")
        until(lambda: one.shown.facts()["open_files"] == 0, "the writer's end is told")
        assert (one.target / "f").stat().st_size == 3
        (other.target / "f").unlink()
        assert number_of(lambda: os.truncate(one.target / "f", size)) == errno.ENOENT  # noqa: B023 - called here
        assert list(one.root.iterdir()) == []


def test_files_that_others_create_and_remove_are_noticed(one: MountedPlace, other: MountedPlace) -> None:
    assert not (one.target / "f").exists()
    (other.target / "f").write_bytes(b"x")
    assert (one.target / "f").exists(), "missing names are not cached"
    assert os.listdir(one.target) == ["f"]  # noqa: PTH208
    (other.target / "f").unlink()
    assert number_of((one.target / "f").read_bytes) == errno.ENOENT
    assert VALID_S == 1


def test_a_listing_that_was_begun_before_a_change_does_not_restore_old_attributes(one: MountedPlace) -> None:
    for name in ("a", "f"):
        (one.target / name).write_bytes(b"old")
    listing = one.shown.open_folder(1)
    assert [entry.name for entry in one.shown.entries(listing, 0, 1, attributes=True)] == [b"a"]
    (one.target / "f").write_bytes(b"longer than before")
    until(lambda: one.shown.facts()["open_files"] == 0, "closed")
    node = (one.target / "f").stat().st_ino
    (late,) = one.shown.entries(listing, 1, 1, attributes=True)
    assert (late.name, late.found) == (b"f", None)
    assert ((one.target / "f").stat().st_ino, (one.target / "f").stat().st_size) == (node, 18)


def test_a_file_whose_create_fails_is_not_kept_in_memory(mounts: Mounts) -> None:
    one = mounts(rewrite_bytes=MIB)
    (one.root / "f").write_bytes(bytes(2 * MIB))
    caller = Caller(os.geteuid(), os.getegid(), 0)
    assert number_of(lambda: one.shown.create(1, b"f", 0o644, os.O_WRONLY | os.O_APPEND, caller)) == errno.EOPNOTSUPP
    assert one.shown.facts()["known_names"] == 1, "the root"


def test_a_removed_file_that_is_open_is_read_correctly_or_not_at_all(one: MountedPlace) -> None:
    for size in (1000, LARGE):
        data = os.urandom(size)
        (one.target / "f").write_bytes(data)
        with (one.target / "f").open("rb", buffering=0) as reader:
            (one.target / "f").unlink()
            check_rest(reader, data)
        assert list(one.target.iterdir()) == []


def test_the_time_of_a_file_is_set_by_name_while_it_is_open(one: MountedPlace, other: MountedPlace) -> None:
    (one.target / "f").write_bytes(b"old")
    until(lambda: one.shown.facts()["open_files"] == 0, "closed")
    with (one.target / "f").open("r+b", buffering=0) as file:
        assert file.read(1) == b"o"
        os.utime(one.target / "f", (5, 5))
        assert (one.target / "f").read_bytes() == b"old"
        file.write(b"nl")
    assert (other.target / "f").read_bytes() == b"onl"


def test_a_file_that_is_published_while_it_is_looked_up_or_listed_keeps_its_node(
    one: MountedPlace, other: MountedPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    f, stat, listed = one.target / "f", one.files.stat, one.files.list
    first = os.open(f, os.O_WRONLY | os.O_CREAT)
    copy = os.dup(first)
    monkeypatch.setattr(
        "bootseer.checkpoint.mount.open_files.num_writers", lambda *_: 0
    )  # like for invisible processes

    def then_published(path: str) -> object:
        found = stat(path)
        monkeypatch.setattr(one.files, "stat", stat)
        os.write(copy, b"+")
        os.close(os.dup(copy))
        return found

    def first_published(path: str) -> object:
        found = list(listed(path))
        monkeypatch.setattr(one.files, "list", listed)
        os.close(os.dup(copy))
        return found

    os.write(first, b"one")
    monkeypatch.setattr(one.files, "list", first_published)
    assert [entry.name for entry in one.shown.entries(one.shown.open_folder(ROOT), 0, 9, attributes=False)] == [b"f"]
    os.close(first)
    monkeypatch.setattr(one.files, "stat", then_published)
    assert one.shown.lookup(ROOT, b"f") is not None
    os.write(copy, b"+")
    os.close(copy)
    assert (other.target / "f").read_bytes() == b"one++"


def test_the_latest_time_that_was_set_is_kept(one: MountedPlace) -> None:
    f = one.target / "f"
    f.write_bytes(b"old")
    with f.open("rb"):  # keeps the written data in use
        with f.open("r+b", buffering=0) as file:
            file.write(b"new")
            os.utime(file.fileno(), (5, 5))
        os.utime(f, (6, 6))
        with f.open("r+b") as file:
            os.fchmod(file.fileno(), 0o600)
        assert (one.root / "f").stat().st_mtime == f.stat().st_mtime == 6


def test_a_file_without_a_name_is_extended_through_a_copy_of_its_descriptor(one: MountedPlace) -> None:
    with (one.target / "f").open("wb", buffering=0) as file:
        (one.target / "f").unlink()
        os.close(os.dup(file.fileno()))  # like a program that was started meanwhile
        file.truncate(100)
        assert os.fstat(file.fileno()).st_size == 100


def test_a_synced_file_without_a_name_that_cannot_be_truncated_is_an_io_error(one: MountedPlace) -> None:
    with (one.target / "f").open("wb", buffering=0) as file:
        file.write(bytes(3 * MIB))
        os.fsync(file.fileno())
        (one.target / "f").unlink()
        assert number_of(lambda: os.ftruncate(file.fileno(), 5)) == errno.EIO


@pytest.mark.parametrize("policy", [STRIPED, Policy(stripes=1, replication=5)])
def test_a_folder_that_was_removed_or_renamed_does_not_come_back(
    one: MountedPlace, other: MountedPlace, policy: Policy
) -> None:
    one.files.policy = lambda path: policy  # type: ignore[method-assign]
    for name in ("a", "b"):
        (one.target / name).mkdir()
    renamed = (one.target / "a/f").open("wb", buffering=0)
    nameless = (one.target / "b/f").open("wb", buffering=0)
    (other.target / "a").rename(other.target / "c")
    (one.target / "b/f").unlink()
    (one.target / "b").rmdir()

    def write(file: FileIO) -> None:
        with file:
            file.write(b"x" * LARGE)
            os.fsync(file.fileno())

    assert number_of(lambda: write(renamed)) == errno.ENOENT
    assert number_of(lambda: write(nameless)) in (None, errno.ENOENT)
    until(lambda: one.shown.facts()["open_files"] == 0, "the writers' ends are told")
    assert sorted(path.name for path in one.root.iterdir()) == ["c"]


def test_a_temporary_file_without_a_name_is_written_and_read(one: MountedPlace, other: MountedPlace) -> None:
    with (one.target / "f").open("w+b", buffering=0) as file:
        (one.target / "f").unlink()
        file.write(b"scratch")
        file.seek(0)
        assert file.read() == b"scratch"
    until(lambda: one.shown.facts()["open_files"] == 0, "closed")
    assert list(other.target.iterdir()) == []


@pytest.mark.parametrize("size", [1000, LARGE])
def test_later_opens_of_a_file_read_from_the_page_cache(one: MountedPlace, size: int) -> None:
    data = os.urandom(size)
    (one.target / "f").write_bytes(data)

    def is_read_from_memory() -> bool:
        before = one.session.reads
        assert (one.target / "f").read_bytes() == data
        return one.session.reads == before

    # Not always with the second: the kernel drops the written pages when it gets the published version.
    until(is_read_from_memory, "in memory")


def test_a_file_written_here_is_read_from_the_place(one: MountedPlace) -> None:
    (one.target / "f").write_bytes(b"written")
    until(lambda: one.shown.facts()["open_files"] == 0, "closed")
    before = one.session.reads
    assert (one.target / "f").read_bytes() == b"written"
    assert one.session.reads > before


def in_another_process(code: str, path: Path) -> None:
    """Run code with `path`, in another process than the server: page faults wait with the GIL held."""
    code = f"import mmap, os, sys; path = sys.argv[1]\n{textwrap.dedent(code)}"
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=180)


def test_files_are_mapped_into_memory(one: MountedPlace, other: MountedPlace) -> None:
    (one.target / "f").write_bytes(bytes(range(256)) * (LARGE // 256))
    check = """
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert mapped[5_000_000:5_001_000] == (bytes(range(256)) * 5)[5_000_000 % 256:][:1000]
            assert mapped[:] == bytes(range(256)) * (len(mapped) // 256)
    """
    in_another_process(check, other.target / "f")


def test_a_small_file_is_changed_through_a_mapping(one: MountedPlace, other: MountedPlace) -> None:
    (one.target / "f").write_bytes(bytes(3 * 4096))
    change = """
        with open(path, "r+b") as file:
            with mmap.mmap(file.fileno(), 0) as mapped:
                mapped[4096:4100] = b"here"
                mapped.flush()
            os.fsync(file.fileno())
    """
    in_another_process(change, one.target / "f")
    assert (other.target / "f").read_bytes() == bytes(4096) + b"here" + bytes(8188)

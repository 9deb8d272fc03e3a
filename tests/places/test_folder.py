"""A folder as a place: the contract, and unexpected files from others."""

from __future__ import annotations

import errno
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from bootseer.checkpoint.attempts import Attempt
from bootseer.errors import (
    AccessError,
    AlreadyExistsError,
    BootseerError,
    NotFoundError,
    PermanentError,
    UsageError,
)
from bootseer.io.pooled_reads import ReadOutcome
from bootseer.places import open_place
from bootseer.places.folder import FolderPlace
from bootseer.places.place import ChangedError, Place
from checkpoint.striped_files import content_of, put_striped
from places.contract import PlaceContract, opened, read


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "root").mkdir()
    opened_place = open_place(f"file://{tmp_path}/root")
    yield opened_place
    opened_place.close()


class TestFolderPlace(PlaceContract):
    """The contract."""


def test_links_and_special_files_are_neither_shown_nor_followed(place: Place, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_bytes(b"secret")
    root = tmp_path / "root"
    (root / "folder-link").symlink_to(secret)
    (root / "file-link").symlink_to(secret / "key")
    os.mkfifo(root / "pipe")
    assert list(place.list("")) == []
    for path in ("folder-link", "file-link", "pipe", "folder-link/key"):
        with pytest.raises(NotFoundError):
            place.stat(path)
        with pytest.raises(NotFoundError):
            place.open(path)
        with pytest.raises(NotFoundError):
            place.read_bytes(path, 100)
    with pytest.raises(NotFoundError):
        place.write_bytes("folder-link/new", b"x")
    with pytest.raises(NotFoundError):
        place.set_mode("folder-link/key", 0o777)
    assert sorted(path.name for path in secret.iterdir()) == ["key"]


def test_writing_over_a_link_replaces_the_link(place: Place, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "secret")
    place.write_bytes("link", b"new")
    assert (tmp_path / "secret").read_bytes() == b"secret"
    assert place.read_bytes("link", 10) == b"new"


def test_a_file_that_another_machine_replaces_on_nfs_is_read_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write_bytes("latest", b"step-1")
    preadv = os.preadv

    def stale(*words: Any) -> int:
        monkeypatch.setattr(os, "preadv", preadv)
        place.write_bytes("latest", b"step-2")
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "preadv", stale)
    assert place.read_bytes("latest", 10) == b"step-2"


def test_an_open_that_fails_at_its_end_leaves_no_descriptor(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write_bytes("file", b"content")
    fstat, descriptors = os.fstat, []

    def stale(descriptor: int) -> os.stat_result:
        if stat.S_ISREG(fstat(descriptor).st_mode):
            descriptors.append(descriptor)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return fstat(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", stale)
        with pytest.raises(BootseerError):
            place.open("file")
    assert descriptors
    left = [os.path.realpath(f"/proc/self/fd/{number}") for number in descriptors]
    assert str(tmp_path / "root" / "file") not in left


def test_a_checkpoint_mount_that_refuses_our_names_is_reported(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: Any, **folder: int) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(AccessError, match="use the address that `bootseer ckpt mounted` shows"):
        place.make_folder(".attempts")
    with pytest.raises(AccessError, match=r"not permitted$"):
        place.make_folder("other")


def test_without_room_the_clock_is_this_machines(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cleanups need it, also on a full disk."""
    os_open = os.open

    def full(path: str, flags: int, *words: Any, **folder: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return os_open(path, flags, *words, **folder)

    monkeypatch.setattr(os, "open", full)
    assert abs(place.now_s() - time.time()) < 60


def test_a_name_that_was_taken_for_a_moment_was_taken(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a lock that another process releases just then."""
    link = os.link

    def link_late(*names: str, **folders: int) -> None:
        monkeypatch.setattr(os, "link", link)
        (tmp_path / "root" / "name").unlink()
        raise FileExistsError

    assert place.create_bytes("name", b"of another")
    monkeypatch.setattr(os, "link", link_late)
    assert not place.create_bytes("name", b"mine")
    assert place.create_bytes("name", b"mine")


def test_removing_a_folder_does_not_follow_links_in_it(place: Place, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"x")
    place.make_folder("a")
    (tmp_path / "root" / "a" / "link").symlink_to(tmp_path / "kept")
    place.delete("a", recursive=True)
    assert (tmp_path / "kept" / "file").exists()


def test_a_file_that_is_written_to_or_cut_while_it_is_read_is_an_error(place: Place, tmp_path: Path) -> None:
    place.write_bytes("file", b"0123456789")
    with opened(place, "file") as file:
        os.utime(tmp_path / "root" / "file", ns=(1, 1))
        with pytest.raises(ChangedError, match="changed"):
            read(file, 0, 10)
    with opened(place, "file") as file:
        os.truncate(tmp_path / "root" / "file", 5)
        with pytest.raises(ChangedError, match="shorter"):
            read(file, 0, 10)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to groups that it is not in")
def test_what_is_made_in_a_folder_of_a_group_belongs_to_it(place: Place, tmp_path: Path) -> None:
    root = tmp_path / "root"
    os.chown(root, -1, 5)
    root.chmod(0o2770)
    put_striped(place, "model", content_of(3 << 20), stripes=2)
    with Attempt(place, "step-1") as attempt:
        place.make_folder(f"{attempt.path}/sub", mode=0o700)
        place.write_bytes(f"{attempt.path}/sub/file", b"x")
        attempt.publish()
    assert (root / "step-1/sub/file").exists()
    assert {path.stat().st_gid for path in root.rglob("*")} == {5}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("mode", "of_parts"), [(0o777, 0o755), (0o1777, 0o777)])
def test_a_folder_that_may_be_deleted_only_in_part_stays_whole(mode: int, of_parts: int) -> None:
    with TemporaryDirectory() as root:
        for name in ("parts", *"abcdefghi"):  # for any order of listing
            Path(root, "step-1", name).mkdir(parents=True)
            Path(root, "step-1", name).chmod(of_parts)
        for name in ("parts/0", *"123456789", *(f"{folder}/0" for folder in "abcdefghi")):
            Path(root, "step-1", name).write_bytes(b"x")
        for name in "12345678":
            os.chown(Path(root, "step-1", name), 65534, 65534)
        Path(root).chmod(0o777)
        Path(root, "step-1").chmod(mode)
        os.seteuid(65534)
        try:
            with closing(FolderPlace(Path(root))) as place, pytest.raises(AccessError):
                place.delete("step-1", recursive=True)
        finally:
            os.seteuid(0)
        left = [path.name for path in Path(root, "step-1").rglob("*")]
        assert (set(left), len(left)) == ({"parts", *"0123456789abcdefghi"}, 29)


def test_closing_a_file_does_not_block_and_reads_in_flight_end(place: Place) -> None:
    data = os.urandom(4 << 20)
    place.write_bytes("file", data)
    file = place.open("file")
    into = [bytearray(1 << 20) for _ in range(32)]
    ends = threading.Semaphore(0)
    outcomes: list[ReadOutcome] = []

    def done(outcome: ReadOutcome) -> None:
        outcomes.append(outcome)
        ends.release()

    for number, buffer in enumerate(into):
        file.read_into(number % 4 << 20, memoryview(buffer), done, urgent=number % 2 == 0)
    file.close()
    file.close()
    for _ in into:
        assert ends.acquire(timeout=180)
    assert [outcome.error for outcome in outcomes] == [None] * 32
    assert all(buffer == data[number % 4 << 20 : (number % 4 + 1) << 20] for number, buffer in enumerate(into))
    with pytest.raises(PermanentError, match="closed"):
        file.read_into(0, memoryview(bytearray(1)), done)


def test_a_read_outside_of_the_file_is_refused(place: Place) -> None:
    place.write_bytes("file", b"123")
    with opened(place, "file") as file:
        for offset, length in ((-1, 1), (0, 4), (3, 1)):
            with pytest.raises(PermanentError):
                file.read_into(offset, memoryview(bytearray(length)), lambda outcome: None)


def test_a_closed_file_has_no_descriptor_whatever_is_kept_of_its_reads(place: Place, tmp_path: Path) -> None:
    place.write_bytes("file", bytes(8))
    file, ended = place.open("file"), [Future[ReadOutcome](), Future[ReadOutcome]()]
    kept = [file.read_into(0, memoryview(bytearray(8)), ended[0].set_result)]
    assert ended[0].result(120).error is None
    os.truncate(tmp_path / "root/file", 4)
    kept.append(file.read_into(0, memoryview(bytearray(8)), ended[1].set_result))
    assert isinstance(ended[1].result(120).error, ChangedError)
    file.close()
    assert str(tmp_path / "root/file") not in {os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()}
    assert len(kept) == 2


def test_a_child_of_fork_reads_too(place: Place) -> None:
    place.write_bytes("file", b"content")
    with opened(place, "file") as file:
        assert read(file, 0, 7) == b"content"
        child = os.fork()
        if child == 0:
            signal.alarm(120)
            os._exit(0 if read(file, 0, 7) == b"content" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_root_that_does_not_exist_is_not_found_and_can_be_made(tmp_path: Path) -> None:
    place = FolderPlace(tmp_path / "not" / "there")
    with pytest.raises(NotFoundError):
        list(place.list(""))
    with pytest.raises(NotFoundError):
        place.stat("")
    place.make_folder("", parents=True)
    assert list(place.list("")) == []
    place.close()


def test_a_root_that_is_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    place = FolderPlace(tmp_path / "link")
    place.write_bytes("file", b"x")
    assert (tmp_path / "real" / "file").read_bytes() == b"x"
    place.close()


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "ftp://host/x",
        "file://host/dir",
        "hdfs://",
        "hdfs:///dir",
        "hdfs://user@host/x",
        "s3://key:secret@bucket/x",
        "/a/.stripes/b",
        "a\0b",
    ],
)
def test_invalid_places_are_refused_with_a_hint(uri: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_place(uri)
    assert caught.value.hint


def test_a_root_that_is_a_loop_of_links_is_missing(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    place = open_place(f"{tmp_path}/loop/below")
    with pytest.raises(NotFoundError):
        place.list("")
    place.close()


def test_a_rename_of_what_does_not_exist_names_it_and_not_the_target(place: Place) -> None:
    for replace in (True, False):
        with pytest.raises(NotFoundError, match=r"/missing$"):
            place.rename("missing", "target", replace=replace)


def test_of_many_that_want_a_folders_name_one_gets_it_and_the_others_hear_that_it_is_taken(place: Place) -> None:
    def rename(number: int) -> bool:
        try:
            place.rename(f"{number}", f"target{number // 4}", replace=False)
        except AlreadyExistsError:
            return False
        return True

    for number in range(400):
        place.make_folder(f"{number}/below", parents=True)
    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(rename, range(400))) == 100

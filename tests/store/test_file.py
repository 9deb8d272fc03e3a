"""The store in a folder."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import AccessError, NotFoundError, PermanentError, TransientError
from bootseer.store.file import FileStore
from bootseer.store.store import Store
from small_disks import small_disk
from store.contract import DATA, SharedStoreContract, all_files, get, put, sha256

READERS = 64321
"""A user and a group without any rights."""


@contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Act on files as another user, without any other group."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


class Outside:
    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, name: str) -> bytes | None:
        if name.startswith("sha256:"):
            name = f"sha256/{name[7:9]}/{name[7:]}"
        path = self.root / name
        return path.read_bytes() if path.exists() else None

    def unfinished(self) -> list[str]:
        return [str(path) for path in all_files(self.root) if ".uploads" in path.parts]


class TestFileStore(SharedStoreContract):
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return tmp_path / "not" / "there yet"

    @pytest.fixture
    def store(self, root: Path) -> Store:
        return FileStore(root)

    @pytest.fixture
    def outside(self, root: Path) -> Outside:
        return Outside(root)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "size=2m") as folder:
        yield folder


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_is_an_error_and_nothing_stays(disk: Path) -> None:
    store = FileStore(disk / "store")
    put(store, b"x" * 1000, "before")
    upload = store.upload()
    with pytest.raises(PermanentError, match=r"No space left on device; nothing was stored, make room"):
        for _ in range(50):
            upload.write(DATA[:100_000])
    upload.abort()
    assert Outside(disk).unfinished() == []
    put(store, b"y" * 1_000_000, "after")
    assert sorted(found.name for found in store.list()) == ["after", "before"]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_objects_are_for_the_group_of_the_store_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        name = put(FileStore(tmp_path / "store"), DATA).name
    finally:
        os.umask(before)
    path = tmp_path / "store" / "sha256" / name[7:9] / name[7:]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    for folder in (*path.relative_to(tmp_path).parents[:-1], Path("store/.uploads")):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o2750, folder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can choose any group")
def test_the_group_of_objects_is_that_of_the_store(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, 0, READERS)
    shared.chmod(0o770)
    (shared / "a").mkdir(0o700)  # as a process leaves it that is killed before it shares it
    put(FileStore(shared), DATA, "a/b")
    status = [(shared / name).stat() for name in ("a/b", "a", ".uploads")]
    assert [found.st_gid for found in status] == [READERS] * 3
    # A group that may write to the store may write to its folders.
    assert [stat.S_IMODE(found.st_mode) for found in status] == [0o640, 0o2770, 0o2770]


def test_the_rest_of_a_killed_writer_is_removed_after_a_day(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "bootseer.store")
    store = FileStore(tmp_path)
    old, new = store.upload(), store.upload()
    old.write(b"abandoned")
    new.write(b"alive")
    oldest = min((tmp_path / ".uploads").iterdir(), key=lambda path: path.read_bytes())
    os.utime(oldest, (0, 0))
    store.upload().abort()
    assert [path.read_bytes() for path in all_files(tmp_path)] == [b"alive"]
    assert oldest.name in caplog.text
    new.commit("name")
    assert get(store, "name") == b"alive"


def test_a_machine_whose_clock_is_ahead_removes_no_upload_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = FileStore(tmp_path).upload()
    upload.write(DATA)
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 2 * 86_400)
    put(FileStore(tmp_path), b"x", "a")
    upload.commit("b")
    assert get(FileStore(tmp_path), "b") == DATA


def test_a_name_that_is_released_while_it_is_to_be_created_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path)
    rename = store.place.rename

    def released(source: str, target: str, *, replace: bool = True) -> None:
        (tmp_path / target).write_bytes(b"of another process")
        try:
            rename(source, target, replace=replace)
        finally:
            (tmp_path / target).unlink()

    monkeypatch.setattr(store.place, "rename", released)
    assert not store.create("lease", b"x")
    assert list(store.list()) == Outside(tmp_path).unfinished() == []


def test_an_object_cannot_be_the_folder_of_another(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    put(store, b"x", "a")
    with pytest.raises(PermanentError, match="cannot be the folder of another"):
        put(store, b"x", "a/b")
    put(store, b"x", "c/d")
    with pytest.raises(PermanentError, match="cannot be the folder of another"):
        put(store, b"x", "c")
    assert Outside(tmp_path).unfinished() == []


def test_an_object_is_not_created_where_others_have_their_folder(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    assert store.create("c/d", b"x")
    for name in ("c", "c/d/e"):
        with pytest.raises(PermanentError, match="cannot be the folder of another"):
            store.create(name, b"y")
    assert Outside(tmp_path).unfinished() == []


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EXDEV])
def test_an_object_is_created_where_files_cannot_be_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def link(*names: object, **where: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    store = FileStore(tmp_path)
    assert store.create("a/name", b"first")
    assert not store.create("a/name", b"second")
    assert get(store, "a/name") == b"first"
    assert Outside(tmp_path).unfinished() == []


def test_a_link_whose_answer_was_lost_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link_twice(*names: str, **where: Any) -> None:
        real(*names, **where)
        real(*names, **where)  # like a file server that receives the request twice

    monkeypatch.setattr(os, "link", link_twice)
    assert FileStore(tmp_path).create("a/name", b"first")


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    put(store, DATA, "name")
    pieces = store.read("name")
    next(pieces)
    os.truncate(tmp_path / "name", 300_000)
    with pytest.raises(TransientError, match="became shorter"):
        list(pieces)


def test_a_read_ends_at_its_deadline(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    name = put(store, DATA).name
    with pytest.raises(TransientError, match="took longer"):
        list(store.read(name, timeout_s=-1))


def test_a_folder_in_place_of_an_object_is_not_found(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    put(store, b"x", "a/b")
    for name in ("a", "a/b/c"):
        with pytest.raises(NotFoundError):
            get(store, name)
        with pytest.raises(NotFoundError):
            store.stat(name)
        store.delete(name)
    assert get(store, "a/b") == b"x"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(AccessError, match="Permission denied"):
        FileStore(tmp_path / "store").upload()


def test_content_is_in_folders_by_its_first_digits(tmp_path: Path) -> None:
    put(FileStore(tmp_path), DATA)
    digits = sha256(DATA)[7:]
    assert (tmp_path / "sha256" / digits[:2] / digits).read_bytes() == DATA


def test_a_link_in_the_place_of_the_uploads_reaches_no_other_folder(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    for name in ("letters", "0123456789abcdef" * 2):
        (victim / name).write_text("keep me")
        os.utime(victim / name, (0, 0))
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / ".uploads").symlink_to(victim)
    with pytest.raises(AccessError, match=r"\.uploads is a symbolic link, which is not followed: delete it"):
        FileStore(tmp_path / "store").upload()
    assert len(list(victim.iterdir())) == 2


def test_only_uploads_are_removed_from_the_uploads(tmp_path: Path) -> None:
    put(FileStore(tmp_path), DATA)
    kept = tmp_path / ".uploads" / "README"
    kept.write_text("keep me")
    os.utime(kept, (0, 0))
    FileStore(tmp_path).upload().abort()
    assert kept.exists()


@pytest.mark.parametrize("name", ["images/sha256-1", "images", "sha256"])
def test_links_are_not_followed_to_objects_or_folders(tmp_path: Path, name: str) -> None:
    store, outside = FileStore(tmp_path / "store"), tmp_path / "outside"
    put(store, DATA)
    put(store, DATA, "images/sha256-1")
    (tmp_path / "store" / name).rename(outside)
    (tmp_path / "store" / name).symlink_to(outside)
    wanted = f"sha256:{sha256(DATA)[7:]}" if name == "sha256" else "images/sha256-1"
    before = [path.stat() for path in sorted(tmp_path.rglob("outside*/**"))]
    with pytest.raises(NotFoundError):
        get(store, wanted)
    with pytest.raises(NotFoundError):
        store.stat(wanted)
    assert [found.name for found in store.list()] == (["images/sha256-1"] if name == "sha256" else [])
    if name != "images/sha256-1":
        with pytest.raises(AccessError, match="is a symbolic link"):
            put(store, DATA, None if name == "sha256" else wanted)
        store.delete(wanted)
    assert [path.stat() for path in sorted(tmp_path.rglob("outside*/**"))] == before


@pytest.mark.usefixtures("alarm")
def test_a_pipe_in_the_place_of_an_object_holds_nothing_up(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    (tmp_path / "images").mkdir()
    os.mkfifo(tmp_path / "images" / "sha256-1")
    with pytest.raises(NotFoundError):
        get(store, "images/sha256-1")
    assert list(store.list()) == []

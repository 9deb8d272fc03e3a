"""The store in a folder."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import AccessError, NotFoundError, PermanentError, TransientError
from bootseer.store.file import FileStore
from bootseer.store.store import Store
from store.contract import DATA, SharedStoreContract, all_files, get, put, sha256


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
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_is_said_and_nothing_stays(small_disk: Path) -> None:
    store = FileStore(small_disk / "store")
    put(store, b"x" * 1000, "before")
    upload = store.upload()
    with pytest.raises(PermanentError, match=r"No space left on device; nothing was stored, make room"):
        for _ in range(50):
            upload.write(DATA[:100_000])
    upload.abort()
    assert Outside(small_disk).unfinished() == []
    put(store, b"y" * 1_000_000, "after")
    assert sorted(found.name for found in store.list()) == ["after", "before"]


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        name = put(FileStore(tmp_path), DATA).name
    finally:
        os.umask(before)
    mode = (tmp_path / "sha256" / name[7:9] / name[7:]).stat().st_mode
    assert stat.S_IMODE(mode) == 0o644


def test_the_rest_of_a_killed_writer_is_removed_after_a_day(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    old, new = store.upload(), store.upload()
    old.write(b"abandoned")
    new.write(b"alive")
    oldest = min((tmp_path / ".uploads").iterdir(), key=lambda path: path.read_bytes())
    os.utime(oldest, (0, 0))
    store.upload().abort()
    assert [path.read_bytes() for path in all_files(tmp_path)] == [b"alive"]
    new.commit("name")
    assert get(store, "name") == b"alive"


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


def test_an_object_is_created_where_files_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: object, target: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", link)
    store = FileStore(tmp_path)
    assert store.create("a/name", b"first")
    assert not store.create("a/name", b"second")
    assert get(store, "a/name") == b"first"
    assert Outside(tmp_path).unfinished() == []


def test_a_link_whose_answer_was_lost_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link_twice(source: Path, target: Path) -> None:
        real(source, target)
        real(source, target)  # as a file server does that is asked again

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


def test_a_folder_in_place_of_an_object_is_no_object(tmp_path: Path) -> None:
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
def test_a_folder_that_may_not_be_written_is_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(AccessError, match="Permission denied"):
        FileStore(tmp_path / "store").upload()


def test_content_lies_in_folders_by_its_first_digits(tmp_path: Path) -> None:
    put(FileStore(tmp_path), DATA)
    digits = sha256(DATA)[7:]
    assert (tmp_path / "sha256" / digits[:2] / digits).read_bytes() == DATA

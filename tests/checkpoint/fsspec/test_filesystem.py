"""BootSeer's file systems for fsspec."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

fsspec = pytest.importorskip("fsspec")

from bootseer.checkpoint.fsspec import FolderFileSystem, HdfsFileSystem  # noqa: E402
from bootseer.checkpoint.locations import resolve  # noqa: E402

MIB = 1 << 20


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Register the file systems in fsspec, in case the package is not installed."""
    fsspec.register_implementation("bootseer+file", FolderFileSystem, clobber=True)
    fsspec.register_implementation("bootseer+hdfs", HdfsFileSystem, clobber=True)
    yield
    FolderFileSystem.clear_instance_cache()
    HdfsFileSystem.clear_instance_cache()


@pytest.fixture
def system() -> FolderFileSystem:
    """The file system of folders."""
    return fsspec.filesystem("bootseer+file")


def put(path: Path, data: bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)


def test_addresses_name_a_file_system_and_a_path() -> None:
    system, path = fsspec.url_to_fs("bootseer+hdfs://node:8020/a//b/../c")
    assert (type(system), system.authority, path) == (HdfsFileSystem, "node:8020", "/a/c")
    assert system.unstrip_protocol(path) == "bootseer+hdfs://node:8020/a/c"
    other, path = fsspec.url_to_fs("bootseer+hdfs://other/")
    assert (other.authority, path) == ("other", "/")
    assert other is not system
    assert fsspec.url_to_fs("bootseer+hdfs://node:8020/elsewhere")[0] is system
    folders, path = fsspec.url_to_fs("bootseer+file:///a/b")
    assert (type(folders), path) == (FolderFileSystem, "/a/b")


@pytest.mark.parametrize("size", [0, 5, 40 * MIB + 3], ids=["empty", "small", "striped"])
def test_what_is_written_is_read(tmp_path: Path, system: FolderFileSystem, size: int) -> None:
    data = os.urandom(size)
    path = f"{tmp_path}/file"
    with fsspec.open(f"bootseer+file://{path}", "wb") as file:
        for start in range(0, size, 7 * MIB):
            file.write(data[start : start + 7 * MIB])
        assert file.tell() == size
        assert not system.exists(path)
    info = system.info(path)
    assert (info["size"], info["striped"], info["type"]) == (size, size > MIB, "file")
    with fsspec.open(f"bootseer+file://{path}", "rb") as file:
        assert (file.size, file.name) == (size, path)
        assert file.read() == data
        assert file.read(1) == b""
        file.seek(size // 2)
        assert file.read(10) == data[size // 2 :][:10]
        assert file.seek(-3, os.SEEK_END) == size - 3 if size else True
        buffer = bytearray(20)
        assert file.readinto(buffer) == min(3, size)
    assert system.cat(path) == data


def test_a_whole_file_is_read_by_one_request(tmp_path: Path, system: FolderFileSystem) -> None:
    data = os.urandom(3 * MIB)
    path = put(tmp_path / "file", data)
    reading = resolve(path).system.reading
    before = reading.facts()["reads"]
    with system.open(path) as file:
        assert file.read() == data
    assert reading.facts()["reads"] == before + 1  # type: ignore[operator]


def test_lines_are_read_as_text(tmp_path: Path, system: FolderFileSystem) -> None:
    with system.open(f"{tmp_path}/lines", "w") as file:
        file.write("one\ntwo\n")
    with system.open(f"{tmp_path}/lines", "r") as file:
        assert file.readlines() == ["one\n", "two\n"]


def test_a_file_whose_writer_fails_does_not_appear(tmp_path: Path, system: FolderFileSystem) -> None:
    system.pipe(f"{tmp_path}/file", b"old")
    with pytest.raises(KeyError), system.open(f"{tmp_path}/file", "wb") as file:
        file.write(bytes(9 * MIB))
        raise KeyError
    assert system.cat(f"{tmp_path}/file") == b"old"
    forgotten = system.open(f"{tmp_path}/other", "wb")
    forgotten.write(b"new")
    with pytest.warns(RuntimeWarning, match="other: not saved"):
        del forgotten
        gc.collect()  # from Python 3.12 on it is in a reference cycle
    assert not system.exists(f"{tmp_path}/other")


@pytest.mark.parametrize("how", [{"mode": "wb"}, {"mode": "wt"}, {"mode": "wb", "compression": "gzip"}], ids=str)
@pytest.mark.parametrize("by", ["open", "file system"])
def test_files_wrapped_for_text_or_compression_are_saved_likewise(
    tmp_path: Path, system: FolderFileSystem, by: str, how: dict[str, str]
) -> None:
    path = f"{tmp_path}/file"
    data: Any = "text" if how["mode"] == "wt" else b"data"
    if by == "file system" and "compression" in how:
        with pytest.raises(ValueError, match=r"file: open a file that is compressed with fsspec\.open"):
            system.open(path, **how)
        return

    def opened_file(mode: str) -> Any:
        options = {**how, "mode": mode}
        return (
            system.open(path, **options) if by == "file system" else fsspec.open(f"bootseer+file://{path}", **options)
        )

    with pytest.raises(KeyError), opened_file(how["mode"]) as file:
        file.write(data)
        raise KeyError
    assert not system.exists(path)
    try:
        raise ValueError
    except ValueError:  # saving in an error handler is not a failed save
        with opened_file(how["mode"]) as file:
            file.write(data)
    with opened_file(how["mode"].replace("w", "r")) as file:
        assert file.read() == data


def test_the_end_of_an_iteration_is_not_an_error(tmp_path: Path, system: FolderFileSystem) -> None:
    file = system.open(f"{tmp_path}/file", "wb")
    pieces = iter([b"one", b"two"])
    try:
        while True:
            file.write(next(pieces))
    except StopIteration:
        file.close()
    assert system.cat(f"{tmp_path}/file") == b"onetwo"


def test_files_of_a_transaction_appear_at_its_end(tmp_path: Path, system: FolderFileSystem) -> None:
    with system.transaction:
        with system.open(f"{tmp_path}/file", "wb") as file:
            file.write(b"data")
        assert not system.exists(f"{tmp_path}/file")
    assert system.cat(f"{tmp_path}/file") == b"data"
    with pytest.raises(KeyError), system.transaction:
        with system.open(f"{tmp_path}/other", "wb") as file:
            file.write(b"data")
        raise KeyError
    assert not system.exists(f"{tmp_path}/other")


def test_exclusive_creation_refuses_an_existing_file(tmp_path: Path, system: FolderFileSystem) -> None:
    with system.open(f"{tmp_path}/file", "xb") as file:
        file.write(b"1")
    with pytest.raises(FileExistsError):
        system.open(f"{tmp_path}/file", "xb")


def test_appending_is_refused_clearly(tmp_path: Path, system: FolderFileSystem) -> None:
    with pytest.raises(OSError, match="whole") as caught:
        system.open(f"{tmp_path}/file", "ab")
    assert caught.value.errno == errno.EOPNOTSUPP


def test_folders_are_listed_without_hidden_files(tmp_path: Path, system: FolderFileSystem) -> None:
    put(tmp_path / "a" / "small", b"12")
    with system.open(f"{tmp_path}/a/large", "wb") as file:
        file.write(bytes(20 * MIB))
    part = next((tmp_path / "a" / ".stripes").glob("*/*"))
    with pytest.raises(FileNotFoundError):
        system.open(str(part))
    assert [(one["name"], one["size"]) for one in system.ls(f"{tmp_path}/a")] == [
        (f"{tmp_path}/a/large", 20 * MIB),
        (f"{tmp_path}/a/small", 2),
    ]
    assert system.ls(f"{tmp_path}/a/small", detail=False) == [f"{tmp_path}/a/small"]
    assert system.find(str(tmp_path)) == [f"{tmp_path}/a/large", f"{tmp_path}/a/small"]
    assert system.glob(f"{tmp_path}/*/s*") == [f"{tmp_path}/a/small"]
    assert system.du(str(tmp_path)) == 20 * MIB + 2
    assert (system.isdir(f"{tmp_path}/a"), system.isfile(f"{tmp_path}/a")) == (True, False)


def test_errors_are_the_standard_ones(tmp_path: Path, system: FolderFileSystem) -> None:
    put(tmp_path / "file", b"")
    (tmp_path / "full" / "inner").mkdir(parents=True)
    for name in ("none", "file/below"):
        assert not system.exists(f"{tmp_path}/{name}")
    for call in (system.info, system.ls, system.open, system.rm_file, system.cat_file):
        with pytest.raises(FileNotFoundError):
            call(f"{tmp_path}/none")
    with pytest.raises(NotADirectoryError):
        system.info(f"{tmp_path}/file/below")
    with pytest.raises(IsADirectoryError):
        system.open(f"{tmp_path}/full")
    with pytest.raises(IsADirectoryError):
        system.rm(f"{tmp_path}/full")
    with pytest.raises(OSError, match="full") as caught:
        system.rmdir(f"{tmp_path}/full")
    assert caught.value.errno == errno.ENOTEMPTY
    with pytest.raises(FileExistsError):
        system.mkdir(f"{tmp_path}/full")
    with pytest.raises(FileExistsError):
        system.makedirs(f"{tmp_path}/full")


def test_files_are_renamed_and_removed(tmp_path: Path, system: FolderFileSystem) -> None:
    system.makedirs(f"{tmp_path}/a/b", exist_ok=True)
    system.makedirs(f"{tmp_path}/a/b", exist_ok=True)
    system.mkdir(f"{tmp_path}/c")
    data = os.urandom(20 * MIB)
    system.pipe(f"{tmp_path}/a/large", data)
    system.mv(f"{tmp_path}/a/large", f"{tmp_path}/a/renamed")
    system.mv(f"{tmp_path}/a/renamed", f"{tmp_path}/c/moved")  # striped files are moved to other folders by copying
    assert system.find(str(tmp_path)) == [f"{tmp_path}/c/moved"]
    assert system.cat(f"{tmp_path}/c/moved") == data
    system.copy(f"{tmp_path}/c/moved", f"{tmp_path}/c/copy")
    assert system.cat(f"{tmp_path}/c/copy") == data
    system.rm(f"{tmp_path}/c/mo*")
    assert system.ls(f"{tmp_path}/c", detail=False) == [f"{tmp_path}/c/copy"]
    system.rm(f"{tmp_path}/c", recursive=True)
    system.rmdir(f"{tmp_path}/a/b")
    assert system.ls(str(tmp_path), detail=False) == [f"{tmp_path}/a"]


def test_a_new_file_creates_its_folder(tmp_path: Path, system: FolderFileSystem) -> None:
    system.pipe(f"{tmp_path}/new/folder/file", b"data")
    system.copy(f"{tmp_path}/new/folder/file", f"{tmp_path}/other/copy")
    assert system.cat(f"{tmp_path}/other/copy") == b"data"


def test_a_file_is_moved_into_a_folder(tmp_path: Path, system: FolderFileSystem) -> None:
    system.pipe({f"{tmp_path}/file": b"data", f"{tmp_path}/folder/other": b""})
    system.mv(f"{tmp_path}/file", f"{tmp_path}/folder/")
    assert system.find(str(tmp_path)) == [f"{tmp_path}/folder/file", f"{tmp_path}/folder/other"]


def test_links_are_followed_but_their_targets_are_not_removed(tmp_path: Path, system: FolderFileSystem) -> None:
    put(tmp_path / "real" / "file", b"data")
    (tmp_path / "link").symlink_to("real")
    assert system.cat(f"{tmp_path}/link/file") == b"data"
    assert system.ls(f"{tmp_path}/link", detail=False) == [f"{tmp_path}/link/file"]
    with pytest.raises(OSError, match="link"):
        system.rm(f"{tmp_path}/link", recursive=True)
    assert (tmp_path / "real" / "file").exists()


def test_times_and_versions_change_with_the_content(tmp_path: Path, system: FolderFileSystem) -> None:
    begin = datetime.now(UTC).timestamp()
    system.pipe(f"{tmp_path}/file", b"1")
    first = system.ukey(f"{tmp_path}/file")
    assert begin - 2 < system.modified(f"{tmp_path}/file").timestamp() < begin + 60
    assert system.created(f"{tmp_path}/file") == system.modified(f"{tmp_path}/file")
    assert system.ukey(f"{tmp_path}/file") == first
    system.pipe(f"{tmp_path}/file", b"2")
    assert system.ukey(f"{tmp_path}/file") != first


def test_parts_of_files_are_read(tmp_path: Path, system: FolderFileSystem) -> None:
    path = put(tmp_path / "file", b"0123456789")
    assert system.cat_file(path, 2, 5) == b"234"
    assert system.cat_file(path, -3) == b"789"
    assert system.cat_file(path, 8, 100) == b"89"
    assert system.cat_file(path, 7, 3) == b""
    assert system.head(path, 4) == b"0123"
    assert system.cat_ranges([path, path], [1, -2], [3, None]) == [b"12", b"89"]


def test_a_file_system_and_a_child_process_work_after_pickling(tmp_path: Path, system: FolderFileSystem) -> None:
    path = put(tmp_path / "file", b"data")
    assert system.cat(path) == b"data"
    assert pickle.loads(pickle.dumps(system)).cat(path) == b"data"  # noqa: S301 - written by this test
    code = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).cat(sys.argv[2]).decode())"
    done = subprocess.run(
        [sys.executable, "-c", code, pickle.dumps(system).hex(), path], capture_output=True, timeout=300, check=False
    )
    assert done.stdout == b"data\n", done.stderr.decode()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_reads_and_writes(tmp_path: Path, system: FolderFileSystem) -> None:
    data = os.urandom(20 * MIB)
    system.pipe(f"{tmp_path}/large", data)
    assert system.cat(f"{tmp_path}/large") == data
    child = os.fork()
    if not child:
        is_right = False
        try:
            signal.alarm(60)  # a child that waits for its parent's threads would wait forever
            is_right = system.cat(f"{tmp_path}/large") == data
            system.pipe(f"{tmp_path}/other", data)
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert system.cat(f"{tmp_path}/other") == data
    assert system.cat(f"{tmp_path}/large") == data


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_pytorch_saves_and_loads_through_fsspec(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    state = {"w": torch.randn(3000, 1000), "step": 3}
    uri = f"bootseer+file://{tmp_path}"
    with fsspec.open(f"{uri}/state.pt", "wb") as file:
        torch.save(state, file)
    with fsspec.open(f"{uri}/state.pt", "rb") as file:
        assert torch.equal(torch.load(file)["w"], state["w"])
    dcp.save(state, storage_writer=FsspecWriter(f"{uri}/dcp"))
    target = {"w": torch.zeros(3000, 1000), "step": 0}
    dcp.load(target, storage_reader=FsspecReader(f"{uri}/dcp"))
    assert torch.equal(target["w"], state["w"])
    assert target["step"] == 3

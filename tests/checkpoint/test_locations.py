"""Resolving locations to file systems, which a process opens once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from bootseer.checkpoint.locations import is_uri, resolve, resolve_below, split
from bootseer.errors import CorruptError, NotFoundError, PermanentError, UsageError
from bootseer.places import open_place
from bootseer.store.open import open_store
from checkpoint_process import close_all, own_file_systems

__all__ = ["own_file_systems"]


@pytest.mark.parametrize(
    ("uri", "root", "path"),
    [
        ("hdfs://node:8020/a/b", "hdfs://node:8020/", "a/b"),
        ("hdfs://node", "hdfs://node/", ""),
        ("hdfs://node/a#b?c%20d", "hdfs://node/", "a#b?c%20d"),
        ("file:///a b=%3D/c", "file:///", "/a b=%3D/c"),
        ("/a b/c", "file:///", "/a b/c"),
    ],
)
def test_addresses_have_a_root_and_a_path(uri: str, root: str, path: str) -> None:
    assert split(uri) == (root, path)
    assert is_uri(uri)


def test_an_address_in_a_mount_table_is_resolved_to_its_links_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, value = "fs.viewfs.mounttable.all.link./jobs", "hdfs://node:9000/teams/jobs"
    text = f"<configuration><property><name>{name}</name><value>{value}</value></property></configuration>"
    (tmp_path / "core-site.xml").write_text(text)
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    assert split("viewfs://all/jobs/moe/step-1") == ("hdfs://node:9000/", "teams/jobs/moe/step-1")
    assert not is_uri("viewfs://all/models/a")


@pytest.mark.parametrize("uri", ["ftp://bucket/a", "file://host/a", "http://host/a"])
def test_other_addresses_are_refused(uri: str) -> None:
    with pytest.raises(UsageError, match="not a location for checkpoints"):
        split(uri)
    assert not is_uri(uri)


@pytest.mark.parametrize("uri", ["s3a://KEY:SECRET@bucket/a", "s3:/KEY:SECRET@bucket/a"])
def test_errors_do_not_contain_a_password(uri: str) -> None:
    with pytest.raises(UsageError) as raised:
        resolve(uri)
    assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize("uri", ["hdfs://nn:8020/jobs/step-1", "S3://bucket/step-1", "viewfs:///a", "file:///a"])
def test_an_address_converted_to_a_path_is_not_taken_for_a_local_folder(uri: str) -> None:
    path = Path(uri)  # which removes one of the two slashes
    for refuse in (resolve, split, open_place, open_store):
        with pytest.raises(UsageError, match="// is missing"):
            refuse(os.fspath(path))
    assert split(f"./{path}")[0] == "file:///"


def test_locations_are_named_like_users_do(tmp_path: Path) -> None:
    folder = tmp_path / "a b%3D"
    folder.mkdir()
    (folder / "file").write_bytes(b"data")
    found = resolve(folder)
    assert found.at("file").uri == f"file://{tmp_path}/a b%3D/file"
    assert resolve(found.at("file").uri).read_bytes("", 100) == b"data"
    assert found.read_bytes("file", 4) == b"data"
    assert open_place(found.at("").uri).read_bytes("file", 4) == b"data"
    with pytest.raises(PermanentError, match="4 bytes are more than the 3 expected"):
        found.read_bytes("file", 3)


def test_relative_paths_and_links_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    assert resolve("link") == resolve(tmp_path / "real") == resolve("real/../real")


def test_a_path_through_a_loop_of_links_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for location in (resolve(tmp_path / "loop/x"), resolve_below("file:///", f"{tmp_path}/loop/x/y", follow=False)):
        with pytest.raises(NotFoundError):
            location.read_bytes("", 1)


def test_a_file_system_is_opened_once_until_all_are_closed(tmp_path: Path) -> None:
    system = resolve(tmp_path / "a").system
    assert resolve(tmp_path / "b").system is system
    close_all()
    assert resolve(tmp_path / "a").system is not system


def test_latest_resolves_to_the_name_in_the_file_or_to_itself(tmp_path: Path) -> None:
    assert resolve(tmp_path / "step-1").latest() == resolve(tmp_path / "step-1")
    assert resolve(tmp_path / "latest").latest() == resolve(tmp_path / "latest")
    (tmp_path / "latest").write_text("step-7\n")
    assert resolve(tmp_path / "latest").latest() == resolve(tmp_path / "step-7")
    assert resolve(tmp_path / "latest" / "a" / "b").latest() == resolve(tmp_path / "step-7" / "a" / "b")
    (tmp_path / "latest").write_text("../../etc\n")
    assert resolve(tmp_path / "latest" / "a").latest() == resolve(tmp_path / "latest" / "a")
    with pytest.raises(CorruptError, match="latest"):
        resolve(tmp_path / "latest").latest()


def test_a_folder_named_latest_is_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    assert resolve(tmp_path / "latest").latest() == resolve(tmp_path / "latest")


def test_the_nodes_cache_is_used_unless_it_is_switched_off(
    tmp_path: Path, own_file_systems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOTSEER_CHECKPOINT_CACHE", "0")
    resolve(tmp_path)
    assert not list(own_file_systems.iterdir())
    close_all()
    monkeypatch.delenv("BOOTSEER_CHECKPOINT_CACHE")
    resolve(tmp_path)
    assert [path.name for path in own_file_systems.iterdir()] == ["blocks"]


def test_reading_works_without_a_usable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"data")
    monkeypatch.setenv("BOOTSEER_CACHE", str(tmp_path / "file" / "below"))
    assert resolve(tmp_path).read_bytes("file", 10) == b"data"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_opens_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    system = resolve(tmp_path).system
    assert resolve(tmp_path).read_bytes("file", 10) == b"data"
    child = os.fork()
    if not child:
        is_right = False
        try:
            signal.alarm(60)
            own = resolve(tmp_path)
            is_right = own.system is not system and own.read_bytes("file", 10) == b"data"
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert resolve(tmp_path).system is system

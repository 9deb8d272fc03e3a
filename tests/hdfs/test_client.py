"""The client's operations on names and folders, and its addresses, with a real cluster."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from bootseer.errors import NotFolderError, NotFoundError, PermanentError, TransientError, UsageError
from hdfs_cluster import HdfsCluster, needs_hdfs
from registry import free_port

pytest.importorskip("hdfs_native", reason="extra hdfs")

import hadoop
from bootseer.hdfs.addresses import ClientSettings
from bootseer.hdfs.client import HdfsClient
from bootseer.hdfs.errors import AlreadyExistsError
from bootseer.hdfs.rpc import UnreachableError
from hdfs.whole_files import put_over, read_all

pytestmark = needs_hdfs
DATA = random.Random(5).randbytes(3_000_001)


def test_a_small_file_is_put_and_read(client: HdfsClient, folder: str) -> None:
    for size in (0, 1, 511, 512, 100_001, 3_000_001):
        client.put(f"{folder}/{size}", DATA[:size], mode=0o640)
        found = client.stat(f"{folder}/{size}")
        assert (found.size_bytes, found.mode, found.is_folder) == (size, 0o640, False)
        assert read_all(client, f"{folder}/{size}") == DATA[:size]


def test_an_existing_name_is_refused(client: HdfsClient, folder: str) -> None:
    client.put(f"{folder}/a", b"first")
    with pytest.raises(AlreadyExistsError):
        client.put(f"{folder}/a", b"second")
    assert read_all(client, f"{folder}/a") == b"first"


def test_a_file_that_is_put_may_be_larger_than_its_blocks(client: HdfsClient, folder: str) -> None:
    client.put(f"{folder}/a", DATA, block_size=1 << 20)
    assert client.stat(f"{folder}/a").block_size == 1 << 20
    assert read_all(client, f"{folder}/a") == DATA


def test_the_block_size_of_a_small_file_is_kept_exactly(client: HdfsClient, folder: str) -> None:
    client.put(f"{folder}/a", b"x", block_size=8_389_120)
    assert client.stat(f"{folder}/a").block_size == 8_389_120


def test_a_file_that_is_removed_while_it_is_written_is_an_error_that_says_so(client: HdfsClient, folder: str) -> None:
    ordinary = client.create(f"{folder}/job/ordinary")
    part, unused = client.create_placed([f"{folder}/job/{name}" for name in ("part", "unused")], block_size=1 << 20)
    ordinary.write(b"x")
    part.write(b"x")
    client.delete(f"{folder}/job", recursive=True)
    for write in (ordinary.close, part.close, lambda: unused.write(b"x")):
        with pytest.raises(NotFoundError, match=r"/job/.* does not exist: it was removed while it was written"):
            write()
    for writer in (ordinary, part, unused):
        writer.abort()
    assert list(client.list(folder)) == []


def test_folders_are_made_listed_and_removed(client: HdfsClient, folder: str) -> None:
    with pytest.raises(NotFoundError):
        client.make_folder(f"{folder}/a/b")
    client.make_folder(f"{folder}/a/b", parents=True)
    client.make_folder(f"{folder}/a/b", parents=True)
    with pytest.raises(AlreadyExistsError):
        client.make_folder(f"{folder}/a/b")
    client.put(f"{folder}/a/file", DATA[:5])
    assert sorted((entry.path, entry.is_folder) for entry in client.list(f"{folder}/a")) == [
        (f"{folder}/a/b", True),
        (f"{folder}/a/file", False),
    ]
    with pytest.raises(PermanentError):
        client.delete(f"{folder}/a")
    client.delete(f"{folder}/a", recursive=True)
    with pytest.raises(NotFoundError):
        client.delete(f"{folder}/a")
    with pytest.raises(NotFoundError):
        list(client.list(f"{folder}/a"))


def test_renaming_replaces_files_and_empty_folders_and_nothing_else(client: HdfsClient, folder: str) -> None:
    for name in ("a", "b", "full/file"):
        client.put(f"{folder}/{name}", name.encode())
    client.make_folder(f"{folder}/empty")
    client.make_folder(f"{folder}/other")
    with pytest.raises(AlreadyExistsError):
        client.rename(f"{folder}/a", f"{folder}/b")
    client.rename(f"{folder}/a", f"{folder}/b", overwrite=True)
    assert read_all(client, f"{folder}/b") == b"a"
    client.rename(f"{folder}/empty", f"{folder}/other", overwrite=True)
    for source, target in (("b", "full"), ("other", "b"), ("other", "full"), ("full", "full/below")):
        with pytest.raises(PermanentError):
            client.rename(f"{folder}/{source}", f"{folder}/{target}", overwrite=True)
    for source, target in (("gone", "x"), ("b", "gone/x")):
        with pytest.raises(NotFoundError):
            client.rename(f"{folder}/{source}", f"{folder}/{target}")


def test_permissions_owners_and_times_are_set(client: HdfsClient, folder: str) -> None:
    path = f"{folder}/a"
    client.put(path, b"x")
    client.set_permission(path, 0o600)
    client.set_owner(path, "somebody", None)
    group = client.stat(path).group
    client.set_owner(path, None, "others")
    client.set_mtime(path, 6_000)
    found = client.stat(path)
    assert (found.mode, found.owner, found.group) == (0o600, "somebody", "others")
    assert found.mtime_ms == 6_000
    assert group != "others"


@pytest.mark.parametrize("name", ["x" * 300, "a:b"])
def test_names_that_hdfs_refuses_are_permanent_errors(client: HdfsClient, folder: str, name: str) -> None:
    with pytest.raises(PermanentError):
        client.create(f"{folder}/{name}")
    with pytest.raises(PermanentError):
        client.put(f"{folder}/{name}", b"x")


def test_a_file_is_not_used_as_a_folder(client: HdfsClient, folder: str) -> None:
    client.put(f"{folder}/a", b"x")
    for attempt in (
        lambda: client.put(f"{folder}/a/b", b"x"),
        lambda: client.create(f"{folder}/a/b"),
        lambda: client.make_folder(f"{folder}/a", parents=True),
        lambda: client.make_folder(f"{folder}/a/b", parents=True),
    ):
        with pytest.raises((NotFolderError, AlreadyExistsError)):
            attempt()


def test_the_space_of_the_datanodes_is_reported(client: HdfsClient) -> None:
    total, free = client.space()
    assert total > free > 0


def test_many_threads_use_one_client(client: HdfsClient, folder: str) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            path = f"{folder}/{number}"
            client.put(path, DATA[:number])
            client.rename(path, f"{path}-renamed")
            assert read_all(client, f"{path}-renamed") == DATA[:number]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert len(list(client.list(folder))) == 12


def test_the_child_of_a_fork_uses_the_client_of_its_parent(client: HdfsClient, folder: str) -> None:
    client.put(f"{folder}/a", DATA)
    assert read_all(client, f"{folder}/a") == DATA
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            client.put(f"{folder}/b", DATA[:1000])
            client.create(f"{folder}/c").abort()
            code = 0 if read_all(client, f"{folder}/a") == DATA else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert read_all(client, f"{folder}/b") == DATA[:1000]


def test_requests_to_a_hung_namenode_end_with_their_deadline(cluster: HdfsCluster) -> None:
    with closing(HdfsClient(cluster.uri.removeprefix("hdfs://"), ClientSettings(call_s=0.5))) as client:
        client.stat("/")
        cluster.hang_namenode()
        try:
            with pytest.raises(TransientError, match="no NameNode answers"):
                client.stat("/")
        finally:
            cluster.resume_namenode()
        client.stat("/")


def test_a_missing_namenode_is_a_transient_error() -> None:
    nobody = HdfsClient(f"127.0.0.1:{free_port()}", ClientSettings(call_s=0.5))
    with closing(nobody), pytest.raises(TransientError):
        nobody.stat("/")


def test_ports_of_other_servers_are_reported_as_such(cluster: HdfsCluster) -> None:
    for address in (cluster.nodes[0], cluster.datanode_rpc[0], cluster.datanode_http[0], cluster.namenode_http):
        with closing(HdfsClient(address)) as client, pytest.raises(UnreachableError, match=f"is there: {address} "):
            client.stat("/")


@pytest.mark.parametrize("authority", ["", "user@host", "host/dir"])
def test_invalid_addresses_are_refused(authority: str) -> None:
    with pytest.raises(UsageError):
        HdfsClient(authority)


def _conf(folder: Path, hdfs: Mapping[str, str], core: Mapping[str, str] | None = None) -> str:
    hadoop.write_conf(folder, {"core-site.xml": dict(core or {}), "hdfs-site.xml": dict(hdfs)})
    return str(folder)


def test_a_service_of_two_namenodes_works_if_one_is_missing(
    cluster: HdfsCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = {"gone": f"127.0.0.1:{free_port()}", "here": cluster.uri.removeprefix("hdfs://")}
    settings = {
        "dfs.nameservices": "checkpoints",
        "dfs.ha.namenodes.checkpoints": "gone,here",
        **{f"dfs.namenode.rpc-address.checkpoints.{name}": address for name, address in addresses.items()},
    }
    conf_dir = _conf(tmp_path / "conf", settings)
    monkeypatch.setenv("HADOOP_CONF_DIR", conf_dir)
    for given in (ClientSettings(), ClientSettings(conf_dir=conf_dir)):
        with closing(HdfsClient("checkpoints", given)) as client:
            put_over(client, "/service/a", DATA)
            assert client.stat("/service/a").size_bytes == len(DATA)
            assert read_all(client, "/service/a") == DATA
            assert client.reads().facts()["fallback"] == ""
        monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)


def test_an_unknown_service_is_a_usage_error(tmp_path: Path) -> None:
    conf_dir = _conf(tmp_path / "conf", {"dfs.nameservices": "checkpoints"})
    with pytest.raises(UsageError):
        HdfsClient("checkpoints", ClientSettings(conf_dir=conf_dir))

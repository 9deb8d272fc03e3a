"""The store in HDFS, against a real cluster."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import hdfs_plain
from bootseer.errors import CorruptError, NoSpaceError, NotFoundError, PermanentError, TransientError, UsageError
from bootseer.hdfs.client import HdfsClient
from bootseer.places import open_place
from bootseer.store.file import PlaceStore
from bootseer.store.store import Store
from hdfs_cluster import HdfsCluster, needs_hdfs
from registry import free_port
from store.contract import DATA, SharedStoreContract, get, put, sha256

hdfs_native = pytest.importorskip("hdfs_native", reason="extra hdfs")

pytestmark = needs_hdfs
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(shared_hdfs: HdfsCluster) -> HdfsCluster:
    return shared_hdfs


@pytest.fixture
def uri(cluster: HdfsCluster) -> str:
    return f"{cluster.uri}/stores/{next(_numbers)}/store"


class Outside:
    """A separate client, which reads files instead of objects."""

    def __init__(self, uri: str) -> None:
        server, _, path = uri.removeprefix("hdfs://").partition("/")
        self.client, self.root = hdfs_native.Client(f"hdfs://{server}"), f"/{path}"

    def get(self, name: str) -> bytes | None:
        path = f"sha256/{name[7:9]}/{name[7:]}" if name.startswith("sha256:") else name
        try:
            return self.client.read(f"{self.root}/{path}").read()
        except FileNotFoundError:
            return None

    def unfinished(self) -> list[str]:
        try:
            return [entry.path for entry in self.client.list_status(f"{self.root}/.uploads")]
        except FileNotFoundError:
            return []


def put_twice(cluster: HdfsCluster, uri: str) -> tuple[str, list[int]]:
    """Create an object with two replicas. Returns its name, and the numbers of the DataNodes with a replica."""
    name = sha256(DATA)
    path = f"{Outside(uri).root}/sha256/{name[7:9]}/{name[7:]}"
    with closing(HdfsClient(cluster.uri.removeprefix("hdfs://"))) as client:
        client.make_folder(path.rpartition("/")[0], parents=True)
        client.put(path, DATA, replication=2)
    (block,) = cluster.where(path, replicas=2)
    return name, [cluster.nodes.index(node) for node in block.nodes]


class TestHdfsStore(SharedStoreContract):
    @pytest.fixture
    def store(self, uri: str) -> Iterator[Store]:
        with closing(PlaceStore(open_place(uri))) as opened:
            yield opened

    @pytest.fixture
    def outside(self, uri: str) -> Outside:
        return Outside(uri)


def test_an_object_may_have_many_blocks(cluster: HdfsCluster, uri: str) -> None:
    outside = Outside(uri)
    data = os.urandom(1024 * 1024) * 5
    with closing(PlaceStore(open_place(uri))) as store:
        name = put(store, data).name
        path = f"{outside.root}/sha256/{name[7:9]}/{name[7:]}"
        hdfs_plain.write(cluster.uri, path, data, block_size=1024 * 1024)
        assert get(store, name, 1024 * 1024 - 10, 3 * 1024 * 1024) == data[1024 * 1024 - 10 : 4 * 1024 * 1024 - 10]


def test_many_reads_with_a_hung_datanode_are_late_once_and_not_each(cluster: HdfsCluster, uri: str) -> None:
    with closing(PlaceStore(open_place(uri))) as store:
        name, nodes = put_twice(cluster, uri)
        cluster.hang(nodes[0])
        try:
            # Each read may try the hung replica first. All together have less time than if each waited a second for
            # it, let alone 60 s like other clients.
            until = time.monotonic() + 300
            for _ in range(100):
                assert b"".join(store.read(name, timeout_s=until - time.monotonic())) == DATA
        finally:
            cluster.resume(nodes[0])
        facts = store.place.facts()
        assert facts["fallback"] == ""


def test_a_read_from_hung_datanodes_ends_with_its_deadline(cluster: HdfsCluster, uri: str) -> None:
    with closing(PlaceStore(open_place(uri))) as store:
        name, nodes = put_twice(cluster, uri)
        for number in nodes:
            cluster.hang(number)
        try:
            with pytest.raises(TransientError):
                list(store.read(name, timeout_s=0.5))
        finally:
            for number in nodes:
                cluster.resume(number)
        assert get(store, name) == DATA


def test_a_read_from_a_hung_namenode_ends_with_its_deadline(cluster: HdfsCluster, uri: str) -> None:
    with closing(PlaceStore(open_place(uri))) as store:
        name = put(store, DATA).name
        cluster.hang_namenode()
        try:
            with pytest.raises(TransientError):
                list(store.read(name, timeout_s=0.5))
        finally:
            cluster.resume_namenode()
        assert get(store, name) == DATA


def test_a_namenode_that_does_not_exist_is_transient() -> None:
    refused = pytest.raises(TransientError, match=r"hdfs://127\.0\.0\.1:\d+/x/name: .*refused")
    with closing(PlaceStore(open_place(f"hdfs://127.0.0.1:{free_port()}/x"))) as store, refused:
        store.stat("name")


def test_damaged_bytes_are_never_handed_out(cluster: HdfsCluster, uri: str) -> None:
    with closing(PlaceStore(open_place(uri))) as store:
        before = set(cluster.blocks())
        name, _ = put_twice(cluster, uri)
        replicas = set(cluster.blocks()) - before
        assert len(replicas) == 2
        for replica in replicas:
            data = bytearray(replica.read_bytes())
            data[1000] ^= 0xFF
            replica.write_bytes(data)
        with pytest.raises(CorruptError):
            get(store, name)


def test_small_objects_fit_into_a_quota_that_is_nearly_reached(cluster: HdfsCluster, uri: str) -> None:
    """While a block is written, HDFS counts all of it, usually 128 MiB."""
    outside = Outside(uri)
    with closing(PlaceStore(open_place(uri))) as store:
        put(store, DATA, "a/before")
        cluster.ask("setQuota", outside.root, (1 << 63) - 1, 4 << 20)
        with pytest.raises(NoSpaceError, match="quota"):
            put(store, DATA * 2)
        assert store.create("a/lease", b"x")
        put(store, b"y", "a/tombstone")
        assert [get(store, f"a/{name}") for name in ("before", "lease", "tombstone")] == [DATA, b"x", b"y"]
    assert outside.unfinished() == []


def test_an_object_cannot_be_the_folder_of_another(cluster: HdfsCluster, uri: str) -> None:
    with closing(PlaceStore(open_place(uri))) as store:
        put(store, b"x", "a")
        with pytest.raises(PermanentError, match="cannot be the folder of another"):
            put(store, b"x", "a/b")
        put(store, b"x", "c/d")
        with pytest.raises(PermanentError, match="cannot be the folder of another"):
            put(store, b"x", "c")
        for name in ("c", "a/b"):
            with pytest.raises(NotFoundError):
                get(store, name)
            with pytest.raises(NotFoundError):
                store.stat(name)
            store.delete(name)
        assert get(store, "c/d") == b"x"
    assert Outside(uri).unfinished() == []


def test_an_object_is_not_created_where_others_have_their_folder(cluster: HdfsCluster, uri: str) -> None:
    with closing(PlaceStore(open_place(uri))) as store:
        assert store.create("c/d", b"x")
        for name in ("c", "c/d/e"):
            with pytest.raises(PermanentError, match="cannot be the folder of another"):
                store.create(name, b"y")
        assert not store.create("c/d", b"y")
    assert Outside(uri).unfinished() == []


def test_creating_in_a_hung_cluster_ends_with_its_deadline(cluster: HdfsCluster, uri: str) -> None:
    with closing(PlaceStore(open_place(uri))) as store:
        put(store, DATA)
        cluster.hang_namenode()
        try:
            with pytest.raises(TransientError, match="no complete answer"):
                store.create("a/name", b"x", timeout_s=0.5)
        finally:
            cluster.resume_namenode()
        store.create("a/other", b"x")


def test_the_rest_of_a_killed_writer_is_removed_after_a_day(cluster: HdfsCluster, uri: str) -> None:
    outside = Outside(uri)
    with closing(PlaceStore(open_place(uri))) as store:
        put(store, b"x", "name")
    old, new = "0" * 32, "1" * 32
    for name in (old, new):
        with outside.client.create(f"{outside.root}/.uploads/{name}") as file:
            file.write(b"rest")
    outside.client.set_times(f"{outside.root}/.uploads/{old}", 1, 1)
    with closing(PlaceStore(open_place(uri))) as store:
        put(store, b"y", "name")
    assert [Path(path).name for path in outside.unfinished()] == [new]


@pytest.mark.parametrize("uri", ["hdfs://", "hdfs:///dir", "hdfs://host/a/../b"])
def test_invalid_addresses_are_refused(uri: str) -> None:
    with pytest.raises(UsageError):
        PlaceStore(open_place(uri))

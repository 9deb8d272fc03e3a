"""Files that are being written, as the NameNode sees them, against a real cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from bootseer.errors import NotFoundError, PermanentError, TransientError
from hdfs_cluster import HdfsCluster, needs_hdfs

pytest.importorskip("hdfs_native", reason="extra hdfs")

from bootseer.hdfs.addresses import Cluster
from bootseer.hdfs.answers import TakenError
from bootseer.hdfs.client import HdfsClient
from bootseer.hdfs.lease import Lease, NoNodesError, ask_defaults
from bootseer.hdfs.namenode import NameNode

pytestmark = needs_hdfs


@pytest.fixture
def namenode(cluster: HdfsCluster) -> Iterator[NameNode]:
    with closing(NameNode(Cluster.of(cluster.uri.removeprefix("hdfs://")))) as opened:
        yield opened


def begin(namenode: NameNode, path: str, *, mode: int = 0o640, overwrite: bool = False) -> Lease:
    return Lease(namenode, path, block_size=4 << 20, replication=1, mode=mode, overwrite=overwrite)


def test_the_cluster_says_how_files_are_to_be(namenode: NameNode) -> None:
    defaults = ask_defaults(namenode)
    assert (defaults.replication, defaults.chunk_bytes, defaults.block_size) == (1, 512, 128 << 20)


def test_a_file_without_blocks_is_empty(namenode: NameNode, client: HdfsClient, folder: str) -> None:
    lease = begin(namenode, f"{folder}/deep/a")
    lease.complete(None, 0, 10)
    found = client.stat(f"{folder}/deep/a")
    assert (found.size_bytes, found.mode, found.block_size) == (0, 0o640, 4 << 20)


def test_a_name_has_one_writer(namenode: NameNode, client: HdfsClient, folder: str) -> None:
    first = begin(namenode, f"{folder}/a")
    with pytest.raises(TakenError):
        begin(namenode, f"{folder}/a")
    second = begin(namenode, f"{folder}/a", overwrite=True)
    with pytest.raises((NotFoundError, TransientError)):
        first.complete(None, 0, 10)
    second.complete(None, 0, 10)
    with pytest.raises(PermanentError):
        begin(namenode, f"{folder}/a/b")


def test_an_answer_that_was_lost_on_the_way_does_not_take_the_name_from_its_writer(
    namenode: NameNode, client: HdfsClient, folder: str
) -> None:
    class AskedTwice(NameNode):
        def ask(self, method: str, request: bytes, path: str, timeout_s: float | None) -> bytes:
            super().ask(method, request, path, timeout_s)
            return super().ask(method, request, path, timeout_s)

    with closing(AskedTwice(namenode.cluster)) as twice:
        lease = begin(twice, f"{folder}/a")
        with pytest.raises(TakenError):
            begin(twice, f"{folder}/a")
        new = lease.add_block([])
        lease.abandon(new.block)
        lease.complete(None, 0, 10)
    assert client.stat(f"{folder}/a").size_bytes == 0


def test_excluded_nodes_get_no_block_and_when_all_are_nobody_does(
    namenode: NameNode, cluster: HdfsCluster, folder: str
) -> None:
    lease = begin(namenode, f"{folder}/a")
    told: list[bytes] = []
    seen: set[str] = set()
    with pytest.raises(NoNodesError):
        for _ in range(len(cluster.nodes) + 1):
            new = lease.add_block(told)
            assert seen.isdisjoint(node.host_port for node in new.block.nodes)
            seen |= {node.host_port for node in new.block.nodes}
            told += new.told
            lease.abandon(new.block)
    assert seen == set(cluster.nodes)


def test_a_block_that_no_node_has_confirmed_does_not_end_the_file(namenode: NameNode, folder: str) -> None:
    lease = begin(namenode, f"{folder}/a")
    new = lease.add_block([])
    with pytest.raises(TransientError, match="no DataNode confirmed"):
        lease.complete(replace(new.block, length=10), 10, 0.2)

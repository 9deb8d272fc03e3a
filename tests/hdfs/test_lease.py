"""The NameNode's side of files that are being written, with a real cluster."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import closing

import pytest
from msgspec.structs import replace

from bootseer.errors import AccessError, BootseerError, NotFoundError, PermanentError, TransientError
from hdfs_cluster import HdfsCluster, needs_hdfs

pytest.importorskip("hdfs_native", reason="extra hdfs")

from bootseer.errors import NoSpaceError, NoSpaceNowError
from bootseer.hdfs.addresses import Cluster
from bootseer.hdfs.client import HdfsClient
from bootseer.hdfs.errors import AlreadyExistsError
from bootseer.hdfs.lease import ExcludedDataNodes, FileSettings, Lease, NoNodesError, ask_defaults
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.protobuf import Message, field
from bootseer.hdfs.rpc import RemoteError
from hdfs.peers import node

pytestmark = needs_hdfs


@pytest.fixture
def namenode(cluster: HdfsCluster) -> Iterator[NameNode]:
    with closing(NameNode(Cluster.of(cluster.uri.removeprefix("hdfs://")))) as opened:
        yield opened


def begin(namenode: NameNode, path: str, *, mode: int = 0o640) -> Lease:
    defaults = ask_defaults(namenode)
    return Lease(namenode, path, FileSettings(4 << 20, 1, mode, True, defaults, ExcludedDataNodes(), 60.0))


def test_the_clusters_defaults_are_read(namenode: NameNode) -> None:
    defaults = ask_defaults(namenode)
    assert (defaults.replication, defaults.chunk_bytes, defaults.block_size) == (1, 512, 128 << 20)


def test_a_file_without_blocks_is_empty(namenode: NameNode, client: HdfsClient, folder: str) -> None:
    lease = begin(namenode, f"{folder}/deep/a")
    lease.complete(None, 0, 10)
    found = client.stat(f"{folder}/deep/a")
    assert (found.size_bytes, found.mode, found.block_size) == (0, 0o640, 4 << 20)


def test_a_name_has_one_writer(namenode: NameNode, client: HdfsClient, folder: str) -> None:
    first = begin(namenode, f"{folder}/a")
    with pytest.raises(AlreadyExistsError):
        begin(namenode, f"{folder}/a")
    client.delete(f"{folder}/a")
    second = begin(namenode, f"{folder}/a")
    with pytest.raises((NotFoundError, TransientError)):
        first.complete(None, 0, 10)
    second.complete(None, 0, 10)
    with pytest.raises(PermanentError):
        begin(namenode, f"{folder}/a/b")


def test_a_lost_answer_does_not_take_the_name_from_its_writer(
    namenode: NameNode, client: HdfsClient, folder: str
) -> None:
    class AskedTwice(NameNode):
        def ask(self, method: str, request: bytes = b"", path: str = "/", timeout_s: float | None = None) -> Message:
            super().ask(method, request, path, timeout_s)
            return super().ask(method, request, path, timeout_s)

    with closing(AskedTwice(namenode.cluster)) as twice:
        lease = begin(twice, f"{folder}/a")
        with pytest.raises(AlreadyExistsError):
            begin(twice, f"{folder}/a")
        new = lease.add_block([])
        lease.abandon(new.block)
        lease.complete(None, 0, 10)
    assert client.stat(f"{folder}/a").size_bytes == 0


def test_excluded_nodes_get_no_block(namenode: NameNode, cluster: HdfsCluster, folder: str) -> None:
    lease = begin(namenode, f"{folder}/a")
    told: list[bytes] = []
    seen: set[str] = set()
    with pytest.raises(NoNodesError):
        for _ in range(len(cluster.nodes) + 1):
            new = lease.add_block(told)
            assert seen.isdisjoint(node.host_port for node in new.block.nodes)
            seen |= {node.host_port for node in new.block.nodes}
            told += new.node_ids
            lease.abandon(new.block)
    assert seen == set(cluster.nodes)


class _Answering(NameNode):
    """A NameNode with some replaced answers or errors, like those of a real one in another state."""

    def __init__(self, cluster: Cluster, answers: dict[str, bytes | Exception]) -> None:
        super().__init__(cluster)
        self._answers = answers

    def ask(self, method: str, request: bytes = b"", path: str = "/", timeout_s: float | None = None) -> Message:
        if method not in self._answers:
            return super().ask(method, request, path, timeout_s)
        answer = self._answers[method]
        if isinstance(answer, Exception):
            raise answer
        return Message(answer)


def test_full_nodes_are_distinguished_from_busy_ones(namenode: NameNode, folder: str) -> None:
    said = (
        "File /a could only be written to 0 of the 1 minReplication nodes. There are 2 datanode(s) running and 2 "
        "node(s) are excluded in this operation."
    )
    refused = TransientError(said)
    refused.__cause__ = RemoteError("java.io.IOException", said)

    def raised(most: int, *, may_ask: bool = True) -> BootseerError:
        nodes = [field(1, node(port)) + field(4, room) for port, room in ((1, most), (2, most // 2)) if most]
        nodes.append(field(1, node(3)) + field(4, 8 << 30) + field(10, 2))  # decommissioned
        report = b"".join(field(1, told) for told in nodes) if may_ask else AccessError("superuser privilege")
        stats = field(1, 1 << 40) + field(2, 0) + field(3, 2 * most)
        with closing(_Answering(namenode.cluster, {"getDatanodeReport": report, "getFsStats": stats})) as full:
            lease = begin(full, f"{folder}/{secrets.token_hex(4)}")
            full._answers["addBlock"] = refused
            with pytest.raises(BootseerError) as caught:
                lease.add_block([])
        return caught.value

    full = raised(3 << 20)
    assert isinstance(full, NoSpaceError)
    assert str(full).endswith("for a block of 4.0 MiB; free: 127.0.0.1:1 3.0 MiB, 127.0.0.1:2 1.5 MiB")
    assert "free: 3.0 MiB on each DataNode" in str(raised(3 << 20, may_ask=False))
    short, busy, none_in_service = raised(8 << 20), raised(8 << 30), raised(0)
    assert isinstance(short, NoSpaceNowError)
    assert isinstance(busy, NoNodesError)
    assert isinstance(none_in_service, NoNodesError)


def test_a_block_that_no_node_has_reported_does_not_end_the_file(namenode: NameNode, folder: str) -> None:
    lease = begin(namenode, f"{folder}/a")
    new = lease.add_block([])
    with pytest.raises(TransientError, match="no DataNode confirmed"):
        lease.complete(replace(new.block, length=10), 10, 1.0)

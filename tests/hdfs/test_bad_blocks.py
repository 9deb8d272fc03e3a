"""Telling the NameNode which replicas have wrong bytes: what is told by a server that listens, and that it helps."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

pytest.importorskip("google_crc32c", reason="extra hdfs")

from bootseer.hdfs.addresses import Cluster
from bootseer.hdfs.bad_blocks import BadBlockReports
from bootseer.hdfs.block_locations import Block, Node
from bootseer.hdfs.client import HdfsClient
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.protobuf import Message
from hdfs.peers import TOKEN, FakeNameNode
from hdfs_cluster import HdfsCluster, needs_hdfs

NODES = tuple(Node(f"10.0.0.{number}:9866", f"node{number}", f"uuid-{number}", 9867) for number in range(3))


class Listening:
    """A NameNode that remembers what it was told, and answers when it may."""

    def __init__(self, peer: FakeNameNode) -> None:
        self.told: list[tuple[int, list[str]]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        peer.answers["reportBadBlocks"] = self._hear
        self._namenode = NameNode(Cluster("job", (("127.0.0.1", peer.port),), {}, False, "me"))
        self.reports = BadBlockReports(self._namenode)

    def _hear(self, request: Message) -> bytes:
        block = request.message(1)
        names = [Message(node).message(1).text(1) for node in block.every(3)]
        self.told.append((block.message(1).number(2), names))
        self.may_answer.wait(120)
        return b""

    def close(self) -> None:
        self.may_answer.set()
        self._namenode.close()


@pytest.fixture
def listening() -> Iterator[Listening]:
    with FakeNameNode() as peer, closing(Listening(peer)) as told:
        yield told


def block(number: int, replicas: int = 3) -> Block:
    return Block(0, 100, "BP-1", number, 7, TOKEN, NODES[:replicas])


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def test_corrupt_replicas_are_reported_once_where_another_may_be_right(listening: Listening) -> None:
    wrong = [NODES[0].host_port, NODES[2].host_port]
    for _ in range(3):
        listening.reports.report(block(1), wrong)
    listening.reports.report(block(2), wrong[:1])
    assert listening.told == [(1, ["10.0.0.0", "10.0.0.2"]), (2, ["10.0.0.0"])]


def test_who_finds_all_replicas_wrong_damns_none_unless_there_is_only_one(listening: Listening) -> None:
    listening.reports.report(block(1), [node.host_port for node in NODES])
    listening.reports.report(block(2, replicas=1), [node.host_port for node in NODES])
    assert listening.told == [(2, ["10.0.0.0"])]


def test_while_a_namenode_hangs_one_thread_waits_for_it(listening: Listening) -> None:
    listening.may_answer.clear()
    waiting = threading.Thread(target=listening.reports.report, args=(block(0), [NODES[0].host_port]))
    waiting.start()
    assert eventually(lambda: len(listening.told) == 1)
    listening.reports.report(block(1), [NODES[0].host_port])
    listening.may_answer.set()
    waiting.join()
    assert len(listening.told) == 1
    listening.reports.report(block(1), [NODES[0].host_port])
    assert len(listening.told) == 2


def test_the_child_of_a_fork_reports_for_itself(listening: Listening) -> None:
    listening.may_answer.clear()
    waiting = threading.Thread(target=listening.reports.report, args=(block(1), [NODES[0].host_port]))
    waiting.start()
    assert eventually(lambda: len(listening.told) == 1)
    pid = os.fork()
    if pid == 0:
        listening.reports.report(block(2), [NODES[0].host_port])
        os._exit(0)
    assert eventually(lambda: len(listening.told) == 2)
    listening.may_answer.set()
    waiting.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class TestOnACluster:
    pytestmark = needs_hdfs

    def test_a_reported_replica_is_replaced(self, cluster: HdfsCluster, client: HdfsClient, folder: str) -> None:
        path = f"{folder}/a"
        client.put(path, b"right" * 1000, replication=2)
        bad = cluster.where(path, replicas=2)[0].nodes[0]
        assert cluster.corrupt(path, datanode=cluster.nodes.index(bad)) == 1
        with closing(NameNode(Cluster.of(cluster.uri.removeprefix("hdfs://")))) as namenode:
            BadBlockReports(namenode).report(namenode.locate(path).blocks[0], [bad])

            def is_replaced() -> bool:
                nodes = cluster.where(path)[0].nodes
                return len(nodes) == 2 and bad not in nodes

            assert eventually(is_replaced, 300.0)

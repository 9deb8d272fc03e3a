"""DataNodes with links: one is slow, or one is cut off."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from hdfs_cluster import HdfsCluster, needs_links

pytest.importorskip("hdfs_native", reason="extra hdfs")

from bootseer.errors import TransientError
from bootseer.hdfs.addresses import Cluster
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.reads import HdfsReads
from hdfs.asking import MIB, Waiting, put, read

pytestmark = needs_links
_PART = random.Random(17).randbytes(8 * MIB)
DATA = b"".join(_PART[at:] + _PART[:at] for at in range(8))  # all blocks differ, and it is created quickly
_CUT_S = 20.0


@pytest.fixture(scope="module")
def linked(linked_hdfs: HdfsCluster) -> HdfsCluster:
    """`/two` has two replicas of 64 MiB."""
    put(linked_hdfs.uri, "/two", DATA, block_size=4 * MIB, replication=2)
    return linked_hdfs


@pytest.fixture
def reads(linked: HdfsCluster) -> Iterator[HdfsReads]:
    namenode = NameNode(Cluster.of(linked.uri.removeprefix("hdfs://")))
    made = HdfsReads(namenode)
    yield made
    made.close()
    namenode.close()


def _sent(reads: HdfsReads) -> dict[str, int]:
    """Bytes by DataNode."""
    return {node: counts["bytes"] for node, counts in reads.facts()["nodes"].items()}


class TestASlowNode:
    def test_is_routed_around(self, linked: HdfsCluster, reads: HdfsReads) -> None:
        """It has two thirds of the blocks, and sends less than half of an equal share."""
        for node, rate in enumerate((4, 40, 40)):
            linked.set_rate(node, rate)
        try:
            file = reads.open("/two")
            share, until = 1.0, time.monotonic() + 240.0
            while share >= 1 / 6:  # until its rate is measured; on a busy machine the others are slow, too
                assert time.monotonic() < until, "the slow node is waited for"
                before = _sent(reads)
                assert read(file, 0, 32 * MIB) == DATA[: 32 * MIB]
                sent = {node: count - before.get(node, 0) for node, count in _sent(reads).items()}
                share = sent.get(linked.nodes[0], 0) / sum(sent.values())
        finally:
            for node in range(3):
                linked.set_rate(node, None)


class TestANodeThatIsCutOff:
    def test_is_not_waited_for_if_there_is_another(self, linked: HdfsCluster, reads: HdfsReads) -> None:
        """Connections over a cut link stay open, and new ones get no answer."""
        file = reads.open("/two")
        assert read(file) == DATA
        linked.cut(0)
        try:
            # Without another replica, connections would wait for minutes.
            assert read(file, deadline_s=_CUT_S) == DATA
            assert read(reads.open("/two"), deadline_s=_CUT_S) == DATA
        finally:
            linked.join(0)

    def test_reads_from_other_nodes_continue_if_there_is_no_other_replica(
        self, linked: HdfsCluster, reads: HdfsReads
    ) -> None:
        names: dict[str, str] = {}
        while len(names) < 2:
            path = f"/alone-{len(names)}"
            put(linked.uri, path, DATA[: 4 * MIB], block_size=4 * MIB)
            names.setdefault(linked.where(path)[0].nodes[0], path)
        (cut_off, alone), (_, other) = names.items()
        linked.cut(linked.nodes.index(cut_off))
        try:
            held_up, done = reads.open(alone), Waiting()
            began_s = time.monotonic()
            held_up.read_into(0, memoryview(bytearray(held_up.size_bytes)), done, deadline_s=_CUT_S / 2)
            for _ in range(2):
                assert read(reads.open(other)) == DATA[: 4 * MIB]
            assert not done.outcomes, "the others had to wait"
            error = done.wait()[0].error
            assert time.monotonic() - began_s < 3 * _CUT_S
            assert isinstance(error, TransientError)
            assert cut_off in str(error)
            assert alone in str(error)
        finally:
            linked.join(linked.nodes.index(cut_off))

"""Reads while DataNodes of a real cluster hang, die, crawl or rot."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("hdfs_native", reason="extra hdfs")

from bootseer.errors import CorruptError, TransientError
from bootseer.hdfs.addresses import Cluster
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.reads import HdfsFile, HdfsReads
from hdfs.asking import MIB, Waiting, error_of, failures, put, read
from hdfs_cluster import HdfsCluster, needs_hdfs, needs_links

DATA = random.Random(17).randbytes(64 * MIB)
EXTRA_S = 2.0
"""All that a hung DataNode may cost a whole file, with two replicas."""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    """Three DataNodes; `/two` has two replicas of 64 MiB in 16 blocks, `/one` a single one of 4 MiB in 4."""
    with HdfsCluster(tmp_path_factory.mktemp("faulty"), num_datanodes=3, replication=2) as running:
        put(running.uri, "/two", DATA, block_size=4 * MIB, replication=2)
        put(running.uri, "/one", DATA[: 4 * MIB], block_size=MIB, replication=1)
        yield running


@pytest.fixture
def reads(faulty: HdfsCluster) -> Iterator[HdfsReads]:
    namenode = NameNode(Cluster.of(faulty.uri.removeprefix("hdfs://")))
    made = HdfsReads(namenode)
    yield made
    made.close()
    namenode.close()


def seconds(file: HdfsFile, *, piece: int = 0) -> float:
    """How long reading it takes; it must be right."""
    began_s = time.monotonic()
    assert read(file, piece=piece) == DATA
    return time.monotonic() - began_s


@pytest.mark.parametrize("piece", [0, MIB])
@pytest.mark.parametrize("is_warm", [True, False])
@pytest.mark.parametrize("node", [0, 1, 2])
@pytest.mark.usefixtures("reads")
class TestAHungNode:
    pytestmark = needs_hdfs

    def test_costs_a_file_moments(
        self, faulty: HdfsCluster, reads: HdfsReads, node: int, is_warm: bool, piece: int
    ) -> None:
        """Whether connections to it exist (`is_warm`), or are made while it hangs and never answer."""
        file = reads.open("/two")
        healthy_s = seconds(file) if is_warm else 1.0
        faulty.hang(node)
        try:
            assert seconds(file, piece=piece) < healthy_s + EXTRA_S
            assert seconds(file, piece=piece) < healthy_s + EXTRA_S
        finally:
            faulty.resume(node)


class TestFaults:
    pytestmark = needs_hdfs

    def test_a_node_that_hangs_in_the_middle_costs_moments(self, faulty: HdfsCluster, reads: HdfsReads) -> None:
        file = reads.open("/two")
        healthy_s = seconds(file)
        into = bytearray(len(DATA))
        done = Waiting()
        began_s = time.monotonic()
        for start in range(0, len(DATA), MIB):
            file.read_into(start, memoryview(into)[start : start + MIB], done)
        done.wait(3)
        faulty.hang(1)
        try:
            outcomes = done.wait(64)
            assert time.monotonic() - began_s < healthy_s + EXTRA_S
        finally:
            faulty.resume(1)
        assert [outcome.error for outcome in outcomes if outcome.error] == []
        assert into == DATA

    def test_a_node_that_was_hung_is_used_again_when_it_goes_on(self, faulty: HdfsCluster, reads: HdfsReads) -> None:
        file = reads.open("/two")
        faulty.hang(0)
        try:
            until = time.monotonic() + 60.0
            while not failures(reads).get(faulty.nodes[0]):
                assert read(file) == DATA
                assert time.monotonic() < until, "the hang was not noticed"
        finally:
            faulty.resume(0)

        def served() -> int:
            nodes = reads.facts()["nodes"]
            assert isinstance(nodes, dict)
            return int(nodes[faulty.nodes[0]]["bytes"])

        before = served()
        until = time.monotonic() + 60.0
        while served() == before:
            assert read(file) == DATA
            assert time.monotonic() < until, "it is not used again"

    def test_a_hung_node_that_is_alone_costs_the_deadline_and_is_named(
        self, faulty: HdfsCluster, reads: HdfsReads
    ) -> None:
        file = reads.open("/one")
        node = faulty.nodes.index(file.nodes(0)[0])
        faulty.hang(node)
        try:
            error = error_of(file, deadline_s=2.0)
        finally:
            faulty.resume(node)
        assert isinstance(error, TransientError)
        assert faulty.nodes[node] in str(error)
        assert read(file) == DATA[: 4 * MIB]

    def test_a_read_of_a_hung_node_goes_on_with_it(self, faulty: HdfsCluster, reads: HdfsReads) -> None:
        file = reads.open("/one")
        node = faulty.nodes.index(file.nodes(0)[0])
        faulty.hang(node)
        done = Waiting()
        into = bytearray(file.size_bytes)
        try:
            file.read_into(0, memoryview(into), done)
            with pytest.raises(AssertionError):
                done.wait(deadline_s=1.5)
        finally:
            faulty.resume(node)
        assert done.wait()[0].error is None
        assert into == DATA[: 4 * MIB]

    def test_a_killed_node_costs_nothing_and_is_used_again_after_its_restart(
        self, faulty: HdfsCluster, reads: HdfsReads
    ) -> None:
        file, alone = reads.open("/two"), reads.open("/one")
        node = faulty.nodes.index(alone.nodes(0)[0])
        assert read(file) == DATA
        faulty.kill(node)
        try:
            assert seconds(file) < EXTRA_S
            error = error_of(alone)
            assert isinstance(error, TransientError)
            assert f"{faulty.nodes[node]}: cannot be reached" in str(error)
        finally:
            faulty.restart(node)
        assert read(alone) == DATA[: 4 * MIB]

    def test_a_flipped_byte_is_read_from_the_other_replica(self, faulty: HdfsCluster, reads: HdfsReads) -> None:
        file = reads.open("/two")
        where = faulty.where("/two")[0].nodes
        rotten = faulty.nodes.index(where[0])
        assert faulty.corrupt("/two", datanode=rotten, offset=70_000) == 1
        try:
            # The other one is asked only when this one has given wrong bytes.
            assert read(file, 0, 4 * MIB, avoid=frozenset({where[1]})) == DATA[: 4 * MIB]
            assert failures(reads)[where[0]]
            assert not failures(reads).get(where[1])
            faulty.corrupt("/two", datanode=faulty.nodes.index(where[1]), offset=70_000)
            error = error_of(file)
            faulty.corrupt("/two", datanode=faulty.nodes.index(where[1]), offset=70_000)
        finally:
            faulty.corrupt("/two", datanode=rotten, offset=70_000)
        assert isinstance(error, CorruptError)
        assert all(f"{node}: wrong bytes at 69632 of the block" in str(error) for node in where)
        assert read(file) == DATA

    def test_a_flipped_byte_without_another_replica_is_an_error(self, faulty: HdfsCluster, reads: HdfsReads) -> None:
        file = reads.open("/one")
        faulty.corrupt("/one", block=2, offset=MIB - 1)
        try:
            assert isinstance(error_of(file), CorruptError)
            assert read(file, 0, 2 * MIB) == DATA[: 2 * MIB]
            assert read(file, 3 * MIB, MIB) == DATA[3 * MIB : 4 * MIB]
        finally:
            faulty.corrupt("/one", block=2, offset=MIB - 1)

    def test_a_namenode_that_is_gone_is_not_missed_by_open_files(self, faulty: HdfsCluster, reads: HdfsReads) -> None:
        file = reads.open("/two")
        faulty.kill_namenode()
        try:
            assert read(file) == DATA
            with pytest.raises(TransientError, match="no NameNode answers"):
                reads.open("/two", deadline_s=1.0)
            opened = threading.Thread(target=lambda: reads.open("/two", deadline_s=60.0))
            opened.start()
        finally:
            faulty.restart_namenode()
        opened.join(60.0)
        assert not opened.is_alive()
        assert read(reads.open("/two")) == DATA


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    """Three DataNodes at 200 Mbit/s each, with two replicas of 64 MiB."""
    folder = tmp_path_factory.mktemp("shaped")
    with HdfsCluster(folder, num_datanodes=3, replication=2, rate_mbit=200) as running:
        for node in range(3):
            running.set_rate(node, None)
        put(running.uri, "/two", DATA, block_size=4 * MIB, replication=2)
        for node in range(3):
            running.set_rate(node, 200)
        yield running


class TestASlowNode:
    pytestmark = needs_links

    def test_is_routed_around(self, shaped: HdfsCluster, tmp_path: Path) -> None:
        """Two healthy links carry 45 MiB/s; a client that gave each node a third would get 7."""
        namenode = NameNode(Cluster.of(shaped.uri.removeprefix("hdfs://")))
        reads = HdfsReads(namenode)
        shaped.set_rate(0, 20)
        try:
            file = reads.open("/two")
            times_s = [seconds(file) for _ in range(3)]
        finally:
            shaped.set_rate(0, 200)
            reads.close()
            namenode.close()
        assert len(DATA) / MIB / statistics.median(times_s) > 30

"""Reads while DataNodes of a real cluster hang, are killed or overloaded, or have corrupt blocks."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("hdfs_native", reason="extra hdfs")

from bootseer.errors import BootseerError, CorruptError, PermanentError, TransientError
from bootseer.hdfs.addresses import Cluster
from bootseer.hdfs.client import HdfsClient
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.reads import HdfsFile, HdfsReads
from hdfs.asking import MIB, Waiting, error_of, failures, put, read
from hdfs_cluster import HdfsCluster, needs_hdfs

_PART = random.Random(17).randbytes(8 * MIB)
DATA = b"".join(_PART[at:] + _PART[:at] for at in range(4))  # all blocks differ, and it is created quickly
EXTRA_S = 45.0
"""Limit of the delay by a hung DataNode when a whole file with two replicas is read, on a busy machine. Waiting for its
answer would take a minute for each block."""
_CUT_S = 20.0


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    """Three DataNodes; `/two` has two replicas of 32 MiB in 8 blocks, `/one` a single one of 4 MiB in 4."""
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


def two_nodes(cluster: HdfsCluster, path: str) -> tuple[str, ...]:
    """The nodes of the only block of a new file, when both are reported to the NameNode."""
    until = time.monotonic() + 180.0
    while len(nodes := cluster.where(path)[0].nodes) < 2:
        assert time.monotonic() < until, "the second replica was not made"
        time.sleep(0.1)
    return nodes


def seconds(file: HdfsFile, *, piece: int = 0) -> float:
    """Duration of reading the file, whose content is checked."""
    began_s = time.monotonic()
    assert read(file, piece=piece) == DATA
    return time.monotonic() - began_s


@pytest.mark.parametrize("piece", [0, MIB])
@pytest.mark.parametrize("is_warm", [True, False])
@pytest.mark.parametrize("node", [0])  # each has two of three blocks
@pytest.mark.usefixtures("reads")
class TestAHungNode:
    pytestmark = needs_hdfs

    def test_delays_a_file_little(
        self, faulty: HdfsCluster, reads: HdfsReads, node: int, is_warm: bool, piece: int
    ) -> None:
        """With existing connections to it (`is_warm`), or new ones, which never answer."""
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

    def test_a_node_that_hangs_during_reads_delays_them_little(self, faulty: HdfsCluster, reads: HdfsReads) -> None:
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
            outcomes = done.wait(32)
            assert time.monotonic() - began_s < healthy_s + EXTRA_S
        finally:
            faulty.resume(1)
        assert [outcome.error for outcome in outcomes if outcome.error] == []
        assert into == DATA

    def test_a_hung_node_delays_small_reads_little(self, faulty: HdfsCluster, reads: HdfsReads) -> None:
        file = reads.open("/two")

        def read_small(number: int) -> None:
            into, done = bytearray(1000), Waiting()
            file.read_into(number * MIB, memoryview(into), done, inline=True)
            assert done.wait()[0].error is None
            assert into == DATA[number * MIB : number * MIB + 1000]

        for number in range(32):
            read_small(number)
        began_s = time.monotonic()
        faulty.hang(1)
        try:
            for number in range(32):
                read_small(number)
        finally:
            faulty.resume(1)
        assert time.monotonic() - began_s < EXTRA_S

    def test_a_hung_node_is_used_again_when_it_continues(self, faulty: HdfsCluster, reads: HdfsReads) -> None:
        file = reads.open("/two")
        faulty.hang(0)
        try:
            until = time.monotonic() + 180.0
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
        until = time.monotonic() + 180.0
        while served() == before:
            assert read(file) == DATA
            assert time.monotonic() < until, "it is not used again"

    def test_a_hung_node_with_the_only_replica_fails_at_the_deadline_and_is_named(
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

    def test_a_read_from_a_hung_node_completes_when_it_continues(self, faulty: HdfsCluster, reads: HdfsReads) -> None:
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

    def test_a_killed_node_does_not_fail_reads_with_another_replica_and_is_used_again(
        self, faulty: HdfsCluster, reads: HdfsReads
    ) -> None:
        file, alone = reads.open("/two"), reads.open("/one")
        node = faulty.nodes.index(alone.nodes(0)[0])
        assert read(file) == DATA
        faulty.kill(node)
        try:
            assert read(file) == DATA
            error = error_of(alone)
            assert isinstance(error, TransientError)
            assert f"{faulty.nodes[node]}: cannot be reached" in str(error)
        finally:
            faulty.restart(node)
        assert read(alone) == DATA[: 4 * MIB]

    def test_a_flipped_byte_is_read_from_the_other_replica(self, faulty: HdfsCluster, reads: HdfsReads) -> None:
        put(faulty.uri, "/rotten", DATA[: 4 * MIB], block_size=4 * MIB, replication=2)
        where = two_nodes(faulty, "/rotten")
        assert faulty.corrupt("/rotten", datanode=faulty.nodes.index(where[0]), offset=70_000) == 1
        # The other one is used only after this one has returned wrong bytes.
        file = reads.open("/rotten")
        assert read(file, 0, 4 * MIB, avoid=frozenset({where[1]})) == DATA[: 4 * MIB]
        assert failures(reads)[where[0]]
        assert not failures(reads).get(where[1])

    def test_bytes_that_are_flipped_on_all_replicas_are_an_error_that_names_them(
        self, faulty: HdfsCluster, reads: HdfsReads
    ) -> None:
        put(faulty.uri, "/lost", DATA[: 4 * MIB], block_size=4 * MIB, replication=2)
        where = two_nodes(faulty, "/lost")
        assert faulty.corrupt("/lost", offset=70_000) == 2
        error = error_of(reads.open("/lost"))
        assert isinstance(error, CorruptError)
        assert all(f"{node}: wrong bytes at 69632 of the block" in str(error) for node in where)

    def test_a_flipped_byte_without_another_replica_is_an_error(self, faulty: HdfsCluster, reads: HdfsReads) -> None:
        put(faulty.uri, "/only", DATA[: 4 * MIB], block_size=MIB, replication=1)
        file = reads.open("/only")
        faulty.corrupt("/only", block=2, offset=MIB - 1)
        assert isinstance(error_of(file), CorruptError)
        assert read(file, 0, 2 * MIB) == DATA[: 2 * MIB]
        assert read(file, 3 * MIB, MIB) == DATA[3 * MIB : 4 * MIB]
        faulty.corrupt("/only", block=2, offset=MIB - 1)
        assert read(file) == DATA[: 4 * MIB]

    @pytest.mark.parametrize("damage", ["cut", "removed", "sums removed", "sums cut", "sums garbled"])
    def test_a_damaged_replica_is_replaced_by_another(self, faulty: HdfsCluster, reads: HdfsReads, damage: str) -> None:
        path = f"/{damage.replace(' ', '-')}"
        put(faulty.uri, path, DATA[: 4 * MIB], block_size=4 * MIB, replication=2)
        first, second = two_nodes(faulty, path)
        name = faulty.where(path)[0].block
        (found,) = (block for block in faulty.blocks(faulty.nodes.index(first)) if block.name == name)
        (sums,) = found.parent.glob(f"{found.name}_*.meta")
        if damage == "cut":
            os.truncate(found, MIB + 13)
        elif damage == "removed":
            found.unlink()
        elif damage == "sums removed":
            faulty.corrupt(found, offset=70_000)  # without checksums, this would not be noticed
            sums.unlink()
        elif damage == "sums cut":
            os.truncate(sums, 7 + 4 * 1000)
        else:
            sums.write_bytes(b"garbage" + sums.read_bytes()[7:])
        # The other one is used only after this one has failed.
        assert read(reads.open(path), avoid=frozenset({second})) == DATA[: 4 * MIB]
        assert failures(reads)[first]

    def test_blocks_without_checksums_anywhere_are_read_and_counted(
        self, faulty: HdfsCluster, reads: HdfsReads, tmp_path: Path
    ) -> None:
        put(faulty.uri, "/unchecked", DATA[: 4 * MIB], block_size=MIB, replication=2)
        two_nodes(faulty, "/unchecked")
        name = faulty.where("/unchecked", replicas=2)[1].block
        blocks = [block for block in faulty.blocks() if block.name == name]
        for block in blocks:
            (sums,) = block.parent.glob(f"{name}_*.meta")
            sums.unlink()
        assert len(blocks) == 2
        file = reads.open("/unchecked")
        assert read(file) == DATA[: 4 * MIB]
        counted = reads.facts()["unchecked"]
        assert counted
        assert read(file, piece=MIB // 4) == DATA[: 4 * MIB]
        assert reads.facts()["unchecked"] == counted, "it is counted once"
        command = [sys.executable, "-m", "bootseer", "ckpt", "get", f"{faulty.uri}/unchecked", str(tmp_path / "copy")]
        got = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "were read without checksums" in got.stderr
        assert (tmp_path / "copy").read_bytes() == DATA[: 4 * MIB]

    def test_each_read_of_a_removed_file_reports_its_removal(self, faulty: HdfsCluster, reads: HdfsReads) -> None:
        put(faulty.uri, "/removed", DATA[:MIB])
        file = reads.open("/removed")
        with closing(HdfsClient(faulty.uri.removeprefix("hdfs://"))) as client:
            client.delete("/removed")
        until = time.monotonic() + 180.0
        while True:
            try:
                read(file)
            except BootseerError as error:
                assert isinstance(error, PermanentError), "its blocks are removed, so a retry cannot succeed"
                assert "was removed while it was read" in str(error)
                break
            assert time.monotonic() < until, "the DataNodes keep it"
            time.sleep(0.1)
        assert isinstance(error_of(file), PermanentError)

    def test_open_files_can_be_read_without_a_namenode(self, faulty: HdfsCluster, reads: HdfsReads) -> None:
        file = reads.open("/two")
        faulty.kill_namenode()
        try:
            assert read(file) == DATA
            with pytest.raises(TransientError, match="no NameNode answers"):
                reads.open("/two", deadline_s=1.0)
            opened = threading.Thread(target=lambda: reads.open("/two", deadline_s=150.0))
            opened.start()
        finally:
            faulty.restart_namenode()
        opened.join(180.0)
        assert not opened.is_alive()
        assert read(reads.open("/two")) == DATA


@needs_hdfs[0]
@needs_hdfs[1]
def test_datanodes_with_too_many_readers_are_retried(tmp_path: Path) -> None:
    """They reset connections over their limit."""
    data = DATA[: 8 * MIB]
    with HdfsCluster(tmp_path, settings={"dfs.datanode.max.transfer.threads": "3"}) as small:
        put(small.uri, "/file", data, block_size=2 * MIB)

        def read_twice() -> bool:
            with closing(HdfsClient(small.uri.removeprefix("hdfs://"))) as client:
                file = client.reads().open("/file")
                assert isinstance(file, HdfsFile)
                return all(read(file, piece=MIB) == data for _ in range(2))

        with ThreadPoolExecutor(6) as readers:
            assert all(future.result() for future in [readers.submit(read_twice) for _ in range(6)])

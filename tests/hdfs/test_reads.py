"""Reads of files on a real cluster with healthy nodes."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("hdfs_native", reason="extra hdfs")

from hdfs_native import Client, WriteOptions

from bootseer.errors import IsFolderError, NotFoundError, PermanentError
from bootseer.hdfs.addresses import Cluster
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.reads import HdfsReads
from bootseer.io.pooled_reads import ReadOutcome
from hdfs.asking import MIB, Waiting, error_of, put, read
from hdfs_cluster import HdfsCluster, needs_hdfs

pytestmark = needs_hdfs

DATA = random.Random(11).randbytes(5 * MIB + 12_345)


@pytest.fixture(scope="module")
def path(cluster: HdfsCluster) -> str:
    """A file of six blocks."""
    put(cluster.uri, "/reads/file", DATA)
    return "/reads/file"


@pytest.fixture
def reads(cluster: HdfsCluster) -> Iterator[HdfsReads]:
    namenode = NameNode(Cluster.of(cluster.uri.removeprefix("hdfs://")))
    made = HdfsReads(namenode)
    yield made
    made.close()
    namenode.close()


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("piece", [0, MIB, 300_001, 65_536])
def test_a_file_is_read_whole_and_in_pieces(reads: HdfsReads, path: str, piece: int, check: bool) -> None:
    file = reads.open(path)
    assert file.size_bytes == len(DATA)
    assert read(file, piece=piece, check=check, urgent=False) == DATA


@pytest.mark.parametrize("check", [True, False])
def test_ranges_of_any_offset_and_length_are_read(reads: HdfsReads, path: str, check: bool) -> None:
    file = reads.open(path)
    rng = random.Random(2)
    for _ in range(150):
        offset = rng.randrange(len(DATA))
        length = min(rng.choice([1, 2, 511, 512, 513, 4096, 65_536, 65_537, 1_500_000]), len(DATA) - offset)
        assert read(file, offset, length, check=check) == DATA[offset : offset + length]


def test_edges_of_chunks_packets_and_blocks_are_read(reads: HdfsReads, path: str) -> None:
    file = reads.open(path)
    for edge in (512, 65_536, MIB, 2 * MIB, len(DATA) // 512 * 512, len(DATA)):
        for offset in (max(edge - 513, 0), edge - 1, edge):
            for length in (1, 2, 512, 1025):
                end = min(offset + length, len(DATA))
                assert read(file, offset, end - offset) == DATA[offset:end]


def test_an_empty_file_and_an_empty_range_are_read(cluster: HdfsCluster, reads: HdfsReads, path: str) -> None:
    put(cluster.uri, "/reads/empty", b"")
    assert read(reads.open("/reads/empty")) == b""
    done = Waiting()
    reads.open(path).read_into(5, memoryview(bytearray()), done)
    assert done.wait()[0].error is None


def test_callbacks_can_begin_further_reads(reads: HdfsReads, path: str) -> None:
    file = reads.open(path)
    into = bytearray(len(DATA))
    last = Waiting()

    def step(offset: int) -> None:
        if offset >= len(DATA):
            last(outcome_of[-1])
            return
        view = memoryview(into)[offset : offset + 100_000]

        def done(outcome: object) -> None:
            outcome_of.append(outcome)
            step(offset + 100_000)

        file.read_into(offset, view, done)

    outcome_of: list[object] = []
    step(0)
    last.wait()
    assert into == DATA


def test_a_small_range_is_read_by_the_calling_thread(reads: HdfsReads, path: str) -> None:
    file, done = reads.open(path), Waiting()
    told: list[int] = []

    def note(outcome: ReadOutcome) -> None:
        told.append(threading.get_ident())
        done(outcome)

    for number in range(20):
        into = memoryview(bytearray(1000))
        file.read_into(number * 1000, into, note, inline=True)
        assert done.wait(number + 1)[-1].error is None
        assert bytes(into) == DATA[number * 1000 : number * 1000 + 1000]
    assert threading.get_ident() in told  # other threads hedge if a node is late


def test_many_threads_read_one_file(reads: HdfsReads, path: str) -> None:
    file = reads.open(path)
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(20):
            offset = rng.randrange(len(DATA) - 200_000)
            if read(file, offset, 200_000) != DATA[offset : offset + 200_000]:
                wrong.append(offset)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_nodes_that_store_a_byte_and_the_one_that_served_it_are_reported(
    cluster: HdfsCluster, reads: HdfsReads, path: str
) -> None:
    file = reads.open(path)
    where = cluster.where(path)
    assert [file.nodes(number * MIB) for number in range(6)] == [block.nodes for block in where]
    assert file.nodes(len(DATA)) == file.nodes(-1) == ()
    done = Waiting()
    file.read_into(2 * MIB, memoryview(bytearray(100)), done)
    assert (done.wait()[0].node,) == where[2].nodes
    told = reads.facts()["nodes"]
    assert isinstance(told, dict)
    assert told[where[2].nodes[0]]["bytes"] == 100


def test_the_duration_of_a_read_is_estimated(reads: HdfsReads, path: str) -> None:
    file = reads.open(path)
    read(file)
    assert 0.0 < file.delay_s(0, MIB) < file.delay_s(0, 100 * MIB)
    assert file.delay_s(len(DATA), 1) == 0.0


def test_names_without_a_file_are_errors(reads: HdfsReads) -> None:
    for path, kind in (("/reads/nothing", NotFoundError), ("/reads", IsFolderError)):
        with pytest.raises(kind, match=path):
            reads.open(path)


def test_finished_blocks_of_a_file_that_is_being_written_are_read(cluster: HdfsCluster, reads: HdfsReads) -> None:
    until = time.monotonic() + 180
    while True:
        writer = Client(cluster.uri).create("/reads/open", WriteOptions(block_size=MIB, overwrite=True))
        try:
            writer.write(DATA[: MIB + 1000])
            break
        except RuntimeError as error:  # see hdfs_plain.write
            assert "NotReplicatedYetException" in str(error)
            assert time.monotonic() < until
    writer.hsync()
    early = reads.open("/reads/open")
    assert early.size_bytes == MIB
    assert read(early) == DATA[:MIB]
    writer.write(DATA[MIB + 1000 : 2 * MIB])  # in the same block
    writer.close()
    assert read(early) == DATA[:MIB]
    late = reads.open("/reads/open")
    assert read(late) == DATA[: 2 * MIB]
    assert late.version != early.version


def test_a_replaced_file_has_another_version_and_the_old_one_is_never_mixed(
    cluster: HdfsCluster, reads: HdfsReads
) -> None:
    put(cluster.uri, "/reads/replaced", DATA[:MIB])
    old = reads.open("/reads/replaced")
    assert reads.open("/reads/replaced").version == old.version
    put(cluster.uri, "/reads/replaced", DATA[MIB : 2 * MIB])
    new = reads.open("/reads/replaced")
    assert new.version != old.version
    assert read(new) == DATA[MIB : 2 * MIB]
    try:
        # DataNodes may keep the old blocks for some seconds.
        assert read(old) == DATA[:MIB]
    except PermanentError as error:
        assert "was replaced while it was read" in str(error)


def test_reading_a_removed_file_is_an_error(cluster: HdfsCluster, reads: HdfsReads) -> None:
    put(cluster.uri, "/reads/removed", DATA[:MIB])
    file = reads.open("/reads/removed")
    (block,) = cluster.where("/reads/removed")
    Client(cluster.uri).delete("/reads/removed")
    until = time.monotonic() + 180.0
    while any(found.name == block.block for found in cluster.blocks()):
        assert time.monotonic() < until, "the DataNode keeps the block"
        time.sleep(0.1)
    assert "was removed while it was read" in str(error_of(file))


def test_threads_and_connections_end_with_close(cluster: HdfsCluster, path: str) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    namenode = NameNode(Cluster.of(cluster.uri.removeprefix("hdfs://")))
    reads = HdfsReads(namenode)
    assert read(reads.open(path)) == DATA
    reads.close()
    namenode.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("bootseer-hdfs")] == []
    assert set(Path("/proc/self/fd").iterdir()) <= before


FORKS = """
    import os, sys, threading
    sys.path[:0] = {paths!r}
    from bootseer.hdfs.addresses import Cluster
    from bootseer.hdfs.namenode import NameNode
    from bootseer.hdfs.reads import HdfsReads
    from hdfs.asking import Waiting, read
    # A module that a thread imports during a fork is incomplete in the child, in any program.
    import numpy

    namenode = NameNode(Cluster.of({authority!r}))
    reads = HdfsReads(namenode)
    file = reads.open({path!r})
    whole = read(file)
    # Some reads are underway during the fork, and their threads hold locks and connections.
    done = Waiting()
    memory = [bytearray(file.size_bytes) for _ in range(30)]
    for into in memory:
        file.read_into(0, memoryview(into), done)
    children = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            ok = read(file) == whole and read(reads.open({path!r})) == whole
            os._exit(0 if ok else 1)
        children.append(pid)
    assert all(outcome.error is None for outcome in done.wait(30))
    assert all(into == whole for into in memory)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0]
    assert read(file) == whole
    reads.close()
    namenode.close()
"""


def test_reads_work_in_a_child_of_a_fork_and_continue_in_the_parent(cluster: HdfsCluster, path: str) -> None:
    program = textwrap.dedent(
        FORKS.format(
            paths=[entry for entry in sys.path if entry], authority=cluster.uri.removeprefix("hdfs://"), path=path
        )
    )
    # Newer Python versions warn about forks of processes with threads, which this tests.
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")

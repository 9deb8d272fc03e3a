"""Writing to a real HDFS whose servers are killed, hang, run out of space or restart, and with killed writers."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import warm
from bootseer.checkpoint import attempts
from bootseer.checkpoint.attempts import collect
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.head import STRIPES
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.writing.publication import Written
from bootseer.checkpoint.writing.writing import Writing
from bootseer.errors import NotFoundError
from bootseer.places import open_place
from checkpoint.striped_files import in_memory
from checkpoint.writing.killed import write_until_killed
from hdfs_cluster import HdfsCluster, needs_links
from stepwise_place import StepwisePlace

from .conftest import MIB, Restarts, read_by_format

pytestmark = needs_links

POLICY = Policy(stripes=3, part_bytes=8 * MIB, min_bytes_per_stripe=MIB)
"""One part of each segment on each DataNode."""
_PART = random.Random(5).randbytes(6 * MIB)
DATA = b"".join(_PART[at:] + _PART[:at] for at in range(6)) + _PART[:77]  # created quickly, and all blocks differ


class Hdfs:
    """A cluster and a `Writing` for it. Tests may break the cluster and must repair it."""

    def __init__(self, cluster: HdfsCluster, spool: Path) -> None:
        self.cluster = cluster
        self.place = StepwisePlace(open_place(f"{cluster.uri}/job"))
        self.place.make_folder("", parents=True)
        self.files = Files(self.place)  # type: ignore[arg-type]
        self.writing = Writing(self.files, spool=spool)

    def write(self, fault: Callable[[int], object], *, policy: Policy = POLICY, only: int | None = None) -> Written:
        """Write a file with a fault in the middle. `fault` is called with the DataNode of the part that is about to be
        written. `only`: wait for a part on this DataNode."""
        hurt = False
        lock = threading.Lock()
        left = 10

        def before(step: str, path: str) -> None:
            nonlocal hurt, left
            with lock:
                left -= step == "write"
                if hurt or step != "write" or left > 0:
                    return
                nodes = [node for block in self.cluster.where(path) for node in block.nodes]
                if nodes and only in (None, node := self.cluster.nodes.index(nodes[0])):
                    hurt = True
                    fault(node)

        self.place.before = before
        try:
            written = self.writing.write_file("file", *in_memory(DATA), policy=policy)
        finally:
            self.place.before = lambda step, path: None
        assert hurt
        return written

    def nodes(self, name: str) -> list[set[str]]:
        """The DataNodes of each part of a file, from the NameNode's fsck."""
        head = self.files.head(name)
        assert head is not None
        folder = f"/job/{STRIPES}/{head.id}"
        parts = [part for segment in head.segments for part in segment.all_parts]
        return [
            {node for block in self.cluster.where(f"{folder}/{part.name}") for node in block.nodes} for part in parts
        ]

    def part_folders(self) -> list[str]:
        try:
            return [entry.path for entry in self.place.list(STRIPES)]
        except NotFoundError:
            return []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    folder = tmp_path_factory.mktemp("hdfs")
    # Otherwise a node that was just busy would be skipped, and two parts would be on one node.
    settings = {"dfs.namenode.redundancy.considerLoad": "false"}
    with HdfsCluster(folder, num_datanodes=3, fast_detection=True, disk_mib={2: 600}, settings=settings) as cluster:
        yield cluster


@pytest.fixture
def hdfs(cluster: HdfsCluster, tmp_path: Path) -> Iterator[Hdfs]:
    hdfs = Hdfs(cluster, tmp_path / "spool")
    with contextlib.closing(hdfs.writing):
        yield hdfs
    hdfs.place.close()


def test_parts_are_on_different_datanodes_which_are_recorded_in_the_head(hdfs: Hdfs) -> None:
    hdfs.writing.write_file("file", *in_memory(DATA), policy=POLICY)
    assert read_by_format(hdfs.files, "file") == DATA
    head = hdfs.files.head("file")
    assert head is not None
    said = [set(part.nodes) for segment in head.segments for part in segment.all_parts]
    assert hdfs.nodes("file") == said
    assert [set().union(*said[at : at + 3]) for at in (0, 3)] == [set(hdfs.cluster.nodes)] * 2


def test_the_part_of_a_killed_datanode_is_written_again_and_heads_on_it_are_still_read(
    hdfs: Hdfs, restarts: Restarts
) -> None:
    parity = Policy(stripes=2, parity=True, part_bytes=8 * MIB, min_bytes_per_stripe=MIB)
    hdfs.writing.write_file("parity", *in_memory(DATA), policy=parity)
    (head,) = hdfs.cluster.where("/job/parity")
    killed = hdfs.cluster.nodes.index(head.nodes[0])
    try:
        hdfs.write(hdfs.cluster.kill, only=killed)
        assert restarts() > 0
        lost = [nodes for nodes in hdfs.nodes("file") if nodes <= {hdfs.cluster.nodes[killed]}]
        assert not lost  # its part was incomplete
        with contextlib.closing(open_place(hdfs.place.uri)) as place, contextlib.closing(Reading(place)) as reading:
            file = reading.open("parity")
            assert file.read(0, file.size_bytes) == DATA
            file.close()
    finally:
        hdfs.cluster.restart(killed)
    assert read_by_format(hdfs.files, "file") == DATA


def test_a_hung_datanode_is_avoided(hdfs: Hdfs, restarts: Restarts) -> None:
    hung: list[int] = []

    def hang(i: int) -> None:
        hung.append(i)
        hdfs.cluster.hang(i)

    try:
        hdfs.write(hang)
        before = restarts()
        assert before > 0
        hdfs.writing.write_file("next", *in_memory(DATA), policy=POLICY)
        assert restarts() == before, "the next file must not try it again"
    finally:
        hdfs.cluster.resume(hung[0])
    assert read_by_format(hdfs.files, "file") == DATA
    assert read_by_format(hdfs.files, "next") == DATA


def test_a_full_datanode_is_avoided(hdfs: Hdfs) -> None:
    def fill(i: int) -> None:
        while True:
            with contextlib.suppress(OSError):  # the free space has just changed
                hdfs.cluster.fill(2, wait=False)
                return

    try:
        hdfs.write(fill)
    finally:
        hdfs.cluster.make_room(2)
    assert read_by_format(hdfs.files, "file") == DATA


def test_a_namenode_that_restarts_is_waited_for(hdfs: Hdfs) -> None:
    restart = threading.Thread(target=hdfs.cluster.restart_namenode)
    hdfs.write(lambda i: restart.start())
    restart.join(120)
    assert read_by_format(hdfs.files, "file") == DATA


def test_a_pipeline_of_two_datanodes_survives_a_kill_of_one(hdfs: Hdfs) -> None:
    policy = Policy(stripes=3, part_bytes=8 * MIB, min_bytes_per_stripe=MIB, replication=2)
    killed: list[int] = []

    def kill(i: int) -> None:
        killed.append(i)
        hdfs.cluster.kill(i)

    try:
        hdfs.write(kill, policy=policy)
    finally:
        hdfs.cluster.restart(killed[0])
    assert read_by_format(hdfs.files, "file") == DATA


def test_a_writer_that_is_killed_at_any_moment_leaves_the_old_file_or_the_new_one(
    hdfs: Hdfs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "LEASE_S", 0.0)
    monkeypatch.setattr(attempts, "_NO_LEASE_S", 0.0)
    source = random.Random(7)
    for _ in range(6):
        before = set(hdfs.part_folders())
        pipe, end = warm.context.Pipe(duplex=False)
        writer = warm.context.Process(
            target=write_until_killed, args=(end, hdfs.place.uri, tmp_path / "spool of it"), daemon=True
        )
        warm.CHECKPOINTS.start(writer)
        end.close()
        number = pipe.recv()
        time.sleep(source.uniform(0.0, 0.6))
        writer.kill()
        writer.join()
        with pipe, contextlib.suppress(EOFError):
            while True:
                number = pipe.recv()
        content = read_by_format(hdfs.files, "killed")
        assert len(content) == 12 * MIB
        assert content in (bytes([number]) * 12 * MIB, bytes([number + 1]) * 12 * MIB)
        collect(hdfs.place, "")  # type: ignore[arg-type]
        head = hdfs.files.head("killed")
        assert head is not None
        assert set(hdfs.part_folders()) - before <= {f"{STRIPES}/{head.id}"}
        assert read_by_format(hdfs.files, "killed") == content

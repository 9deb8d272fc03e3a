"""Reading through hdfs-native, with a real cluster."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from bootseer.errors import IsFolderError, NotFoundError, PermanentError, TransientError
from hdfs_cluster import HdfsCluster, needs_hdfs

pytest.importorskip("hdfs_native", reason="extra hdfs")

from bootseer.hdfs.addresses import ClientSettings
from bootseer.hdfs.client import HdfsClient
from bootseer.hdfs.native import Native, NativeReads
from hdfs.whole_files import put_over, read_ranges

pytestmark = needs_hdfs
DATA = random.Random(6).randbytes(9_000_001)


@pytest.fixture
def reads(cluster: HdfsCluster) -> Iterator[NativeReads]:
    with closing(_reads(cluster, 5)) as opened:
        yield opened


def _reads(cluster: HdfsCluster, socket_timeout_s: float) -> NativeReads:
    return NativeReads(Native(cluster.uri, ClientSettings(socket_timeout_s=socket_timeout_s)))


@pytest.fixture
def path(client: HdfsClient, folder: str) -> str:
    client.put(f"{folder}/file", DATA, block_size=1 << 20)
    return f"{folder}/file"


def test_ranges_are_read_exactly(cluster: HdfsCluster, path: str) -> None:
    reads = _reads(cluster, 60)  # no retry because of a busy machine
    file = reads.open(path)
    assert file.size_bytes == len(DATA)
    chance = random.Random(1)
    starts = [chance.randrange(len(DATA)) for _ in range(30)]
    ranges = [(start, chance.randrange(len(DATA) - start + 1)) for start in starts]
    ranges += [(0, 0), (0, len(DATA)), (len(DATA), 0), (len(DATA) - 1, 1)]
    for (start, length), (data, outcome) in zip(ranges, read_ranges(file, ranges), strict=True):
        assert outcome == (None, "")
        assert data == DATA[start : start + length]
    assert reads.nodes()[""]["bytes"] == sum(length for _, length in ranges)
    assert reads.num_retries == 0
    reads.close()


@pytest.mark.parametrize(("start", "length"), [(0, len(DATA) + 1), (len(DATA), 1), (-1, 1)])
def test_a_range_outside_of_the_file_is_an_error(reads: NativeReads, path: str, start: int, length: int) -> None:
    with pytest.raises(PermanentError):
        read_ranges(reads.open(path), [(start, length)])


def test_missing_files_and_folders_are_errors(reads: NativeReads, folder: str) -> None:
    with pytest.raises(NotFoundError):
        reads.open(f"{folder}/nothing")
    with pytest.raises(IsFolderError):
        reads.open(folder)


def test_the_version_changes_with_the_content(reads: NativeReads, client: HdfsClient, path: str) -> None:
    before = reads.open(path)
    assert reads.open(path).version == before.version
    put_over(client, path, DATA[::-1])
    assert reads.open(path).version != before.version


def test_bytes_of_a_replaced_file_are_never_mixed(reads: NativeReads, client: HdfsClient, path: str) -> None:
    file = reads.open(path)
    put_over(client, path, DATA[::-1])
    ((data, outcome),) = read_ranges(file, [(0, len(DATA))], deadline_s=20)
    # Old blocks can be read until the DataNodes have removed them.
    assert outcome.error is not None or data == DATA


def test_another_replica_is_read_instead_of_a_hung_node(
    cluster: HdfsCluster, reads: NativeReads, client: HdfsClient, folder: str
) -> None:
    client.put(f"{folder}/two", DATA, replication=2)
    hung = cluster.nodes.index(cluster.where(f"{folder}/two")[0].nodes[0])
    cluster.hang(hung)
    try:
        with ThreadPoolExecutor(12) as pool:
            # Each chooses a random replica: enough of them that not all choose the other one.
            files = [reads.open(f"{folder}/two") for _ in range(12)]
            answers = list(pool.map(lambda file: read_ranges(file, [(0, len(DATA))], deadline_s=120), files))
    finally:
        cluster.resume(hung)
    for ((data, outcome),) in answers:
        assert outcome.error is None
        assert data == DATA


def test_a_read_without_an_answer_ends_with_its_deadline_and_does_not_change_the_buffer(
    cluster: HdfsCluster, reads: NativeReads, path: str
) -> None:
    file = reads.open(path)
    buffer = bytearray(len(DATA))
    outcomes: list[Any] = []
    ended = threading.Event()
    for number in range(len(cluster.nodes)):
        cluster.hang(number)
    try:
        file.read_into(
            0, memoryview(buffer), lambda outcome: (outcomes.append(outcome), ended.set()), deadline_s=0.5
        )  # fmt: skip
        assert ended.wait(120)
    finally:
        for number in range(len(cluster.nodes)):
            cluster.resume(number)
    assert isinstance(outcomes[0].error, TransientError)
    # If the abandoned fetch still had the buffer, it would write to it now.
    ((data, outcome),) = read_ranges(reads.open(path), [(0, len(DATA))])
    assert outcome.error is None
    assert data == DATA
    assert bytes(buffer) == bytes(len(DATA))
    assert len(outcomes) == 1


def test_cancelled_reads_end_and_prioritized_ones_succeed(reads: NativeReads, path: str) -> None:
    file = reads.open(path)
    outcomes: dict[int, Any] = {}
    left = threading.Semaphore(0)

    def ended(number: int, outcome: Any) -> None:
        outcomes[number] = outcome
        left.release()

    buffers = [bytearray(len(DATA)) for _ in range(12)]
    tickets = [
        file.read_into(0, memoryview(buffer), lambda outcome, number=number: ended(number, outcome), urgent=False)
        for number, buffer in enumerate(buffers)
    ]
    tickets[-1].prioritize()
    for ticket in tickets[1:-1]:
        ticket.cancel()
    for _ in tickets:
        assert left.acquire(timeout=180)
    assert sorted(outcomes) == list(range(12))
    assert outcomes[11].error is None
    assert buffers[11] == DATA
    for number in range(1, 11):
        assert outcomes[number].error is not None or buffers[number] == DATA


def test_wrong_bytes_are_never_returned(
    cluster: HdfsCluster, reads: NativeReads, client: HdfsClient, folder: str
) -> None:
    client.put(f"{folder}/bad", DATA)
    assert cluster.corrupt(f"{folder}/bad", offset=5000) == 1
    ((_, outcome),) = read_ranges(reads.open(f"{folder}/bad"), [(0, 10_000)], deadline_s=20)
    assert isinstance(outcome.error, TransientError)


def test_the_child_of_a_fork_reads_files_that_its_parent_has_opened(reads: NativeReads, path: str) -> None:
    file = reads.open(path)
    assert read_ranges(file, [(0, 1000)])[0][0] == DATA[:1000]
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ((data, outcome),) = read_ranges(file, [(1000, 5_000_000)])
            code = 0 if outcome.error is None and data == DATA[1000:5_001_000] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert read_ranges(file, [(0, 1000)])[0][0] == DATA[:1000]


def test_nothing_is_read_after_close(reads: NativeReads, path: str) -> None:
    file = reads.open(path)
    reads.close()
    with pytest.raises(PermanentError):
        read_ranges(file, [(0, 10)])

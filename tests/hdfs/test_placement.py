"""Files on different DataNodes: unit tests of the decisions, and everything else with a real cluster."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import NotFoundError, TransientError, UsageError
from hdfs_cluster import HdfsCluster, needs_hdfs

pytest.importorskip("hdfs_native", reason="extra hdfs")

from bootseer.hdfs.block_locations import has_distinct_nodes
from bootseer.hdfs.client import HdfsClient
from bootseer.hdfs.errors import AlreadyExistsError
from bootseer.hdfs.placement import BlockFileWriter, nodes_at_capacity
from hdfs.whole_files import read_all

DATA = random.Random(3).randbytes(3_000_001)
MIB = 1 << 20


@given(st.lists(st.frozensets(st.sampled_from("abcd"), max_size=3), max_size=5), st.integers(1, 3))
def test_files_have_distinct_nodes_exactly_if_some_assignment_exists(files: list[frozenset[str]], share: int) -> None:
    possible = any(max(Counter(choice).values(), default=0) <= share for choice in product(*files))
    assert has_distinct_nodes(files, share) == possible


def test_a_node_is_full_when_it_has_its_share_of_the_files() -> None:
    files = [frozenset("ab"), frozenset("a"), frozenset("c")]
    assert nodes_at_capacity(files, 1) == frozenset("abc")
    assert nodes_at_capacity(files, 2) == frozenset("a")
    assert nodes_at_capacity(files, 3) == frozenset()


class TestOnACluster:
    pytestmark = needs_hdfs

    def test_as_many_files_as_nodes_are_always_on_all_nodes(
        self, cluster: HdfsCluster, client: HdfsClient, folder: str
    ) -> None:
        for number in range(6):
            parts = begin(client, folder, len(cluster.nodes), prefix=f"{number}-")
            with ThreadPoolExecutor(len(parts)) as pool:
                nodes = list(pool.map(write_and_close, parts))
            assert {node for (node,) in nodes} == set(cluster.nodes)
            for part, (node,) in zip(parts, nodes, strict=True):
                assert part.nodes == (node,)
                (block,) = cluster.where(part.path)
                assert (block.nodes, block.size_bytes) == ((node,), len(DATA))
                assert read_all(client, part.path) == DATA

    def test_more_files_than_nodes_share_them_evenly(
        self, cluster: HdfsCluster, client: HdfsClient, folder: str
    ) -> None:
        parts = begin(client, folder, 12)
        nodes = [write_and_close(part)[0] for part in parts]
        assert sorted(Counter(nodes).values()) == [2, 2, 2, 3, 3]

    def test_files_of_two_replicas_have_one_distinct_node_each(
        self, cluster: HdfsCluster, client: HdfsClient, folder: str
    ) -> None:
        parts = begin(client, folder, 4, replication=2)
        nodes = [frozenset(write_and_close(part)) for part in parts]
        assert all(len(pair) == 2 for pair in nodes)
        assert has_distinct_nodes(nodes, 1)
        assert [frozenset(cluster.where(part.path, replicas=2)[0].nodes) for part in parts] == nodes

    def test_avoided_nodes_are_used_only_if_there_are_no_others(
        self, cluster: HdfsCluster, client: HdfsClient, folder: str
    ) -> None:
        avoided = frozenset(cluster.nodes[:2])
        for number in range(5):
            parts = begin(client, folder, len(cluster.nodes) - 2, prefix=f"{number}-", avoid=avoided)
            assert {node for part in parts for node in write_and_close(part)} == set(cluster.nodes[2:])
        (part,) = begin(client, folder, 1, avoid=frozenset(cluster.nodes))
        assert set(write_and_close(part)) < set(cluster.nodes)

    def test_a_node_is_known_after_the_first_bytes(self, cluster: HdfsCluster, client: HdfsClient, folder: str) -> None:
        (part,) = begin(client, folder, 1)
        assert part.nodes == ()
        part.write(b"x")
        assert len(part.nodes) == 1
        part.write(DATA)
        part.close()
        assert read_all(client, part.path) == b"x" + DATA

    @pytest.mark.parametrize("step", [1, 511, 4096, 262_143, 262_145, 1_000_000])
    def test_bytes_may_be_written_in_pieces_of_any_size(self, client: HdfsClient, folder: str, step: int) -> None:
        data = DATA[: step * 5 if step < 10_000 else None]
        (part,) = begin(client, folder, 1)
        for start in range(0, len(data), step):
            part.write(bytearray(data[start : start + step]))
        part.close()
        assert client.stat(part.path).size_bytes == len(data)
        assert read_all(client, part.path) == data

    def test_a_file_may_be_empty_and_as_long_as_its_block_but_not_longer(self, client: HdfsClient, folder: str) -> None:
        empty, full, longer = begin(client, folder, 3, block_size=MIB)
        assert empty.close() == ()
        full.write(DATA[:MIB])
        full.close()
        assert [client.stat(part.path).size_bytes for part in (empty, full)] == [0, MIB]
        assert read_all(client, full.path) == DATA[:MIB]
        longer.write(DATA[:MIB])
        with pytest.raises(UsageError, match="more than one block"):
            longer.write(b"x")
        longer.abort()

    def test_aborted_files_are_removed_and_closed_ones_kept(self, client: HdfsClient, folder: str) -> None:
        kept, begun, written = begin(client, folder, 3)
        write_and_close(kept)
        written.write(DATA)
        for part in (kept, begun, written, written):
            part.abort()
        assert [entry.path for entry in client.list(folder)] == [kept.path]
        for part in (kept, begun, written):
            with pytest.raises(UsageError):
                part.write(b"x")
            with pytest.raises(UsageError):
                part.close()

    def test_an_existing_name_is_refused_and_its_siblings_are_removed(self, client: HdfsClient, folder: str) -> None:
        client.put(f"{folder}/1", b"somebody's")
        with pytest.raises(AlreadyExistsError):
            begin(client, folder, 3)
        assert [entry.path for entry in client.list(folder)] == [f"{folder}/1"]
        assert read_all(client, f"{folder}/1") == b"somebody's"

    def test_a_file_that_was_removed_by_another_client_cannot_be_closed(self, client: HdfsClient, folder: str) -> None:
        (part,) = begin(client, folder, 1)
        part.write(DATA)
        client.delete(part.path)
        with pytest.raises((NotFoundError, TransientError)):
            part.close()
        part.abort()


class TestWithFaults:
    pytestmark = needs_hdfs

    def test_new_files_avoid_a_hung_node(self, cluster: HdfsCluster, client: HdfsClient, folder: str) -> None:
        cluster.hang(0)
        try:
            for number in range(3):
                parts = begin(client, f"{folder}/hung/{number}", len(cluster.nodes) - 1)
                with ThreadPoolExecutor(len(parts)) as pool:
                    nodes = {node for pair in pool.map(write_and_close, parts) for node in pair}
                assert nodes == set(cluster.nodes[1:])
            client.put(f"{folder}/hung/small", b"x")
        finally:
            cluster.resume(0)
        assert read_all(client, f"{folder}/hung/2/0") == read_all(client, f"{folder}/hung/2/1") == DATA

    def test_a_node_that_hangs_while_it_is_written_to_ends_the_file_and_is_excluded_afterwards(
        self, cluster: HdfsCluster, client: HdfsClient, folder: str
    ) -> None:
        (part,) = begin(client, f"{folder}/stopped", 1, block_size=512 * MIB)
        part.write(DATA)
        hung = cluster.nodes.index(part.nodes[0])
        cluster.hang(hung)
        try:
            with pytest.raises(TransientError, match=r"nothing was (accepted|received)"):
                for _ in range(100):
                    part.write(DATA)
                part.close()
            with pytest.raises(UsageError):
                part.write(b"x")
            part.abort()
            (again,) = begin(client, f"{folder}/stopped", 1)
            assert write_and_close(again)[0] != cluster.nodes[hung]
        finally:
            cluster.resume(hung)
        assert read_all(client, again.path) == DATA

    def test_a_node_that_is_killed_while_it_is_written_to_ends_the_file(
        self, cluster: HdfsCluster, client: HdfsClient, folder: str
    ) -> None:
        (part,) = begin(client, f"{folder}/killed", 1)
        part.write(DATA)
        killed = cluster.nodes.index(part.nodes[0])
        cluster.datanodes[killed].send_signal(signal.SIGKILL)
        try:
            with pytest.raises(TransientError):
                part.write(DATA)
                part.close()
            part.abort()
            # For the NameNode it is live for minutes.
            for number in range(4):
                (again,) = begin(client, f"{folder}/killed/{number}", 1)
                assert write_and_close(again)[0] != cluster.nodes[killed]
        finally:
            cluster.restart(killed)

    def test_a_block_that_no_node_accepts_is_an_error(self, tmp_path: Path) -> None:
        # A separate cluster, as restarting five DataNodes takes 6 s of processor time.
        with HdfsCluster(tmp_path) as dead, closing(HdfsClient(dead.uri[len("hdfs://") :])) as client:
            dead.kill(0)
            (part,) = begin(client, "/dead", 1)
            with pytest.raises(TransientError):
                part.write(DATA)
            part.abort()


def begin(
    client: HdfsClient,
    folder: str,
    number: int,
    *,
    prefix: str = "",
    block_size: int = 8 * MIB,
    replication: int | None = None,
    avoid: frozenset[str] = frozenset(),
) -> Sequence[BlockFileWriter]:
    parts = client.create_placed(
        [f"{folder}/{prefix}{part}" for part in range(number)],
        block_size=block_size,
        replication=replication,
        avoid=avoid,
    )
    return [part for part in parts if isinstance(part, BlockFileWriter)]


def write_and_close(part: BlockFileWriter) -> tuple[str, ...]:
    part.write(DATA)
    return part.close()

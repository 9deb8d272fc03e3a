"""HDFS as a place, against a real cluster."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bootseer.checkpoint.places.open import open_place
from bootseer.checkpoint.places.place import Place
from checkpoint.places.contract import PlaceContract
from hdfs_cluster import HdfsCluster, needs_hdfs

pytestmark = needs_hdfs
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    # A node that has just been busy would count as one that takes nothing.
    settings = {"dfs.namenode.redundancy.considerLoad": "false"}
    with HdfsCluster(tmp_path_factory.mktemp("cluster"), num_datanodes=3, settings=settings) as running:
        yield running


@pytest.fixture
def place(cluster: HdfsCluster) -> Iterator[Place]:
    opened = open_place(f"{cluster.uri}/tests/{next(_numbers)}")
    opened.make_folder("", parents=True)
    yield opened
    opened.close()


class TestHdfsPlace(PlaceContract):
    """The contract."""


def test_parts_that_are_begun_together_lie_on_different_nodes(place: Place) -> None:
    writers = place.begin_parts([f"parts/{number}" for number in range(3)], part_bytes=1 << 20)
    for writer in writers:
        writer.write(bytes(1 << 20))
    nodes = [writer.close() for writer in writers]
    assert len({node for lie in nodes for node in lie}) == 3


def test_nodes_that_are_spare_are_taken_before_two_parts_share_one(place: Place) -> None:
    nodes = _nodes_of_parts(place, "first", 3)
    assert len(set(nodes)) == 3
    for spare in (nodes[:1], nodes[1:]):
        alone = {_nodes_of_parts(place, f"{len(spare)}/{number}", 1, spare)[0] for number in range(6)}
        assert not alone & set(spare)
    assert len(set(_nodes_of_parts(place, "again", 3, nodes[:2]))) == 3


def _nodes_of_parts(place: Place, folder: str, count: int, spare: Sequence[str] = ()) -> list[str]:
    writers = place.begin_parts([f"{folder}/{number}" for number in range(count)], part_bytes=1 << 20, spare=spare)
    for writer in writers:
        writer.write(bytes(1000))
    return [writer.close()[0] for writer in writers]


def test_a_part_of_more_than_the_largest_block_becomes_several_blocks(cluster: HdfsCluster, place: Place) -> None:
    (writer,) = place.begin_parts(["long"], part_bytes=2 << 30)
    for _ in range(129):
        writer.write(bytes(8 << 20))
    writer.close()
    assert place.stat("long").size_bytes == 129 * (8 << 20)
    assert [block.size_bytes for block in cluster.where(f"{urlsplit(place.uri).path}/long")] == [1 << 30, 8 << 20]


def test_a_small_file_has_as_many_copies_as_the_cluster_allows(
    cluster: HdfsCluster, place: Place, tmp_path: Path
) -> None:
    place.write_bytes("small", b"x" * 5000)
    assert place.create_bytes("new", b"x")
    for name in ("small", "new"):
        (block,) = cluster.where(f"{urlsplit(place.uri).path}/{name}")
        assert len(block.nodes) == 3
    with HdfsCluster(tmp_path, settings={"dfs.replication.max": "2"}) as frugal:
        other = open_place(frugal.uri)
        other.write_bytes("small", b"x")
        other.write_bytes("small", b"y")
        assert other.read_bytes("small", 1) == b"y"
        other.close()

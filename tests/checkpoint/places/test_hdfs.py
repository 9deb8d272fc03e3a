"""HDFS as a place, against a real cluster."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from bootseer.checkpoint.places.open import open_place
from bootseer.checkpoint.places.place import Place
from checkpoint.places.contract import PlaceContract
from hdfs_cluster import HdfsCluster, needs_hdfs

pytestmark = needs_hdfs
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    with HdfsCluster(tmp_path_factory.mktemp("cluster"), num_datanodes=3) as running:
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

"""A DataNode at a tenth of its link, on a real HDFS behind links of a given rate."""

from __future__ import annotations

import pytest

from bootseer.checkpoint.reading.reading import Reading
from bootseer.places import open_place
from checkpoint.striped_files import content_of, part_paths, put_striped
from hdfs_cluster import HdfsCluster, needs_links

pytestmark = needs_links
MIB = 1 << 20
SIZE = 64 * MIB
RATE = 200


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with HdfsCluster(tmp_path_factory.mktemp("links"), num_datanodes=5, links=True) as cluster:
        yield cluster


@pytest.mark.parametrize("part", [1, 4])
@pytest.mark.parametrize("small", [False, True])
def test_a_slow_node_is_left_out_by_the_first_read_of_a_file_with_parity(cluster, part, small):
    content = content_of(SIZE)
    place = open_place(f"{cluster.uri}/slow-{part}-{small}")
    place.make_folder("", parents=True)
    path = part_paths("file", put_striped(place, "file", content, parity=True))[part]
    (node,) = cluster.where(f"/slow-{part}-{small}/{path}")[0].nodes
    slow = cluster.nodes.index(node)
    for number in range(5):
        cluster.set_rate(number, RATE // 10 if number == slow else RATE)
    reading = Reading(place)
    try:
        with reading.open("file") as file:
            memory = bytearray(SIZE)
            if small:
                for at in range(0, SIZE, MIB):
                    memory[at : at + MIB] = file.read(at, MIB)
            else:
                file.readinto(0, memory)
        assert memory == content
        nodes = reading.facts()["place"]["nodes"]
        # A quarter of the file lies on each of the other four.
        assert nodes[node]["bytes"] < SIZE // 4 // 2
        assert sum(one["bytes"] for one in nodes.values()) < 1.2 * SIZE
    finally:
        for number in range(5):
            cluster.set_rate(number, None)
        reading.close()
        place.close()

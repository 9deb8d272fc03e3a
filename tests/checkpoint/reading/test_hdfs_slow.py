"""A DataNode with a tenth of the link rate, in a real HDFS with links of given rates."""

from __future__ import annotations

import contextlib

import pytest

from bootseer.checkpoint.reading.reading import Reading
from bootseer.places import open_place
from checkpoint.striped_files import content_of, part_paths, put_striped
from hdfs_cluster import needs_links

pytestmark = needs_links
MIB = 1 << 20
SIZE = 64 * MIB
RATE = 200
NODES = 3


@pytest.fixture(scope="module")
def cluster(linked_hdfs):
    return linked_hdfs


@pytest.fixture(scope="module")
def content():
    return content_of(SIZE)


@pytest.fixture(scope="module")
def parts(cluster, content):
    """The paths of the file's parts, all on different nodes."""
    with contextlib.closing(open_place(f"{cluster.uri}/slow")) as place:
        place.make_folder("", parents=True)
        return part_paths("file", put_striped(place, "file", content, stripes=NODES - 1, parity=True))


@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("small", [False, True])
def test_a_slow_node_is_avoided_by_the_first_read_of_a_file_with_parity(cluster, content, parts, part, small):
    (node,) = cluster.where(f"/slow/{parts[part]}")[0].nodes
    slow = cluster.nodes.index(node)
    place = open_place(f"{cluster.uri}/slow")
    for number in range(NODES):
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
        # Each of the other two has half of the file.
        assert nodes[node]["bytes"] < SIZE // 2 // 2
        assert sum(one["bytes"] for one in nodes.values()) < 1.2 * SIZE
    finally:
        for number in range(NODES):
            cluster.set_rate(number, None)
        reading.close()
        place.close()

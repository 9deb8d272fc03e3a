"""Nodes that read the same ranges of a striped file in a real HDFS: these leave the DataNodes once; and what happens
when one of them is gone, silent or has wrong bytes."""

from __future__ import annotations

import contextlib
import time

import pytest
from blake3 import blake3

from bootseer.places import open_place
from checkpoint.peer_nodes import Node, meet
from checkpoint.striped_files import content_of, put_striped
from hdfs_cluster import HdfsCluster, _bean, needs_hdfs

pytestmark = needs_hdfs
MIB = 1 << 20
SIZE = 96 * MIB + 777
WHOLE = [(0, SIZE)]


@pytest.fixture(scope="module")
def content():
    return content_of(SIZE)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, content):
    with HdfsCluster(tmp_path_factory.mktemp("cluster"), num_datanodes=4) as cluster:
        with contextlib.closing(open_place(f"{cluster.uri}/job")) as place:
            place.make_folder("", parents=True)
            put_striped(place, "file", content)
            put_striped(place, "parity", content, parity=True)
        yield cluster


@pytest.fixture
def nodes(cluster, tmp_path):
    nodes = [Node(tmp_path, f"n{at}", f"{cluster.uri}/job") for at in range(4)]
    meet(nodes)
    yield nodes
    for node in nodes:
        node.kill()


def sent(cluster):
    """What the DataNodes have sent to readers so far."""
    return sum(
        _bean(http, "Hadoop:service=DataNode,name=DataNodeActivity*")["BytesRead"] for http in cluster.datanode_http
    )


def digest_of(content, ranges):
    return blake3(b"".join(content[at : at + length] for at, length in ranges)).hexdigest()


def all_read(nodes, path="file", ranges=WHOLE, *, step=None):
    for node in nodes:
        node.begin(path, ranges, step=step)
    return [node.ended() for node in nodes]


@pytest.mark.parametrize(("path", "step"), [("file", None), ("parity", None), ("file", MIB)])
def test_what_all_nodes_read_leaves_hdfs_once(cluster, nodes, content, path, step):
    before = sent(cluster)
    ends = all_read(nodes, path, step=step)
    assert {end.get("error", end.get("digest")) for end in ends} == {digest_of(content, WHOLE)}
    assert sent(cluster) - before < 1.1 * SIZE
    assert sum(end["peer_bytes"] for end in ends) > 2.8 * SIZE


def test_nodes_that_come_later_get_it_from_those_that_came_first(cluster, nodes, content):
    before = sent(cluster)
    for node in nodes:
        node.begin("file", WHOLE)
        assert node.ended()["digest"] == digest_of(content, WHOLE)
    assert sent(cluster) - before < 1.02 * SIZE


def test_what_each_reads_alone_comes_to_it_straight(cluster, nodes, content):
    before = sent(cluster)
    quarter = SIZE // 4 // MIB * MIB
    shards = [[(at * quarter, quarter)] for at in range(4)]
    for node, ranges in zip(nodes, shards, strict=True):
        node.begin("file", ranges)
    for node, ranges in zip(nodes, shards, strict=True):
        end = node.ended()
        assert end["digest"] == digest_of(content, ranges)
        assert end["peer_bytes"] == 0
        assert end["sent_bytes"] == 0
    assert sent(cluster) - before < 1.02 * 4 * quarter


def test_nodes_that_are_killed_while_they_read_are_replaced(cluster, nodes, content):
    nodes[0].begin("file", WHOLE, step=MIB)
    time.sleep(0.05)
    nodes[0].kill()
    before = sent(cluster)
    ends = all_read(nodes[1:])
    assert {end["digest"] for end in ends} == {digest_of(content, WHOLE)}
    assert sent(cluster) - before < 1.35 * SIZE


def test_a_node_that_hangs_holds_nobody_up_for_long(nodes, content):
    nodes[0].begin("file", WHOLE)
    assert "digest" in nodes[0].ended()
    nodes[0].hang()
    ends = all_read(nodes[1:])
    assert {end["digest"] for end in ends} == {digest_of(content, WHOLE)}
    assert max(end["seconds"] for end in ends) < 30  # 5 on a quiet machine; a part of a read has 60


def test_a_flipped_byte_in_a_nodes_cache_is_never_delivered(nodes, content):
    nodes[0].begin("file", WHOLE)
    assert "digest" in nodes[0].ended()
    (data,) = [path for path in nodes[0].cached if path.stat().st_size > MIB]
    with data.open("r+b") as file:
        file.seek(5 * MIB + 12345)
        byte = file.read(1)
        file.seek(5 * MIB + 12345)
        file.write(bytes([byte[0] ^ 1]))
    ends = all_read(nodes[1:])
    assert {end["digest"] for end in ends} == {digest_of(content, WHOLE)}
    assert {name for end in ends for name in end["peers"]["liars"]} == {"n0"}

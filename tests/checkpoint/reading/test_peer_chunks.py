"""Nodes that read the same ranges of a striped file in a real HDFS, which are read from the DataNodes once; also with
nodes that are killed, hang or have wrong bytes."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import subprocess
import sys
import threading
import weakref
from queue import SimpleQueue

import pytest
from blake3 import blake3

import hadoop
from bootseer.checkpoint.reading.peer_chunks import PeerChunks, PeerRead, Unit
from bootseer.checkpoint.reading.transfer import Counters
from bootseer.peers.job import JobPeers
from bootseer.places import open_place
from bootseer.report.inputs import sources
from bootseer.report.log_scan import scan
from checkpoint.heads import some_head
from checkpoint.peer_nodes import SECRET, Node, meet
from checkpoint.striped_files import content_of, put_striped
from conftest_launch import BOOTSEER
from hdfs_cluster import needs_hdfs
from waiting import until

pytestmark = needs_hdfs
MIB = 1 << 20
SIZE = 32 * MIB + 777
WHOLE = [(0, SIZE)]


@pytest.fixture(scope="module")
def content():
    return content_of(SIZE)


@pytest.fixture(scope="module")
def cluster(shared_hdfs, content):
    with contextlib.closing(open_place(f"{shared_hdfs.uri}/peers")) as place:
        place.make_folder("", parents=True)
        put_striped(place, "file", content)
        put_striped(place, "parity", content, parity=True)
    return shared_hdfs


@pytest.fixture
def nodes(cluster, tmp_path):
    nodes = [Node(tmp_path, f"n{at}", f"{cluster.uri}/peers") for at in range(4)]
    meet(nodes)
    yield nodes
    for node in nodes:
        node.kill()


def sent(cluster):
    """Bytes that the DataNodes have sent to readers so far."""
    return sum(
        hadoop.bean(http, "Hadoop:service=DataNode,name=DataNodeActivity*")["BytesRead"]
        for http in cluster.datanode_http
    )


def digest_of(content, ranges):
    return blake3(b"".join(content[at : at + length] for at, length in ranges)).hexdigest()


def all_read(nodes, path="file", ranges=WHOLE, *, step=None):
    for node in nodes:
        node.begin(path, ranges, step=step)
    return [node.ended() for node in nodes]


@pytest.mark.parametrize(("path", "step"), [("file", None), ("parity", None), ("file", MIB)])
def test_data_read_by_all_nodes_is_read_from_hdfs_once(cluster, nodes, content, path, step):
    before = sent(cluster)
    ends = all_read(nodes, path, step=step)
    assert {end.get("error", end.get("digest")) for end in ends} == {digest_of(content, WHOLE)}
    # One copy instead of four, and chunks that a node considers lost on a busy machine.
    assert sent(cluster) - before < 1.5 * SIZE
    assert sum(end["peer_bytes"] for end in ends) > 2.4 * SIZE
    assert {len(end["by_interface"]) for end in ends if end["sent_bytes"] > SIZE // 6} == {2}


def test_later_nodes_read_from_earlier_ones(cluster, nodes, content):
    before = sent(cluster)
    for node in nodes:
        node.begin("file", WHOLE)
        assert node.ended()["digest"] == digest_of(content, WHOLE)
    assert sent(cluster) - before < 1.5 * SIZE  # as above
    ends = all_read(nodes, ranges=[(0, 1)])
    assert max(end["sent_bytes"] for end in ends) < 1.5 * SIZE  # the first one does not serve all the others


def test_data_read_by_one_node_is_read_from_hdfs_directly(cluster, nodes, content):
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
    assert sent(cluster) - before < 1.5 * 4 * quarter


def test_nodes_that_are_killed_while_they_read_are_replaced(cluster, nodes, content):
    nodes[0].begin("file", WHOLE, step=MIB)
    until(lambda: nodes[0].cached, "the first bytes")
    nodes[0].kill()
    before = sent(cluster)
    ends = all_read(nodes[1:])
    assert {end["digest"] for end in ends} == {digest_of(content, WHOLE)}
    assert sent(cluster) - before < 1.5 * SIZE


def test_a_hung_peer_delays_readers_only_briefly(nodes, content):
    nodes[0].begin("file", WHOLE)
    healthy = nodes[0].ended()
    assert "digest" in healthy
    nodes[0].hang()
    ends = all_read(nodes[1:])
    assert {end["digest"] for end in ends} == {digest_of(content, WHOLE)}
    # 6 s on a quiet machine; waiting for a part of a read takes 60.
    assert max(end["seconds"] for end in ends) < 50 + 4 * healthy["seconds"]


def test_the_only_other_node_is_left_if_hdfs_is_much_faster(cluster, nodes, content):
    """A node with a slow upload is compared with HDFS. Compared with itself alone it would never be slow."""
    nodes[0].begin("file", WHOLE)
    assert "digest" in nodes[0].ended()
    nodes[0].limit(MIB // 2)  # less than HDFS sends on any machine, by more than a factor of eight
    meet(nodes[:2])
    nodes[1].begin("file", WHOLE)
    end = nodes[1].ended()
    assert end["digest"] == digest_of(content, WHOLE)
    assert 0 < end["peer_bytes"] < SIZE // 3


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
    assert {name for end in ends for name, sent in end["peers"].items() if sent["wrong"]} == {"n0"}


def test_the_memory_of_a_chunk_is_freed_at_the_end_of_its_read(tmp_path):
    class Memory(bytearray):
        """Memory with support for weak references."""

    memory, answers = Memory(MIB), SimpleQueue()
    is_held = weakref.ref(memory)
    peers = PeerChunks(JobPeers.create(tmp_path / "peers", SECRET), tmp_path, Counters())
    unit = Unit(peers, some_head(MIB, MIB).segments[0].index, 0)
    unit.add(0)
    may_ask = threading.Event()
    for _ in range(8):  # all threads are busy, so the read waits for the answer
        peers.asking.submit(may_ask.wait)
    gc.disable()
    try:
        unit.read(PeerRead(0, memoryview(memory), bool, bool, answers.put), shareable=False)
        may_ask.set()
        assert answers.get(timeout=60) is False
        del unit, memory
        until(lambda: not is_held())
    finally:
        gc.enable()
        peers.close()


READ = """
until [ $(grep -o addresses $BOOTSEER_PEERS_DIR/members.json | wc -l) = 2 ]; do sleep 0.05; done
sha256sum < $BOOTSEER_CHECKPOINT/file
$PYTHON -c "$PROGRAM" $PLACE/parity
touch $OVER.$BOOTSEER_NODE
until [ $(ls $OVER.* | wc -l) = 2 ]; do sleep 0.05; done
"""
PROGRAM = """
import hashlib, sys
from bootseer.checkpoint.locations import resolve
with resolve(sys.argv[1]).open() as file:
    print(hashlib.sha256(file.read(0, file.size_bytes)).hexdigest(), " -")
"""


@pytest.mark.root
@pytest.mark.fuse
def test_two_nodes_of_a_job_share_chunks_read_by_the_mount_and_by_programs(cluster, env, content, tmp_path):
    before, place = sent(cluster), f"{cluster.uri}/peers"
    runs = []
    for name in ("a", "b"):
        own = {
            "BOOTSEER_RUNTIME": tmp_path / f"runtime-{name}",
            "BOOTSEER_CACHE": tmp_path / f"cache-{name}",
            "OVER": tmp_path / "over",
            "PYTHON": sys.executable,
            "PROGRAM": PROGRAM,
            "PLACE": place,
            "BOOTSEER_NODE": name,
        }
        words = ["--job", "two", "--node", name, "--num-nodes", "2", "--peers-interface", "lo"]
        words += ["--peers", str(tmp_path / "meet"), "--checkpoint", place, "--", "sh", "-c", READ]
        more = {key: str(value) for key, value in own.items()}
        runs.append(subprocess.Popen([*BOOTSEER, "run", *words], env=env | more, stdout=subprocess.PIPE, text=True))
    digest = hashlib.sha256(content).hexdigest()
    assert [run.communicate(timeout=120)[0] for run in runs] == 2 * [2 * f"{digest}  -\n"]
    assert sent(cluster) - before < 2.3 * SIZE
    events = [event for event in scan(sources([env["BOOTSEER_SPOOL"]])).events if event.stage == "checkpoint_start"]
    assert sum(event.attrs["peer_bytes"] for event in events) > 0.8 * SIZE

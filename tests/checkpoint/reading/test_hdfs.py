"""Reading from a real HDFS of five DataNodes."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest

from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.errors import BootseerError, CorruptError, TransientError
from bootseer.places import open_place
from checkpoint.striped_files import content_of, part_paths, put_striped
from hdfs_cluster import needs_hdfs

pytestmark = needs_hdfs
MIB = 1 << 20
SIZE = 33 * MIB + 777


@pytest.fixture
def cluster(shared_hdfs):
    return shared_hdfs


@pytest.fixture
def place(cluster, request):
    place = open_place(f"{cluster.uri}/{request.node.name.translate(str.maketrans('[]', '__'))}")
    place.make_folder("", parents=True)
    yield place
    place.close()


@pytest.fixture
def reading(place):
    reading = Reading(place)
    yield reading
    reading.close()


@pytest.fixture(scope="module")
def content():
    return content_of(SIZE)


def whole(reading, name):
    memory = bytearray(SIZE)
    with reading.open(name) as file:
        assert file.readinto(0, memory) == SIZE
    return memory


def in_hdfs(place, path):
    return f"/{place.uri.partition('://')[2].partition('/')[2]}/{path}"


def only_node(cluster, place, path):
    (block,) = cluster.where(in_hdfs(place, path))
    (node,) = block.nodes
    return cluster.nodes.index(node)


@pytest.mark.parametrize("parity", [False, True])
def test_a_striped_file_is_read_from_all_its_nodes(place, reading, content, parity):
    put_striped(place, "file", content, parity=parity)
    assert whole(reading, "file") == content
    with reading.open("file") as file:
        assert b"".join(file.read(at, 100_000) for at in range(0, SIZE, 100_000)) == content
    assert len(reading.facts()["place"]["nodes"]) >= 4


def test_an_ordinary_file_is_read_without_being_changed(place, reading, content):
    place.write_bytes("file", content)
    assert whole(reading, "file") == content
    with reading.open("file") as file:
        assert file.read(SIZE - 5, 10) == content[-5:]


def test_flipped_bytes_of_the_only_replica_are_never_returned(cluster, place, reading, content):
    head = put_striped(place, "file", content)
    part = part_paths("file", head)[2]
    assert cluster.corrupt(in_hdfs(place, part), offset=MIB + 500) == 1
    with pytest.raises(CorruptError) as caught:
        whole(reading, "file")
    node = cluster.nodes[only_node(cluster, place, part)]
    assert all(word in str(caught.value) for word in ("file", "chunk 6", part, node))
    with reading.open("file") as file:
        assert file.read(5 * MIB, MIB) == content[5 * MIB : 6 * MIB]


def test_flipped_bytes_of_one_of_two_replicas_are_read_from_the_other(cluster, place, reading, content):
    head = put_striped(place, "file", content, replication=2)
    part = part_paths("file", head)[0]
    (block,) = cluster.where(in_hdfs(place, part), replicas=2)
    assert len(block.nodes) == 2
    assert cluster.corrupt(in_hdfs(place, part), datanode=cluster.nodes.index(block.nodes[0]), offset=700) == 1
    for _ in range(5):  # so that each replica is tried first
        assert whole(reading, "file") == content


def test_flipped_bytes_are_rebuilt_from_parity(cluster, place, reading, content):
    head = put_striped(place, "file", content, parity=True)
    cluster.corrupt(in_hdfs(place, part_paths("file", head)[1]), offset=2 * MIB + 9)
    assert whole(reading, "file") == content
    with reading.open("file") as file:
        assert file.read(9 * MIB, 50) == content[9 * MIB : 9 * MIB + 50]
    assert reading.facts()["wrong_chunks"] >= 1


def test_flipped_bytes_of_an_ordinary_file_are_an_error(cluster, place, reading, content):
    place.write_bytes("file", content)
    cluster.corrupt(in_hdfs(place, "file"), offset=3000)
    with pytest.raises(BootseerError, match="file"):
        whole(reading, "file")


def test_a_file_that_is_removed_while_it_is_open_is_read_correctly_or_an_error(place, reading, content):
    put_striped(place, "file", content)
    file = reading.open("file")
    assert file.read(0, 10) == content[:10]
    place.delete(".stripes", recursive=True)
    place.delete("file")
    for at in range(0, SIZE, 4 * MIB):
        try:
            assert file.read(at, MIB) == content[at : at + MIB]
        except BootseerError as error:
            assert "file" in str(error)


def test_eight_processes_read_one_file_in_any_order(place, reading, content):
    put_striped(place, "file", content)
    place.write_bytes("plain", content)
    files = [reading.open("file"), reading.open("plain")]
    assert files[0].read(0, 10) == content[:10]
    children = []
    for seed in range(8):
        pid = os.fork()
        if pid == 0:
            code = 2
            try:
                starts = list(range(0, SIZE, MIB))
                random.Random(seed).shuffle(starts)
                read = {at: files[seed % 2].read(at, MIB) for at in starts}
                code = 0 if b"".join(read[at] for at in sorted(read)) == content else 1
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 8
    assert files[1].read(0, SIZE) == content


@pytest.mark.parametrize("fault", ["hang", "kill"])
def test_a_failed_node_delays_reads_with_parity_and_one_replica_little(cluster, place, content, fault):
    head = put_striped(place, "file", content, parity=True)
    nodes = [only_node(cluster, place, path) for path in part_paths("file", head)]
    sick = nodes[0]  # the head has more replicas
    try:
        getattr(cluster, fault)(sick)
        reading = Reading(place)
        began = time.monotonic()
        assert whole(reading, "file") == content
        assert whole(reading, "file") == content
        with reading.open("file") as file:
            assert b"".join(file.read(at, MIB) for at in range(0, SIZE, MIB)) == content
        # Each request to a node that hangs would take a minute otherwise.
        assert time.monotonic() - began < 50
        assert reading.facts()["rebuilt"] >= 9
        reading.close()
    finally:
        if fault == "hang":
            cluster.resume(sick)
        else:
            cluster.restart(sick)


def test_a_hung_node_without_a_replacement_fails_its_reads_and_delays_no_others(cluster, place, content):
    nodes = [only_node(cluster, place, path) for path in part_paths("file", put_striped(place, "file", content))]
    (healthy,) = part_paths("other", put_striped(place, "other", content, stripes=1))
    sick = next(number for number, node in enumerate(nodes) if node != only_node(cluster, place, healthy))
    reading = Reading(place, settings=ReadingSettings(deadline_s=15.0))
    whole(reading, "other")
    errors = []

    def fail(file, offset, length):
        with pytest.raises(TransientError) as raised:
            file.readinto(offset, bytearray(length))
        errors.append(str(raised.value))

    cluster.hang(nodes[sick])
    try:
        with reading.open("file") as file:
            asked = [(0, SIZE), (0, 8 * MIB), *((row * 4 * MIB + sick * MIB, 1000) for row in range(8))]
            threads = [threading.Thread(target=fail, args=(file, *each), daemon=True) for each in asked]
            for thread in threads:
                thread.start()
            for _ in range(2):
                assert whole(reading, "other") == content
            assert errors == [], "the others had to wait until these ended"
            for thread in threads:
                thread.join(120)
    finally:
        cluster.resume(nodes[sick])
    assert len(errors) == len(asked)
    assert all("part .stripes/" in error and cluster.nodes[nodes[sick]] in error for error in errors)
    assert whole(reading, "file") == content
    reading.close()

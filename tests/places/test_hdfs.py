"""A real HDFS as a place."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import hadoop
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.writing.writing import Writing
from bootseer.errors import NotFoundError, UsageError
from bootseer.places import open_place
from bootseer.places.place import Place
from checkpoint.striped_files import in_memory
from hdfs_cluster import HdfsCluster, needs_hdfs
from places.contract import PlaceContract

pytestmark = needs_hdfs
_numbers = itertools.count()


@pytest.fixture(scope="session")
def cluster(shared_hdfs: HdfsCluster) -> HdfsCluster:
    return shared_hdfs


@pytest.fixture
def place(cluster: HdfsCluster) -> Iterator[Place]:
    opened = open_place(f"{cluster.uri}/places/{next(_numbers)}")
    opened.make_folder("", parents=True)
    yield opened
    opened.close()


class TestHdfsPlace(PlaceContract):
    """The contract."""


def test_parts_begun_together_are_on_different_nodes(place: Place) -> None:
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


def _nodes_of_parts(place: Place, folder: str, count: int, last_resort: Sequence[str] = ()) -> list[str]:
    writers = place.begin_parts(
        [f"{folder}/{number}" for number in range(count)], part_bytes=1 << 20, last_resort=last_resort
    )
    for writer in writers:
        writer.write(bytes(1000))
    return [writer.close()[0] for writer in writers]


def test_a_part_of_more_than_the_largest_block_becomes_several_blocks(cluster: HdfsCluster, place: Place) -> None:
    (writer,) = place.begin_parts(["long"], part_bytes=2 << 30)
    for _ in range(17):
        writer.write(bytes(8 << 20))
    writer.close()
    assert place.stat("long").size_bytes == 17 * (8 << 20)
    blocks = [block.size_bytes for block in cluster.where(f"{urlsplit(place.uri).path}/long")]
    assert blocks == [128 << 20, 8 << 20]


def test_a_small_file_has_three_copies(cluster: HdfsCluster, place: Place) -> None:
    place.write_bytes("small", b"x" * 5000)
    assert place.create_bytes("new", b"x")
    for name in ("small", "new"):
        (block,) = cluster.where(f"{urlsplit(place.uri).path}/{name}", replicas=3)
        assert len(block.nodes) == 3


def test_a_small_file_has_copies_also_where_its_policy_wants_one_of_each_part(
    cluster: HdfsCluster, place: Place
) -> None:
    policy = Policy(stripes=2, parity=True, replication=1, min_bytes_per_stripe=1 << 20)
    with contextlib.closing(Writing(Files(place))) as writing:
        writing.write_file("metadata", *in_memory(b"x" * 5000), policy=policy)
        writing.write_file("tensors", *in_memory(bytes(3 << 20)), policy=policy)
    folder = urlsplit(place.uri).path
    copies = {name: cluster.where(f"{folder}/{name}", replicas=3)[0].nodes for name in ("metadata", "tensors")}
    assert [len(nodes) for nodes in copies.values()] == [3, 3]
    (part, *_) = [entry.path for folder in place.list(".stripes") for entry in place.list(folder.path)]
    assert len(cluster.where(f"{folder}/{part}")[0].nodes) == 1


def test_names_that_hdfs_cannot_have_are_known_before_and_never_found(place: Place) -> None:
    assert place.name_problem("step-1_12:30") != ""
    assert place.name_problem("bad\udcff") != ""
    assert place.name_problem("schön=1.ckpt") == ""
    for ask in (place.stat, place.open, place.delete, place.make_folder):
        with pytest.raises(NotFoundError):
            ask("bad\udcff")
    with closing(open_place(f"{place.uri}/bad\udcff")) as below, pytest.raises(NotFoundError):
        below.stat("")


def test_versions_of_the_same_length_and_time_differ(place: Place) -> None:
    versions = set()
    for number in range(8):
        place.write_bytes("head", b"%d" % number)
        place.set_mtime("head", 10**18)
        versions.add(place.stat("head").version)
    # By chance, two of the eight may be equal.
    assert len(versions) >= 7


def test_addresses_of_a_mount_table_lead_where_hadoop_s_own_shell_finds_the_same_files(
    cluster: HdfsCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = {"/jobs": f"{cluster.uri}/federated", "/here": f"file://{tmp_path}/here"}
    table = {f"fs.viewfs.mounttable.all.link.{path}": target for path, target in links.items()}
    hadoop.write_conf(tmp_path / "conf", {"core-site.xml": {"fs.defaultFS": "viewfs://all", **table}})
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "conf"))
    (tmp_path / "here").mkdir()
    with closing(open_place("viewfs:///jobs/moe")) as place:
        place.make_folder("", parents=True)
        place.write_bytes("note", b"content")
    shell = hadoop.tool(tmp_path / "conf", "fs.FsShell", "-cp", "/jobs/moe/note", "/here/copy")
    subprocess.run(shell, check=True, capture_output=True, timeout=300)
    assert (tmp_path / "here" / "copy").read_bytes() == b"content"
    with closing(open_place("viewfs://all/here")) as place:
        assert place.uri == f"file://{tmp_path}/here"
    with pytest.raises(UsageError, match="no link of the mount table all covers viewfs:///other"):
        open_place("viewfs:///other")

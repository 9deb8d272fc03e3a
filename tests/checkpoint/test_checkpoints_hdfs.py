"""Putting, verifying, getting and removing checkpoints in a real HDFS."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.checkpoint import attempts
from bootseer.checkpoint.attempts import collect
from bootseer.checkpoint.catalog import anatomy, checkpoints, missing_parts, newest_whole, remove
from bootseer.checkpoint.download import get_checkpoint
from bootseer.checkpoint.files import Files, maybe_head
from bootseer.checkpoint.latest import read_latest
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.publish import PutSettings, put_checkpoint
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.reading.settings import ReadingSettings
from bootseer.checkpoint.verify import verify
from bootseer.errors import AlreadyExistsError, NotFoundError, TransientError
from bootseer.places import open_place
from bootseer.places.place import Place
from checkpoint.striped_files import part_paths, put_striped
from hdfs_cluster import HdfsCluster, needs_hdfs
from waiting import until

pytestmark = needs_hdfs
_numbers = itertools.count()
_MIB = 1 << 20
_STRIPED = PutSettings(policy=Policy(stripes=2, parity=True, min_bytes_per_stripe=_MIB))


def in_hdfs(place: Place, path: str) -> str:
    return f"/{place.uri.partition('://')[2].partition('/')[2]}/{path}"


@pytest.fixture
def cluster(shared_hdfs: HdfsCluster) -> HdfsCluster:
    return shared_hdfs


@pytest.fixture
def files(cluster: HdfsCluster) -> Iterator[Files]:
    place = open_place(f"{cluster.uri}/jobs/{next(_numbers)}")
    place.make_folder("", parents=True)
    yield Files(place)
    place.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "sub").mkdir(parents=True)
    (folder / "model").write_bytes(os.urandom(5 * _MIB + 7))
    (folder / "sub" / "config").write_bytes(b"{}")
    return folder


def test_a_checkpoint_is_put_and_got(files: Files, source: Path, tmp_path: Path) -> None:
    put = put_checkpoint(files.place, source, "step-1", settings=_STRIPED)
    assert (put.num_files, put.num_striped, put.latest) == (2, 1, "step-1")
    with pytest.raises(AlreadyExistsError):
        put_checkpoint(files.place, source, "step-1", settings=_STRIPED)
    put_checkpoint(files.place, source / "model", "step-2.pt", settings=_STRIPED)
    with pytest.raises(AlreadyExistsError):
        put_checkpoint(files.place, source / "model", "step-2.pt", settings=_STRIPED)
    assert [(one.name, one.size_bytes, one.is_latest) for one in checkpoints(files, "")] == [
        ("step-1", 5 * _MIB + 9, False),
        ("step-2.pt", 5 * _MIB + 7, True),
    ]
    with contextlib.closing(Reading(files.place)) as reading:
        get_checkpoint(files, reading, "step-1", tmp_path / "out")
    assert (tmp_path / "out/model").read_bytes() == (source / "model").read_bytes()
    found = anatomy(files, "step-1/model")
    parts = found["segments"][0]["parts"]
    nodes = [part["nodes"] for part in parts]
    assert len({node for lie in nodes for node in lie}) == 3
    assert [part["put_on"] for part in parts] == nodes
    assert found["bytes_by_node"] == {part["nodes"][0]: part["size_bytes"] for part in parts}
    remove(files, "", "step-2.pt", force=True)
    assert read_latest(files.place, "") == "step-1"
    remove(files, "", "step-1", force=True)
    assert [entry.path for entry in files.place.list("") if not entry.is_folder] == []
    assert [entry for folder in files.place.list("") for entry in files.place.list(folder.path)] == []


def _begin_of(path: Path, length: int) -> bytes:
    """The beginning of a block's file; empty if it was just deleted, like those of earlier tests."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()[:length]
    return b""


def test_a_flipped_byte_on_a_disk_is_found_with_its_node(cluster: HdfsCluster, files: Files, source: Path) -> None:
    put_checkpoint(files.place, source, "step-1", settings=_STRIPED)
    found = anatomy(files, "step-1/model")
    part = found["segments"][0]["parts"][0]
    wanted = files.place.read_first(f"step-1/.stripes/{found['id']}/{part['name']}", 1 << 16)
    (block,) = [path for path in cluster.blocks() if _begin_of(path, 1 << 16) == wanted]
    data = bytearray(block.read_bytes())
    data[_MIB + 3] ^= 1
    block.write_bytes(data)
    (problem,) = verify(files, "step-1").problems
    assert (problem.path, problem.offset, problem.part) == ("step-1/model", 2 * _MIB, part["name"])
    assert problem.node == part["nodes"][0]
    assert problem.repairable


def test_replacing_and_collecting_what_dead_writers_left(
    files: Files, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_checkpoint(files.place, source, "step-1", settings=_STRIPED)
    (source / "model").write_bytes(b"small")
    put_checkpoint(files.place, source, "step-1", settings=PutSettings(replace=True))
    assert files.place.read_bytes("step-1/model", 9) == b"small"
    files.place.make_folder(".attempts/1", parents=True)
    files.place.write_bytes(".attempts/1/file", b"x")
    files.place.make_folder(f".stripes/{'a' * 32}", parents=True)
    assert collect(files.place, "") == 1
    monkeypatch.setattr(attempts, "LEASE_S", -1.0)
    monkeypatch.setattr(attempts, "_NO_LEASE_S", -1.0)
    assert collect(files.place, "") == 1
    assert list(files.place.list(".attempts")) == []


def test_a_lost_part_makes_an_older_checkpoint_the_newest_whole_one(files: Files, source: Path) -> None:
    for step in (1, 2):
        put_checkpoint(files.place, source, f"step-{step}", settings=_STRIPED)
    found = anatomy(files, "step-2/model")
    path = f"step-2/.stripes/{found['id']}/{found['segments'][0]['parts'][1]['name']}"
    files.place.delete(path)
    assert missing_parts(files, "step-2") == [path]
    assert newest_whole(files, "") == "step-1"


def test_modes_of_parts_follow_the_file(files: Files, source: Path) -> None:
    put_checkpoint(files.place, source, "step-1", settings=_STRIPED)
    files.set_mode("step-1/model", 0o600)
    parts = files.place.list(f"step-1/.stripes/{anatomy(files, 'step-1/model')['id']}")
    assert {entry.mode for entry in parts} == {0o600}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_two_signals_end_a_get_whose_nodes_hang(
    cluster: HdfsCluster, files: Files, tmp_path: Path, number: signal.Signals
) -> None:
    files.place.write_bytes("model", os.urandom(5 * _MIB))
    local = tmp_path / "local"
    local.mkdir()
    for node in range(len(cluster.nodes)):
        cluster.hang(node)
    try:
        words = [sys.executable, "-m", "bootseer", "ckpt", "get", f"{files.place.uri}/model", str(local / "copy")]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as getting:
            while not list(local.glob(".bootseer-get-*/copy")):
                assert getting.poll() is None
                time.sleep(0.01)
            for each in (number, signal.SIGINT):
                getting.send_signal(each)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    getting.wait(2)
            # A read would time out after 60 s.
            _, said = getting.communicate(timeout=40)
    finally:
        for node in range(len(cluster.nodes)):
            cluster.resume(node)
    assert getting.returncode in (128 + number, -signal.SIGINT), said
    assert "Traceback" not in said


def test_a_hung_node_with_the_only_replica_is_named_in_the_error(cluster: HdfsCluster, files: Files) -> None:
    head = put_striped(files.place, "model", os.urandom(5 * _MIB), stripes=2)
    (block,) = cluster.where(in_hdfs(files.place, part_paths("model", head)[1]))
    (node,) = block.nodes
    settings = ReadingSettings(deadline_s=8.0)  # 60 s by default
    with contextlib.closing(Reading(files.place, settings=settings)) as reading, reading.open("model") as file:
        cluster.hang(cluster.nodes.index(node))
        try:
            with pytest.raises(TransientError) as caught:
                file.readinto(0, bytearray(5 * _MIB))
        finally:
            cluster.resume(cluster.nodes.index(node))
    said = str(caught.value)
    assert said.startswith("model: bytes 1048576 to 2097152 ")
    assert f"was not read within 8.0 s; its only copy is on {node} ({node}: it sent nothing for" in said
    assert "\n" not in said


def _killed(work: Callable[[], None], is_due: Callable[[], bool]) -> None:
    """Run `work` in a child process, which kills itself as soon as `is_due`: if this process polled and killed it, it
    might end before."""

    def kill() -> None:
        until(is_due, "the state in which to kill it")
        os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        threading.Thread(target=kill, daemon=True).start()
        work()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL, "it ended before it was killed"


def test_killed_puts_and_gets_are_resumed(cluster: HdfsCluster, files: Files, tmp_path: Path) -> None:
    source = tmp_path / "shards"
    source.mkdir()
    for number in range(6):  # larger than the pieces in which files are downloaded
        (source / f"shard{number}").write_bytes(os.urandom(24 * _MIB))

    def heads() -> int:
        """The number of complete files in attempts."""
        with contextlib.suppress(NotFoundError):
            folders = [entry.path for entry in files.place.list(".attempts") if entry.is_folder]
            entries = [entry for folder in folders for entry in files.place.list(folder)]
            return sum(maybe_head(entry) and "/shard" in entry.path for entry in entries)
        return 0

    def put() -> None:
        place = open_place(files.place.uri)
        put_checkpoint(place, source, "step-1", settings=_STRIPED)

    _killed(put, lambda: heads() >= 3)
    left = heads()
    data = bytearray((source / "shard0").read_bytes())
    data[20 * _MIB] ^= 1
    (source / "shard0").write_bytes(data)
    assert put_checkpoint(files.place, source, "step-1", settings=_STRIPED).kept_bytes >= (left - 1) * 24 * _MIB
    assert verify(files, "step-1").problems == []
    assert list(files.place.list(".attempts")) == []

    def whole() -> int:
        return sum(path.stat().st_blocks * 512 for path in tmp_path.glob(".bootseer-get-*/copy/*"))

    def get() -> None:
        opened = Files(open_place(files.place.uri))
        with contextlib.closing(Reading(opened.place)) as reading:
            get_checkpoint(opened, reading, "step-1", tmp_path / "out")

    _killed(get, lambda: whole() >= 60 * _MIB)
    with contextlib.closing(Reading(files.place)) as reading:
        got = get_checkpoint(files, reading, "step-1", tmp_path / "out")
    assert got.kept_bytes >= 24 * _MIB
    for path in source.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert list(tmp_path.glob(".bootseer-get-*")) == []

"""A mounted folder of a real HDFS: the same guarantees, and faults of its nodes during reads and writes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import warm
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.layout import Policy
from bootseer.checkpoint.mount.mounted import MountedCheckpoint, find_checkpoint, runtime_of
from bootseer.checkpoint.publish import PutSettings, put_checkpoint
from bootseer.errors import NoSpaceError, NoSpaceNowError
from bootseer.hdfs.namenode import NameNode
from bootseer.places import open_place
from checkpoint.mounted_place import DEADLINE_S, MIB, MountedPlace, number_of
from hdfs_cluster import HdfsCluster, needs_hdfs
from hdfs_links import links_missing
from waiting import until

pytestmark = [*needs_hdfs, pytest.mark.fuse]

JOB = Path(__file__).with_name("mount_job.py")
LARGE = 20 * MIB + 77


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    folder = tmp_path_factory.mktemp("hdfs")
    with HdfsCluster(folder, num_datanodes=3, replication=2, fast_detection=True) as running:
        yield running


@pytest.fixture
def mounted(tmp_path: Path, cluster: HdfsCluster) -> Iterator[MountedCheckpoint]:
    with _mounted(tmp_path, cluster) as found:
        yield found


@contextmanager
def _mounted(tmp_path: Path, cluster: HdfsCluster) -> Iterator[MountedCheckpoint]:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened by this user")
    target, runtime = tmp_path / "m", tmp_path / "run"
    with closing(open_place(cluster.uri)) as place:
        Files(place).set_policy("", Policy(stripes=2, parity=True))
    words = [f"{cluster.uri}/", str(target), str(runtime), ""]
    (ended,) = warm.run(JOB, words, folder=tmp_path / "said", parent=warm.CHECKPOINTS)
    said = json.loads(ended.stdout)
    assert said["target"] == str(target), said
    found = find_checkpoint(runtime_of(runtime), target)
    try:
        yield found
    finally:
        found.unmount(force=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's mounts are open to other users")
@pytest.mark.parametrize("only_me", [False, True])
def test_root_is_warned_that_other_users_can_use_the_mount(cluster: HdfsCluster, tmp_path: Path, only_me: bool) -> None:
    env = {**os.environ, "BOOTSEER_RUNTIME": str(tmp_path / "run"), "BOOTSEER_CACHE": str(tmp_path / "cache")}

    def ckpt(*words: str) -> str:
        argv = [sys.executable, "-m", "bootseer", "ckpt", *words]
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=180, check=True).stderr

    said = ckpt("mount", f"{cluster.uri}/", str(tmp_path / "m"), *["--only-me"] * only_me)
    ckpt("umount", "--force", str(tmp_path / "m"))
    assert ("--only-me excludes them" in said) is not only_me


def test_a_tree_is_created_read_renamed_and_removed(mounted: MountedCheckpoint, tmp_path: Path) -> None:
    root = mounted.target
    data = os.urandom(LARGE)
    (root / "job/step-1.tmp").mkdir(parents=True)
    (root / "job/step-1.tmp/large").write_bytes(data)
    (root / "job/step-1.tmp/small").write_text("small")
    (root / "job/step-1.tmp").rename(root / "job/step-1")
    (root / "job/latest.new").write_text("step-1\n")
    (root / "job/latest.new").rename(root / "job/latest")
    assert (root / "job/step-1/large").read_bytes() == data
    assert (root / "job/step-1/small").read_text() == "small"
    assert sorted(path.name for path in (root / "job").rglob("*")) == ["large", "latest", "small", "step-1"]
    (root / "job/step-1/large").chmod(0o600)
    os.utime(root / "job/step-1/large", (0, 1_000_000_000))
    status = (root / "job/step-1/large").stat()
    assert (status.st_mode, status.st_size, status.st_mtime) == (0o100600, LARGE, 1_000_000_000)
    assert (root / "job/step-1/large").read_bytes() == data
    subprocess.run(["rm", "-r", root / "job"], check=True)
    assert not (root / "job").exists()


def test_a_hung_node_only_delays_a_reader(mounted: MountedCheckpoint, cluster: HdfsCluster) -> None:
    data = os.urandom(LARGE)
    (mounted.target / "f").write_bytes(data)
    cluster.hang(0)
    try:
        assert (mounted.target / "f").read_bytes() == data
    finally:
        cluster.resume(0)


def test_a_node_that_hangs_while_a_file_is_written_loses_no_data(
    mounted: MountedCheckpoint, cluster: HdfsCluster
) -> None:
    data = os.urandom(LARGE)
    with (mounted.target / "f").open("wb", buffering=0) as file:
        file.write(data[: LARGE // 2])
        until(lambda: _sends(mounted), "it is being sent")
        cluster.hang(1)
        try:
            file.write(data[LARGE // 2 :])
            file.close()
            assert (mounted.target / "f").read_bytes() == data
        finally:
            cluster.resume(1)
    assert (mounted.target / "f").read_bytes() == data


def _sends(mounted: MountedCheckpoint) -> bool:
    return bool(mounted.status()["writing"]["files"])


def test_a_mount_works_after_a_restart_of_the_namenode(mounted: MountedCheckpoint, cluster: HdfsCluster) -> None:
    before, after = os.urandom(LARGE), os.urandom(LARGE)
    (mounted.target / "before").write_bytes(before)
    with (mounted.target / "before").open("rb") as reader, (mounted.target / "after").open("wb") as writer:
        assert reader.read(1000) == before[:1000]
        writer.write(after[: LARGE // 2])
        cluster.restart_namenode()
        assert reader.read() == before[1000:]
        writer.write(after[LARGE // 2 :])
    assert (mounted.target / "after").read_bytes() == after
    assert sorted(path.name for path in mounted.target.iterdir() if path.name in ("after", "before")) == [
        "after",
        "before",
    ]


def test_names_that_hdfs_refuses_are_refused_before_anything_is_written(mounted: MountedCheckpoint) -> None:
    root = mounted.target
    (root / "f").write_text("f")
    assert number_of(lambda: os.open(root / "step-12:30", os.O_WRONLY | os.O_CREAT)) == errno.EINVAL
    assert number_of((root / "step-12:30").mkdir) == errno.EINVAL
    assert number_of(lambda: (root / "f").rename(root / "12:30")) == errno.EINVAL
    assert not (root / "step-12:30").exists()
    assert (root / "f").read_text() == "f"


def test_while_a_file_cannot_be_written_others_are_opened_looked_up_and_listed(
    mounted: MountedCheckpoint, cluster: HdfsCluster
) -> None:
    root = mounted.target / "hung"
    root.mkdir()
    (root / "known").write_text("known")
    assert (root / "known").read_text() == "known"
    nodes = range(3)
    with ThreadPoolExecutor(2) as threads:
        for node in nodes:
            cluster.hang(node)
        try:
            closing = threads.submit((root / "f").write_text, "f")
            until(lambda: [path.name for path in root.iterdir() if path.name == "f"] == ["f"], "it was created")
            until(lambda: (root / "f").stat().st_size == 1, "it was written")
            assert (root / "f").read_text() == "f"
            assert (root / "known").read_text() == "known"
            assert (root / "known").stat().st_size == 5
            assert sorted(path.name for path in root.iterdir()) == ["f", "known"]
            assert not closing.done()
        finally:
            for node in nodes:
                cluster.resume(node)
        closing.result(DEADLINE_S)
    assert (root / "f").read_text() == "f"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts requests to NameNodes by method."""
    counts: Counter[str] = Counter()
    ask = NameNode.ask

    def count(self: NameNode, method: str, *rest: Any) -> bytes:
        counts[method] += 1
        return ask(self, method, *rest)

    monkeypatch.setattr(NameNode, "ask", count)
    return counts


def test_a_small_file_takes_few_requests_to_the_namenode(
    cluster: HdfsCluster, tmp_path: Path, asked: Counter[str]
) -> None:
    with contextlib.closing(MountedPlace(tmp_path, tmp_path / "m", place=open_place(f"{cluster.uri}/"))) as mounted:
        folder = mounted.target / "few"
        folder.mkdir()
        names = [f"f{i}" for i in range(10)]
        (folder / "first").write_text("what holds for all files of a folder is asked now and then")
        asked.clear()
        for name in names:
            (folder / name).write_text(name)
        # Without `complete`, which is repeated if a DataNode's report is late.
        assert {asked[method] for method in ("create", "addBlock", "rename2")} == {len(names)}
        # The name, the replaced file, the length; and the folder, which is queried again after 0.1 s.
        assert asked["getFileInfo"] <= 5 * len(names)
        assert asked.keys() <= {"create", "addBlock", "complete", "rename2", "getFileInfo", "getBlockLocations"}
        asked.clear()
        for name in names:
            assert (folder / name).read_text() == name
        assert asked["getBlockLocations"] == len(names)
        assert asked["getFileInfo"] <= 2 * len(names)
        # The kernel uses its own cache for a second, and then the attributes from the listing.
        entries = sorted(entry.name for entry in os.scandir(folder))
        assert entries == ["f0", *names[1:], "first"]
        asked.clear()
        assert [(folder / name).stat().st_size for name in names] == [2] * len(names)
        assert asked.keys() <= {"getFileInfo"}  # of the folder, if its cached attributes have expired
        assert asked["getFileInfo"] <= 1


@pytest.mark.root
@pytest.mark.skipif(bool(links_missing()), reason=links_missing())
def test_full_datanodes_are_enospc_and_leave_no_name(tmp_path: Path) -> None:
    with (
        HdfsCluster(tmp_path, num_datanodes=2, disk_mib={0: 20, 1: 20}, fast_detection=True) as cluster,
        _mounted(tmp_path, cluster) as mounted,
    ):
        (mounted.target / "before").write_bytes(b"small")
        assert number_of(lambda: (mounted.target / "large").write_bytes(os.urandom(50 * MIB))) == errno.ENOSPC
        assert [path.name for path in mounted.target.iterdir()] == ["before"]
        source = tmp_path / "source"
        source.write_bytes(bytes(25 * MIB))
        with closing(open_place(cluster.uri)) as place:
            with pytest.raises(NoSpaceError, match=r"/step-1 needs 75\.0 MiB: no space, .* are free on all DataN"):
                put_checkpoint(place, source, "step-1", settings=PutSettings(policy=Policy(replication=3)))
            with pytest.raises((NoSpaceError, NoSpaceNowError)) as refused:
                put_checkpoint(place, source, "step-1", settings=PutSettings(policy=Policy(stripes=1)))
            assert "/step-1 needs 25.0 MiB: no space on hdfs://" in str(refused.value)
            assert all(f"{node} " in str(refused.value) for node in cluster.nodes)
        for number in (0, 1):
            cluster.fill(number)
        assert number_of(lambda: (mounted.target / "small").write_bytes(b"1")) == errno.ENOSPC
        assert number_of(lambda: (mounted.target / "before").write_bytes(b"2")) == errno.ENOSPC
        assert [path.read_bytes() for path in mounted.target.iterdir()] == [b"small"]
        assert mounted.status()["lost"] == []

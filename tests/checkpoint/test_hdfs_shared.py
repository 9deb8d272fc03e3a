"""Checkpoints in a shared HDFS: with permissions, quotas, snapshots, large blocks, and Hadoop's own programs.

One cluster for all tests: permissions are checked, block access needs tokens, blocks have at least 4 MiB and at most
two replicas, and checksums are CRC32 of 4,096 bytes.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import hadoop
import warm
from bootseer.artifact.objects import put_once
from bootseer.checkpoint.attempts import collect, lease_bytes
from bootseer.checkpoint.catalog import checkpoints, remove
from bootseer.checkpoint.download import get_checkpoint
from bootseer.checkpoint.files import Files
from bootseer.checkpoint.hot_list import Range
from bootseer.checkpoint.latest import read_latest
from bootseer.checkpoint.layout import Policy, encode_policy
from bootseer.checkpoint.mount.hot_lists import HotLists
from bootseer.checkpoint.mount.mounted import MountedCheckpoint, find_checkpoint, runtime_of
from bootseer.checkpoint.publish import PutSettings, put_checkpoint
from bootseer.checkpoint.reading.reading import Reading
from bootseer.checkpoint.verify import verify
from bootseer.errors import AccessError, BootseerError, NoSpaceError, NotFoundError
from bootseer.hdfs.client import HdfsClient
from bootseer.places import open_place
from bootseer.places.place import Place, make_folder_like_parent
from bootseer.store.file import PlaceStore
from hdfs_cluster import HdfsCluster, needs_hdfs
from waiting import until

pytestmark = needs_hdfs
_MOUNT_JOB = Path(__file__).parent / "mount" / "mount_job.py"
_MIB = 1 << 20
_BLOCK = 4 * _MIB
_DATA = os.urandom(5 * _MIB + 7)
_PUT = PutSettings(policy=Policy(stripes=2, part_bytes=_BLOCK, min_bytes_per_stripe=_MIB))
_SHELL = "fs.FsShell"
_UNCHANGED = (1 << 63) - 1
"""A quota that is not changed."""
_LEAVE, _ENTER = 1, 2
"""Actions of setSafeMode."""
_DEADLINE_S = 120.0

Opened = Callable[[str, str], Place]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    settings = {
        "dfs.permissions.enabled": "true",
        "dfs.block.access.token.enable": "true",
        "dfs.namenode.fs-limits.min-block-size": str(_BLOCK),
        "dfs.blocksize": str(_BLOCK),
        "dfs.replication.max": "2",
        "dfs.checksum.type": "CRC32",
        "dfs.bytes-per-checksum": "4096",
    }
    with HdfsCluster(tmp_path_factory.mktemp("shared"), settings=settings) as running:
        with closing(HdfsClient(running.uri.removeprefix("hdfs://"))) as client:
            for folder in ("/sticky", "/quota", "/names", "/snapped", "/mounted", "/store"):
                client.make_folder(folder, mode=0o1777)
            client.make_folder("/team", mode=0o777)
            client.make_folder("/private")
        yield running


@pytest.fixture
def opened(cluster: HdfsCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Opens a place as a user."""
    made: list[Place] = []

    def open_as(user: str, path: str) -> Place:
        monkeypatch.setenv("HADOOP_USER_NAME", user)
        made.append(open_place(f"{cluster.uri}{path}"))
        # The library reads the user's name at its first request.
        with pytest.raises(NotFoundError):
            made[-1].stat("nothing")
        return made[-1]

    yield open_as
    for place in made:
        place.close()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "step"
    folder.mkdir()
    (folder / "model").write_bytes(_DATA)
    (folder / "config").write_bytes(b"{}")
    return folder


def _assert_whole(place: Place, path: str, target: Path) -> None:
    files = Files(place)
    assert verify(files, path).problems == []
    with closing(Reading(place)) as reading:
        get_checkpoint(files, reading, path, target)
    assert (target / "model").read_bytes() == _DATA
    assert (target / "config").read_bytes() == b"{}"


def test_a_checkpoint_is_put_where_blocks_must_be_larger_than_its_files(
    opened: Opened, source: Path, tmp_path: Path
) -> None:
    place = opened(getpass.getuser(), "/")
    put_checkpoint(place, source, "step-1", folder="large", settings=_PUT)
    _assert_whole(place, "large/step-1", tmp_path / "out")


def test_the_replication_of_a_small_file_is_limited_to_what_the_cluster_allows(opened: Opened) -> None:
    place = opened(getpass.getuser(), "/")
    for content in (b"x", b"y"):
        place.write_bytes("small", content)
        assert place.read_bytes("small", 1) == content


def test_users_share_a_job_and_cannot_remove_each_others_checkpoints(
    opened: Opened, source: Path, tmp_path: Path
) -> None:
    alice, bob = opened("alice", "/sticky"), opened("bob", "/sticky")
    put_checkpoint(alice, source, "step-1", settings=_PUT)
    put_checkpoint(bob, source, "step-2", settings=PutSettings(policy=_PUT.policy, move_latest=False))
    _assert_whole(alice, "step-2", tmp_path / "out")
    assert [one.name for one in checkpoints(Files(alice), "")] == ["step-1", "step-2"]
    with pytest.raises(AccessError, match="Permission denied by sticky bit: user=bob"):
        bob.delete("step-1", recursive=True)
    alice.set_mode("step-1", 0o700)
    refused: list[str] = []
    assert [one.name for one in checkpoints(Files(bob), "", refused.append)] == ["step-2"]
    assert refused == ["step-1"]
    listed = subprocess.run(
        [sys.executable, "-m", "bootseer", "ckpt", "list", bob.uri],
        env=os.environ | {"HADOOP_USER_NAME": "bob"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "no permission to read step-1\n" in listed.stdout
    assert "not there" not in listed.stdout  # it is there, and latest names it


def test_a_checkpoint_that_a_user_may_hide_but_not_delete_is_kept(opened: Opened, source: Path, tmp_path: Path) -> None:
    alice, bob = opened("alice", "/team"), opened("bob", "/team")
    put_checkpoint(alice, source, "step-1", settings=PutSettings(policy=_PUT.policy, move_latest=False))
    with pytest.raises(AccessError):
        remove(Files(bob), "", "step-1")
    collect(alice, "")
    _assert_whole(alice, "step-1", tmp_path / "out")


def test_another_users_incomplete_attempt_does_not_fail_a_put(opened: Opened, source: Path, tmp_path: Path) -> None:
    alice, bob = opened("alice", "/team"), opened("bob", "/team")
    make_folder_like_parent(alice, ".attempts")
    alice.make_folder(".attempts/dead")
    alice.write_bytes(".attempts/dead/config", b"{}")
    alice.write_bytes(".attempts/dead.lease", lease_bytes("step-2", encode_policy(_PUT.policy or Policy()).decode()))
    alice.set_mtime(".attempts/dead.lease", 1_700_000_000_000_000_000)
    put_checkpoint(bob, source, "step-2", settings=_PUT)
    _assert_whole(bob, "step-2", tmp_path / "out")


def test_the_rest_of_another_users_upload_does_not_fail_those_of_others(opened: Opened) -> None:
    alice, bob = opened("alice", "/store"), opened("bob", "/store")
    rest = f".uploads/{'0' * 32}"
    alice.make_folder(".uploads", mode=0o1777)
    alice.write_bytes(rest, b"rest")
    alice.set_mtime(rest, 1_700_000_000_000_000_000)
    put_once(PlaceStore(bob), "by-bob", b"b")
    assert [entry.path for entry in alice.list(".uploads")] == [rest]
    put_once(PlaceStore(alice), "by-alice", b"a")
    assert list(alice.list(".uploads")) == []
    assert [alice.read_bytes(name, 1) for name in ("by-alice", "by-bob")] == [b"a", b"b"]


def test_a_user_without_write_access_gets_an_access_error(opened: Opened, source: Path) -> None:
    with pytest.raises(AccessError, match='Permission denied: user=bob, access=WRITE, inode="/private"'):
        put_checkpoint(opened("bob", "/private"), source, "step-1", settings=_PUT)


def test_a_user_without_write_access_uses_hot_lists_but_saves_none(opened: Opened) -> None:
    said: list[str] = []
    root, bob = opened(getpass.getuser(), "/private"), opened("bob", "/private")
    ranges = [Range("step-1/model", 0, _MIB)]
    HotLists(root, "0 of 2", said.append).save(ranges, "step-1", began=True)
    assert said == []
    lists = HotLists(bob, "0 of 2", said.append)
    assert lists.load("step-2") == [Range("step-2/model", 0, _MIB)]
    others = [Range("step-2/config", 0, _MIB)]
    lists.save(others, "step-2", began=True)
    assert ["the hot list is not kept: " in line for line in said] == [True]
    assert HotLists(root, "0 of 2", said.append).load("step-2") == [Range("step-2/model", 0, _MIB)]


@pytest.mark.parametrize(("folder", "quota"), [("quota", (_UNCHANGED, 6 * _MIB)), ("names", (9, _UNCHANGED))])
def test_an_exceeded_quota_fails_a_put_which_leaves_nothing(
    cluster: HdfsCluster, opened: Opened, source: Path, folder: str, quota: tuple[int, int]
) -> None:
    cluster.ask("setQuota", f"/{folder}", *quota)
    place = opened("alice", f"/{folder}")
    with pytest.raises(NoSpaceError, match=f"quota.* of .*/{folder} is exceeded"):
        put_checkpoint(place, source, "step-1", settings=_PUT)
    assert [entry.path for entry in place.list("")] == [".attempts"]
    assert list(place.list(".attempts")) == []


def test_a_snapshot_can_be_read_but_not_written(
    cluster: HdfsCluster, opened: Opened, source: Path, tmp_path: Path
) -> None:
    place = opened("alice", "/snapped")
    put_checkpoint(place, source, "step-1", settings=_PUT)
    cluster.ask("allowSnapshot", "/snapped")
    cluster.ask("createSnapshot", "/snapped", "then")
    place.delete("step-1", recursive=True)
    then = opened("bob", "/snapped/.snapshot/then")
    assert read_latest(then, "") == "step-1"
    _assert_whole(then, "step-1", tmp_path / "out")
    with pytest.raises(AccessError, match="read-only snapshot"):
        put_checkpoint(then, source, "step-2", settings=_PUT)


def test_a_put_waits_for_a_namenode_in_safe_mode(
    cluster: HdfsCluster, opened: Opened, source: Path, tmp_path: Path
) -> None:
    place = opened(getpass.getuser(), "/")
    cluster.ask("setSafeMode", _ENTER)
    put = threading.Thread(target=put_checkpoint, args=(place, source, "step-1"), kwargs={"folder": "safe"})
    put.start()
    until(lambda: _has_refused(cluster), "refused")
    cluster.ask("setSafeMode", _LEAVE)
    put.join(_DEADLINE_S)
    assert not put.is_alive()
    _assert_whole(place, "safe/step-1", tmp_path / "out")


def _has_refused(cluster: HdfsCluster) -> bool:
    """Whether the NameNode has refused a change because of its safe mode."""
    return "SafeModeExceptionNumOps" in hadoop.bean(
        cluster.namenode_http, "Hadoop:service=NameNode,name=RpcDetailedActivityForPort*"
    )


@pytest.mark.parametrize(
    "checksums",
    [["-Ddfs.checksum.type=NULL"], ["-Ddfs.bytes-per-checksum=1000", "-Ddfs.blocksize=4195000"]],
    ids=["none", "odd"],
)
def test_files_written_truncated_and_appended_to_by_hadoops_programs_are_read(
    cluster: HdfsCluster, opened: Opened, tmp_path: Path, checksums: list[str]
) -> None:
    local, path = tmp_path / "data", f"/{checksums[0].strip('-')}"
    local.write_bytes(_DATA)
    cluster.tool(_SHELL, *checksums, "-put", str(local), path)
    place = opened(getpass.getuser(), "/")
    with closing(Reading(place)) as reading:
        before = reading.open(path[1:])
        assert before.read(0, len(_DATA)) == _DATA
        cluster.tool(_SHELL, "-truncate", "-w", str(5 * _MIB), path)
        # Either still in memory, or an error.
        with contextlib.suppress(BootseerError):
            assert before.read(5 * _MIB - 1, 8) == _DATA[5 * _MIB - 1 :]
        cluster.tool(_SHELL, *checksums, "-appendToFile", str(local), path)
        after = reading.open(path[1:])
        expected = _DATA[: 5 * _MIB] + _DATA
        assert after.read(0, len(expected)) == expected


@pytest.mark.fuse
def test_an_exceeded_quota_is_enospc_on_a_mount(
    cluster: HdfsCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse cannot be opened by this user")
    monkeypatch.setenv("HADOOP_USER_NAME", "alice")
    cluster.ask("setQuota", "/mounted", _UNCHANGED, 12 * _MIB)
    mounted = _mount(f"{cluster.uri}/mounted", tmp_path)
    try:
        with pytest.raises(OSError, match="No space left") as raised:
            (mounted.target / "model").write_bytes(_DATA * 2)
        assert raised.value.errno == errno.ENOSPC
        (mounted.target / "small").write_bytes(b"small")
        assert (mounted.target / "small").read_bytes() == b"small"
    finally:
        mounted.unmount(force=True)


def _mount(uri: str, folder: Path) -> MountedCheckpoint:
    target, runtime = folder / "m", folder / "run"
    with closing(open_place(uri)) as place:
        Files(place).set_policy("", Policy(stripes=2))
    words = [uri, str(target), str(runtime), ""]
    (ended,) = warm.run(_MOUNT_JOB, words, folder=folder / "said", parent=warm.CHECKPOINTS)
    said = json.loads(ended.stdout)
    assert said.get("target") == str(target), said
    return find_checkpoint(runtime_of(runtime), target)

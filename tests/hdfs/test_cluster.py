"""The HDFS that tests and benchmarks start: whether it is there, and whether its faults are real."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hadoop
import hdfs_links
import hdfs_plain
from hdfs_cluster import HdfsCluster, needs_hdfs, needs_links

MIB = 1024 * 1024
TESTS = Path(__file__).parents[1]
SCRIPT = TESTS.parent / "scripts" / "hdfs.py"
SUBNETS = (253, 254)
"""Of these tests alone, so that they can tell what they leave from what others have."""


@pytest.mark.skipif(os.environ.get("BOOTSEER_WITHOUT_HDFS") == "1", reason="BOOTSEER_WITHOUT_HDFS=1")
@pytest.mark.skipif(shutil.which("java") is None, reason="java is not installed")
def test_an_hdfs_can_be_started_here() -> None:
    """All others of HDFS are skipped when it cannot; a run of the tests shall not look green then."""
    assert hadoop.missing() == ""
    importlib.import_module("hdfs_native")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    with HdfsCluster(
        tmp_path_factory.mktemp("cluster"), num_datanodes=3, replication=2, fast_detection=True
    ) as running:
        yield running


def put(cluster: HdfsCluster, path: str, data: bytes) -> None:
    hdfs_plain.write(cluster.uri, path, data)


def get(cluster: HdfsCluster, path: str) -> bytes:
    return hdfs_plain.read(cluster.uri, path)


def eventually(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def answers(address: str, seconds: float = 60.0) -> bool:
    """Whether a server ends a connection on which it gets what it cannot understand."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.sendall(b"\0\0")
        connection.shutdown(socket.SHUT_WR)
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False


class TestFaults:
    pytestmark = needs_hdfs

    def test_where_names_the_blocks_in_order_and_their_nodes(self, cluster: HdfsCluster) -> None:
        data = os.urandom(2 * MIB + 5)
        put(cluster, "/where/it", data)
        found = cluster.where("/where/it", replicas=2)
        assert [block.size_bytes for block in found] == [MIB, MIB, 5]
        for number, block in enumerate(found):
            assert len(set(block.nodes)) == 2
            for node in block.nodes:
                (file,) = (path for path in cluster.blocks(cluster.nodes.index(node)) if path.name == block.block)
                assert file.read_bytes() == data[number * MIB : number * MIB + MIB]
        with pytest.raises(FileNotFoundError):
            cluster.where("/nowhere")

    def test_corrupt_flips_one_byte_on_one_node_or_on_each(self, cluster: HdfsCluster) -> None:
        data = os.urandom(MIB + 100)
        put(cluster, "/corrupt/it", data)
        block = cluster.where("/corrupt/it")[1]
        files = [path for path in cluster.blocks() if path.name == block.block]
        first = cluster.nodes.index(block.nodes[0])
        assert cluster.corrupt("/corrupt/it", block=1, offset=7, datanode=first) == 1
        contents = [path.read_bytes() for path in files]
        assert sorted(content == data[MIB:] for content in contents) == [False, True]
        assert get(cluster, "/corrupt/it") == data
        assert cluster.corrupt(files[0], offset=99) == 1
        put(cluster, "/corrupt/both", data)
        assert cluster.corrupt("/corrupt/both") == 2
        with pytest.raises(RuntimeError):
            get(cluster, "/corrupt/both")

    def test_a_hung_datanode_takes_connections_and_answers_nothing(self, cluster: HdfsCluster) -> None:
        assert answers(cluster.nodes[0])
        cluster.hang(0)
        try:
            assert not answers(cluster.nodes[0], 0.5)
        finally:
            cluster.resume(0)
        assert answers(cluster.nodes[0])

    def test_a_killed_datanode_refuses_and_comes_back_with_its_blocks(self, cluster: HdfsCluster) -> None:
        put(cluster, "/kill/it", b"kept" * 1000)
        before, node = cluster.blocks(1), cluster.nodes[1]
        cluster.kill(1)
        with pytest.raises(ConnectionRefusedError):
            answers(node)
        cluster.restart(1)
        assert answers(node)
        assert set(before) <= set(cluster.blocks(1))
        assert get(cluster, "/kill/it") == b"kept" * 1000

    def test_a_namenode_hangs_goes_on_and_keeps_everything_when_it_restarts(self, cluster: HdfsCluster) -> None:
        put(cluster, "/restart/it", b"kept" * 1000)
        address = cluster.uri.removeprefix("hdfs://")
        cluster.hang_namenode()
        try:
            assert not answers(address, 0.5)
        finally:
            cluster.resume_namenode()
        assert answers(address)
        cluster.restart_namenode()
        assert get(cluster, "/restart/it") == b"kept" * 1000


class TestLinks:
    pytestmark = needs_links

    @pytest.fixture(autouse=True)
    def subnets(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(hdfs_links, "SUBNETS", SUBNETS)
        yield
        with hdfs_links.Links(0), hdfs_links.Links(0):
            pass

    def test_each_datanode_is_behind_a_link_with_a_rate_of_its_own(self, tmp_path: Path) -> None:
        data = os.urandom(4 * MIB)
        with HdfsCluster(tmp_path, num_datanodes=2, rate_mbit=16) as cluster:
            assert len({node.split(":")[0] for node in cluster.nodes}) == 2
            started = time.monotonic()
            hdfs_plain.write(cluster.uri, "/links/it", data, block_size=16 * MIB)
            # The kernel lets no more than 2 MB pass in a second, beyond a burst of 64 KiB.
            assert time.monotonic() - started > 1.5
            started = time.monotonic()
            assert get(cluster, "/links/it") == data
            assert time.monotonic() - started > 1.5
            for i in range(2):
                cluster.set_rate(i, None)

            def is_quick() -> bool:
                started = time.monotonic()
                assert get(cluster, "/links/it") == data
                return time.monotonic() - started < 1.5

            # On a busy machine not each read is.
            assert eventually(is_quick)
            with HdfsCluster(tmp_path / "beside", links=True) as other:
                put(other, "/links/it", data)
                assert get(other, "/links/it") == get(cluster, "/links/it")
        assert network() == set()

    def test_a_full_datanode_gets_no_block_and_one_with_room_again_does(self, tmp_path: Path) -> None:
        with HdfsCluster(tmp_path, num_datanodes=2, disk_mib={1: 16}, fast_detection=True) as cluster:
            full, numbers = cluster.nodes[1], itertools.count()

            def chosen() -> set[str]:
                """The nodes of a few new blocks, as they are chosen while the disk is as it is."""
                found = set()
                for number in itertools.islice(numbers, 20):
                    put(cluster, f"/fill/{number}", b"small")
                    found.update(cluster.where(f"/fill/{number}")[0].nodes)
                return found

            cluster.fill(1)
            assert chosen() == {cluster.nodes[0]}
            cluster.make_room(1)
            # One time in a million chance would choose the same node of two 20 times.
            assert full in chosen()
        assert not os.path.ismount(tmp_path / "hdfs" / "datanode1")

    def test_a_cluster_that_does_not_start_leaves_no_link_and_no_server(self, tmp_path: Path) -> None:
        with (
            pytest.raises(RuntimeError, match="does not start"),
            HdfsCluster(tmp_path, links=True, settings={"dfs.datanode.failed.volumes.tolerated": "7"}),
        ):
            pytest.fail("it has started")
        assert network() == set()
        assert running(tmp_path) == []

    def test_servers_of_a_killed_test_run_die_and_their_links_are_removed_by_the_next(self, tmp_path: Path) -> None:
        program = (
            "import time; from pathlib import Path; import hdfs_links; from hdfs_cluster import HdfsCluster\n"
            f"hdfs_links.SUBNETS = {SUBNETS}\n"
            f"with HdfsCluster(Path({str(tmp_path)!r}), links=True): print('up', flush=True); time.sleep(600)"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(TESTS)}
        )
        assert child.stdout is not None
        with child.stdout:
            assert child.stdout.readline() == b"up\n"
            child.kill()
            child.wait()
        assert eventually(lambda: running(tmp_path) == [])
        assert network() != set()
        with hdfs_links.Links(1):
            pass
        assert network() == set()


class TestInstalled:
    pytestmark = needs_hdfs

    def test_hadoop_home_is_used_when_it_is_set(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if "HADOOP_HOME" in os.environ:
            pytest.skip("HADOOP_HOME is set: all tests use it")
        home = tmp_path / "home"
        for part in ("common/lib", "hdfs/lib"):
            (home / "share/hadoop" / part).mkdir(parents=True)
        for jar in (hadoop.FETCHED / "lib").iterdir():
            (home / "share/hadoop/hdfs/lib" / jar.name).symlink_to(jar)
        (home / "share/hadoop/hdfs/webapps").symlink_to(hadoop.FETCHED / "webapps")
        monkeypatch.setenv("HADOOP_HOME", str(home))
        monkeypatch.setattr(hadoop, "FETCHED", tmp_path / "nothing")
        assert hadoop.missing() == ""
        with HdfsCluster(tmp_path) as cluster:
            put(cluster, "/home/it", b"kept")
            assert get(cluster, "/home/it") == b"kept"
        monkeypatch.setenv("HADOOP_HOME", str(tmp_path / "nothing"))
        assert "HADOOP_HOME" in hadoop.missing()


class TestDevelopment:
    """The HDFS that `make hdfs` starts."""

    pytestmark = needs_hdfs

    def test_it_stays_until_it_is_stopped_and_keeps_its_files(self, tmp_path: Path) -> None:
        folder = tmp_path / "it"
        assert script(folder, "uri") == (1, "")
        assert script(folder, "stop") == (0, "")
        try:
            code, address = script(folder, "start", "--datanodes", "1")
            assert code == 0
            assert address.startswith("hdfs://127.0.0.1:")
            assert script(folder, "start") == (0, address)
            assert script(folder, "uri") == (0, address)
            hdfs_plain.write(address, "/kept/it", b"kept")
            assert script(folder, "stop") == (0, "")
            assert running(folder) == []
            assert script(folder, "status") == (1, "")
            code, address = script(folder, "start", "--datanodes", "1")
            assert hdfs_plain.read(address, "/kept/it") == b"kept"
            os.kill(int((folder / "keeper.pid").read_text()), signal.SIGKILL)
            assert eventually(lambda: script(folder, "uri") == (1, "") and running(folder) == [])
            assert script(folder, "start", "--datanodes", "1")[0] == 0
        finally:
            script(folder, "stop")
        assert running(folder) == []

    def test_a_rate_that_cannot_be_is_said(self, tmp_path: Path) -> None:
        assert script(tmp_path / "it", "start", "--rate-mbit", "0") == (2, "")
        assert script(tmp_path / "it", "rate") == (1, "")


class TestDevelopmentWithLinks:
    """The same with a link for each DataNode."""

    pytestmark = needs_links

    def test_a_rate_gives_each_datanode_a_link_until_it_is_stopped(self, tmp_path: Path) -> None:
        folder, spaces = tmp_path / "it", Path("/run/netns")
        try:
            code, address = script(folder, "start", "--datanodes", "1", "--rate-mbit", "400")
            assert code == 0
            assert address.startswith("hdfs://198.18.")
            assert "400 Mbit/s" in script(folder, "rate")[1]
            own = f"hdfs{address.split('.')[2]}-*"
            assert len(list(spaces.glob(own))) == 1
            assert script(folder, "start", "--rate-mbit", "200") == (1, "")
            hdfs_plain.write(address, "/kept/it", b"kept")
            assert hdfs_plain.read(address, "/kept/it") == b"kept"
        finally:
            script(folder, "stop")
        assert running(folder) == []
        assert not list(spaces.glob(own))


def script(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of scripts/hdfs.py."""
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    return done.returncode, done.stdout.strip()


def network() -> set[str]:
    """The names of the devices and network namespaces of these tests."""
    spaces = Path("/run/netns")
    found = [*Path("/sys/class/net").iterdir(), *(spaces.iterdir() if spaces.exists() else [])]
    return {
        name for name in (path.name for path in found) if name.startswith(tuple(f"hdfs{subnet}" for subnet in SUBNETS))
    }


def running(folder: Path) -> list[int]:
    """The ids of processes in whose command a folder is named."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if f"{folder}/hdfs/".encode() in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
    return found

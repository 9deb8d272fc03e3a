"""The HDFS that tests and benchmarks start: whether it can be started, its links, and its use for development."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hadoop
import hdfs_links
import hdfs_plain
from hdfs_cluster import needs_hdfs, needs_links

MIB = 1024 * 1024
TESTS = Path(__file__).parents[1]
SCRIPT = TESTS.parent / "scripts" / "hdfs.py"
SUBNETS = (253, 254)
"""Used only by these tests, so that they can distinguish what they leave from what other runs have."""


@pytest.mark.skipif(os.environ.get("BOOTSEER_WITHOUT_HDFS") == "1", reason="BOOTSEER_WITHOUT_HDFS=1")
@pytest.mark.skipif(shutil.which("java") is None, reason="java is not installed")
def test_an_hdfs_can_be_started_here() -> None:
    """Otherwise all other tests of HDFS are skipped, and the run must not pass."""
    assert hadoop.missing() == ""
    importlib.import_module("hdfs_native")


def eventually(condition: Callable[[], bool], seconds: float = 120.0) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


class TestLinks:
    pytestmark = needs_links

    @pytest.fixture(autouse=True)
    def subnets(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(hdfs_links, "SUBNETS", SUBNETS)
        yield
        with hdfs_links.Links(0), hdfs_links.Links(0):
            pass

    def test_servers_of_a_killed_run_end_and_their_links_are_removed_by_the_next(self, tmp_path: Path) -> None:
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


def test_hadoop_home_is_used_when_it_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    (home / "share/hadoop/hdfs").mkdir(parents=True)
    monkeypatch.delenv("BOOTSEER_WITHOUT_HDFS", raising=False)
    monkeypatch.setenv("HADOOP_HOME", str(home))
    monkeypatch.setattr(hadoop, "FETCHED", tmp_path / "nothing")
    assert hadoop.missing() == ("" if shutil.which("java") else "java is not installed")
    assert f"{home}/share/hadoop/hdfs/lib/*" in hadoop.java(tmp_path, "namenode.NameNode")[-2].split(":")
    monkeypatch.setenv("HADOOP_HOME", str(tmp_path / "nothing"))
    assert not shutil.which("java") or "HADOOP_HOME" in hadoop.missing()


class TestDevelopment:
    """The HDFS that `make hdfs` starts."""

    pytestmark = needs_hdfs

    def test_it_runs_until_it_is_stopped_and_keeps_its_files(self, tmp_path: Path) -> None:
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

    def test_an_invalid_rate_is_refused(self, tmp_path: Path) -> None:
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
    env = {**os.environ, "BOOTSEER_HDFS_BRIEF": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=400)
    return done.returncode, done.stdout.strip()


def network() -> set[str]:
    """The names of the devices and network namespaces of these tests."""
    spaces = Path("/run/netns")
    found = [*Path("/sys/class/net").iterdir(), *(spaces.iterdir() if spaces.exists() else [])]
    return {
        name for name in (path.name for path in found) if name.startswith(tuple(f"hdfs{subnet}" for subnet in SUBNETS))
    }


def running(folder: Path) -> list[int]:
    """The ids of processes with a folder in their command line."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if f"{folder}/hdfs/".encode() in (process / "cmdline").read_bytes():
                    found.append(int(process.name))
    return found

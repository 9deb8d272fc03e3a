"""`bootseer run --checkpoint` with slow storage: it shows what it waits for, and Ctrl-C ends it cleanly."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.mounts import kernel
from conftest_launch import BOOTSEER
from hdfs_cluster import HdfsCluster, needs_hdfs

pytestmark = [pytest.mark.root, pytest.mark.fuse]
DEADLINE_S = 300.0


@pytest.fixture
def env(env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    return {**env, "BOOTSEER_CACHE": str(tmp_path / "cache"), "BOOTSEER_RUNTIME": str(tmp_path / "runtime")}


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of an HDFS that accepts connections and never answers."""
    pytest.importorskip("hdfs_native", reason="the extra hdfs is not installed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"hdfs://127.0.0.1:{server.getsockname()[1]}/jobs"


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def start(env: dict[str, str], tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*BOOTSEER, *words], env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)


def mounts_folder(tmp_path: Path) -> Path:
    return tmp_path / "runtime" / "checkpoints" / "mounts"


def nothing_is_left(tmp_path: Path) -> None:
    assert not [point for point in kernel.mount_points() if point.startswith(f"{tmp_path}/")]
    assert list(mounts_folder(tmp_path).iterdir()) == []


@pytest.mark.parametrize("words", [("run", "--checkpoint"), ("ckpt", "mount")])
def test_a_place_that_does_not_answer_is_reported_and_ctrl_c_ends_the_wait(
    env: dict[str, str], silent: str, tmp_path: Path, words: tuple[str, ...]
) -> None:
    more = ["--", "touch", "began"] if words[0] == "run" else [str(tmp_path / "m")]
    with start(env, tmp_path, *words, silent, *more) as process:
        assert process.stderr is not None
        assert f"bootseer: still waiting for {silent}" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 130
        rest = process.stderr.read()
    assert "interrupted" in rest
    assert "Traceback" not in rest
    assert not (tmp_path / "began").exists()
    nothing_is_left(tmp_path)


def test_a_quiet_run_waits_silently_and_ends_with_a_signal(env: dict[str, str], silent: str, tmp_path: Path) -> None:
    with start(env, tmp_path, "run", "-q", "--checkpoint", silent, "--", "touch", "began") as process:
        folder = mounts_folder(tmp_path)
        until(lambda: folder.is_dir() and any(folder.glob("*/log")))
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 143
        assert process.stderr is not None
        assert "still waiting" not in process.stderr.read()
    nothing_is_left(tmp_path)


_KILLED = """
import os, signal, sys
file = os.open(os.environ["BOOTSEER_CHECKPOINT"] + "/half", os.O_WRONLY | os.O_CREAT)
for _ in range(16):
    os.write(file, bytes(1 << 20))
os.kill(int(sys.argv[1]), signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_hdfs[0]
@needs_hdfs[1]
def test_what_is_still_being_sent_is_reported_and_ctrl_c_leaves_it_to_the_daemon(
    env: dict[str, str], tmp_path: Path
) -> None:
    with HdfsCluster(tmp_path / "cluster") as cluster:
        uri, node = f"{cluster.uri}/jobs", cluster.datanodes[0].pid
        subprocess.run([*BOOTSEER, "ckpt", "put", __file__, uri], env=env, check=True, capture_output=True)
        command = [sys.executable, "-c", _KILLED, str(node)]
        with start(env, tmp_path, "run", "--no-hook", "--checkpoint", uri, "--", *command) as process:
            assert process.stderr is not None
            # On a busy machine there may be a line about the mount, too.
            assert any(f"still sending what was written to {uri}" in line for line in process.stderr)
            process.send_signal(signal.SIGINT)
            assert "is still being sent" in process.stderr.readline()
            assert process.wait(DEADLINE_S) == 137, "as the command ended"
        os.kill(node, signal.SIGCONT)
        until(lambda: not [point for point in kernel.mount_points() if point.startswith(f"{tmp_path}/")])
        copy = [*BOOTSEER, "ckpt", "get", "--replace", f"{uri}/half", str(tmp_path / "half")]
        until(lambda: subprocess.run(copy, env=env, check=False, capture_output=True).returncode == 0)
        assert (tmp_path / "half").read_bytes() == bytes(16 << 20)

"""A NameNode that accepts connections and does not answer: all operations end with an error."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from bootseer.errors import TransientError
from hdfs_cluster import HdfsCluster, needs_hdfs

pytest.importorskip("hdfs_native", reason="extra hdfs")

from bootseer.checkpoint.publish import PutSettings, put_checkpoint
from bootseer.checkpoint.writing.lane import WritingSettings
from bootseer.hdfs.addresses import ClientSettings
from bootseer.hdfs.client import HdfsClient
from bootseer.places.hdfs import HdfsPlace
from hdfs.whole_files import below

pytestmark = needs_hdfs
ENDS_S = 120.0
"""Limit for all of them together; each may take a second or two, and one that hangs takes minutes."""


def ends(work: Callable[[], object], timeout_s: float = ENDS_S) -> None:
    """Assert that `work` ends with an error that names the NameNode."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert not thread.is_alive(), "it does not end"
    assert len(errors) == 1
    assert isinstance(errors[0], TransientError), errors
    assert "no NameNode answers" in str(errors[0])


def test_every_request_ends_with_an_error_and_works_again_later(cluster: HdfsCluster) -> None:
    settings = ClientSettings(call_s=1.0, close_s=2.0)
    with closing(HdfsClient(cluster.uri.removeprefix("hdfs://"), settings)) as client:
        for name in ("a", "kept"):
            client.put(f"/hung/folder/{name}", b"x")
        writer = client.create("/hung/folder/long")
        writer.write(b"x")
        (part,) = client.create_placed(["/hung/folder/part"], block_size=1 << 20)
        part.write(b"x")
        cluster.hang_namenode()
        try:
            questions: list[Callable[[], object]] = [
                lambda: client.stat("/hung/folder/a"),
                lambda: list(client.list("/hung/folder")),
                lambda: client.make_folder("/b", parents=True),
                lambda: client.rename("/hung/folder/a", "/hung/folder/b"),
                lambda: client.delete("/hung/folder/a"),
                lambda: client.set_permission("/hung/folder/a", 0o600),
                lambda: client.set_owner("/hung/folder/a", "me", None),
                lambda: client.set_mtime("/hung/folder/a", 5),
                lambda: client.put("/hung/folder/c", b"x"),
                lambda: client.create("/hung/folder/d"),
                client.space,
                lambda: client.reads().open("/hung/folder/a", deadline_s=1.0),
                writer.close,
                part.close,
            ]
            with ThreadPoolExecutor(len(questions)) as pool:
                for ended in [pool.submit(ends, question) for question in questions]:
                    ended.result()
        finally:
            cluster.resume_namenode()
        for begun in (writer, part):
            begun.abort()
        # It may execute the earlier requests now.
        assert client.stat("/hung/folder/kept").size_bytes == 1


def test_a_put_ends_with_an_error(cluster: HdfsCluster, tmp_path: Path) -> None:
    source = tmp_path / "step-1"
    source.mkdir()
    (source / "a").write_bytes(os.urandom(8 << 20))
    settings = PutSettings(writing=WritingSettings(retry_for_s=2.0, end_s=2.0))
    native = ClientSettings(call_s=1.0, close_s=2.0)
    with closing(HdfsPlace(HdfsClient(cluster.uri.removeprefix("hdfs://"), native), "/hung/job")) as place:

        def hang(done: int, total: int) -> None:
            cluster.hang_namenode()

        try:
            ends(lambda: put_checkpoint(place, source, "step-1", settings=settings, progress=hang))
        finally:
            cluster.resume_namenode()


def test_a_put_that_is_interrupted_twice_does_not_wait_for_servers(cluster: HdfsCluster, tmp_path: Path) -> None:
    with (tmp_path / "step-1").open("wb") as source:
        source.truncate(16 << 30)  # a gigabyte may be written before all nodes hang
    with closing(HdfsClient(cluster.uri.removeprefix("hdfs://"))) as client:
        client.make_folder("/interrupted")  # a separate folder: parts of other puts would be taken for this one's
        command = ["-m", "bootseer", "ckpt", "put", str(tmp_path / "step-1"), f"{cluster.uri}/interrupted/job"]
        put = subprocess.Popen([sys.executable, "-X", "faulthandler", *command], stderr=subprocess.PIPE, text=True)
        try:
            until = time.monotonic() + ENDS_S
            while not is_writing(client):
                assert put.poll() is None
                assert time.monotonic() < until
                time.sleep(0.05)
            for number in range(len(cluster.nodes)):
                cluster.hang(number)  # so that it is still writing
            cluster.hang_namenode()
            for _ in range(2):
                put.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    put.wait(2)
            with contextlib.suppress(subprocess.TimeoutExpired):
                put.wait(60)
        finally:
            put.send_signal(signal.SIGABRT)  # if it hangs, it prints its stack
            said = put.communicate()[1]
            cluster.resume_namenode()
            for number in range(len(cluster.nodes)):
                cluster.resume(number)
        assert put.returncode in (128 + signal.SIGINT, -signal.SIGINT), said


def is_writing(client: HdfsClient) -> bool:
    """Whether the put has begun a part."""
    return any(not entry.is_folder and ".stripes/" in entry.path for entry in below(client, "/interrupted"))

"""Writing through hdfs-native, with a real cluster."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bootseer.errors import BootseerError, NotFoundError, TransientError, UsageError
from hdfs_cluster import HdfsCluster, needs_hdfs

pytest.importorskip("hdfs_native", reason="extra hdfs")

from bootseer.hdfs.addresses import ClientSettings
from bootseer.hdfs.client import HdfsClient
from bootseer.hdfs.errors import AlreadyExistsError
from bootseer.hdfs.native import Native, NativeWriter
from hdfs.whole_files import read_all

pytestmark = needs_hdfs
DATA = random.Random(4).randbytes(3_000_001)


@pytest.fixture
def native(cluster: HdfsCluster) -> Iterator[Native]:
    with closing(Native(cluster.uri, ClientSettings())) as opened:
        yield opened


def test_a_file_of_many_blocks_is_written_and_read(native: Native, client: HdfsClient, folder: str) -> None:
    until = time.monotonic() + 180.0
    while True:
        writer = NativeWriter(native, f"{folder}/a/b", mode=0o600, block_size=1 << 20)
        try:
            writer.write(DATA[:10])
            writer.write(bytearray(DATA[10:]))
            writer.close()
            break
        except TransientError as error:
            # The library does not wait until the previous block is reported to the NameNode.
            assert "NotReplicatedYetException" in str(error)
            assert time.monotonic() < until
        finally:
            writer.abort()
    assert writer.size_bytes == len(DATA)
    assert client.stat(f"{folder}/a/b").mode == 0o600
    assert read_all(client, f"{folder}/a/b") == DATA


def test_an_existing_name_is_refused(native: Native, client: HdfsClient, folder: str) -> None:
    client.put(f"{folder}/a", b"first")
    with pytest.raises(AlreadyExistsError):
        NativeWriter(native, f"{folder}/a")


def test_nothing_is_left_of_an_aborted_file_not_even_a_connection(
    native: Native, client: HdfsClient, folder: str
) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    for number in range(3):
        begun = NativeWriter(native, f"{folder}/{number}")
        begun.write(DATA)
        begun.abort()
    before = open_files()
    for number in range(10):
        begun = NativeWriter(native, f"{folder}/{number}")
        begun.write(DATA)
        begun.abort()
        begun.abort()
    gc.collect()
    assert open_files() < before + 5
    assert list(client.list(folder)) == []
    with pytest.raises(UsageError):
        begun.write(b"x")


def test_a_file_that_was_removed_by_another_client_cannot_be_closed(
    native: Native, client: HdfsClient, folder: str
) -> None:
    writer = NativeWriter(native, f"{folder}/a")
    writer.write(DATA)
    client.delete(f"{folder}/a")
    with pytest.raises(BootseerError):
        writer.close()
    with pytest.raises(UsageError):
        writer.write(b"x")
    writer.abort()


def test_a_write_to_a_hung_node_ends_with_its_deadline(cluster: HdfsCluster) -> None:
    native = Native(cluster.uri, ClientSettings(write_s=4.0, close_s=4.0))
    writer = NativeWriter(native, f"/hung/{os.getpid()}")
    writer.write(DATA)
    for number in range(4):
        cluster.hang(number)
    try:
        with pytest.raises(TransientError, match="no complete answer within"):
            for _ in range(100):
                writer.write(DATA)
        with pytest.raises(UsageError):
            writer.write(b"x")
        writer.abort()
    finally:
        for number in range(4):
            cluster.resume(number)
    with pytest.raises(NotFoundError):
        native.call("it", lambda client: client.get_file_info(writer.path))
    native.close()


def test_deleting_an_open_writer_does_not_wait_for_hdfs(cluster: HdfsCluster, folder: str) -> None:
    native = Native(cluster.uri, ClientSettings())
    writer = NativeWriter(native, f"{folder}/a")
    writer.write(DATA)
    cluster.hang_namenode()
    try:
        # The library's finalizer would close the file here, and hang.
        del writer
        gc.collect()
    finally:
        cluster.resume_namenode()
    native.close()

"""Writing files of many blocks, with DataNodes that report late, hang or are killed, with real clusters."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from bootseer.errors import NotFoundError, TransientError, UsageError
from hdfs_cluster import HdfsCluster, needs_hdfs

pytest.importorskip("hdfs_native", reason="extra hdfs")

from bootseer.hdfs import placement
from bootseer.hdfs.addresses import ClientSettings
from bootseer.hdfs.client import HdfsClient
from bootseer.hdfs.native import Native, NativeWriter
from bootseer.hdfs.placement import BlockFileWriter
from bootseer.places import open_place
from bootseer.store.file import PlaceStore
from hdfs.whole_files import read_all

pytestmark = needs_hdfs
MIB = 1 << 20
DATA = random.Random(9).randbytes(5 * MIB + 777)
LATE = {
    # DataNodes report their blocks with each heartbeat, or at this interval.
    "dfs.blockreport.incremental.intervalMsec": "20000",
    "dfs.heartbeat.interval": "18",
    "dfs.blocksize": str(MIB),
}
"""Longer than hdfs-native's timeout at the end of a file, 15 s."""


def begin(client: HdfsClient, path: str, *, replication: int = 1) -> BlockFileWriter:
    writer = client.create(path, block_size=MIB, replication=replication)
    assert isinstance(writer, BlockFileWriter)
    return writer


@pytest.mark.parametrize("step", [1000, 262_144, MIB, 3 * MIB + 1, 100 * MIB])
def test_a_file_is_written_in_pieces_of_any_size(
    cluster: HdfsCluster, client: HdfsClient, folder: str, step: int
) -> None:
    writer = begin(client, f"{folder}/a", replication=2)
    for start in range(0, len(DATA), step):
        writer.write(bytearray(DATA[start : start + step]))
    writer.close()
    writer.abort()
    assert [block.size_bytes for block in cluster.where(f"{folder}/a")] == [MIB] * 5 + [777]
    assert read_all(client, f"{folder}/a") == DATA


@pytest.mark.parametrize("length", [0, MIB, 2 * MIB])
def test_a_file_may_be_empty_and_end_with_a_block(client: HdfsClient, folder: str, length: int) -> None:
    writer = begin(client, f"{folder}/a")
    writer.write(DATA[:length])
    assert writer.close() == ()
    assert read_all(client, f"{folder}/a") == DATA[:length]


def test_nothing_is_left_of_an_aborted_file(client: HdfsClient, folder: str) -> None:
    writer = begin(client, f"{folder}/a")
    writer.write(DATA)
    writer.abort()
    writer.abort()
    assert list(client.list(folder)) == []
    for attempt in (lambda: writer.write(b"x"), writer.close):
        with pytest.raises(UsageError):
            attempt()


def test_a_file_that_was_removed_by_another_client_cannot_be_written(client: HdfsClient, folder: str) -> None:
    writer = begin(client, f"{folder}/a")
    writer.write(DATA[: MIB // 2])
    client.delete(f"{folder}/a")
    with pytest.raises((NotFoundError, TransientError)):
        writer.write(DATA)
        writer.close()
    writer.abort()


@pytest.mark.parametrize("how", ["killed", "hung"])
def test_a_block_whose_datanode_fails_is_begun_again_elsewhere(
    cluster: HdfsCluster, client: HdfsClient, folder: str, how: str
) -> None:
    path = f"{folder}/a"
    writer = begin(client, path)
    writer.write(DATA[: MIB + MIB // 2])
    node = cluster.where(path)[1].nodes[0]
    number = cluster.nodes.index(node)
    # Its blocks are complete or written again. The first one may be only there, so it is read after the restart.
    cluster.kill(number) if how == "killed" else cluster.hang(number)
    try:
        writer.write(DATA[MIB + MIB // 2 :])
        writer.close()
        assert all(node not in block.nodes for block in cluster.where(path)[1:])
    finally:
        cluster.restart(number) if how == "killed" else cluster.resume(number)
    assert read_all(client, path) == DATA


def test_a_file_that_is_written_slowly_may_lose_its_connection_any_number_of_times(
    client: HdfsClient, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_IDLE_S", 0.0)  # DataNodes close connections that are idle for a minute
    writer = begin(client, f"{folder}/a")
    for start in range(0, 7 * MIB // 8, MIB // 8):
        writer.write(DATA[start : start + MIB // 8])
        assert writer._block is not None
        writer._block._connection.stop()
    writer.write(DATA[7 * MIB // 8 : MIB])
    assert writer._block is None, "a full block is finished at once, so that a pause after it does no harm"
    writer.close()
    assert read_all(client, f"{folder}/a") == DATA[:MIB]
    assert not client.excluded.names()


class TestLate:
    """DataNodes that report blocks to the NameNode long after they have acknowledged them to the writer."""

    data = DATA[: MIB + 777]
    """A full block and the last one; each takes as long as a heartbeat."""

    @pytest.fixture
    def late(self, tmp_path: Path) -> Iterator[HdfsCluster]:
        with HdfsCluster(tmp_path, settings=LATE) as running:
            yield running

    def test_all_ways_of_writing_work(self, late: HdfsCluster) -> None:
        with (
            closing(HdfsClient(late.uri.removeprefix("hdfs://"))) as client,
            closing(Native(late.uri, ClientSettings())) as native,
            closing(PlaceStore(open_place(f"{late.uri}/store"))) as store,
        ):

            def write(writer: BlockFileWriter | NativeWriter) -> None:
                writer.write(self.data)
                writer.close()

            def apart() -> None:
                (part,) = client.create_placed(["/apart"], block_size=8 * MIB)
                part.write(self.data)
                part.close()

            def upload() -> None:
                writing = store.upload()
                writing.write(self.data)
                writing.commit("object")

            def plain() -> None:
                from hdfs_native import Client, WriteOptions

                with pytest.raises(RuntimeError, match="NotReplicatedYetException"):
                    Client(late.uri).create("/plain", WriteOptions(block_size=MIB)).write(DATA)

            ways: list[Callable[[], None]] = [
                plain, upload, apart,
                lambda: write(client.create("/create")),
                lambda: write(NativeWriter(native, "/library", block_size=8 * MIB)),
                lambda: client.put("/put", self.data, block_size=8 * MIB),
            ]  # fmt: skip
            with ThreadPoolExecutor(len(ways)) as pool:
                for done in [pool.submit(way) for way in ways]:
                    done.result(300)
            for path in ("/create", "/library", "/apart", "/put"):
                assert read_all(client, path) == self.data
            assert b"".join(store.read("object")) == self.data

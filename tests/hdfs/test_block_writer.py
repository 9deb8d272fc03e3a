"""Writing one block to its DataNodes: real ones, and one with wrong answers."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace

import pytest
from msgspec import structs

from hdfs_cluster import HdfsCluster, needs_hdfs

pytest.importorskip("hdfs_native", reason="extra hdfs")

from bootseer.hdfs.block_locations import Block, Node
from bootseer.hdfs.block_writer import PACKET_BYTES, BlockWriter, PipelineError
from bootseer.hdfs.checksums import CRC32, CRC32C
from bootseer.hdfs.client import HdfsClient
from bootseer.hdfs.lease import ExcludedDataNodes, FileSettings, Lease, NewBlock, WriteDefaults, ask_defaults
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.protobuf import delimited, field
from hdfs.whole_files import read_all

DATA = random.Random(8).randbytes(3 * PACKET_BYTES + 777)
DEFAULTS = WriteDefaults(block_size=1 << 27, replication=1, checksum_kind=CRC32C, chunk_bytes=512)


@pytest.mark.parametrize("kind", [CRC32, CRC32C])
@pytest.mark.parametrize("chunk_bytes", [512, 4096])
class TestOnACluster:
    pytestmark = needs_hdfs

    def test_a_block_is_read_back_as_it_was_written(
        self, cluster: HdfsCluster, client: HdfsClient, folder: str, kind: int, chunk_bytes: int
    ) -> None:
        with closing(NameNode(client.cluster)) as namenode:
            defaults = replace(ask_defaults(namenode), checksum_kind=kind, chunk_bytes=chunk_bytes)
            path = f"{folder}/a"
            settings = FileSettings(8 << 20, 2, 0o644, True, defaults, ExcludedDataNodes(), 60.0)
            lease = Lease(namenode, path, settings)
            new = lease.add_block([])
            writer = BlockWriter(new, defaults, lease.holder, by_hostname=False, setup_s=60, stall_s=60)
            writer.write(memoryview(bytearray(DATA[: 2 * PACKET_BYTES - 7])))
            writer.write(memoryview(DATA[2 * PACKET_BYTES - 7 :]))
            writer.finish()
            writer.close()
            lease.complete(structs.replace(new.block, length=len(DATA)), len(DATA), 120)
        # The checksums are verified here, and by the library.
        assert read_all(client, path) == DATA
        assert cluster.where(path)[0].size_bytes == len(DATA)


def a_block(port: int) -> NewBlock:
    node = Node(f"127.0.0.1:{port}", "localhost")
    return NewBlock(Block(0, 0, "pool", 1, 1, b"", (node,)), (b"",), (1,), ("storage",))


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[NewBlock]:
    """A DataNode that accepts one connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(ConnectionError):  # a client closes the connection after a malformed answer
                connection.recv(3)
                answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield a_block(server.getsockname()[1])
        thread.join(120)


def begin(new: NewBlock, *, silent_s: float = 60.0) -> BlockWriter:
    return BlockWriter(new, DEFAULTS, "holder", by_hostname=False, setup_s=silent_s, stall_s=silent_s)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\xff" * 20,
        delimited(field(1, 1) + field(5, "no room")),
        delimited(field(2, "no status")),
        b"\xff\xff\x7f" + bytes(100_000),
    ],
)
def test_a_malformed_answer_or_a_refusal_is_an_error_that_names_the_node(said: bytes) -> None:
    with answering(lambda connection: connection.sendall(said)) as new:
        with pytest.raises(PipelineError) as raised:
            begin(new)
        assert raised.value.node == new.block.nodes[0].host_port


def test_a_node_that_accepts_no_connection_is_named_alone() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as waiting:
        for _ in range(3):
            link = waiting.enter_context(socket.socket())
            link.setblocking(False)
            link.connect_ex(full.getsockname())
        new = a_block(full.getsockname()[1])
        new = replace(new, block=structs.replace(new.block, nodes=(*new.block.nodes, Node("127.0.0.1:1", "x"))))
        with pytest.raises(PipelineError, match=f"^{new.block.nodes[0].host_port}: cannot be reached: timed out"):
            begin(new, silent_s=0.5)


@pytest.mark.parametrize(
    "confirmed",
    [
        delimited(field(1, 2 * 7) + field(2, 0)),
        delimited(field(1, 0) + field(2, 1)),
        b"".join(delimited(field(1, 2 * number) + field(2, 0)) for number in range(3)),
        delimited(field(1, 1) + field(2, 0)) * 1000,
        delimited(b"\x08"),
        b"\xff" * 100_000,
        b"",
    ],
)
def test_an_unexpected_acknowledgement_ends_the_block(confirmed: bytes) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(delimited(field(1, 0)) + confirmed)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 20):
            pass

    with answering(answer) as new:
        writer = begin(new)
        with pytest.raises(PipelineError):
            writer.write(memoryview(DATA[:1000]))
            writer.finish()
        writer.close()


def test_a_packet_that_not_all_nodes_have_acknowledged_ends_the_block() -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(delimited(field(1, 0)) + delimited(field(1, 0)) + delimited(field(1, 2)))
        while connection.recv(1 << 20):
            pass

    with (
        answering(answer) as new,
        closing(begin(new)) as writer,
        pytest.raises(PipelineError, match="0 of 1 nodes acknowledge packet 0"),
    ):
        writer.write(memoryview(DATA[:1000]))
        writer.finish()


def test_a_node_that_accepts_no_more_data_fails_after_the_timeout_of_a_silent_one() -> None:
    over = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.sendall(delimited(field(1, 0)))
        over.wait(120)

    with answering(answer) as new, closing(begin(new, silent_s=4.0)) as writer:
        began_s = time.monotonic()
        with pytest.raises(PipelineError, match="nothing was accepted"):
            writer.write(memoryview(bytes(64 << 20)))
        took_s = time.monotonic() - began_s
        over.set()
    assert 4.0 <= took_s < 7.0


def test_a_reported_failure_ends_a_large_write_early() -> None:
    received = 0

    def answer(connection: socket.socket) -> None:
        nonlocal received
        connection.sendall(delimited(field(1, 0)) + delimited(field(1, 0) + field(2, 1)))
        while data := connection.recv(1 << 20):
            received += len(data)

    with (
        answering(answer) as new,
        closing(begin(new)) as writer,
        pytest.raises(PipelineError, match="failed with status 1"),
    ):
        writer.write(memoryview(bytes(256 << 20)))
    assert received < 128 << 20


@pytest.mark.parametrize("said", [b"", delimited(field(1, 0))])
def test_a_dripping_node_has_the_same_deadline_as_a_silent_one(said: bytes) -> None:
    over = threading.Event()

    def answer(connection: socket.socket) -> None:
        connection.sendall(said)
        while not over.wait(0.3):
            connection.sendall(b"\x80")

    with answering(answer) as new:
        try:
            with (
                pytest.raises(PipelineError, match="nothing was received"),
                closing(begin(new, silent_s=1.0)) as writer,
            ):
                writer.write(memoryview(DATA[:1000]))
                writer.finish()
        finally:
            over.set()


def test_a_node_that_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(PipelineError, match="cannot be reached") as raised:
        begin(a_block(port))
    assert raised.value.node == f"127.0.0.1:{port}"

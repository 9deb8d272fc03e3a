from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

pytest.importorskip("google_crc32c", reason="extra hdfs")

from bootseer.hdfs.block_locations import Node
from bootseer.hdfs.datanode import ConnectionPool, DataNodeConnection
from bootseer.hdfs.errors import DataNodeError
from hdfs.peers import FakeDataNode
from registry import free_port


def connected(connections: ConnectionPool, node: Node) -> DataNodeConnection:
    connection = connections.new(node)
    try:
        connection.connect(1.0)
    except DataNodeError:
        connection.close()
        raise
    return connection


@pytest.fixture
def connections() -> Iterator[ConnectionPool]:
    kept = ConnectionPool(silent_s=1.0, by_hostname=False)
    yield kept
    kept.close()


@pytest.fixture
def node() -> Iterator[Node]:
    with FakeDataNode({}) as peer:
        yield Node(f"127.0.0.1:{peer.port}", "no.such.name", "")


def test_a_connection_is_used_again_by_one_at_a_time(connections: ConnectionPool, node: Node) -> None:
    assert connections.take(node) is None
    first = connected(connections, node)
    first.last_used_s = time.monotonic()
    connections.give(node, first)
    assert connections.take(Node("127.0.0.1:1", "", "")) is None
    assert connections.take(node) is first
    assert connections.take(node) is None
    first.close()


def test_what_lies_idle_for_too_long_is_closed(connections: ConnectionPool, node: Node) -> None:
    old = connected(connections, node)
    old.last_used_s = -1e9
    connections.give(node, old)
    assert connections.take(node) is None
    with pytest.raises(DataNodeError):
        old.send(b"x")


def test_no_more_than_a_few_lie_idle(connections: ConnectionPool, node: Node) -> None:
    made = [connected(connections, node) for _ in range(70)]
    for connection in made:
        connection.last_used_s = time.monotonic()
        connections.give(node, connection)
    taken = []
    while (connection := connections.take(node)) is not None:  # type: ignore[assignment]
        taken.append(connection)
        connection.close()
    assert len(taken) == 64
    assert made[0] not in taken


def test_all_of_one_node_are_dropped(connections: ConnectionPool, node: Node) -> None:
    for _ in range(2):
        connection = connected(connections, node)
        connection.last_used_s = time.monotonic()
        connections.give(node, connection)
    connections.drop(node)
    assert connections.take(node) is None


def test_datanodes_are_addressed_by_hostname_if_configured(node: Node) -> None:
    port = node.host_port.rpartition(":")[2]
    named = ConnectionPool(silent_s=1.0, by_hostname=True)
    with pytest.raises(DataNodeError, match="cannot be reached"):
        connected(named, node)
    connected(named, Node(f"192.0.2.1:{port}", "localhost", "")).close()


def test_an_address_without_a_server_is_an_error(connections: ConnectionPool) -> None:
    with pytest.raises(DataNodeError, match="cannot be reached"):
        connected(connections, Node(f"127.0.0.1:{free_port()}", "", ""))

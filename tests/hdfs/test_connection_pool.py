from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("google_crc32c", reason="extra hdfs")

from bootseer.hdfs.block_locations import Node
from bootseer.hdfs.datanode import DataNodeConnection
from bootseer.hdfs.errors import DataNodeError
from bootseer.io.idle import IdleConnections
from hdfs.peers import FakeDataNode
from registry import free_port

Pool = IdleConnections[DataNodeConnection]


def connected(node: Node, *, by_hostname: bool = False) -> DataNodeConnection:
    connection = DataNodeConnection(node.address(by_hostname=by_hostname), silent_s=1.0)
    try:
        connection.connect(1.0)
    except DataNodeError:
        connection.close()
        raise
    return connection


@pytest.fixture
def connections() -> Iterator[Pool]:
    kept = Pool(60.0)
    yield kept
    kept.close()


@pytest.fixture
def node() -> Iterator[Node]:
    with FakeDataNode({}) as peer:
        yield Node(f"127.0.0.1:{peer.port}", "no.such.name")


def test_a_connection_is_reused_by_one_user_at_a_time(connections: Pool, node: Node) -> None:
    assert connections.take(node.host_port) is None
    first = connected(node)
    connections.give(node.host_port, first)
    assert connections.take("127.0.0.1:1") is None
    assert connections.take(node.host_port) is first
    assert connections.take(node.host_port) is None
    first.close()


def test_connections_that_are_idle_for_too_long_are_closed(node: Node) -> None:
    connections, old = Pool(-1.0), connected(node)
    connections.give(node.host_port, old)
    assert connections.take(node.host_port) is None
    with pytest.raises(DataNodeError):
        old.send(b"x")


def test_the_number_of_idle_connections_is_limited(connections: Pool, node: Node) -> None:
    made = [connected(node) for _ in range(70)]
    for connection in made:
        connections.give(node.host_port, connection)
    taken = []
    while (found := connections.take(node.host_port)) is not None:
        taken.append(found)
        found.close()
    assert len(taken) == 64
    assert made[0] not in taken


def test_all_connections_of_one_node_are_dropped(connections: Pool, node: Node) -> None:
    for _ in range(2):
        connections.give(node.host_port, connected(node))
    connections.drop(node.host_port)
    assert connections.take(node.host_port) is None


def test_datanodes_are_addressed_by_hostname_if_configured(node: Node) -> None:
    port = node.host_port.rpartition(":")[2]
    with pytest.raises(DataNodeError, match="cannot be reached"):
        connected(node, by_hostname=True)
    connected(Node(f"192.0.2.1:{port}", "localhost"), by_hostname=True).close()


def test_an_address_without_a_server_is_an_error() -> None:
    with pytest.raises(DataNodeError, match="cannot be reached"):
        connected(Node(f"127.0.0.1:{free_port()}", ""))


def test_a_timeout_right_below_a_whole_second_can_be_set(node: Node) -> None:
    connection = connected(node)
    connection.set_timeout(0.9999999)  # Linux refuses 1,000,000 microseconds
    connection.close()

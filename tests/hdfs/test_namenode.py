"""Requests to NameNodes that answer, refuse, hang, or give malformed answers."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

pytest.importorskip("google_crc32c", reason="extra hdfs")

from bootseer.checkpoint.files import Files
from bootseer.checkpoint.layout import Policy
from bootseer.errors import AccessError, BootseerError, NotFoundError, PermanentError, TransientError, UsageError
from bootseer.hdfs.addresses import Cluster
from bootseer.hdfs.client import HdfsClient
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.protobuf import Message, field
from bootseer.hdfs.rpc import UnreachableError
from bootseer.places import open_place
from hdfs.peers import FakeNameNode, block, located
from registry import free_port

MIB = 1 << 20
LONG_S = 60.0
"""A timeout for requests that end earlier."""


def answer(request: Message) -> bytes:
    return located(MIB, [block(0, 1, MIB, (1,))])


@pytest.fixture
def peer() -> Iterator[FakeNameNode]:
    with FakeNameNode() as running:
        running.answers["getBlockLocations"] = answer
        yield running


def asked(*ports: int, call_timeout_s: float = 5.0, host: str = "127.0.0.1") -> NameNode:
    cluster = Cluster("job", tuple((host, port) for port in ports), {}, False, "me")
    return NameNode(cluster, call_timeout_s=call_timeout_s)


def error_of(namenode: NameNode, timeout_s: float = 5.0) -> BootseerError:
    with pytest.raises(BootseerError) as caught:
        namenode.locate("/f", timeout_s=timeout_s)
    namenode.close()
    assert "\n" not in str(caught.value)
    return caught.value


def test_one_connection_serves_many_requests(peer: FakeNameNode) -> None:
    namenode = asked(peer.port)
    for _ in range(5):
        assert namenode.locate("/f").size_bytes == MIB
    namenode.close()
    assert peer.num_connections == 1


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("java.io.FileNotFoundException", NotFoundError),
        ("org.apache.hadoop.security.AccessControlException", AccessError),
        ("org.apache.hadoop.hdfs.protocol.UnresolvedPathException", PermanentError),
        ("java.lang.NullPointerException", TransientError),
    ],
)
def test_errors_of_the_server_are_mapped(peer: FakeNameNode, kind: str, expected: type[BootseerError]) -> None:
    peer.answers["getBlockLocations"] = lambda _: (kind, "File does not exist: /f\n\tat org.apache.hadoop.Stack")
    error = error_of(asked(peer.port))
    assert type(error) is expected
    assert "hdfs://job/f" in str(error)
    assert "Stack" not in str(error)


def test_a_message_of_several_lines_is_read_as_a_whole(peer: FakeNameNode) -> None:
    """A message of Hadoop 2.7.4 with the reason in its second line; with the third, a stack trace begins."""
    said = "file /f on client 127.0.0.1.\nRequested replication 3 exceeds maximum 2\n\tat org.apache.hadoop.Stack"
    peer.answers["getBlockLocations"] = lambda _: ("java.io.IOException", said)
    error = error_of(asked(peer.port))
    assert type(error) is PermanentError
    assert str(error).endswith("file /f on client 127.0.0.1. Requested replication 3 exceeds maximum 2")


@pytest.mark.parametrize("said", ["Cannot find locations for /f", "not allowed, no eligible destination was found"])
def test_a_path_without_a_cluster_behind_a_router_is_not_retried(peer: FakeNameNode, said: str) -> None:
    peer.answers["getBlockLocations"] = lambda _: ("java.io.IOException", said)
    assert isinstance(error_of(asked(peer.port)), PermanentError)


def test_a_job_behind_a_router_has_a_policy_even_if_no_mount_covers_its_parents(peer: FakeNameNode) -> None:
    """Otherwise nothing could be written there."""

    def refused(request: Message) -> tuple[str, str]:
        path = request.text(1)
        is_covered = path.startswith("/mounted/")
        return ("FileNotFoundException", path) if is_covered else ("IOException", f"Cannot find locations for {path}")

    peer.answers["getBlockLocations"] = refused
    with closing(open_place(f"hdfs://127.0.0.1:{peer.port}/mounted/job")) as place:
        assert Files(place).policy("") == Policy()
    assert peer.asked.count("getBlockLocations") == 3


def test_an_empty_answer_also_means_a_missing_file(peer: FakeNameNode) -> None:
    peer.answers["getBlockLocations"] = lambda _: b""
    assert isinstance(error_of(asked(peer.port)), NotFoundError)


def test_the_error_of_a_server_with_kerberos_refers_to_the_configuration() -> None:
    with FakeNameNode("secure") as peer:
        error = error_of(asked(peer.port))
    assert isinstance(error, AccessError)
    assert "HADOOP_CONF_DIR must name its configuration" in str(error)


def test_a_user_refused_by_the_servers_policy_gets_an_error_at_once() -> None:
    with FakeNameNode("policy") as peer:
        error = error_of(asked(peer.port), LONG_S)
        assert peer.num_connections == 1
    assert isinstance(error, AccessError)
    assert "User me (auth:SIMPLE) is not authorized" in str(error)
    assert "requires a login" not in str(error)


def test_a_cluster_that_encrypts_its_data_needs_ciphers(peer: FakeNameNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    peer.answers["getServerDefaults"] = lambda _: field(1, field(1, 1) + field(6, True))
    error = error_of(asked(peer.port))
    assert isinstance(error, UsageError)
    assert "bootseer[hdfs]" in (error.hint or "")


def test_a_server_without_a_key_for_encrypted_data_is_a_permanent_error_before_any_datanode_is_used(
    peer: FakeNameNode,
) -> None:
    """Routers have none with `dfs.encrypt.data.transfer`."""
    defaults = field(1, MIB) + field(2, 512) + field(4, 1) + field(6, True)
    peer.answers |= {"getServerDefaults": lambda _: field(1, defaults), "getDataEncryptionKey": lambda _: b""}
    with closing(HdfsClient(f"127.0.0.1:{peer.port}")) as client:
        for use in (lambda: client.reads().open("/f"), lambda: client.put("/g", b"x"), lambda: client.create("/h")):
            with pytest.raises(PermanentError, match=r"dfs\.encrypt\.data\.transfer.*NameNodes"):
                use()
    assert "create" not in peer.asked


def test_the_default_replication_is_unknown_if_another_client_writes(peer: FakeNameNode) -> None:
    defaults = field(1, MIB) + field(2, 768) + field(4, 2)  # bytes per checksum: not a power of two
    peer.answers["getServerDefaults"] = lambda _: field(1, defaults)
    with closing(HdfsClient(f"127.0.0.1:{peer.port}")) as client:
        assert client.replication is None


def test_the_encryption_setting_is_requested_once(peer: FakeNameNode) -> None:
    namenode = asked(peer.port)
    for _ in range(3):
        namenode.locate("/f")
    namenode.close()
    assert peer.asked.count("getServerDefaults") == 1


@pytest.mark.parametrize("spoil", ["huge", "garbage", "other call", "silent"])
def test_a_server_with_malformed_answers_takes_no_longer_than_the_timeout(spoil: str) -> None:
    with FakeNameNode(spoil) as peer:
        peer.answers["getBlockLocations"] = answer
        began_s = time.monotonic()
        assert isinstance(error_of(asked(peer.port), timeout_s=0.6), TransientError)
        assert time.monotonic() - began_s < 30.0


@pytest.mark.parametrize("spoil", ["page", "huge", "garbage"])
def test_a_port_with_another_protocol_is_reported_as_no_namenode(spoil: str) -> None:
    with FakeNameNode(spoil) as peer:
        peer.answers["getBlockLocations"] = answer
        error = error_of(asked(peer.port), timeout_s=LONG_S)
    assert isinstance(error, UnreachableError)
    assert f"hdfs://job/f: no NameNode is there: 127.0.0.1:{peer.port}" in str(error)
    assert ("web page" in str(error)) == (spoil == "page")


def test_addresses_without_a_server_are_not_waited_for() -> None:
    ports = (free_port(), free_port())
    error = error_of(asked(*ports), timeout_s=LONG_S)
    assert isinstance(error, UnreachableError)
    for port in ports:
        assert f"127.0.0.1:{port} cannot be reached: Connection refused" in str(error)
    error = error_of(asked(8020, host="no-such-host.invalid"), timeout_s=LONG_S)
    assert isinstance(error, UnreachableError)
    assert "no-such-host.invalid:8020" in str(error)


def test_a_login_fails_only_if_all_namenodes_refuse_it(peer: FakeNameNode) -> None:
    peer.answers["getBlockLocations"] = answer
    with FakeNameNode() as other:
        kind = "org.apache.hadoop.security.token.SecretManager$InvalidToken"
        other.answers["getServerDefaults"] = lambda _: (kind, "token (token for me) can't be found in cache")
        with closing(asked(other.port, peer.port)) as namenode:
            assert namenode.locate("/f").size_bytes == MIB
        error = error_of(asked(other.port), timeout_s=LONG_S)
    assert isinstance(error, AccessError)
    assert "the delegation token is not valid" in str(error)


def test_a_namenode_that_has_answered_is_waited_for(peer: FakeNameNode) -> None:
    with FakeNameNode() as other:
        other.answers["getBlockLocations"] = answer
        namenode = asked(other.port)
        namenode.locate("/f")
    error = error_of(namenode, timeout_s=2.5)
    assert isinstance(error, TransientError)
    assert not isinstance(error, UnreachableError)


def test_a_standby_next_to_a_missing_namenode_is_waited_for() -> None:
    with FakeNameNode() as standby:
        kind = "org.apache.hadoop.ipc.StandbyException"
        standby.answers["getServerDefaults"] = lambda _: (kind, "Operation category READ is not supported")
        assert not isinstance(error_of(asked(standby.port, free_port()), timeout_s=2.5), UnreachableError)


def test_a_malformed_answer_is_reported_as_such(peer: FakeNameNode) -> None:
    peer.answers["getBlockLocations"] = lambda _: field(1, b"\xff\xff")
    assert "is malformed" in str(error_of(asked(peer.port)))


def test_the_active_one_of_several_is_found_and_remembered(peer: FakeNameNode) -> None:
    with FakeNameNode() as standby:
        kind = "org.apache.hadoop.ipc.StandbyException"
        standby.answers["getServerDefaults"] = lambda _: (kind, "Operation category READ is not supported")
        namenode = asked(standby.port, peer.port)
        for _ in range(3):
            assert namenode.locate("/f").size_bytes == MIB
        namenode.close()
        assert standby.asked.count("getServerDefaults") == 1


def test_a_namenode_that_hangs_after_an_answer_is_not_retried(peer: FakeNameNode) -> None:
    with FakeNameNode() as hung:
        hung.answers["getBlockLocations"] = answer
        namenode = asked(hung.port, peer.port, call_timeout_s=1.0)
        namenode.locate("/f")
        hung.spoil = "silent"
        assert namenode.locate("/f").size_bytes == MIB
        namenode.close()
    assert hung.num_connections == 1
    assert peer.asked.count("getBlockLocations") == 1


def test_a_missing_or_hung_namenode_is_skipped(peer: FakeNameNode) -> None:
    with FakeNameNode("silent") as hung:
        namenode = asked(free_port(), hung.port, peer.port, call_timeout_s=1.0)
        assert namenode.locate("/f").size_bytes == MIB
        namenode.close()


def test_a_hung_namenode_leaves_time_for_the_next_one_when_a_request_has_little(peer: FakeNameNode) -> None:
    with FakeNameNode("silent") as hung, closing(asked(hung.port, peer.port, call_timeout_s=LONG_S)) as namenode:
        assert namenode.locate("/f", timeout_s=3.0).size_bytes == MIB


def test_a_new_client_leaves_a_hung_namenode_early(peer: FakeNameNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.hdfs.namenode._NEW_S", 0.4)
    with FakeNameNode("silent") as hung:
        namenode = asked(*[hung.port] * 16, peer.port, call_timeout_s=LONG_S)
        assert namenode.locate("/f", timeout_s=LONG_S).size_bytes == MIB
        namenode.close()


def test_requests_that_wait_for_their_turn_skip_a_namenode_that_has_hung_meanwhile(peer: FakeNameNode) -> None:
    with FakeNameNode("silent") as hung, closing(asked(hung.port, peer.port, call_timeout_s=1.0)) as namenode:
        with ThreadPoolExecutor(48) as threads:
            files = list(threads.map(lambda _: namenode.locate("/f", timeout_s=5.0), range(48)))
        assert [file.size_bytes for file in files] == [MIB] * 48


def test_an_address_that_drops_packets_leaves_time_for_the_next_one(
    peer: FakeNameNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example the IPv6 address of a host in a network without IPv6."""
    with contextlib.ExitStack() as full:
        listener = full.enter_context(socket.create_server(("127.0.0.2", peer.port), backlog=0))
        for _ in range(2):  # further connections are not answered
            waiting = full.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, peer.port)) for host in ("127.0.0.2", "127.0.0.1")]
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: [
            one for one in found if host in ("nn", one[-1][0])
        ])  # fmt: skip
        with closing(asked(peer.port, host="nn")) as namenode:
            assert namenode.locate("/f", timeout_s=2.0).size_bytes == MIB


def test_no_active_namenode_is_reported_in_time() -> None:
    with FakeNameNode() as standby:
        standby.answers["getServerDefaults"] = lambda _: ("org.apache.hadoop.ipc.StandbyException", "standby")
        error = error_of(asked(standby.port), timeout_s=3.0)
        assert "no NameNode is active" in str(error)
        assert standby.asked.count("getServerDefaults") > 1, "it may become active"


def test_an_error_names_all_namenodes() -> None:
    with FakeNameNode() as standby:
        said = "a.b.NoNamenodesAvailableException: none under other. Visit https://s.apache.org/sbnn-error"
        standby.answers["getServerDefaults"] = lambda _: ("org.apache.hadoop.ipc.StandbyException", said)
        gone = free_port()
        error = error_of(asked(standby.port, gone), timeout_s=1.0)
    assert f"active: 127.0.0.1:{standby.port}: NoNamenodesAvailableException: none under other; 127" in str(error)
    assert f"127.0.0.1:{gone} cannot be reached" in str(error)


def test_a_refused_login_fails_at_once_even_with_an_unreachable_namenode(peer: FakeNameNode) -> None:
    kind = "org.apache.hadoop.security.token.SecretManager$InvalidToken"
    peer.answers["getServerDefaults"] = lambda _: (kind, "token (token for me) can't be found in cache")
    assert isinstance(error_of(asked(peer.port, free_port()), timeout_s=2.0), AccessError)


@pytest.mark.parametrize("by_router", [False, True])
def test_a_rename_that_a_router_has_repeated_succeeds(peer: FakeNameNode, by_router: bool) -> None:
    missing = "java.io.FileNotFoundException", "rename source /a is not found."
    kind = (
        "java.lang.UnsupportedOperationException" if by_router else "org.apache.hadoop.security.AccessControlException"
    )

    def status(request: Message) -> bytes:
        told = field(1, 2) + field(3, 1) + field(4, field(1, 0o644)) + field(5, "me") + field(6, "us")
        return field(1, told + field(7, 1) + field(8, 1)) if request.text(1) == "/b" else b""

    peer.answers |= {"rename2": lambda _: missing, "getFileInfo": status, "getEditsFromTxid": lambda _: (kind, "no")}
    with closing(asked(peer.port)) as namenode:
        with contextlib.nullcontext() if by_router else pytest.raises(NotFoundError):
            namenode.rename("/a", "/b", overwrite=False)
        with pytest.raises(NotFoundError):
            namenode.rename("/a", "/c", overwrite=False)


def test_a_connection_that_the_server_has_closed_is_replaced(peer: FakeNameNode) -> None:
    namenode = asked(peer.port)
    namenode.locate("/f")
    peer.hang_up()
    assert namenode.locate("/f").size_bytes == MIB
    namenode.close()
    assert peer.num_connections == 2


def test_a_file_of_a_terabyte_is_located(peer: FakeNameNode) -> None:
    length = 128 * MIB
    told = located(8192 * length, [block(number * length, number, length, (1, 2, 3)) for number in range(8192)])
    peer.answers["getBlockLocations"] = lambda _: told
    namenode = asked(peer.port)
    file = namenode.locate("/f", timeout_s=60.0)
    namenode.close()
    assert file.size_bytes == 1 << 40
    assert file.block_at((1 << 40) - 1).id == 8191

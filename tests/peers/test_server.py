"""A server of blocks and its clients over real sockets: answers and refusals."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import BinaryIO

import pytest

from bootseer.blocks.index import MAX_BLOCK_SIZE
from bootseer.errors import AccessError, NotFoundError, TransientError
from bootseer.peers.choice import Level
from bootseer.peers.client import Client, UnreachableError
from bootseer.peers.connection import Connection
from bootseer.peers.interfaces import joined
from bootseer.peers.protocol import ANSWER, WELCOME, Answer, Hello, Request, Signer, Welcome, framed
from bootseer.peers.server import MAX_CONNECTIONS, Server
from waiting import until

FILE = "ab" * 32
SECRET = b"s" * 32
DATA = os.urandom(3 << 20)


def address_of(sock: socket.socket) -> str:
    return joined(*sock.getsockname()[:2])


class File:
    """A whole file, or one whose second MiB arrives when its future in `waiting` is set."""

    size_bytes = len(DATA)
    num_ready = 0

    def __init__(self, path: Path, *, is_whole: bool = True) -> None:
        path.write_bytes(DATA)
        self._path = path
        self._is_whole = is_whole
        self.waiting: list[Future[None]] = []

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        with self._path.open("rb") as file:
            yield file.fileno()

    def here(self, first: int, blocks: int) -> int:
        return blocks

    def wait_for(self, start: int, length: int, level: Level) -> Iterator[None]:
        if self._is_whole or start < 1 << 20:
            return
        arrival: Future[None] = Future()
        self.waiting.append(arrival)
        yield
        while not wait([arrival], 0.02).done:
            yield
        arrival.result()


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "data", is_whole=False)


@pytest.fixture
def server(file: File, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, str]]:
    monkeypatch.setattr("bootseer.peers.server._SOON_S", 0.1)
    listening = socket.create_server(("127.0.0.1", 0))
    server = Server([listening], SECRET, {FILE: file}.get)
    yield server, f"127.0.0.1:{listening.getsockname()[1]}"
    server.close()


def ask(
    address: str, start: int, length: int, *, secret: bytes = SECRET, file: str = FILE, wait_s: float = 5.0
) -> bytes:
    into = bytearray(length)
    client = Client(secret)
    try:
        client.read(
            address, Request(file, start, length, Level.GLOBAL, "m"), memoryview(into), on_progress=lambda _: wait_s
        )
    finally:
        client.close()
    return bytes(into)


def test_a_range_arrives(server: tuple[Server, str]) -> None:
    assert ask(server[1], 4096, 100_000) == DATA[4096:104_096]
    server[0].close()  # it counts after the last byte; this waits for it
    assert server[0].served.bytes_sent == 100_000


def test_one_connection_serves_many_requests(server: tuple[Server, str]) -> None:
    client = Client(SECRET)
    for start in range(0, 1 << 20, 1 << 18):
        into = bytearray(1 << 18)
        client.read(
            server[1], Request(FILE, start, 1 << 18, Level.RACK, ""), memoryview(into), on_progress=lambda _: 5.0
        )
        assert into == DATA[start : start + (1 << 18)]
    assert len(server[0]._connections) == 1
    client.close()


def test_a_client_of_many_nodes_keeps_few_connections(file: File) -> None:
    listening = [socket.create_server((f"127.0.0.{number}", 0)) for number in range(1, 101)]
    server, client = Server(listening, SECRET, {FILE: file}.get, name="n"), Client(SECRET)
    with contextlib.closing(server), contextlib.closing(client):
        before = len(list(Path("/proc/self/fd").iterdir()))
        for sock in listening:
            assert client.probe(address_of(sock)) == "n"
        # Client and server are both in this process; the threads of the server close connections after the client.
        until(lambda: len(list(Path("/proc/self/fd").iterdir())) - before <= 64 + MAX_CONNECTIONS + 1)


def test_with_tls_a_node_speaks_to_those_with_the_jobs_certificate_alone(file: File) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    server, address = Server([listening], SECRET, {FILE: file}.get, name="n", tls=True), address_of(listening)
    client = Client(SECRET, tls=True)
    with contextlib.closing(client), contextlib.closing(server):
        for start in (0, 4096):
            into = bytearray(900_000)
            asked = Request(FILE, start, len(into), Level.GLOBAL, "m")
            client.read(address, asked, memoryview(into), on_progress=lambda _: 30.0)
            assert into == DATA[start : start + len(into)]
        ((_, _, connection),) = client._idle._idle
        assert connection.sock.version() == "TLSv1.3"  # type: ignore[attr-defined]
        assert len(server._connections) == 1
        with pytest.raises(UnreachableError, match="certificate"):
            Client(b"x" * 32, tls=True).probe(address)
        with pytest.raises(TransientError):
            Client(SECRET).probe(address)


def test_a_server_that_waits_for_the_origin_gives_signs_of_life(server: tuple[Server, str], file: File) -> None:
    signs: list[int] = []
    into = bytearray(4096)

    def heard(count: int) -> float:
        signs.append(count)
        if len(signs) == 5:  # the first is the request itself
            file.waiting[0].set_result(None)
        return 5.0

    client = Client(SECRET)
    client.read(server[1], Request(FILE, 2 << 20, 4096, Level.GLOBAL, ""), memoryview(into), on_progress=heard)
    client.close()
    assert into == DATA[2 << 20 : (2 << 20) + 4096]
    assert signs[:5] == [0, 0, 0, -1, -1], "it is alive, but receives nothing"


def test_an_origin_that_fails_is_reported(server: tuple[Server, str], file: File) -> None:
    def fail() -> None:
        while not file.waiting:
            time.sleep(0.001)
        file.waiting[0].set_exception(TransientError("the registry is down"))

    threading.Thread(target=fail).start()
    with pytest.raises(TransientError, match="could not get it"):
        ask(server[1], 2 << 20, 4096)


def test_a_silent_peer_is_given_up(file: File) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TransientError, match="timed out"):
        ask(f"127.0.0.1:{silent.getsockname()[1]}", 0, 4096, wait_s=0.2)


@pytest.fixture
def link() -> Iterator[tuple[Connection, socket.socket]]:
    """A connection and its remote end."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as near:
        far, _ = listening.accept()
        with far:
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield Connection(near, "far", 0.3), far


def test_a_body_wakes_its_reader_seldom(link: tuple[Connection, socket.socket]) -> None:
    connection, far = link
    connection.sock.settimeout(30.0)
    data, calls = memoryview(bytearray(1 << 18)), 0

    def send() -> None:
        for start in range(0, 1 << 18, 4096):
            far.sendall(DATA[start : start + 4096])
            time.sleep(0.001)

    thread = threading.Thread(target=send)
    thread.start()
    left = data
    while left:
        left, calls = left[connection.read_some(left) :], calls + 1
    thread.join()
    assert data == DATA[: 1 << 18]
    assert calls < 16  # for 64 packets


def test_what_came_of_a_body_in_time_is_not_lost(link: tuple[Connection, socket.socket]) -> None:
    connection, far = link
    data = memoryview(bytearray(1 << 18))
    far.sendall(DATA[:1000])
    assert connection.read_some(data) == 1000
    assert data[:1000] == DATA[:1000]
    with pytest.raises(TransientError, match="timed out"):
        connection.read_some(data)
    far.sendall(framed(Answer(206)))
    connection.sock.settimeout(30.0)
    assert connection.receive(ANSWER) == Answer(206)


def test_another_jobs_secret_is_refused(server: tuple[Server, str]) -> None:
    with pytest.raises(AccessError):
        ask(server[1], 0, 4096, secret=b"other")


@pytest.mark.parametrize(("identity", "start"), [("cd" * 32, 0), (FILE, len(DATA) - 100)])
def test_what_the_job_does_not_use_is_not_served(server: tuple[Server, str], identity: str, start: int) -> None:
    with pytest.raises(NotFoundError):
        ask(server[1], start, 4096, file=identity)


HELLO = framed(Hello(bytes(16)))


def answer(received: BinaryIO) -> Answer | Welcome | None:
    """The next answer, whose body is skipped; None if the connection was closed."""
    size = received.read(4)
    if not size:
        return None
    found = WELCOME.decode(received.read(int.from_bytes(size)))
    received.read(found.length if isinstance(found, Answer) else 0)
    return found


def greet(sock: socket.socket, received: BinaryIO, secret: bytes = SECRET) -> tuple[Welcome, Signer]:
    """The server's first message, and the signer of a client with this secret."""
    sock.sendall(HELLO)
    welcome = answer(received)
    assert isinstance(welcome, Welcome)
    return welcome, Signer.of(secret, bytes(16), welcome.nonce)


def replay(address: str, *messages: bytes) -> list[Answer | Welcome]:
    """Send raw messages over one connection. Returns the answers until it is closed."""
    with socket.create_connection(address.rsplit(":", 1), 5) as sock, sock.makefile("rb") as received:
        answers = []
        for message in messages:
            sock.sendall(message)
            if (found := answer(received)) is None:
                break
            answers.append(found)
        return answers


def test_a_request_cannot_be_sent_again(server: tuple[Server, str]) -> None:
    with socket.create_connection(server[1].rsplit(":", 1), 5) as sock, sock.makefile("rb") as received:
        message = framed(greet(sock, received)[1].sign(Request(FILE, 0, 10, Level.RACK, "")))
        for expected in (Answer(206, 10), Answer(403)):
            sock.sendall(message)
            assert answer(received) == expected
    assert replay(server[1], HELLO, message)[1:] == [Answer(403)]


@pytest.mark.parametrize(
    "message",
    [
        bytes(4),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 500,
        framed(Hello(bytes(15))),
        framed(Answer(200)),
    ],
)
def test_malformed_requests_end_their_connection_alone(server: tuple[Server, str], message: bytes) -> None:
    assert replay(server[1], message) == []
    assert ask(server[1], 0, 4096) == DATA[:4096]


def test_a_file_that_this_node_begins_to_read_a_moment_later_is_served(file: File) -> None:
    """Otherwise the first node of a job that starts would read the whole file from the origin."""
    found: list[File] = []
    listening = socket.create_server(("127.0.0.1", 0))
    server = Server([listening], SECRET, lambda _: found[0] if found else None)
    threading.Timer(0.25, found.append, [file]).start()
    assert ask(f"127.0.0.1:{listening.getsockname()[1]}", 0, 4096) == DATA[:4096]
    server.close()


def test_more_than_a_request_may_ask_for_is_refused(server: tuple[Server, str]) -> None:
    with pytest.raises(TransientError):
        ask(server[1], 0, MAX_BLOCK_SIZE + 1)


def test_a_block_of_the_largest_size_may_be_asked_for() -> None:
    request = Request(FILE, 0, MAX_BLOCK_SIZE, Level.GLOBAL, "m")
    assert Signer(b"key").verify(Signer(b"key").sign(request)) == request


def test_a_connection_over_the_limit_is_asked_to_retry(server: tuple[Server, str], file: File) -> None:
    held = [threading.Thread(target=ask, args=(server[1], 1 << 20, 4096)) for _ in range(MAX_CONNECTIONS)]
    for thread in held:
        thread.start()
    while len(file.waiting) < MAX_CONNECTIONS:
        pass
    with pytest.raises(TransientError, match="too many connections") as caught:
        ask(server[1], 0, 4096)
    assert caught.value.retry_after_s == 1.0
    for arrival in file.waiting:
        arrival.set_result(None)
    for thread in held:
        thread.join()


@pytest.mark.parametrize("said", [b"", HELLO[:-1]])
def test_connections_that_say_nothing_keep_no_node_out(server: tuple[Server, str], said: bytes) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(2 * MAX_CONNECTIONS):
            sock = held.enter_context(socket.create_connection(server[1].rsplit(":", 1), 5))
            sock.sendall(said)
        until_s = time.monotonic() + 30
        while True:  # refused until the server has accepted them all and dropped the first ones
            try:
                assert ask(server[1], 0, 4096) == DATA[:4096]
                break
            except TransientError as error:
                assert "too many connections" in str(error)
                assert time.monotonic() < until_s
                time.sleep(0.05)


def test_a_head_by_drops_ends_its_connection(server: tuple[Server, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(TransientError, match="too slowly"):
        dripping = threading.Thread(target=drip, args=(listening,))
        dripping.start()
        try:
            ask(address_of(listening), 0, 4096, wait_s=0.3)
        finally:
            dripping.join()


def drip(listening: socket.socket) -> None:
    with listening.accept()[0] as sock, contextlib.suppress(OSError):
        sock.sendall((1000).to_bytes(4))
        while True:
            sock.sendall(b"x")
            time.sleep(0.05)


def test_a_server_that_was_out_of_descriptors_takes_connections_again(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(socket.socket):
        refused = 3

        def accept(self) -> tuple[socket.socket, tuple[str, int]]:
            self.refused -= 1
            if self.refused >= 0:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    listening = Refusing()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    server = Server([listening], SECRET, {FILE: file}.get)
    assert ask(address_of(listening), 0, 4096) == DATA[:4096]
    server.close()


@pytest.mark.parametrize("asks", [False, True], ids=["says nothing", "reads nothing"])
def test_a_server_closes_a_connection_that_stands_still(
    server: tuple[Server, str], monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    monkeypatch.setattr("bootseer.peers.server._IDLE_S", 0.2)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", int(server[1].rpartition(":")[2])))
        with sock.makefile("rb") as received:
            _, signer = greet(sock, received)
            if asks:
                sock.sendall(framed(signer.sign(Request(FILE, 0, len(DATA), Level.GLOBAL, ""))))
            until(lambda: not server[0]._connections)
    assert server[0].served.bytes_sent == 0


def test_an_idle_connection_makes_room_for_another(server: tuple[Server, str]) -> None:
    clients = [Client(SECRET) for _ in range(MAX_CONNECTIONS)]
    for client in clients:
        client.read(
            server[1], Request(FILE, 0, 4096, Level.GLOBAL, ""), memoryview(bytearray(4096)), on_progress=lambda _: 5.0
        )
    assert ask(server[1], 0, 4096) == DATA[:4096]
    assert server[0].served.refused == 0
    clients[0].read(
        server[1], Request(FILE, 0, 4096, Level.GLOBAL, ""), memoryview(bytearray(4096)), on_progress=lambda _: 5.0
    )
    for client in clients:
        client.close()


def test_a_connection_that_is_closed_just_when_it_is_used_again_is_replaced(server: tuple[Server, str]) -> None:
    client, calls, into = Client(SECRET), threading.Semaphore(0), bytearray(4096)

    def on_progress(num_bytes: int) -> float:
        calls.release()
        return 30.0

    def read() -> None:
        client.read(server[1], Request(FILE, 0, len(into), Level.GLOBAL, ""), memoryview(into), on_progress=on_progress)

    with contextlib.closing(client):
        client.probe(server[1])
        until(lambda: server[0]._idle)
        reading = threading.Thread(target=read)
        with server[0]._lock:
            reading.start()
            for _ in range(2):  # at the second call the client has found the connection open
                assert calls.acquire(timeout=60)
            server[0]._end(next(iter(server[0]._idle)))
        reading.join()
    assert into == DATA[: len(into)]


def test_connections_that_send_share_the_limit_and_have_low_priority(server: tuple[Server, str], file: File) -> None:
    """The kernel paces each connection; a new one reduces the shares of the others, an idle one has none."""

    def rates() -> list[int]:
        return [int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, 47, 8), "little") for sock in server[0]._connections]

    server[0].limit(8 << 20)
    with contextlib.closing(Client(SECRET)) as idle, ThreadPoolExecutor(2) as threads:
        idle.probe(server[1])
        for number, rate in enumerate((8 << 20, 4 << 20), 1):
            threads.submit(ask, server[1], 1 << 20, 4096)
            until(lambda number=number: len(file.waiting) == number)
            assert rates() == [rate] * (number + 1)
        server[0].limit(None)
        assert min(rates()) > 1 << 40
        for sock in server[0]._connections:
            assert sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 8 << 2
        for arrival in file.waiting:
            arrival.set_result(None)


def test_ipv6_has_low_priority_too(file: File) -> None:
    try:
        listening = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 on this machine")
    server, client = Server([listening], SECRET, {FILE: file}.get), Client(SECRET)
    client.probe(f"[::1]:{listening.getsockname()[1]}")
    for sock in server._connections:
        assert sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS) == 8 << 2
    client.close()
    server.close()


def test_a_limit_is_kept(server: tuple[Server, str]) -> None:
    """By what the kernel still sends after `sendfile`, too. Without a limit it takes milliseconds, and the kernel
    paces only what follows the first ten segments (640 KiB on loopback)."""
    server[0].limit(8 << 20)
    began_s = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(lambda _: ask(server[1], 0, 2 << 20), range(4))) == {DATA[: 2 << 20]}
    assert time.monotonic() - began_s > 0.35


def test_a_server_without_the_jobs_secret_is_not_asked(server: tuple[Server, str]) -> None:
    """And a client without it is refused with 403, whatever it signs."""
    with socket.create_connection(server[1].rsplit(":", 1), 5) as sock, sock.makefile("rb") as received:
        welcome, foreign = greet(sock, received, b"x" * 32)
        assert welcome.proof != foreign.proof("")
        sock.sendall(framed(foreign.sign(Request(FILE, 0, 10, Level.RACK, ""))))
        assert answer(received) == Answer(403)

"""Members with invalid, endless or dripping answers: readers never get a wrong byte, and starts complete."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from bootseer.errors import TransientError
from bootseer.peers.choice import Peer
from bootseer.peers.client import Client
from bootseer.peers.connection import Connection
from bootseer.peers.protocol import HELLO, MAX_MESSAGE, SIGNED, Question, Request, Signer, Welcome, framed
from bootseer.peers.protocol import Answer as Head
from bootseer.peers.readiness import StartReport
from fetch.files import content
from peers.nodes import SECRET
from peers.test_origins import Job

pytestmark = pytest.mark.slow

Answer = Callable[[socket.socket, int], object]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Of 192 blocks, the hostile node `n3` owns 32."""
    with closing(Job(tmp_path, monkeypatch, content(192))) as job:
        yield job


class Hostile:
    """A member with the secret and a correct handshake, which answers each request with `answer`."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._taken: list[socket.socket] = []
        self.peer = Peer("n3", (f"127.0.0.1:{self._listening.getsockname()[1]}",))
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for sock in (self._listening, *self._taken):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listening.accept()
                self._taken.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with suppress(OSError, TransientError):
            link = Connection(sock, "asker", 60.0)
            hello = link.receive(HELLO)
            assert hello is not None
            signer = Signer.of(SECRET, hello.nonce, bytes(16))
            link.send(Welcome(bytes(16), "n3", signer.proof("n3")))
            while (signed := link.receive(SIGNED)) is not None:
                asked = signer.verify(signed)
                assert isinstance(asked, Request)
                self._answer(sock, asked.length)


def head_of(length: int) -> bytes:
    return framed(Head(206, length))


def drip(sock: socket.socket, data: bytes, every_s: float) -> None:
    for at in range(len(data)):
        sock.sendall(data[at : at + 1])
        time.sleep(every_s)


def for_ever(sock: socket.socket, data: bytes, every_s: float) -> None:
    while True:
        sock.sendall(data)
        time.sleep(every_s)


ANSWERS: dict[str, Answer] = {
    "garbage": lambda sock, length: sock.sendall(head_of(length) + os.urandom(length)),
    "200 with bytes": lambda sock, length: sock.sendall(framed(Head(200, length)) + bytes(length)),
    "unknown status": lambda sock, _: sock.sendall(framed(Head(302))),
    "too long": lambda sock, length: sock.sendall(head_of(length + 1) + bytes(length + 1)),
    "too short": lambda sock, length: (sock.sendall(head_of(length) + bytes(length // 2)), sock.close()),
    "another message": lambda sock, _: sock.sendall(framed(Welcome(bytes(16), "n3", bytes(32)))),
    "no message": lambda sock, _: sock.sendall(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"),
    "too long a message": lambda sock, _: for_ever(sock, (MAX_MESSAGE + 1).to_bytes(4) + bytes(500), 0.0),
    "no MessagePack": lambda sock, _: for_ever(sock, MAX_MESSAGE.to_bytes(4) + b"\xc1" * MAX_MESSAGE, 0.0),
    "head by drops": lambda sock, length: drip(sock, head_of(length), 0.4),
    "body by drops": lambda sock, length: (sock.sendall(head_of(length)), drip(sock, bytes(length), 0.2)),
    "filling for ever": lambda sock, _: for_ever(sock, framed(Head(102)), 0.1),
    "filling without a pause": lambda sock, _: for_ever(sock, framed(Head(102)), 0.0),
    "closes": lambda sock, _: sock.close(),
    "403": lambda sock, _: sock.sendall(framed(Head(403))),
    "429": lambda sock, _: sock.sendall(framed(Head(429))),
}


def test_an_idle_connection_that_was_reset_is_replaced(job: Job) -> None:
    """A proxy between the nodes may reset it."""
    client = job.nodes[0].group.client
    address = job.peers[1].addresses[0]
    assert client.probe(address) == job.peers[1].name
    ((_, _, connection),) = client._idle._idle
    with socket.create_server(("127.0.0.1", 0)) as server:
        reset = socket.create_connection(server.getsockname())
        other = server.accept()[0]
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.close()
    connection.sock.close()
    connection.sock = reset
    assert client.ask(address, Question("0" * 64, 0, 1, "n0", keeps=False), 5.0).readers == {}


def test_a_report_that_was_given_up_is_not_sent_any_more() -> None:
    """After a short outage, the link would deliver it after the later report that this node is ready."""
    client = Client(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far = server.accept()[0]
    client._idle.give("n1:1", Connection(near, "n1:1", 5.0))
    with pytest.raises(TransientError):
        client.ask("n1:1", StartReport("n0", "begin"), 0.1)
    with far:
        assert b"StartReport" in far.recv(4096)
        with pytest.raises(ConnectionResetError):
            far.recv(4096)


@pytest.mark.parametrize("how", ANSWERS)
def test_what_a_member_answers_does_no_harm_and_names_it(job: Job, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bootseer.peers.health.STILL_S", 2.0)
    hostile = Hostile(ANSWERS[how])
    for node in job.nodes[:3]:
        node.meet([*job.peers[:3], hostile.peer])
    job.read_all(job.nodes[:3])
    hostile.close()
    assert job.copies <= 1.25
    told = [sent.get("late", 0) + sent.get("wrong", 0) for sent in job.sent_by("n3")]
    assert sum(told) > 0 or how in ("403", "429")

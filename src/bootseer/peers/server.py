"""Serves this node's blocks to the other nodes of its job, from the cache's files by `sendfile`.

A thread per connection: `sendfile` gives the GIL back, and costs a quarter of a second of processor for a GiB, like
nginx and half of what asyncio takes. What is not here is asked of the origin by the node's own fetcher, so that a
block is fetched once however many peers wait for it; they hear `102` at once and again until it is here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from bootseer.errors import BootseerError, CorruptError, NotFoundError, TransientError
from bootseer.io.executor import Executor
from bootseer.logs import logger
from bootseer.peers.choice import Level
from bootseer.peers.connection import Connection, tls_contexts
from bootseer.peers.protocol import HELLO, Head, Question, Request, Signer, encode_answer, encode_readers
from bootseer.peers.readers import CachedContent, Readers
from bootseer.peers.readiness import RollCall, StartReport

_LOG = logger(__name__)
MAX_CONNECTIONS: Final = 32
_IDLE_S: Final = 30.0
_FILLING_EVERY_S: Final = 0.1
_SOON_S: Final = 3.0
"""So long after the first request for a file this node may still begin to read it. A job whose nodes read different
files pays it once for each."""
_AGAIN_S: Final = 0.2
_MAX_UNKNOWN: Final = 4096
_SO_MAX_PACING_RATE: Final = 47
_UNLIMITED: Final = (1 << 64) - 1
_CS1: Final = 8 << 2
"""Low priority, in the upper bits of the traffic class (RFC 8622's predecessor that switches know)."""


class Content(Protocol):
    """One block file that peers may ask for."""

    size_bytes: int

    @property
    def num_ready(self) -> int:
        """The number of blocks that are here."""

    def open(self) -> int:
        """A descriptor of the file with its uncompressed bytes, in their places. The caller closes it."""

    def here(self, first: int, blocks: int) -> int:
        """Those of the blocks from `first` on that are here, as bits."""

    def want(self, start: int, length: int, level: Level, done: Callable[[BootseerError | None], None]) -> bool:
        """Whether a range is here. If not, it is fetched, and `done` is called once when that has ended."""


@dataclass(slots=True)
class Served:
    """What was served so far. Changed under the server's lock."""

    bytes_sent: int = 0
    requests: int = 0
    refused: int = 0
    by_interface: dict[str, int] = field(default_factory=dict)
    """Bytes sent, by the address of this node that they left from."""


class Server:
    """Listens on sockets that its owner has bound. Safe to use from many threads."""

    def __init__(
        self,
        listening: list[socket.socket],
        secret: bytes,
        find: Callable[[str], Content | None],
        *,
        name: str = "",
        max_rate: int | None = None,
        on_unknown: Callable[[str, str], object] = lambda file, sender: None,
        soon: bool = True,
        tls: bool = False,
    ) -> None:
        """`find` gives the content of an index' identity, None for what this job does not use.

        `name` is what the other nodes know this one by; `max_rate`: bytes per second of all connections together;
        `on_unknown` is called with the node that asked for what this one does not use, or not yet. `soon`: whether
        this node may be about to read what it does not use yet. `tls`: whether connections are encrypted.
        """
        self._name = name
        self._listening = listening
        self._secret = secret
        self._find = find
        self._max_rate = max_rate
        self._on_unknown = on_unknown
        self._soon = soon
        self._tls = tls_contexts(secret)[0] if tls else None
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._idle: dict[socket.socket, None] = {}
        """Connections between two requests, the one that waits longest first: they make room for others."""
        self._closed = False
        self._first_asked_s: dict[str, float] = {}
        """Of each file, since when it is asked for."""
        self._readers = Readers()
        self._roll = RollCall()
        self.listed: Sequence[str] = ()
        """The names of all nodes that the job's list has."""
        self.served = Served()
        self._threads = Executor("bootseer-peers", 2 * MAX_CONNECTIONS + len(listening))
        for sock in listening:
            self._threads.submit(partial(self._accept, sock))

    def limit(self, max_rate: int | None) -> None:
        """From now on send no more than this many bytes per second in all; None for no limit."""
        with self._lock:
            self._max_rate = max_rate
            self._pace()

    def answer_readiness(self, report: StartReport) -> bytes:
        """Note how far a node's start is; how far all are."""
        with self._lock:
            return self._roll.answer(report, self.listed, time.monotonic())

    def close(self, timeout_s: float = 1.0) -> None:
        """End all connections. Safe to call twice."""
        with self._lock:
            self._closed = True
            sockets = [*self._connections, *self._listening]
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._threads.close(timeout_s)
        for sock in self._listening:
            sock.close()

    def _accept(self, listening: socket.socket) -> None:
        while not self._closed:
            try:
                sock, address = listening.accept()
            except OSError as error:
                if not self._closed:  # no descriptor is left for a moment, or it was gone before it was taken
                    _LOG.warning("a connection cannot be taken: %s", error)
                    time.sleep(_AGAIN_S)
                continue
            if self._tls is not None:
                try:  # the first one that reads or writes makes the handshake
                    sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                except OSError:
                    sock.close()
                    continue
            with self._lock:
                if len(self._connections) >= MAX_CONNECTIONS and self._idle:
                    self._end(next(iter(self._idle)))
                is_full = len(self._connections) >= MAX_CONNECTIONS
                if not is_full:
                    self._connections.add(sock)
                    self._idle[sock] = None
                    self._pace()
            try:
                if is_full:
                    raise TransientError("too many connections")
                if sock.family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, _CS1)
                else:
                    sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _CS1)
                self._threads.submit(partial(self._serve, Connection(sock, address[0], _IDLE_S)), at_once=True)
            except (OSError, TransientError):
                self._refuse(sock)

    def _refuse(self, sock: socket.socket) -> None:
        with self._lock:
            self._connections.discard(sock)
            self._idle.pop(sock, None)
            self.served.refused += 1
        with sock, contextlib.suppress(OSError):
            sock.settimeout(0.1)
            sock.sendall(encode_answer(429))

    def _pace(self) -> None:
        """Divide the rate among the connections. Under the lock."""
        rate = _UNLIMITED if self._max_rate is None else max(self._max_rate // max(len(self._connections), 1), 1)
        for sock in self._connections:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", rate))

    def _serve(self, connection: Connection) -> None:
        try:
            with connection.sock:
                signer = self._greet(connection)
                while signer is not None and (head := self._next_head(connection)) is not None:
                    request = signer.decode(head)
                    if request is None:
                        connection.send(encode_answer(403))
                        return
                    if isinstance(request, Question):
                        self._tell_readers(connection, request)
                    elif isinstance(request, StartReport):
                        body = self.answer_readiness(request)
                        connection.send(encode_answer(200, len(body)) + body)
                    else:
                        self._answer(connection, request)
        except CorruptError as error:
            _LOG.warning("%s: %s", connection.peer, error)
        except (BootseerError, OSError) as error:  # what the cache says of a file that was deleted, too
            _LOG.debug("%s: %s", connection.peer, error)
        finally:
            with self._lock:
                self._connections.discard(connection.sock)
                self._pace()

    def _next_head(self, connection: Connection) -> Head | None:
        with self._lock:
            self._idle[connection.sock] = None
        try:
            return connection.read_head()
        finally:
            with self._lock:
                self._idle.pop(connection.sock, None)

    def _end(self, sock: socket.socket) -> None:
        """Make room for another connection. Under the lock."""
        self._idle.pop(sock)
        self._connections.discard(sock)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def _greet(self, connection: Connection) -> Signer | None:
        head = self._next_head(connection)
        if head is None:
            return None
        if head.first != ("GET", HELLO):
            connection.send(encode_answer(400))
            return None
        nonce = secrets.token_hex(16)
        signer = Signer.of(self._secret, head.fields.get("bootseer-nonce", ""), nonce)
        fields = (
            f"Bootseer-Nonce: {nonce}\r\nBootseer-Name: {self._name}\r\nBootseer-Proof: {signer.proof(self._name)}\r\n"
        )
        connection.send(encode_answer(200, 0, fields))
        return signer

    def _answer(self, connection: Connection, request: Request) -> None:
        with self._lock:
            self.served.requests += 1
        content = self._find_soon(connection, request.file)
        if content is None:
            self._on_unknown(request.file, request.sender)
            connection.send(encode_answer(404))
        elif request.start + request.length > content.size_bytes:
            connection.send(encode_answer(416))
        elif problem := self._wait(connection, content, request):
            _LOG.info("%s: not served: %s", connection.peer, problem)
            connection.send(encode_answer(404 if isinstance(problem, NotFoundError) else 503))
        else:
            self._send(connection, content, request)

    def _find_soon(self, connection: Connection, file: str) -> Content | None:
        """What is asked for, or will be here in a moment: the nodes of a job start the same files within a second, and
        the first ones would take all of them from the origin while the others are not ready."""
        content = self._find(file)
        with self._lock:
            if len(self._first_asked_s) >= _MAX_UNKNOWN:
                self._first_asked_s.clear()
            until = self._first_asked_s.setdefault(file, time.monotonic()) + _SOON_S
        while content is None and self._soon and not self._closed and time.monotonic() < until:
            connection.send(encode_answer(102))
            time.sleep(_FILLING_EVERY_S)
            content = self._find(file)
        return content

    def _tell_readers(self, connection: Connection, question: Question) -> None:
        content = self._find(question.file)
        own = content.here(question.first, question.blocks) if content is not None else 0
        if isinstance(content, CachedContent) and question.sender == question.without == self._name:
            content.mark_unavailable(question.first, question.blocks)
        body = encode_readers(self._readers.answer(question, own, self._name))
        connection.send(encode_answer(200, len(body)) + body)

    def _wait(self, connection: Connection, content: Content, request: Request) -> BootseerError | None:
        """Until the range is here, or cannot be had: why."""
        ended = threading.Event()
        problems: list[BootseerError] = []

        def done(problem: BootseerError | None) -> None:
            problems.extend([problem] if problem else [])
            ended.set()

        if content.want(request.start, request.length, request.level, done):
            return None
        while True:
            connection.send(encode_answer(102, fields=f"Bootseer-Ready: {content.num_ready}\r\n"))
            if ended.wait(_FILLING_EVERY_S):
                return problems[0] if problems else None
            if self._closed:
                return TransientError("this node leaves")

    def _send(self, connection: Connection, content: Content, request: Request) -> None:
        fd = content.open()
        try:
            connection.send(encode_answer(206, request.length), more=True)
            sent = connection.send_file(fd, request.start, request.length)
        finally:
            os.close(fd)
        if sent != request.length:
            raise TransientError("the file in the cache is shorter than its index says")
        left_from = connection.sock.getsockname()[0]
        with self._lock:
            self.served.bytes_sent += sent
            self.served.by_interface[left_from] = self.served.by_interface.get(left_from, 0) + sent

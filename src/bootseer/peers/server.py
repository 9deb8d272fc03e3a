"""Serves this node's blocks to the other nodes of its job, from files of the cache by `sendfile`.

One thread per connection: `sendfile` releases the GIL and costs a quarter of a second of CPU per GiB, like nginx and
half of asyncio. Missing blocks are requested from the store by the node's own fetcher, so that each is fetched once
however many peers wait for it; those get `102` at once and repeatedly until the block is present.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, TypeVar

from msgspec.msgpack import Decoder

from bootseer.errors import BootseerError, CorruptError, NotFoundError, TransientError
from bootseer.io.executor import Executor
from bootseer.logs import logger
from bootseer.peers.choice import Level
from bootseer.peers.connection import Connection, tls_contexts
from bootseer.peers.protocol import HELLO, SIGNED, Answer, Question, Request, Signer, Welcome, framed
from bootseer.peers.readers import CachedContent, Readers
from bootseer.peers.readiness import Readiness, RollCall, StartReport

_LOG = logger(__name__)
T = TypeVar("T")
MAX_CONNECTIONS: Final = 32
_IDLE_S: Final = 30.0
FILLING_EVERY_S: Final = 0.1
_SOON_S: Final = 3.0
"""For this long after the first request for a file, this node may still be about to read it. A job whose nodes read
different files pays it once for each."""
_AGAIN_S: Final = 0.2
_MAX_UNKNOWN: Final = 4096
_SO_MAX_PACING_RATE: Final = 47
_UNLIMITED: Final = (1 << 64) - 1
_PACE_S: Final = 0.2
"""After this time, connections that have nothing to send any more lose their shares of the limit."""
_CS1: Final = 8 << 2
"""Low priority, in the upper bits of the traffic class (predecessor of RFC 8622, known to switches)."""


class Content(Protocol):
    """One block file that peers may request."""

    size_bytes: int

    @property
    def num_ready(self) -> int:
        """The number of present blocks."""

    def opened(self) -> AbstractContextManager[int]:
        """A descriptor of the file with its uncompressed bytes."""

    def here(self, first: int, blocks: int) -> int:
        """The present blocks among `blocks`, both as bits relative to `first`."""

    def wait_for(self, start: int, length: int, level: Level) -> Iterator[None]:
        """Wait until a range is present, after fetching it if `level` permits that. Yields at least every 0.1 s.

        Raises `NotFoundError` if this node will not have it, and other errors of `bootseer.errors`.
        """


@dataclass(slots=True)
class Served:
    """Statistics. Changed under the server's lock."""

    bytes_sent: int = 0
    requests: int = 0
    refused: int = 0
    by_interface: dict[str, int] = field(default_factory=dict)
    """Bytes sent, by local address."""


class Server:
    """Listens on sockets bound by its owner. Safe for many threads."""

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
        """`find` returns the content for an index identity, None for a file that this job does not use.

        `name`: this node's name; `max_rate`: bytes per second over all connections; `on_unknown` is called with a file
        that this node does not use (yet) and the node that requested it. `soon`: whether this node may be about to read
        such a file. `tls`: whether connections are encrypted.
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
        """Connections without a request, the longest waiting first: they are closed to make room for others."""
        self._sending: set[socket.socket] = set()
        """Connections with a share of the limit."""
        self._paced_s = float("-inf")
        self._closed = False
        self._first_asked_s: dict[str, float] = {}
        """When each file was requested first."""
        self._readers = Readers()
        self._roll = RollCall()
        self.listed: Sequence[str] = ()
        """The names of all listed nodes."""
        self.served = Served()
        self._threads = Executor("bootseer-peers", 2 * MAX_CONNECTIONS + len(listening))
        for sock in listening:
            self._threads.submit(partial(self._accept, sock))

    def limit(self, max_rate: int | None) -> None:
        """Limit the total rate to `max_rate` bytes per second; None: unlimited."""
        with self._lock:
            self._max_rate = max_rate
            self._pace()

    def answer_readiness(self, report: StartReport) -> Readiness:
        """Record a node's report; returns the readiness of all nodes."""
        with self._lock:
            return self._roll.answer(report, self.listed, time.monotonic())

    def close(self, timeout_s: float = 1.0) -> None:
        """Close all connections. Safe to call twice."""
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
                if not self._closed:  # out of descriptors for a moment, or the client is gone already
                    _LOG.warning("cannot accept a connection: %s", error)
                    time.sleep(_AGAIN_S)
                continue
            if self._tls is not None:
                try:  # the handshake happens at the first read or write
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
            try:
                if is_full:
                    raise TransientError("too many connections")
                if sock.family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, _CS1)
                else:
                    sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _CS1)
                connection = Connection(sock, address[0], _IDLE_S, is_server=True)
                self._threads.submit(partial(self._serve, connection), at_once=True)
            except (OSError, TransientError):
                self._refuse(sock)

    def _refuse(self, sock: socket.socket) -> None:
        with self._lock:
            self._connections.discard(sock)
            self._idle.pop(sock, None)
            self.served.refused += 1
        with sock, contextlib.suppress(OSError):
            sock.settimeout(0.1)
            sock.sendall(framed(Answer(429)))

    def _pace(self) -> None:
        """Divide the rate among the connections that send. Under the lock."""
        self._paced_s = time.monotonic()
        self._sending = {sock for sock in self._connections if sock not in self._idle or _has_unsent(sock)}
        rate = _UNLIMITED if self._max_rate is None else max(self._max_rate // max(len(self._sending), 1), 1)
        for sock in self._connections:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", rate))

    def _serve(self, connection: Connection) -> None:
        try:
            with connection.sock:
                signer = self._greet(connection)
                while signer is not None and (signed := self._next_message(connection, SIGNED)) is not None:
                    request = signer.verify(signed)
                    if request is None:
                        connection.send(Answer(403))
                        return
                    if isinstance(request, Question):
                        self._tell_readers(connection, request)
                    elif isinstance(request, StartReport):
                        connection.send(Answer(200, readiness=self.answer_readiness(request)))
                    else:
                        self._answer(connection, request)
        except CorruptError as error:
            _LOG.warning("%s: %s", connection.peer, error)
        except (BootseerError, OSError) as error:  # also from the cache, for a deleted file
            _LOG.debug("%s: %s", connection.peer, error)
        finally:
            with self._lock:
                self._connections.discard(connection.sock)

    def _next_message(self, connection: Connection, kind: Decoder[T]) -> T | None:
        with self._lock:
            self._idle[connection.sock] = None
        try:
            return connection.receive(kind)
        finally:
            with self._lock:
                self._idle.pop(connection.sock, None)
                # Most connections of a node are idle at any time. One that gets a share reduces the others at once.
                is_new = connection.sock not in self._sending
                if self._max_rate is not None and (is_new or time.monotonic() >= self._paced_s + _PACE_S):
                    self._pace()

    def _end(self, sock: socket.socket) -> None:
        """Close an idle connection to make room for another one. Under the lock."""
        self._idle.pop(sock)
        self._connections.discard(sock)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def _greet(self, connection: Connection) -> Signer | None:
        hello = self._next_message(connection, HELLO)
        if hello is None:
            return None
        nonce = secrets.token_bytes(16)
        signer = Signer.of(self._secret, hello.nonce, nonce)
        connection.send(Welcome(nonce, self._name, signer.proof(self._name)))
        return signer

    def _answer(self, connection: Connection, request: Request) -> None:
        with self._lock:
            self.served.requests += 1
        content = self._find_soon(connection, request.file)
        if content is None:
            self._on_unknown(request.file, request.sender)
            connection.send(Answer(404))
        elif request.start + request.length > content.size_bytes:
            connection.send(Answer(416))
        elif problem := self._wait(connection, content, request):
            _LOG.info("%s: not served: %s", connection.peer, problem)
            connection.send(Answer(404 if isinstance(problem, NotFoundError) else 503))
        else:
            self._send(connection, content, request)

    def _find_soon(self, connection: Connection, file: str) -> Content | None:
        """Wait for content that may be registered in a moment: the nodes of a job start to read the same files within a
        second, and the first ones would fetch everything from the store while the others are not ready."""
        content = self._find(file)
        with self._lock:
            if len(self._first_asked_s) >= _MAX_UNKNOWN:
                self._first_asked_s.clear()
            until = self._first_asked_s.setdefault(file, time.monotonic()) + _SOON_S
        while content is None and self._soon and not self._closed and time.monotonic() < until:
            connection.send(Answer(102))
            time.sleep(FILLING_EVERY_S)
            content = self._find(file)
        return content

    def _tell_readers(self, connection: Connection, question: Question) -> None:
        content, own = self._find(question.file), 0
        if content is not None:
            with contextlib.suppress(BootseerError):  # evicted from the cache
                own = content.here(question.first, question.blocks)
        if isinstance(content, CachedContent) and question.sender == question.without == self._name:
            content.mark_unavailable(question.first, question.blocks)
        connection.send(Answer(200, readers=self._readers.answer(question, own, self._name)))

    def _wait(self, connection: Connection, content: Content, request: Request) -> BootseerError | None:
        """Wait for the range, and report that; returns the error if it cannot be had."""
        report_s = 0.0
        try:
            for _ in content.wait_for(request.start, request.length, request.level):
                if self._closed:
                    raise TransientError("this node leaves")
                if time.monotonic() >= report_s:
                    connection.send(Answer(102, num_ready=content.num_ready))
                    report_s = time.monotonic() + FILLING_EVERY_S
        except BootseerError as problem:
            return problem
        return None

    def _send(self, connection: Connection, content: Content, request: Request) -> None:
        with content.opened() as fd:
            connection.send(Answer(206, request.length), more=True)
            sent = connection.send_file(fd, request.start, request.length)
        if sent != request.length:
            raise TransientError("the cached file is shorter than its index says")
        with self._lock:
            self.served.bytes_sent += sent
            self.served.by_interface[connection.local] = self.served.by_interface.get(connection.local, 0) + sent


def _has_unsent(sock: socket.socket) -> bool:
    """Whether the kernel still sends: `sendfile` returns as soon as the socket's buffer has room for the rest."""
    try:
        return any(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
    except (OSError, ValueError):  # closed
        return False

"""Requests to peers for ranges of block files, over persistent connections."""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import Final

from bootseer.errors import AccessError, BootseerError, CorruptError, NotFoundError, TransientError
from bootseer.io.deadline import connect
from bootseer.io.idle import IdleConnections
from bootseer.peers.connection import Connection, tls_contexts
from bootseer.peers.health import Health
from bootseer.peers.protocol import ANSWER, WELCOME, Answer, Hello, Message, Question, Request, Signer, Welcome
from bootseer.peers.readiness import StartReport

_CONNECT_S: Final = 2.0
_KEEP_IDLE_S: Final = 25.0
"""Servers close idle connections after 30 s."""
_MAX_IDLE: Final = 2
"""Idle connections to one peer."""
_MAX_INTERIM: Final = 10_000
"""Limit of interim responses, of which there are ten per second."""


class UnreachableError(TransientError):
    """No connection to a peer."""


class FillFailedError(TransientError):
    """The peer could not get the requested range."""


class Watch:
    """Reports the course of one request to `Health`: `progress` during `Client.stream`, then `ended`."""

    def __init__(self, health: Health, lock: threading.Lock, peer: str, length: int) -> None:
        """`lock` guards `health`; it is held now, but not when the methods are called."""
        self.begun_s = time.monotonic()
        self._health = health
        self._lock = lock
        self._request = health.begin(peer, self.begun_s, length)
        self._calls = 0

    @property
    def num_bytes(self) -> int:
        return self._request.num_bytes

    def progress(self, num_bytes: int) -> float:
        """The `on_progress` of `Client.stream`. Raises `TransientError` when the peer is late."""
        now_s, health, request = time.monotonic(), self._health, self._request
        with self._lock:
            if num_bytes > 0:
                health.received(request, num_bytes, now_s)
            elif self._calls == 1:
                health.connected(request, now_s)
            elif self._calls:
                health.filling(request, now_s, moves=num_bytes == 0)
            left_s = health.late_at(request) - now_s
        self._calls += 1
        if left_s <= 0:
            raise self.late(now_s)
        return left_s

    def late(self, now_s: float) -> TransientError:
        """The error of a request that is given up now."""
        return TransientError(f"{self.num_bytes} bytes in {now_s - self.begun_s:.1f} s")

    def ended(self, error: BootseerError | None, file: str) -> bool:
        """The request has ended. Returns whether its peer was late or broke the connection."""
        now_s, health, request = time.monotonic(), self._health, self._request
        late = False
        with self._lock:
            match error:
                case NotFoundError():
                    health.mark_absent(request.peer, now_s, file)
                case UnreachableError() | AccessError():
                    health.mark_absent(request.peer, now_s)
                case CorruptError():
                    health.sent_wrong(request.peer)
                case TransientError(retry_after_s=None) if not isinstance(error, FillFailedError):
                    late = True
                    health.gave_up()
                case TransientError() if error.retry_after_s is not None:
                    health.refused(request.peer, now_s)
            health.ended(request, late=late, now_s=now_s)
        return late


class Client:
    """Requests to all peers. Safe to use from many threads."""

    def __init__(
        self, secret: bytes, pace: Callable[[int], object] = lambda num_bytes: None, *, tls: bool = False
    ) -> None:
        """`pace` is called with the number of bytes after each piece, and may delay the next one. `tls`: whether
        connections are encrypted."""
        self._secret = secret
        self._tls = tls_contexts(secret)[1] if tls else None
        self._pace = pace
        self._idle = IdleConnections[Connection](_KEEP_IDLE_S, _MAX_IDLE)

    def read(self, address: str, request: Request, into: memoryview, *, on_progress: Callable[[int], float]) -> None:
        """Fill `into` with the range, like `stream`."""
        for _ in self.stream(address, request, [into], on_progress=on_progress):
            pass

    def stream(
        self, address: str, request: Request, parts: Iterable[memoryview], *, on_progress: Callable[[int], float]
    ) -> Generator[memoryview, None, None]:
        """Fill the parts of a range in order, and yield each when it is full.

        Closing the iterator ends the request. `on_progress` is called at the start, for each interim response and after
        each piece of the body, with the number of bytes received since the last call, or -1 if the peer itself has
        received nothing since; it returns the timeout for the next one in seconds, or raises. Raises `TransientError`
        after that timeout, or when the peer is gone or overloaded (with `retry_after_s`); `UnreachableError` without a
        connection, `FillFailedError` when the peer could not get the range, `NotFoundError` for a file that it does not
        serve, `AccessError` when it rejects the secret.
        """
        connect_s = min(on_progress(0), _CONNECT_S)
        connection, answer = self._begin(address, request, connect_s, lambda: on_progress(0))
        try:
            self._wait_for_body(connection, answer, request.length, on_progress)
            for part in parts:
                remaining = part
                while remaining:
                    count = connection.read_some(remaining)
                    remaining = remaining[count:]
                    self._pace(count)
                    connection.sock.settimeout(on_progress(count))
                yield part
        except BaseException:
            _drop(connection)  # a partial response is not drained: that would take as long as receiving it
            raise
        self._idle.give(address, connection)

    def probe(self, address: str) -> str:
        """The name of the node at an address, after it has proved knowledge of the secret.

        Raises `TransientError` when nothing answers, `AccessError` when it does not have the secret.
        """
        connection, name = self._connect(address, _CONNECT_S)
        self._idle.give(address, connection)
        return name

    def ask(self, address: str, request: Question | StartReport, timeout_s: float) -> Answer:
        """The answer to a question, or to a report of this node's stage. Raises like `read`."""
        connection, received = self._begin(address, request, min(timeout_s, _CONNECT_S), lambda: timeout_s)
        try:
            answer = _checked(received, connection.peer, 200, 0)
        except BaseException:
            _drop(connection)
            raise
        self._idle.give(address, connection)
        return answer

    def close(self) -> None:
        self._idle.close()

    def _begin(
        self, address: str, request: Message, connect_s: float, timeout_s: Callable[[], float]
    ) -> tuple[Connection, Answer | None]:
        """Send a request; returns its connection and the first answer, None if the server closed it."""
        while (connection := self._idle.take(address)) is not None:
            if not _is_closed(connection.sock):
                answer = _exchange(connection, request, timeout_s)
                if answer is not None:
                    return connection, answer
            connection.close()  # by the server, to make room for another node, perhaps just when it was used again
        connection, _ = self._connect(address, connect_s)
        return connection, _exchange(connection, request, timeout_s)

    def _wait_for_body(
        self, connection: Connection, answer: Answer | None, length: int, on_progress: Callable[[int], float]
    ) -> None:
        num_ready = -1
        for _ in range(_MAX_INTERIM):
            if answer is None or answer.status != 102:
                break
            connection.sock.settimeout(on_progress(0 if answer.num_ready != num_ready else -1))
            num_ready, answer = answer.num_ready, connection.receive(ANSWER)
        _checked(answer, connection.peer, 206, length)

    def _connect(self, address: str, timeout_s: float) -> tuple[Connection, str]:
        host, _, port = address.rpartition(":")
        try:
            sock = connect(host.strip("[]"), int(port), timeout_s)
        except (OSError, TransientError, ValueError) as error:
            raise UnreachableError(f"{address}: {error}") from error
        if self._tls is not None:
            try:
                sock = self._tls.wrap_socket(sock)
            except OSError as error:
                sock.close()
                raise UnreachableError(f"{address}: no TLS with this job's certificate: {error}") from error
        connection = Connection(sock, address, timeout_s)
        nonce = secrets.token_bytes(16)
        try:
            connection.send(Hello(nonce))
            welcome = connection.receive(WELCOME)
            if not isinstance(welcome, Welcome):
                raise TransientError(f"{address} has too many connections", retry_after_s=1.0)
            connection.signer = Signer.of(self._secret, nonce, welcome.nonce)
            if not hmac.compare_digest(welcome.proof, connection.signer.proof(welcome.name)):
                raise AccessError(f"{address} does not know this job's secret")
            return connection, welcome.name
        except CorruptError as error:  # another program's port: it has not proved knowledge of the secret
            sock.close()
            raise AccessError(f"{address} is not a node of this job: {error}") from error
        except BaseException:
            sock.close()
            raise


def _exchange(connection: Connection, request: Message, timeout_s: Callable[[], float]) -> Answer | None:
    """Send a request; returns the first answer, None if the server has closed the connection."""
    try:
        connection.sock.settimeout(timeout_s())
        connection.send(connection.signer.sign(request))
        return connection.receive(ANSWER)
    except BaseException:
        _drop(connection)
        raise


def _drop(connection: Connection) -> None:
    """Close a connection in the middle of a message. What a lost link has held up is dropped: a stage must not arrive
    after the node's later ones."""
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.sock.close()


def _checked(answer: Answer | None, peer: str, status: int, length: int) -> Answer:
    """The answer if it is of this status, with so many bytes that follow."""
    if answer is None:
        raise TransientError(f"{peer} closed the connection")
    match answer.status:
        case 403:
            raise AccessError(f"{peer} does not accept this job's secret")
        case 404 | 416:
            raise NotFoundError(f"{peer} does not serve this file")
        case 429:
            raise TransientError(f"{peer} has too many connections", retry_after_s=1.0)
        case 503:
            raise FillFailedError(f"{peer} could not get it")
    if (answer.status, answer.length) != (status, length):
        raise CorruptError(f"{peer} answers {answer.status} with {answer.length} bytes")
    return answer


def _is_closed(sock: socket.socket) -> bool:
    """Whether the peer has closed an idle connection, or sent unrequested data."""
    try:
        sock.setblocking(False)
        socket.socket.recv(sock, 1, socket.MSG_PEEK)  # one with TLS cannot do this by itself
    except BlockingIOError:
        return False
    except OSError:  # reset
        return True
    return True

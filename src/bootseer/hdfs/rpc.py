"""Questions in Hadoop's RPC, version 9: one connection, one question at a time, a deadline for each.

Only unauthenticated calls are supported. A server that requires SASL (Kerberos, tokens) says so in its first answer;
it is `UnsupportedError`, and the caller may use another client.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import struct
import time
from collections.abc import Iterator
from typing import Final

from bootseer.errors import PermanentError, TransientError
from bootseer.hdfs.protobuf import MalformedError, Message, delimited, field, read_delimited, zigzag
from bootseer.io.deadline import within

_MAX_ANSWER_BYTES: Final = 128 << 20
"""Hadoop's own `ipc.maximum.response.length`; the blocks of a file of 1 TB take 5 MB."""
_ROOM_BYTES: Final = 16 << 10
_HEADER = b"hrpc" + bytes([9, 0, 0])  # version 9, default service class, no authentication
_PROTOCOL_BUFFERS, _FINAL_PACKET = 2, 0
_CONTEXT_CALL, _SASL_CALL = -3, -33
_SUCCESS, _FATAL = 0, 2
_UNAUTHORIZED = 15
_NO_SERVER = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)


class UnsupportedError(PermanentError):
    """This cluster needs a form of the protocol that our own client does not support; hdfs-native may."""


class UnreachableError(TransientError):
    """No server of this protocol is at the address: the name is unknown, the port refuses, or it speaks another one."""


class RemoteError(Exception):
    """The server's answer is an error of its own."""

    def __init__(self, kind: str, message: str) -> None:
        # Behind the first line stands a stack trace, which tells a user nothing.
        super().__init__(message.partition("\n")[0][:600])
        self.kind = kind.rpartition(".")[2]


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """A connection to a server. Raises `UnreachableError` where there is none, `TransientError` for one that hangs."""
    peer, until_s = f"{host}:{port}", time.monotonic() + timeout_s
    failed: OSError = OSError(errno.EADDRNOTAVAIL, "the name has no address")
    try:
        # The resolver of names knows no deadline.
        found = within(timeout_s, peer, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except OSError as error:
        failed, found = error, []
    for *_, address in found:
        try:
            return socket.create_connection((str(address[0]), port), timeout=max(until_s - time.monotonic(), 0.001))
        except OSError as error:
            failed = error
    is_none = isinstance(failed, socket.gaierror) or failed.errno in _NO_SERVER
    kind = UnreachableError if is_none else TransientError
    raise kind(f"{peer} cannot be reached: {failed.strerror or failed}") from failed


class RpcConnection:
    """One connection to one server. Belongs to one thread at a time; after any error but `RemoteError` it is closed."""

    def __init__(
        self, host: str, port: int, protocol: str, user: str, *, timeout_s: float, client_id: bytes | None = None
    ) -> None:
        """`client_id`: of the asking client, 16 bytes, for questions that are asked again over another connection."""
        self._peer = f"{host}:{port}"
        self._protocol = protocol
        self._client_id = client_id or os.urandom(16)
        self._num_calls = 0
        self._has_answered = False
        self._until = time.monotonic() + timeout_s
        self._socket = connect(host, port, timeout_s)
        # From here on Linux's own time-outs: Python's would take a poll before each call, and a call to set them.
        self._socket.settimeout(None)
        self._received = bytearray()
        context = delimited(field(2, field(1, user)) + field(3, protocol))
        with self._closing():
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._send(_HEADER + _framed(self._call_header(_CONTEXT_CALL, retry=-1) + context))

    def call(self, method: str, request: bytes, timeout_s: float, *, number: int | None = None) -> bytes:
        """The answer to one question. Raises `RemoteError`, `UnsupportedError`, `TransientError` for lost connections.

        `number`: by this and its `client_id` the server knows a question that it has answered before, and changes
        nothing twice.
        """
        self._until = time.monotonic() + timeout_s
        self._num_calls += 1
        number = self._num_calls if number is None else number
        with self._closing():
            header = self._call_header(number, retry=0) + _request_header(method, self._protocol)
            self._send(_framed(header + delimited(request)))
            first = self._receive(4)
            if first == b"HTTP":
                raise UnreachableError(f"{self._peer} is the address of a web page, not of a NameNode")
            (length,) = struct.unpack(">I", first)
            if length > _MAX_ANSWER_BYTES:
                raise MalformedError(f"an answer of {length} bytes")
            answer = self._receive(length)
            header_bytes, at = read_delimited(answer, 0)
            said = Message(header_bytes)
            self._has_answered = True
            if said.number(2) != _SUCCESS:
                self._raise(said)
            if said.number(1) != number:
                raise (
                    _unsupported(self._peer)
                    if said.number(1) == _SASL_CALL & 0xFFFFFFFF
                    else MalformedError("an answer to another question")
                )
            return read_delimited(answer, at)[0]

    def close(self) -> None:
        """End the connection. In a child of a fork it goes on for the parent."""
        self._socket.close()

    def _raise(self, said: Message) -> None:
        kind, message = said.text(4, ""), said.text(5, "")
        if said.number(2) == _FATAL:
            if said.number(6, 0) == _UNAUTHORIZED and "SIMPLE" in message:
                raise _unsupported(self._peer)
            raise TransientError(f"{self._peer} ends the connection: {RemoteError(kind, message)}")
        if kind.endswith("RpcNoSuchProtocolException"):
            raise UnreachableError(f"{self._peer} is the address of another server of Hadoop, not of a NameNode")
        raise RemoteError(kind, message)

    def _call_header(self, number: int, *, retry: int) -> bytes:
        return delimited(
            field(1, _PROTOCOL_BUFFERS)
            + field(2, _FINAL_PACKET)
            + field(3, zigzag(number))
            + field(4, self._client_id)
            + field(5, zigzag(retry))
        )

    def _send(self, data: bytes) -> None:
        self._limit(socket.SO_SNDTIMEO)
        self._socket.sendall(data)

    def _receive(self, length: int) -> bytes:
        """The next bytes. More are taken where they are there already: an answer is one system call."""
        while (missing := length - len(self._received)) > 0:
            self._limit(socket.SO_RCVTIMEO)
            piece = self._socket.recv(min(max(missing, _ROOM_BYTES), 1 << 20))
            if not piece:
                raise ConnectionResetError("the connection was closed")
            self._received += piece
        data = bytes(memoryview(self._received)[:length])
        del self._received[:length]
        return data

    def _limit(self, option: int) -> None:
        """Let the next call wait until the deadline of this question."""
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(left_s), int(left_s % 1 * 1e6) or 1))

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """Close on errors after which the state of the connection is unknown, and map them."""
        try:
            yield
        except RemoteError:
            raise
        except (OSError, MalformedError) as error:
            self.close()
            if isinstance(error, (TimeoutError, BlockingIOError)):
                raise TransientError(f"{self._peer}: no answer in time") from error
            said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            if not self._has_answered:
                raise UnreachableError(f"{self._peer} does not answer as a NameNode: {said}") from error
            raise TransientError(f"{self._peer}: {said}") from error
        except BaseException:
            self.close()
            raise


@functools.cache
def _request_header(method: str, protocol: str) -> bytes:
    return delimited(field(1, method) + field(2, protocol) + field(3, 1))


def _framed(message: bytes) -> bytes:
    return struct.pack(">I", len(message)) + message


def _unsupported(peer: str) -> UnsupportedError:
    return UnsupportedError(
        f"{peer} requires SASL (Kerberos or a delegation token), which BootSeer's HDFS client does not support"
    )

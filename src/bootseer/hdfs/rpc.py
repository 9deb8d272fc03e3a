"""Hadoop's RPC, version 9: one connection, one call at a time, a deadline for each.

On a secured cluster each connection begins with a login (SASL, see `Login`). A server that requires one although the
configuration has none says so in its first answer (`AccessError`).
"""

from __future__ import annotations

import errno
import fnmatch
import functools
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Final

from bootseer.errors import AccessError, TransientError
from bootseer.hdfs.gssapi import Kerberos, login_error
from bootseer.hdfs.protobuf import MalformedError, Message, delimited, field, read_delimited, zigzag
from bootseer.hdfs.sasl import (
    AUTHENTICATION,
    PRIVACY,
    Digest,
    LoginError,
    Token,
    check_ciphers,
    wanted_protections,
)
from bootseer.io import deadline
from bootseer.io.deadline import within

_MAX_ANSWER_BYTES: Final = 128 << 20
"""Hadoop's own `ipc.maximum.response.length`; the blocks of a file of 1 TB take 5 MB."""
_ROOM_BYTES: Final = 16 << 10
_HEADER = b"hrpc" + bytes([9, 0, 0])  # version 9, default service class, no authentication
_LOGIN_HEADER = _HEADER[:-1] + b"\xdf"  # SASL
_CALL: Final = field(1, 2) + field(2, 0)
"""The beginning of each call's header: protocol buffers, a complete call."""
_TICK_MS: Final = 100
"""Granularity of socket timeouts."""
_CONTEXT_CALL, _SASL_CALL = -3, -33
_SUCCESS, _FATAL = 0, 2
_UNAUTHORIZED = 15
_DONE, _NEGOTIATE, _INITIATE, _CHALLENGE, _RESPONSE, _WRAP = range(6)
"""States of a login."""
_PRINCIPAL: Final = "dfs.namenode.kerberos.principal"
"""The setting with the NameNode's principal."""
_CONF_HINT: Final = "if it requires Kerberos, HADOOP_CONF_DIR must name its configuration"
_NO_SERVER = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)


class UnreachableError(TransientError):
    """No server of this protocol is at the address: unknown host, refused, or another protocol."""


class RemoteError(Exception):
    """An error that the server reports."""

    def __init__(self, kind: str, message: str) -> None:
        # A Java stack trace follows the message, which may have several lines.
        super().__init__(message.partition("\n\tat ")[0].replace("\n", " ")[:600])
        self.kind = kind.rpartition(".")[2]


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to a server. Raises `UnreachableError` if there is none, `TransientError` if it hangs."""
    try:
        return deadline.connect(host, port, timeout_s)
    except OSError as error:
        is_none = isinstance(error, socket.gaierror) or error.errno in _NO_SERVER
        kind = UnreachableError if is_none else TransientError
        raise kind(f"{host}:{port} cannot be reached: {error.strerror or error}") from error


Mechanism = Kerberos | Digest
"""One login, and then the protection of messages."""


class Login:
    """The credentials of a client: a token, or else the user's Kerberos ticket."""

    def __init__(self, settings: Mapping[str, str], token: Token | None) -> None:
        self._token = token
        self._principal = settings.get(_PRINCIPAL, "")
        self._pattern = settings.get(f"{_PRINCIPAL}.pattern", "")
        self._protections = wanted_protections(settings.get("hadoop.rpc.protection", ""))

    def choose(self, peer: str, offers: Sequence[Message]) -> tuple[Message, Mechanism]:
        """Choose a server's offer (`SaslAuth`) and begin the login. Raises `UsageError`, `AccessError`."""
        for offer in offers:
            mechanism = offer.text(1), offer.text(2)
            service, host = offer.text(3, ""), offer.text(4, "")
            if mechanism == ("TOKEN", "DIGEST-MD5") and self._token is not None:
                if PRIVACY in self._protections:
                    check_ciphers(f"{peer} may encrypt")
                return offer, self._token.login(f"{service}/{host}", self._protections)
            if mechanism == ("KERBEROS", "GSSAPI"):
                return offer, Kerberos(peer, self._target(peer, service, host), self._protections)
        names = ", ".join(offer.text(1) for offer in offers)
        raise AccessError(
            f"{peer} requires an authentication method that BootSeer's HDFS client does not support: {names}"
        )

    def _target(self, peer: str, service: str, host: str) -> str:
        """The principal that the server must prove: the one it names, which must match the configuration."""
        wanted = self._pattern or self._principal
        name, _, realm = wanted.partition("@")
        if "/" not in name and not self._pattern:
            return f"{service}@{host}"
        spn = f"{service}/{host}"
        if not (fnmatch.fnmatchcase(spn, name) if self._pattern else spn == name.replace("/_HOST", f"/{host}")):
            raise AccessError(
                f"{peer} calls itself {spn}, not {wanted}; check dfs.namenode.kerberos.principal (and its .pattern)"
            )
        return f"{spn}@{realm}" if realm and "*" not in realm else f"{service}@{host}"


class RpcConnection:
    """A connection to one server. Used by one thread at a time; closed after any error except `RemoteError`."""

    def __init__(
        self,
        host: str,
        port: int,
        protocol: str,
        user: str,
        *,
        timeout_s: float,
        client_id: bytes | None = None,
        login: Login | None = None,
    ) -> None:
        """`client_id`: 16 bytes, for calls that may be repeated over another connection. With a `login`, `user` is the
        user to impersonate, "" for none."""
        self._peer = f"{host}:{port}"
        self._protocol = protocol
        self._client = field(4, client_id or os.urandom(16))
        self._has_answered = False
        self._until = time.monotonic() + timeout_s
        self._socket = connect(host, port, timeout_s)
        # From here on Linux's own timeouts: Python's would poll before each call, and a system call would be needed to
        # set them.
        self._socket.settimeout(None)
        self._limits_ms: dict[int, int] = {}
        self._received = bytearray()
        self._unwrapped = bytearray()
        self._wraps: Mechanism | None = None
        context = delimited((field(2, field(1, user)) if user else b"") + field(3, protocol))
        with self:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if login is not None:
                self._log_in(login)
            hello = _framed(self._call_header(_CONTEXT_CALL, retry=-1) + context)
            self._send(hello if login is not None else _HEADER + hello)

    def call(self, method: str, request: bytes, timeout_s: float, *, number: int = 1) -> bytes:
        """Call a method; returns the answer. Raises `RemoteError`, `AccessError`, `TransientError` for lost
        connections.

        `number`: the call id, by which the server recognises a repeated call and does not execute it twice.
        """
        self._until = time.monotonic() + timeout_s
        with self:
            header = self._call_header(number, retry=0) + _request_header(method, self._protocol)
            self._send(_framed(header + delimited(request)))
            first = self._receive(4)
            if first == b"HTTP":
                raise UnreachableError(f"{self._peer} is the address of a web page, not of a NameNode")
            said, answer, at = self._answer(first)
            if said.number(1) != number:
                if said.number(1) == _SASL_CALL & 0xFFFFFFFF:
                    raise _login_missing(self._peer)
                raise MalformedError("an answer to another call")
            return read_delimited(answer, at)[0]

    def _answer(self, first: bytes) -> tuple[Message, bytes, int]:
        """Receive the next answer of length `first`: its header, all of it, and the header's end. Raises its error."""
        (length,) = struct.unpack(">I", first)
        if length > _MAX_ANSWER_BYTES:
            raise MalformedError(f"an answer of {length} bytes")
        answer = self._receive(length)
        header_bytes, at = read_delimited(answer, 0)
        header = Message(header_bytes)
        self._has_answered = True
        if header.number(2) != _SUCCESS:
            self._raise(header)
        return header, answer, at

    def _log_in(self, login: Login) -> None:
        self._send(_LOGIN_HEADER + self._login_message(field(2, _NEGOTIATE)))
        header = self._login_answer()
        if header.number(2) != _NEGOTIATE:
            raise MalformedError("no list of logins")
        chosen, mechanism = login.choose(self._peer, [Message(offer) for offer in header.every(4)])

        def step(challenge: bytes) -> bytes:
            # Kerberos contacts its KDC here, which may hang.
            try:
                return within(max(self._until - time.monotonic(), 0.001), self._peer, lambda: mechanism.step(challenge))
            except LoginError as error:
                raise TransientError(f"{self._peer}: the login failed: {error}") from error

        auth = b"".join(field(number, chosen.text(number, "")) for number in (1, 2, 3, 4))
        token = step(chosen.data(5, b""))
        self._send(self._login_message(field(2, _INITIATE) + field(3, token) + field(4, auth)))
        while (header := self._login_answer()).number(2) == _CHALLENGE:
            self._send(self._login_message(field(2, _RESPONSE) + field(3, step(header.data(3, b"")))))
        if header.number(2) != _DONE:
            raise MalformedError(f"state {header.number(2)} of a login")
        if not mechanism.is_done:
            step(header.data(3, b""))
        if not mechanism.is_done:
            raise AccessError(f"{self._peer}: the server has ended the login before it has proved its name")
        if mechanism.protection != AUTHENTICATION:
            self._wraps = mechanism

    def _login_message(self, body: bytes) -> bytes:
        header = _CALL + field(3, zigzag(_SASL_CALL)) + field(4, b"") + field(5, zigzag(-1))
        return _framed(delimited(header) + delimited(body))

    def _login_answer(self) -> Message:
        header, answer, at = self._answer(self._receive(4))
        if header.number(1) != _SASL_CALL & 0xFFFFFFFF:
            raise MalformedError("a response to another call than the login")
        return Message(read_delimited(answer, at)[0])

    def close(self) -> None:
        """Close the socket. In the child of a fork, the parent's connection stays open."""
        self._socket.close()

    def _raise(self, header: Message) -> None:
        kind, message = header.text(4, ""), header.text(5, "")
        if kind.endswith("InvalidToken"):
            raise AccessError(
                f"{self._peer}: the delegation token is not valid (expired, cancelled?): {RemoteError(kind, message)};"
                " get a new one into $HADOOP_TOKEN_FILE_LOCATION"
            )
        if header.number(2) == _FATAL:
            if kind.endswith("AuthorizationException"):  # by hadoop-policy.xml, or for $HADOOP_PROXY_USER
                raise AccessError(f"{self._peer}: {RemoteError(kind, message)}")
            if "GSS" in message and header.number(6, 0) == _UNAUTHORIZED:
                raise login_error(self._peer, str(RemoteError(kind, message)))
            if header.number(6, 0) == _UNAUTHORIZED and "SIMPLE" in message:
                raise _login_missing(self._peer)
            if kind.endswith("StandbyException"):  # a standby does not accept tokens
                self.close()
                raise RemoteError(kind, message)
            raise TransientError(f"{self._peer} closed the connection: {RemoteError(kind, message)}")
        if kind.endswith("RpcNoSuchProtocolException"):
            raise UnreachableError(f"{self._peer} is the address of another server of Hadoop, not of a NameNode")
        raise RemoteError(kind, message)

    def _call_header(self, number: int, *, retry: int) -> bytes:
        return delimited(_CALL + field(3, zigzag(number)) + self._client + field(5, zigzag(retry)))

    def _send(self, data: bytes) -> None:
        if self._wraps is not None:
            data = self._login_message(field(2, _WRAP) + field(3, self._wraps.wrap(data)))
        self._limit(socket.SO_SNDTIMEO)
        self._socket.sendall(data)

    def _receive(self, length: int) -> bytes:
        if self._wraps is None:
            return self._receive_plain(length)
        while len(self._unwrapped) < length:
            (size,) = struct.unpack(">I", self._receive_plain(4))
            if size > _MAX_ANSWER_BYTES:
                raise MalformedError(f"an answer of {size} bytes")
            wrapped = self._receive_plain(size)
            header = Message(read_delimited(wrapped, read_delimited(wrapped, 0)[1])[0])
            if header.number(2) != _WRAP:
                raise MalformedError("a response without its protection")
            try:
                self._unwrapped += self._wraps.unwrap(header.data(3))
            except LoginError as error:
                raise MalformedError(str(error)) from error
        data = bytes(memoryview(self._unwrapped)[:length])
        del self._unwrapped[:length]
        return data

    def _receive_plain(self, length: int) -> bytes:
        """Receive bytes; more are taken if available, so that an answer needs one system call."""
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
        """Set the socket timeout to the deadline of this call."""
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        limit_ms = (int(left_s * 1000) // _TICK_MS + 1) * _TICK_MS
        if self._limits_ms.get(option) != limit_ms:  # most calls have the same timeout
            self._limits_ms[option] = limit_ms
            wait = struct.pack("@ll", limit_ms // 1000, limit_ms % 1000 * 1000)
            self._socket.setsockopt(socket.SOL_SOCKET, option, wait)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        """Close after errors that leave the connection in an unknown state, and map them."""
        if error is None or isinstance(error, RemoteError):
            return
        self.close()
        if isinstance(error, (TimeoutError, BlockingIOError)):
            raise TransientError(f"{self._peer}: no answer in time") from error
        if isinstance(error, (OSError, MalformedError)):
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            if not self._has_answered:
                raise UnreachableError(f"{self._peer} does not answer as a NameNode: {reason}; {_CONF_HINT}") from error
            raise TransientError(f"{self._peer}: {reason}") from error


@functools.cache
def _request_header(method: str, protocol: str) -> bytes:
    return delimited(field(1, method) + field(2, protocol) + field(3, 1))


def _framed(message: bytes) -> bytes:
    return struct.pack(">I", len(message)) + message


def _login_missing(peer: str) -> AccessError:
    return AccessError(f"{peer} requires a login; {_CONF_HINT}")

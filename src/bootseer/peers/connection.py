"""One TCP connection between peers: messages and bodies with deadlines, optionally over TLS 1.3."""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from msgspec.msgpack import Decoder

from bootseer.errors import TransientError, UsageError
from bootseer.peers.protocol import SIZE_BYTES, Answer, Hello, Signed, Signer, Welcome, decode, framed, framed_bytes

if TYPE_CHECKING:
    from ssl import SSLContext

T = TypeVar("T")
_MESSAGE_PIECE = 4096
_TLS_PIECE = 1 << 18
_PIECE = 1 << 18
"""SO_RCVLOWAT for bodies: waking up for each packet costs 9 ms of CPU per MiB instead of 1.6 on a link of 100
Mbit/s."""


@lru_cache(maxsize=16)
def tls_contexts(secret: bytes) -> tuple[SSLContext, SSLContext]:
    """TLS contexts of the job's nodes, as server and as client, with the job's certificate.

    Key and certificate are derived from the secret: each node computes the same ones, accepts no others, and nothing is
    sent or stored. Raises `UsageError` without the package `cryptography`.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    except ImportError as error:
        raise UsageError(
            "--peers-tls needs the package cryptography", hint="pip install 'bootseer[sign]' on each node"
        ) from error
    import ssl
    from datetime import datetime

    key = Ed25519PrivateKey.from_private_bytes(hmac.digest(secret, b"bootseer peers tls 1", "sha256"))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bootseer job")])
    # Fixed dates: all nodes compute the same certificate whatever their clocks say; its lifetime is the secret's.
    begin, end = datetime(2020, 1, 1), datetime(2120, 1, 1)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, begin, end)
    signed = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True).sign(key, None)
    certificate = signed.public_bytes(Encoding.PEM)
    contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    fd = os.memfd_create("bootseer-job", os.MFD_CLOEXEC)  # `ssl` reads keys only from files
    with os.fdopen(fd, "wb") as file:
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate)
        file.flush()
        for context in contexts:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=certificate.decode())
            context.load_cert_chain(f"/proc/self/fd/{fd}")
    contexts[0].num_tickets = 0  # otherwise readable data on an idle connection could be a session ticket
    return contexts


class Connection:
    """Owns the socket. All methods raise `TransientError` when the peer is gone or silent for `timeout_s`; a whole
    message may take at most twice as long."""

    def __init__(self, sock: socket.socket, peer: str, timeout_s: float, *, is_server: bool = False) -> None:
        self.sock = sock
        self.peer = peer
        self.local: str = sock.getsockname()[0]
        """This node's address: of the interface."""
        self.signer = Signer(b"")
        """Of a client: set when both sides have greeted."""
        self._timeout_s = timeout_s
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(timeout_s)
        self._is_tls = hasattr(sock, "do_handshake")
        if is_server and not self._is_tls:
            # The kernel keeps the timeout. With Python's, each call polls first and releases the GIL once more, which
            # took a quarter of the server's CPU with 64 busy connections. Clients need Python's: their timeouts change,
            # and a blocking receive with SO_RCVLOWAT would wait for more than is left of a body.
            limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._received = b""
        self._woken_at = 1
        """Minimum number of bytes for the kernel to wake a reader (SO_RCVLOWAT)."""

    def close(self) -> None:
        self.sock.close()

    def receive(self, kind: Decoder[T]) -> T | None:
        """The next message; None when the peer has closed the connection between messages. Raises `CorruptError`."""
        data, until_s = self._received, time.monotonic() + (self.sock.gettimeout() or self._timeout_s)
        self._wake_at(1)
        while len(data) < (end := framed_bytes(data)):
            if time.monotonic() > until_s:  # each byte may be in time, and the message too slow
                raise TransientError(f"{self.peer} sends a message too slowly")
            try:
                more = self.sock.recv(_MESSAGE_PIECE)
            except OSError as error:
                raise TransientError(f"{self.peer}: {error}") from error
            if not more:
                if data:
                    raise TransientError(f"{self.peer} closed the connection")
                return None
            data += more
        self._received = data[end:]
        return decode(kind, data[SIZE_BYTES:end])

    def read_some(self, into: memoryview) -> int:
        """Receive a part of a body into the beginning of `into`; returns the number of bytes, at least one. After the
        timeout, takes what has arrived below SO_RCVLOWAT."""
        if self._received:
            count = min(len(self._received), len(into))
            into[:count] = self._received[:count]
            self._received = self._received[count:]
            return count
        self._wake_at(min(len(into), _PIECE))
        try:
            count = self.sock.recv_into(into)
        except TimeoutError as error:
            timeout_s = self.sock.gettimeout()
            self.sock.settimeout(0)
            try:
                count = self.sock.recv_into(into)
            except OSError:
                raise TransientError(f"{self.peer}: {error}") from error
            self.sock.settimeout(timeout_s)
        except OSError as error:
            raise TransientError(f"{self.peer}: {error}") from error
        if not count:
            raise TransientError(f"{self.peer} closed the connection")
        return count

    def send(self, message: Hello | Welcome | Signed | Answer, *, more: bool = False) -> None:
        """Send a message; `more` data follows at once."""
        self._send(framed(message), more=more)

    def _send(self, data: bytes, *, more: bool = False) -> None:
        try:
            self.sock.sendall(data, socket.MSG_MORE if more and not self._is_tls else 0)
        except OSError as error:
            raise TransientError(f"{self.peer}: {error}") from error

    def send_file(self, fd: int, offset: int, length: int) -> int:
        """Send a part of a file; returns the number of bytes, less than `length` if the file ends.

        For servers. With TLS the data is read and sent.
        """
        if self._is_tls:
            remaining = length
            while remaining and (piece := os.pread(fd, min(remaining, _TLS_PIECE), offset + length - remaining)):
                self._send(piece)
                remaining -= len(piece)
            return length - remaining
        end, number = offset + length, self.sock.fileno()
        while offset < end:
            try:
                count = os.sendfile(number, fd, offset, end - offset)
            except OSError as error:  # also after the timeout
                raise TransientError(f"{self.peer}: {error}") from error
            if not count:
                break
            offset += count
        return length - (end - offset)

    def _wake_at(self, num_bytes: int) -> None:
        if num_bytes != self._woken_at and not self._is_tls:  # TLS reads its records in parts
            self._woken_at = num_bytes
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

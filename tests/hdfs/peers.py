"""Fake NameNodes and DataNodes on loopback, for answers that real servers do not give."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import google_crc32c

from bootseer.hdfs.protobuf import Message, delimited, field, read_delimited, varint

CHUNK = 512
PACKET = 64 * 1024
POOL = "BP-1"
TOKEN = field(1, b"who") + field(2, b"secret") + field(3, "BLOCK") + field(4, "")


class Peer:
    """A server on a free port, with a thread for each connection; all end with the `with` block."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_connections = 0
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.closing = threading.Event()

    def __enter__(self) -> Any:
        self._start(self._accept)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()
        self._listener.close()

    def serve(self, connection: socket.socket) -> None:
        """Serve one connection, which is closed when this returns."""
        raise NotImplementedError

    def hang_up(self) -> None:
        """Close all connections."""
        with self._lock:
            for connection in self._open:
                connection.shutdown(socket.SHUT_RDWR)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with self._lock:
                    self.num_connections += 1
                    self._open.add(connection)
                self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            self.serve(connection)
        with self._lock:
            self._open.discard(connection)
        connection.close()


def receive(connection: socket.socket, length: int) -> bytes:
    """Receive exactly this many bytes. Raises `EOFError` if the connection ends before."""
    data = b""
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


class FakeDataNode(Peer):
    """A DataNode with blocks by id. `spoil` selects a deviation from the protocol: see where the methods use it."""

    def __init__(self, blocks: dict[int, bytes], spoil: str = "") -> None:
        super().__init__()
        self.blocks = blocks
        self.spoil = spoil
        self.num_reads = 0
        self.packet_bytes = PACKET
        self.tokens: list[bytes] = []
        self.before_packet: Callable[[int], None] = lambda at: None
        """Called with a packet's offset in its block before the packet is sent; may block."""

    def serve(self, connection: socket.socket) -> None:
        while True:
            assert receive(connection, 3) == struct.pack(">hB", 28, 81)
            self._read(connection, Message(_delimited(connection)))

    def _read(self, connection: socket.socket, request: Message) -> None:
        self.num_reads += 1
        base = request.message(1).message(1)
        self.tokens.append(base.data(2))
        data = self.blocks.get(base.message(1).number(2))
        offset, length, wants_sums = request.number(2), request.number(3), bool(request.number(4, 1))
        if self.spoil == "silent":
            self.closing.wait()
            return
        if self.spoil == "garbage":
            connection.sendall(b"\x05HTTP/1.1 400 Bad Request\r\n\r\n" * 100)
            raise EOFError
        if self.spoil == "endless answer":
            connection.sendall(b"\xff" * 64)
            raise EOFError
        if self.spoil == "huge answer":
            connection.sendall(varint(1 << 40))
            self.closing.wait()
            return
        if data is None or self.spoil in ("refuses", "token"):
            status = 5 if self.spoil == "token" else 1
            connection.sendall(delimited(field(1, status) + field(5, "cannot read the block")))
            return
        first = offset // CHUNK * CHUNK
        if self.spoil == "other offset":
            first += CHUNK
        end = min(-(-(offset + length) // CHUNK) * CHUNK, len(data))
        chunk = 1 << 40 if self.spoil == "huge chunk" else CHUNK
        sums = field(1, field(1, 2) + field(2, chunk)) + field(2, first)
        connection.sendall(delimited(field(1, 0) + field(4, sums)))
        self._send_packets(connection, data, first, end, wants_sums)
        with contextlib.suppress(EOFError):
            _delimited(connection)

    def _send_packets(self, connection: socket.socket, data: bytes, at: int, end: int, wants_sums: bool) -> None:
        sequence = 0
        while at < end:
            self.before_packet(at)
            size = min(self.packet_bytes, end - at)
            if self.spoil == "uneven" and sequence % 2:
                size = min(3 * CHUNK, end - at)
            packet = self._packet(data[at : at + size], at, sequence, wants_sums)
            if self.spoil == "cut" and sequence == 1:
                connection.sendall(packet[: len(packet) // 2])
                raise EOFError
            if self.spoil == "stops" and sequence == 1:
                connection.sendall(packet[: len(packet) // 2])
                self.closing.wait()
                raise EOFError
            if self.spoil == "drips" and sequence == 1:
                for byte in packet:
                    connection.sendall(bytes([byte]))
                    if self.closing.wait(0.05):
                        raise EOFError
            connection.sendall(packet)
            at += size
            sequence += 1
        if self.spoil == "no end":
            connection.sendall(self._packet(data[:CHUNK], at, sequence, wants_sums))
            raise EOFError
        connection.sendall(self._packet(b"", at, sequence, wants_sums, is_last=True))

    def _packet(self, data: bytes, at: int, sequence: int, wants_sums: bool, *, is_last: bool = False) -> bytes:
        sums = b""
        if wants_sums:
            chunks = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
            sums = b"".join(struct.pack(">I", google_crc32c.value(chunk)) for chunk in chunks)
        if self.spoil == "wrong data" and len(data) > 100:
            data = data[:100] + bytes([data[100] ^ 1]) + data[101:]
        if self.spoil == "wrong sums" and sums:
            sums = sums[:-1] + bytes([sums[-1] ^ 1])
        told_at = at + CHUNK if self.spoil == "wrong place" and sequence else at
        told_sequence = sequence + 1 if self.spoil == "wrong sequence" and sequence else sequence
        size = len(data)
        told_size = {"huge size": 1 << 30, "negative size": -5}.get(self.spoil, size)
        if self.spoil == "early end" and sequence == 1:
            is_last = True
        header = b"\x09" + struct.pack("<q", told_at) + b"\x11" + struct.pack("<q", told_sequence)
        header += bytes([0x18, is_last, 0x25]) + struct.pack("<i", told_size)
        if self.spoil == "long header":
            header += b"\x28\x01"
        if self.spoil == "other header":
            header = b"\x08" + header[1:]
        length = (1 << 31 if self.spoil == "huge packet" else 4) + len(sums) + size
        header_length = 60000 if self.spoil == "huge header" else len(header)
        return struct.pack(">IH", length, header_length) + header + sums + data


SPOILED = (
    *("silent", "garbage", "endless answer", "huge answer", "refuses", "token", "other offset", "huge chunk", "cut"),
    *("stops", "wrong place", "wrong sequence", "huge size", "negative size", "early end", "other header"),
    *("huge packet", "huge header", "no end"),
)
"""Deviations after which no data may be accepted, with or without checksums."""
WRONG = ("wrong data", "wrong sums")
ODD = ("uneven", "long header")
"""Unusual, but valid."""


REFUSED = {
    "secure": (
        "org.apache.hadoop.security.AccessControlException",
        "SIMPLE authentication is not enabled.  Available:[TOKEN, KERBEROS]",
    ),
    "policy": (
        "org.apache.hadoop.security.authorize.AuthorizationException",
        "User me (auth:SIMPLE) is not authorized for protocol interface org.apache.hadoop.hdfs.protocol.ClientProtocol",
    ),
}
"""Errors with which a server refuses a connection: class and message."""


class FakeNameNode(Peer):
    """A NameNode. `answers` has a function for each method, which returns the response or an error (class, message)."""

    def __init__(self, spoil: str = "") -> None:
        super().__init__()
        self.spoil = spoil
        self.answers: dict[str, Callable[[Message], bytes | tuple[str, str]]] = {
            "getServerDefaults": _no_encryption,
            "getHAServiceState": lambda _: field(1, 1),
        }
        self.asked: list[str] = []

    def serve(self, connection: socket.socket) -> None:
        assert receive(connection, 7) == b"hrpc\x09\x00\x00"
        receive(connection, struct.unpack(">I", receive(connection, 4))[0])
        if self.spoil in REFUSED:
            kind, said = REFUSED[self.spoil]
            _answer(
                connection, field(1, -1 & 0xFFFFFFFF) + field(2, 2) + field(4, kind) + field(5, said) + field(6, 15)
            )
            return
        while True:
            call = receive(connection, struct.unpack(">I", receive(connection, 4))[0])
            header, at = read_delimited(call, 0)
            method, at = read_delimited(call, at)
            request, _ = read_delimited(call, at)
            number = Message(header).number(3) >> 1
            name = Message(method).text(1)
            self.asked.append(name)
            if self.spoil == "silent":
                self.closing.wait()
                return
            if self.spoil == "huge":
                connection.sendall(struct.pack(">I", 1 << 31))
                self.closing.wait()
                return
            if self.spoil == "garbage":
                connection.sendall(struct.pack(">I", 40) + b"\xff" * 40)
                return
            if self.spoil == "page":
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                return
            if self.spoil == "other call":
                number += 1
            answer = self.answers[name](Message(request))
            if isinstance(answer, tuple):
                _answer(connection, field(1, number) + field(2, 1) + field(4, answer[0]) + field(5, answer[1]))
            else:
                _answer(connection, field(1, number) + field(2, 0), answer)


def located(size: int, blocks: Sequence[bytes], *, more: bytes = b"", under_construction: bool = False) -> bytes:
    """A `GetBlockLocationsResponseProto`."""
    told = field(1, size) + b"".join(field(2, block) for block in blocks)
    return field(1, told + field(3, under_construction) + field(5, not under_construction) + more)


def block(start: int, number: int, length: int, ports: Sequence[int], *, generation: int = 1) -> bytes:
    """A `LocatedBlockProto` on DataNodes at these ports."""
    told = field(1, POOL) + field(2, number) + field(3, generation) + field(4, length)
    nodes = b"".join(field(3, field(1, node(port))) for port in ports)
    return field(1, told) + field(2, start) + nodes + field(4, False) + field(5, TOKEN)


def node(port: int, address: str = "127.0.0.1") -> bytes:
    """A `DatanodeIDProto`."""
    return field(1, address) + field(2, "localhost") + field(3, f"uuid-{port}") + field(4, port)


def _answer(connection: socket.socket, header: bytes, body: bytes | None = None) -> None:
    told = delimited(header) + (b"" if body is None else delimited(body))
    connection.sendall(struct.pack(">I", len(told)) + told)


def _no_encryption(request: Message) -> bytes:
    return field(1, field(1, 1) + field(6, False))


def _delimited(connection: socket.socket) -> bytes:
    length = b""
    while not length or length[-1] > 0x7F:
        length += receive(connection, 1)
    number = 0
    for byte in reversed(length):
        number = number << 7 | byte & 0x7F
    return receive(connection, number)

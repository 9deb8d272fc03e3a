"""Writing one block to its DataNodes: HDFS's data transfer protocol, straight from the caller's memory.

The first DataNode forwards the packets to the second, and so on; all of them acknowledge each packet. There is no
pipeline recovery: when a node fails, the block fails, and the caller starts it on other nodes (`placement`). The
NameNode takes minutes to notice a hung or dead node; `ExcludedDataNodes` keeps writers off it meanwhile.

A node that neither accepts nor acknowledges anything for `stall_s` has failed. Used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Final

import google_crc32c

from bootseer.hdfs.block_locations import Node
from bootseer.hdfs.checksums import CRC32
from bootseer.hdfs.datanode import DataNodeConnection, raise_silent
from bootseer.hdfs.errors import DataNodeError, LostConnectionError, SilentError
from bootseer.hdfs.lease import NewBlock, WriteDefaults, identity
from bootseer.hdfs.protection import Protection
from bootseer.hdfs.protobuf import MalformedError, Message, delimited, field, read_delimited
from bootseer.logs import logger

_LOG = logger(__name__)

PACKET_BYTES: Final = 256 * 1024
"""A multiple of all supported checksum sizes."""
_MAX_ANSWER_BYTES: Final = 64 * 1024
_WRITE_BLOCK: Final = struct.pack(">hB", 28, 80)  # version of the protocol, operation
_READ_BLOCK: Final = struct.pack(">hB", 28, 81)
_PROBE_S: Final = 1.0
_CREATE_STAGE: Final = 6
# Length of what follows minus 4, length of the header; then the header's four fields, each after its tag.
_HEADER: Final = struct.Struct(">IH")
_FIELDS: Final = struct.Struct("<BqBqBBBi")
_SUCCESS: Final = 0


class PipelineError(DataNodeError):
    """A node of the pipeline has failed; `node` says which, if known."""

    def __init__(self, message: str, node: str) -> None:
        super().__init__(message)
        self.node = node
        """`host:port`; "" if unknown."""


class BlockWriter:
    """A block that is being written."""

    def __init__(
        self,
        new: NewBlock,
        defaults: WriteDefaults,
        holder: str,
        *,
        by_hostname: bool,
        setup_s: float,
        stall_s: float,
        protection: Protection | None = None,
    ) -> None:
        """Connect to the pipeline; each step takes at most `setup_s`. Raises `PipelineError`."""
        self.size_bytes = 0
        """Bytes sent."""
        self._pending = bytearray()
        """Bytes that do not fill a packet yet: checksums require all packets but the last to be full."""
        self._new = new
        self.nodes = new.block.nodes
        self._holder = holder
        self._by_hostname = by_hostname
        self._defaults = defaults
        self._sequence = 0
        self._confirmed = 0
        self._answers = bytearray()
        self._first = self.nodes[0].host_port
        address = self.nodes[0].address(by_hostname=by_hostname)
        with self._naming():
            self._connection = DataNodeConnection(address, silent_s=setup_s, protection=protection)
            try:
                try:
                    self._connection.connect(setup_s)
                    self._connection.log_in(new.block.token, raise_silent)
                except SilentError as error:  # the other nodes were not asked yet
                    raise PipelineError(f"{self._first}: {error}", self._first) from error
                self._connection.send(_WRITE_BLOCK + delimited(_request(new, defaults, holder)))
                self._await_setup()
                self._connection.set_timeout(stall_s)
            except BaseException:
                self.close()
                raise

    def write(self, data: memoryview) -> None:
        """Append bytes. Blocks while the nodes are slower."""
        with self._naming():
            if self._pending:
                missing = PACKET_BYTES - len(self._pending)
                self._pending += data[:missing]
                data = data[missing:]
                if len(self._pending) == PACKET_BYTES:
                    full, self._pending = self._pending, bytearray()
                    self._send_packet(memoryview(full))
            whole = len(data) - len(data) % PACKET_BYTES
            for start in range(0, whole, PACKET_BYTES):
                self._send_packet(data[start : start + PACKET_BYTES])
            self._pending += data[whole:]
            self._take_acks()

    def finish(self) -> None:
        """Wait until all nodes have acknowledged all bytes and the end of the block."""
        with self._naming():
            if self._pending:
                self._send_packet(memoryview(self._pending))
            self._send(self._packet_header(0, b"", last=True))
            acked_s = time.monotonic()
            while (confirmed := self._confirmed) < self._sequence:
                self._take_acks(acked_s)
                if self._confirmed > confirmed:
                    acked_s = time.monotonic()

    def close(self) -> None:
        """Close the connection. Before `finish`, the nodes discard the block."""
        self._connection.close()

    def _send_packet(self, packet: memoryview) -> None:
        self._send(self._packet_header(len(packet), self._sums(packet)), packet)
        self.size_bytes += len(packet)
        self._take_acks()  # after each packet: the first node goes on accepting data when another one has failed

    def _await_setup(self) -> None:
        """Receive the first node's answer, which it gives when the whole pipeline is connected."""
        asked_s = time.monotonic()
        while (answer := self._next_answer()) is None:
            self._receive(asked_s)
        status, bad, message = answer.number(1), answer.text(2, ""), answer.text(5, "").partition("\n")[0][:200]
        if status != _SUCCESS or bad:  # without the name of another node, the first one has failed
            known = {"": self._first} | {name: node.host_port for node in self.nodes for name in _names(node)}
            raise PipelineError(message or f"{bad or self._first}: status {status}", known.get(bad, ""))

    def _packet_header(self, length: int, sums: bytes, *, last: bool = False) -> bytes:
        fields = _FIELDS.pack(0x09, self.size_bytes, 0x11, self._sequence, 0x18, last, 0x25, length)
        self._sequence += 1
        return _HEADER.pack(4 + len(sums) + length, len(fields)) + fields + sums

    def _sums(self, packet: memoryview) -> bytes:
        crc = zlib.crc32 if self._defaults.checksum_kind == CRC32 else google_crc32c.value
        chunk, data = self._defaults.chunk_bytes, bytes(packet)  # google_crc32c refuses writable memory
        sums = [crc(data[at : at + chunk]) for at in range(0, len(data), chunk)]
        return struct.pack(f">{len(sums)}I", *sums)

    def _send(self, *data: bytes | memoryview) -> None:
        try:
            self._connection.send(*data)
        except LostConnectionError:
            self._take_acks()  # which may name the failed node
            raise

    def _find_silent_node(self) -> str:
        """Find the node that answers no request; "" if all answer, and the first one does not forward."""
        if len(self.nodes) == 1:
            return self._first
        base = field(1, identity(self._new.block)) + field(2, self._new.block.token)
        question = field(1, field(1, base) + field(2, self._holder)) + field(2, 0) + field(3, 1)
        for node in self.nodes:
            address = node.address(by_hostname=self._by_hostname)
            try:
                with socket.create_connection(address, timeout=_PROBE_S) as probe:
                    probe.sendall(_READ_BLOCK + delimited(question))
                    # Any answer will do: the block is being written.
                    probe.recv(1)
            except OSError:
                return node.host_port
        return ""

    def _take_acks(self, since_s: float | None = None) -> None:
        """Receive acknowledgements; waits only with `since_s`."""
        self._receive(since_s)
        while (answer := self._next_answer()) is not None:
            self._confirm(answer)

    def _next_answer(self) -> Message | None:
        """The next answer of the first node; None if its rest has not arrived yet."""
        try:
            reply, end = read_delimited(self._answers, 0)
        except MalformedError:
            if len(self._answers) > _MAX_ANSWER_BYTES:
                raise PipelineError(f"{self._first} does not answer", self._first) from None
            return None
        del self._answers[:end]
        return Message(reply)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Errors raised inside become `PipelineError`s."""
        try:
            yield
        except PipelineError:
            raise
        except SilentError as error:
            names = ", ".join(node.host_port for node in self.nodes)
            raise PipelineError(f"{names}: {error}", self._find_silent_node()) from error
        except (DataNodeError, MalformedError) as error:
            raise PipelineError(f"{self._first}: {error}", self._first) from error

    def _confirm(self, answer: Message) -> None:
        raw = answer.number(1)
        sequence = raw >> 1 ^ -(raw & 1)
        statuses = answer.numbers(2)
        for number, status in enumerate(statuses):
            if status != _SUCCESS:
                node = self.nodes[min(number, len(self.nodes) - 1)].host_port
                raise PipelineError(f"{node} failed with status {status}", node)
        if len(statuses) != len(self.nodes):
            raise MalformedError(f"{len(statuses)} of {len(self.nodes)} nodes acknowledge packet {sequence}")
        # Heartbeat acknowledgements would have other numbers, but only answer heartbeats, and none is sent.
        if sequence != self._confirmed or sequence == self._sequence:
            raise MalformedError(
                f"packet {sequence} is acknowledged where {self._confirmed} was expected, if it was sent"
            )
        self._confirmed += 1

    def _receive(self, since_s: float | None) -> None:
        """Receive available bytes; with `since_s`, wait for some, at most until `stall_s` after it."""
        if since_s is not None and time.monotonic() - since_s >= self._connection.silent_s:
            raise SilentError(f"nothing was received for {self._connection.silent_s:.0f} s")
        self._answers += self._connection.receive_available(wait=since_s is not None)


def _names(node: Node) -> tuple[str, str]:
    return node.host_port, f"{node.hostname}:{node.host_port.rpartition(':')[2]}"


def _request(new: NewBlock, defaults: WriteDefaults, holder: str) -> bytes:
    block = new.block
    base = field(1, identity(block)) + field(2, block.token)
    request = field(1, field(1, base) + field(2, holder))
    request += b"".join(field(2, node) for node in new.node_ids[1:])
    request += field(4, _CREATE_STAGE) + field(5, len(block.nodes)) + field(6, 0) + field(7, 0)
    request += field(8, block.generation)
    request += field(9, field(1, defaults.checksum_kind) + field(2, defaults.chunk_bytes))
    if len(new.storage_kinds) == len(block.nodes):
        request += field(11, new.storage_kinds[0])
        request += b"".join(field(12, kind) for kind in new.storage_kinds[1:])
    if len(new.storage_ids) == len(block.nodes):
        request += field(16, new.storage_ids[0])
        request += b"".join(field(17, storage) for storage in new.storage_ids[1:])
    return request

"""One block on its way to its DataNodes: HDFS's data transfer protocol, straight from the caller's memory.

The first DataNode passes the packets on to the second, and so on; each packet is confirmed by all of them. Nothing is
repaired here: when a node fails, the block has failed, and the caller begins it on other nodes (`begin_block`). A node
that hangs or is dead counts as live with the NameNode for minutes; `ExcludedNodes` keeps writers off it meanwhile.

A node that neither takes nor confirms anything for `stall_s` has failed. Belongs to one thread at a time.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from typing import Any, Final

import google_crc32c
import numpy as np

from bootseer.errors import TransientError
from bootseer.hdfs.checksums import CRC32
from bootseer.hdfs.errors import DataNodeError, SilentError
from bootseer.hdfs.lease import Lease, NewBlock, WriteDefaults, identity
from bootseer.hdfs.located import Node
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.protection import Channel, Protection
from bootseer.hdfs.protobuf import MalformedError, Message, delimited, field, read_delimited
from bootseer.logs import logger

_LOG = logger(__name__)

PACKET_BYTES: Final = 256 * 1024
"""What the nodes pass on at once; a multiple of all that one checksum can cover."""
_MAX_ANSWER_BYTES: Final = 64 * 1024
_WRITE_BLOCK: Final = struct.pack(">hB", 28, 80)  # version of the protocol, operation
_READ_BLOCK: Final = struct.pack(">hB", 28, 81)
_PROBE_S: Final = 1.0
_CREATE_STAGE: Final = 6
# Length of all behind it but for 4, length of the header; then the header's four fields, each behind its tag.
_HEADER: Final = struct.Struct(">IH")
_FIELDS: Final = struct.Struct("<BqBqBBBi")
_SUCCESS: Final = 0


class PipelineError(DataNodeError):
    """One of the nodes did not do its part: which one, as far as they tell."""

    def __init__(self, message: str, node: str) -> None:
        super().__init__(message)
        self.node = node
        """`host:port`; "" where that is not known."""


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
        """Connect the nodes, each step of which takes `setup_s` at most. Raises `PipelineError`."""
        self.size_bytes = 0
        """What was given to the nodes."""
        self._rest = bytearray()
        """What does not fill a packet yet: only the last one of a block may be cut, as checksums are."""
        self._new = new
        self._nodes = new.block.nodes
        self._holder = holder
        self._by_hostname = by_hostname
        self._defaults = defaults
        self._stall_s = setup_s
        self._sequence = 0
        self._confirmed = 0
        self._answers = bytearray()
        first = self._nodes[0]
        try:
            self._socket = socket.create_connection(self._address(first), timeout=setup_s)
        except OSError as error:
            raise PipelineError(f"{first.host_port} cannot be reached: {error}", first.host_port) from error
        self._channel: Channel | None = None
        try:
            if protection is not None:
                self._channel = self._log_in(protection, first)
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._send([memoryview(_WRITE_BLOCK + delimited(_request(new, defaults, holder)))])
            self._begin()
        except BaseException:
            self.close()
            raise
        self._stall_s = stall_s

    def write(self, data: memoryview) -> None:
        """Append bytes. Blocks while the nodes are slower."""
        if self._rest:
            missing = PACKET_BYTES - len(self._rest)
            self._rest += data[:missing]
            data = data[missing:]
            if len(self._rest) == PACKET_BYTES:
                full, self._rest = self._rest, bytearray()
                self._send_packet(memoryview(full))
        whole = len(data) - len(data) % PACKET_BYTES
        for start in range(0, whole, PACKET_BYTES):
            self._send_packet(data[start : start + PACKET_BYTES])
        self._rest += data[whole:]
        self._take_acks()

    def finish(self) -> None:
        """Wait until all nodes have confirmed all bytes, and that these are all."""
        if self._rest:
            self._send_packet(memoryview(self._rest))
        self._send(self._head(0, b"", last=True))
        acked_s = time.monotonic()
        while (confirmed := self._confirmed) < self._sequence:
            self._take_acks(acked_s)
            if self._confirmed > confirmed:
                acked_s = time.monotonic()

    def close(self) -> None:
        """End the connection. Before `finish`, the nodes drop what they have."""
        self._socket.close()

    def _log_in(self, protection: Protection, first: Node) -> Channel | None:
        def receive(length: int) -> bytes:
            data = b""
            while len(data) < length:
                piece = self._socket.recv(length - len(data))
                if not piece:
                    raise ConnectionResetError("it closed the connection")
                data += piece
            return data

        try:
            return protection.log_in(self._address(first)[1], self._new.block.token, self._socket.sendall, receive)
        except (OSError, DataNodeError) as error:
            raise PipelineError(f"{first.host_port}: {error}", first.host_port) from error

    def _send_packet(self, packet: memoryview) -> None:
        self._send([*self._head(len(packet), self._sums(packet)), packet])
        self.size_bytes += len(packet)

    def _begin(self) -> None:
        """The answer of the first node, given when all are connected."""
        asked_s = time.monotonic()
        while True:
            try:
                reply, at = read_delimited(bytes(self._answers), 0)
                break
            except MalformedError:
                if len(self._answers) > _MAX_ANSWER_BYTES:
                    raise PipelineError(
                        f"{self._nodes[0].host_port} gives no answer", self._nodes[0].host_port
                    ) from None
            self._receive(asked_s)
        del self._answers[:at]
        try:
            answer = Message(reply)
            status, bad, message = answer.number(1), answer.text(2, ""), answer.text(5, "").partition("\n")[0][:200]
        except MalformedError as error:
            raise PipelineError(f"{self._nodes[0].host_port}: {error}", self._nodes[0].host_port) from error
        if status != _SUCCESS or bad:
            raise PipelineError(message or f"{bad or self._nodes[0].host_port}: status {status}", self._failed(bad))

    def _failed(self, bad: str) -> str:
        """The node that another one complains of; the first when it says nothing of others."""
        known = {name: node.host_port for node in self._nodes for name in _names(node)}
        return known.get(bad, self._nodes[0].host_port if not bad else "")

    def _head(self, length: int, sums: bytes, *, last: bool = False) -> list[memoryview]:
        fields = _FIELDS.pack(0x09, self.size_bytes, 0x11, self._sequence, 0x18, last, 0x25, length)
        self._sequence += 1
        return [memoryview(_HEADER.pack(4 + len(sums) + length, len(fields)) + fields + sums)]

    def _sums(self, packet: memoryview) -> bytes:
        chunk = self._defaults.chunk_bytes
        # google_crc32c refuses memory that others can write to, unless it is numpy's.
        array = np.frombuffer(packet, np.uint8)
        crc: Callable[[Any], int] = zlib.crc32 if self._defaults.checksum_kind == CRC32 else google_crc32c.value
        sums = [crc(array[at : at + chunk]) for at in range(0, len(array), chunk)]
        return struct.pack(f">{len(sums)}I", *sums)

    def _send(self, views: list[memoryview]) -> None:
        if self._channel is not None:
            views = [memoryview(piece) for piece in self._channel.seal(views)]
        left = [view for view in views if len(view)]
        stalled_since = time.monotonic()
        while left:
            try:
                sent = self._socket.sendmsg(left)
            except BlockingIOError:
                if self._wait(select.POLLOUT | select.POLLIN, stalled_since) & select.POLLIN:
                    self._take_acks()
                continue
            except OSError as error:
                raise self._broken(error) from error
            stalled_since = time.monotonic()
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    def _wait(self, events: int, since_s: float) -> int:
        left_s = since_s + self._stall_s - time.monotonic()
        poll = select.poll()
        poll.register(self._socket, events)
        ready = poll.poll(max(left_s, 0) * 1000)
        if not ready:
            names = ", ".join(node.host_port for node in self._nodes)
            raise SilentPipelineError(f"{names}: no sign of life for {self._stall_s:.0f} s", self._silent_node())
        return ready[0][1]

    def _silent_node(self) -> str:
        """The node that does not answer any question; "" when all do, and the first does not pass on what it gets."""
        if len(self._nodes) == 1:
            return self._nodes[0].host_port
        base = field(1, identity(self._new.block)) + field(2, self._new.block.token)
        question = field(1, field(1, base) + field(2, self._holder)) + field(2, 0) + field(3, 1)
        for node in self._nodes:
            try:
                with socket.create_connection(self._address(node), timeout=_PROBE_S) as probe:
                    probe.sendall(_READ_BLOCK + delimited(question))
                    # Whatever it says of a block that is being written.
                    probe.recv(1)
            except OSError:
                return node.host_port
        return ""

    def _address(self, node: Node) -> tuple[str, int]:
        host, _, port = node.host_port.rpartition(":")
        return node.hostname if self._by_hostname else host.strip("[]"), int(port)

    def _take_acks(self, since_s: float | None = None) -> None:
        """Take what the nodes have confirmed; None: if there is anything."""
        self._receive(since_s)
        answers = bytes(self._answers)
        at = 0
        try:
            while True:
                try:
                    reply, end = read_delimited(answers, at)
                except MalformedError:
                    break  # the rest of it has not come yet
                self._confirm(Message(reply))
                at = end
        except MalformedError as error:
            raise PipelineError(f"{self._nodes[0].host_port}: {error}", self._nodes[0].host_port) from error
        del self._answers[:at]
        if len(self._answers) > _MAX_ANSWER_BYTES:
            raise PipelineError(f"{self._nodes[0].host_port} confirms nothing", self._nodes[0].host_port)

    def _confirm(self, answer: Message) -> None:
        raw = answer.number(1)
        sequence = raw >> 1 ^ -(raw & 1)
        statuses = answer.numbers(2)
        for number, status in enumerate(statuses):
            if status != _SUCCESS:
                node = self._nodes[min(number, len(self._nodes) - 1)].host_port
                raise PipelineError(f"{node} fails with status {status}", node)
        if len(statuses) != len(self._nodes):
            raise MalformedError(f"{len(statuses)} of {len(self._nodes)} nodes confirm packet {sequence}")
        # Heartbeats would have numbers of their own, but are only answered, and none is sent.
        if sequence != self._confirmed or sequence == self._sequence:
            raise MalformedError(f"packet {sequence} is confirmed where {self._confirmed} had to be, if it was sent")
        self._confirmed += 1

    def _receive(self, since_s: float | None) -> None:
        """Take what has come; with `since_s`, wait for something, until `stall_s` after that."""
        while True:
            try:
                data = self._socket.recv(64 * 1024)
            except BlockingIOError:
                if since_s is None:
                    return
                self._wait(select.POLLIN, since_s)
                continue
            except OSError as error:
                raise self._broken(error) from error
            if not data:
                raise self._broken("it closed the connection")
            try:
                self._answers += data if self._channel is None else self._channel.open(data)
            except DataNodeError as error:
                raise self._broken(error) from error
            return

    def _broken(self, error: object) -> PipelineError:
        node = self._nodes[0].host_port
        return PipelineError(f"{node}: the connection broke: {error}", node)


class SilentPipelineError(PipelineError, SilentError):
    """The nodes say nothing for too long."""


def _names(node: Node) -> tuple[str, str]:
    return node.host_port, f"{node.hostname}:{node.host_port.rpartition(':')[2]}"


def _request(new: NewBlock, defaults: WriteDefaults, holder: str) -> bytes:
    """An `OpWriteBlockProto`."""
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


Nodes = frozenset[str]

SETUP_S: Final = 3.0
STALL_S: Final = 8.0
"""Longer than disks that are busy writing back, which make their readers wait for seconds."""
MAX_FAILURES: Final = 4
"""Blocks that may find no node in a row before the cluster counts as unable to write."""
_BAD_S = 60.0
_MAX_KNOWN = 10_000


class ExcludedNodes:
    """DataNodes that failed to take a block lately (replica exclusion). Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._excluded: dict[str, float] = {}
        self._known: dict[str, bytes] = {}
        self._in_vain_until_s = 0.0

    @property
    def may_wait(self) -> bool:
        """Whether no writer has waited in vain lately for nodes that the NameNode does not choose."""
        return time.monotonic() >= self._in_vain_until_s

    def waited_in_vain(self) -> None:
        """Such nodes, as full ones, are not waited for again for a while."""
        self._in_vain_until_s = time.monotonic() + _BAD_S

    def remember(self, new: NewBlock) -> None:
        """The NameNode has named these nodes."""
        with self._lock:
            if len(self._known) > _MAX_KNOWN:
                self._known.clear()
            self._known.update(zip((node.host_port for node in new.block.nodes), new.node_ids, strict=True))

    def exclude(self, node: str) -> None:
        """This one did not take a block; "" is none."""
        if node:
            with self._lock:
                self._excluded[node] = time.monotonic() + _BAD_S

    def names(self) -> Nodes:
        """Those that failed within the last minute."""
        with self._lock:
            now_s = time.monotonic()
            self._excluded = {node: until_s for node, until_s in self._excluded.items() if until_s > now_s}
            return frozenset(self._excluded)

    def known(self, names: Iterable[str]) -> list[bytes]:
        """What the NameNode calls these nodes; those that it has not named yet cannot be excluded."""
        with self._lock:
            return [self._known[name] for name in names if name in self._known]


def begin_block(
    namenode: NameNode,
    lease: Lease,
    defaults: WriteDefaults,
    excluded: ExcludedNodes,
    draw: Callable[[Nodes], NewBlock],
) -> tuple[NewBlock, BlockWriter]:
    """A block on nodes that take it. `draw` gets one from the NameNode, if it can on none of the nodes that failed."""
    failed: set[str] = set()
    failures = 0
    while True:
        new = draw(frozenset(failed))
        try:
            by_hostname = namenode.cluster.by_hostname
            return new, BlockWriter(
                new, defaults, lease.holder, by_hostname=by_hostname, setup_s=SETUP_S, stall_s=STALL_S,
                protection=namenode.protection,
            )  # fmt: skip
        except PipelineError as error:
            _LOG.info("%s: DataNode %s takes no block and is excluded: %s", lease.path, error.node or "unknown", error)
            excluded.exclude(error.node)
            failed.add(error.node)
            failures += 1
            lease.abandon(new.block)
            if failures == MAX_FAILURES:
                message = f"hdfs://{namenode.cluster.authority}{lease.path}: no DataNode takes it: {error}"
                raise TransientError(message) from error

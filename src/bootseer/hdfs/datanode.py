"""Reading blocks from one DataNode: HDFS's data transfer protocol, straight into the caller's memory.

A DataNode sends packets of 64 KiB, each after a header. After the first header the next ones are predictable, so that
one system call receives sixteen packets, data into the caller's memory and headers beside it; then each header is
compared with the prediction. Nothing from a DataNode is trusted before it was checked against the request.

No call waits longer than the socket's timeout for a byte: Linux's own timeout (`SO_RCVTIMEO`), because Python's would
prevent `MSG_WAITALL`.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final

from bootseer.hdfs import checksums
from bootseer.hdfs.block_locations import Block
from bootseer.hdfs.errors import (
    DataNodeError,
    LostConnectionError,
    RefusedError,
    SilentError,
    UnevenError,
    WrongBytesError,
)
from bootseer.hdfs.protection import Aes, Channel, Messages, Protection
from bootseer.hdfs.protobuf import MalformedError, Message, delimited, field, receive_delimited
from bootseer.hdfs.requests import MAX_PACKETS, NO_CHECKSUMS

_MAX_PACKET_BYTES: Final = 16 << 20
_MAX_ANSWER_BYTES: Final = 64 << 10
_MAX_CHUNK_BYTES: Final = 1 << 20
_EARLY_BYTES, _PACKET_BYTES, _MESSAGES_BYTES = 4 << 10, 64 << 10, 256 << 10
_SMALL_BYTES: Final = 16 << 10
"""Packets up to this size are received contiguously and copied: cheaper than an iovec for each."""
_ACCEPT_S: Final = 1.0
"""How long one call that sends waits for room. It does not say when the last byte was accepted, so that longer waits
are several calls."""
_MAX_VIEWS: Final = 1000
"""Linux accepts 1,024 iovecs."""
_READ_BLOCK = struct.pack(">hB", 28, 81)  # version of the protocol, operation
_LENGTHS = struct.Struct(">IH")
# The fields' tags stand between them. Protocol buffers would allow another order, but Hadoop always uses this one.
_HEADER = struct.Struct("<BqBqBBBi")
_HEADER_BYTES: Final = _LENGTHS.size + _HEADER.size
_MAX_HEADER_BYTES: Final = 1024
_TAGS = (0x09, 0x11, 0x18, 0x25)
_SUCCESS, _TOKEN, _CHECKSUM_OK = 0, 5, 6


class DataNodeConnection:
    """A connection to one DataNode, usable after `connect`. Used by one thread at a time, except for `stop`."""

    def __init__(self, address: tuple[str, int], *, silent_s: float, protection: Protection | None = None) -> None:
        """`protection`: set for clusters whose DataNodes may require a login."""
        self._protection = protection
        self._channel: Channel | None = None
        try:
            self._found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
            self._socket = socket.socket(*self._found[0][:3])
        except OSError as error:
            raise DataNodeError(f"cannot be reached: {error}") from error
        self._stopped = False
        self.silent_s = silent_s
        self.sums = bytearray()
        """A buffer for checksums, reused by the next read."""
        self.row = bytearray()
        """A buffer for many small packets, reused by the next read."""
        self.headers = bytearray((MAX_PACKETS + 1) * _HEADER_BYTES)
        self._early = memoryview(b"")
        """Received early, and not consumed yet."""

    def connect(self, timeout_s: float) -> None:
        """Connect, with this timeout for each of its addresses. Raises `DataNodeError`."""
        problem: OSError = OSError("it has no address")
        for number, (*kind, _, address) in enumerate(self._found):
            try:
                if number:
                    self._socket.close()
                    self._socket = socket.socket(*kind)
                self._socket.settimeout(timeout_s)
                if self._stopped:
                    raise ConnectionAbortedError("it is not needed any more")
                self._socket.connect(address)
                self._socket.settimeout(None)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.set_timeout(self.silent_s)
            except OSError as error:
                problem = error
            else:
                return
        error_kind = SilentError if isinstance(problem, TimeoutError) else LostConnectionError
        raise error_kind(f"cannot be reached: {problem}") from problem

    def set_timeout(self, silent_s: float) -> None:
        """Change the time that a wait for a byte takes at most."""
        self.silent_s = silent_s
        for option, wait_s in ((socket.SO_RCVTIMEO, silent_s), (socket.SO_SNDTIMEO, min(silent_s, _ACCEPT_S))):
            wait = struct.pack("@ll", *divmod(round(wait_s * 1e6), 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, option, wait)

    def stop(self) -> None:
        """From any thread: fail the current wait and all later ones."""
        self._stopped = True
        with contextlib.suppress(OSError):  # already closed by the peer
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. In the child of a fork, the parent's connection stays open."""
        self._socket.close()

    def log_in(self, token: bytes, on_silence: Callable[[float], None]) -> None:
        """Log in before the first request, with the token of its block. Raises `DataNodeError`."""
        protection, self._protection = self._protection, None
        if protection is None:
            return
        receive = functools.partial(self.receive_bytes, on_silence=on_silence)
        self._channel = protection.log_in(int(self._found[0][4][1]), token, self.send, receive)

    def send(self, *data: bytes | memoryview) -> None:
        for part in data if self._channel is None else self._channel.seal(data):
            left, accepted_s = memoryview(part), time.monotonic()
            while left:
                try:
                    left = left[self._socket.send(left) :]
                    accepted_s = time.monotonic()
                except BlockingIOError as error:
                    if time.monotonic() - accepted_s >= self.silent_s:
                        raise SilentError(f"nothing was accepted for {self.silent_s:.0f} s") from error
                except OSError as error:
                    raise LostConnectionError(f"the connection broke: {error}") from error

    def receive(self, views: list[memoryview], on_silence: Callable[[float], None]) -> None:
        """Fill `views`. `on_silence` is called with the seconds since the last byte; it raises to end the wait."""
        left = sum(map(len, views))
        while left:
            if not self._early and isinstance(self._channel, Messages):
                self._early = self._message(self._channel, on_silence)
            got = self._from_early(views) if self._early else self._some(views, socket.MSG_WAITALL, on_silence)
            left -= got
            if left:
                views = _skip_bytes(views, got)

    def receive_bytes(self, length: int, on_silence: Callable[[float], None]) -> bytes:
        if length <= len(self._early):
            data, self._early = self._early[:length], self._early[length:]
            return bytes(data)
        room = bytearray(length)
        self.receive([memoryview(room)], on_silence)
        return bytes(room)

    def receive_available(self, *, wait: bool) -> bytes:
        """Receive what has arrived, with `wait` after a wait for the first byte."""
        try:
            data = self._socket.recv(_PACKET_BYTES, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError as error:
            if not wait:
                return b""
            raise SilentError(f"nothing was received for {self.silent_s:.0f} s") from error
        except OSError as error:
            raise LostConnectionError(f"the connection broke: {error}") from error
        if not data:
            raise LostConnectionError("it closed the connection")
        return data if self._channel is None else self._channel.open(data)

    def receive_early(self, on_silence: Callable[[float], None]) -> None:
        """Wait for the next bytes and receive what is available, up to a few KiB, for later calls of `receive`.

        One system call then receives an answer, the following header and small data together.
        """
        room = memoryview(bytearray(_EARLY_BYTES))
        if isinstance(self._channel, Messages):
            self._early = self._message(self._channel, on_silence)
        else:
            self._early = room[: self._some([room], 0, on_silence)]

    def _from_early(self, views: list[memoryview]) -> int:
        got = 0
        for view in views:
            part = self._early[: len(view)]
            view[: len(part)] = part
            self._early = self._early[len(part) :]
            got += len(part)
        return got

    def _some(self, views: list[memoryview], flags: int, on_silence: Callable[[float], None]) -> int:
        silent_since_s = None
        while True:
            try:
                got = self._socket.recvmsg_into(views[:_MAX_VIEWS], 0, flags)[0]
            except BlockingIOError:
                now_s = time.monotonic()
                silent_since_s = silent_since_s or now_s - self.silent_s
                on_silence(now_s - silent_since_s)
                continue
            except OSError as error:
                raise LostConnectionError(f"the connection broke: {error}") from error
            if got == 0:
                raise LostConnectionError("it closed the connection")
            if isinstance(self._channel, Aes):
                self._channel.open_in_place(views, got)
            return got

    def _message(self, channel: Messages, on_silence: Callable[[float], None]) -> memoryview:
        """Receive and unprotect the next bytes of a connection with messages."""
        room = memoryview(bytearray(_MESSAGES_BYTES))
        while True:
            got = self._some([room], 0, on_silence)
            if opened := channel.open(bytes(room[:got])):
                return memoryview(opened)


class BlockRead:
    """The read of one range of one block: `next_bytes` and `receive` in turn, then `finish`."""

    def __init__(
        self,
        connection: DataNodeConnection,
        block: Block,
        offset: int,
        length: int,
        *,
        check: bool,
        max_packets: int = MAX_PACKETS,
        on_silence: Callable[[float], None],
    ) -> None:
        """Request `length` bytes from `offset` of the block on. Raises `DataNodeError`s.

        `check`: verify HDFS's checksums, which the DataNode must have.
        """
        self._connection = connection
        self._on_silence = on_silence
        self._max_packets = max_packets
        self._left = length
        read = field(1, block.pool) + field(2, block.id) + field(3, block.generation) + field(4, block.length)
        base = field(1, read) + field(2, block.token)
        header = field(1, base) + field(2, "bootseer")
        request = field(1, header) + field(2, offset) + field(3, length) + field(4, check)
        connection.log_in(block.token, on_silence)
        connection.send(_READ_BLOCK + delimited(request))
        try:
            connection.receive_early(on_silence)
            receive = functools.partial(connection.receive_bytes, on_silence=on_silence)
            self._kind, self._chunk, self._at = _parse_answer(receive_delimited(receive, _MAX_ANSWER_BYTES))
            self._has_sums = check
            if check and self._kind == checksums.NONE:
                raise RefusedError(NO_CHECKSUMS, token=False)
            self._skip = offset - self._at
            if not 0 <= self._skip < self._chunk or self._at % self._chunk:
                raise MalformedError(f"bytes from {self._at} on where {offset} was asked")
            self._sequence = 0
            self._size = self._checked(memoryview(connection.receive_bytes(_HEADER_BYTES, on_silence)))
        except MalformedError as error:
            raise DataNodeError(f"malformed answer: {error}") from error

    def next_bytes(self) -> int:
        """How many bytes the next `receive` returns; 0 at the end."""
        if not self._left:
            return 0
        first = min(self._size - self._skip, self._left)
        return first + self._num_more(first) * self._size

    def receive(self, into: Sequence[memoryview]) -> None:
        """Fill `into`, whose size is that of `next_bytes`. The bytes are verified when this returns."""
        connection = self._connection
        first = min(self._size - self._skip, self._left)
        num_packets = 1 + self._num_more(first)
        if num_packets > self._max_packets:
            self._receive_small(into, num_packets)
            return
        skip = memoryview(bytearray(self._skip))
        behind = self._size - self._skip - first
        excess = memoryview(bytearray(behind))
        num_sums = self._sums_bytes(self._size)
        if len(connection.sums) < num_packets * num_sums:
            connection.sums = bytearray(num_packets * num_sums)
        sums = memoryview(connection.sums)[: num_packets * num_sums]
        headers = memoryview(connection.headers)
        data = _split_views(into, [first] + [self._size] * (num_packets - 1))
        views: list[memoryview] = []
        for number, pieces in enumerate(data):
            if num_sums:
                views.append(sums[number * num_sums : (number + 1) * num_sums])
            if number == 0 and skip:
                views.append(skip)
            views += pieces
            if number == 0 and behind:
                views.append(excess)
            views.append(headers[number * _HEADER_BYTES : (number + 1) * _HEADER_BYTES])
        connection.receive(views, self._on_silence)
        try:
            size = self._size
            for number in range(num_packets):
                self._sequence += 1
                self._at += size
                self._left -= size if number else first
                self._skip = 0
                head = headers[number * _HEADER_BYTES : (number + 1) * _HEADER_BYTES]
                self._size = self._checked(head, predicted=size if number < num_packets - 1 else None)
        except MalformedError as error:
            raise DataNodeError(f"malformed answer: {error}") from error
        self._check([piece for piece in (skip, *into, excess) if piece], sums)

    def _check(self, data: Sequence[memoryview], sums: memoryview) -> None:
        wrong = checksums.first_wrong(self._kind, self._chunk, data, sums) if self._has_sums else None
        if wrong is not None:
            raise WrongBytesError(f"wrong bytes at {self._at - sum(map(len, data)) + wrong} of the block")

    def _receive_small(self, into: Sequence[memoryview], num_packets: int) -> None:
        """As `receive`, for many small packets: DataNodes with logins send them (`io.file.buffer.size`)."""
        import numpy as np  # here for the reason that `checksums` has

        size, num_sums = self._size, self._sums_bytes(self._size)
        num_bytes = num_packets * (num_sums + size + _HEADER_BYTES)
        if len(self._connection.row) < num_bytes:
            self._connection.row = bytearray(num_bytes)
        self._connection.receive([memoryview(self._connection.row)[:num_bytes]], self._on_silence)
        packets = np.frombuffer(self._connection.row, np.uint8, num_bytes).reshape(num_packets, -1)
        heads = packets[:, num_sums + size :]
        numbers = np.arange(1, num_packets)[:, None]
        first = _LENGTHS.pack(4 + num_sums + size, _HEADER.size)
        first += _HEADER.pack(_TAGS[0], 0, _TAGS[1], 0, _TAGS[2], 0, _TAGS[3], size)
        wanted = np.tile(np.frombuffer(first, np.uint8), (num_packets - 1, 1))
        wanted[:, 7:15] = (self._at + numbers * size).astype("<i8").view(np.uint8)
        wanted[:, 16:24] = (self._sequence + numbers).astype("<i8").view(np.uint8)
        if not np.array_equal(wanted, heads[:-1]):
            raise UnevenError("its packets differ")
        self._sequence += num_packets
        self._at += num_packets * size
        self._left -= num_packets * size
        try:
            self._size = self._checked(memoryview(heads[-1].tobytes()))
        except MalformedError as error:
            raise DataNodeError(f"malformed answer: {error}") from error
        unit = 1 if any(len(view) % size for view in into) else size
        body, at = packets[:, num_sums : num_sums + size].reshape(-1, unit), 0
        for view in into:
            np.frombuffer(view, np.uint8).reshape(-1, unit)[:] = body[at : at + len(view) // unit]
            at += len(view) // unit
        self._check(into, memoryview(packets[:, :num_sums].tobytes()))

    def finish(self) -> None:
        """End the read after its last byte: the connection can serve another one."""
        self._connection.send(delimited(field(1, _CHECKSUM_OK if self._has_sums else _SUCCESS)))

    def _num_more(self, first: int) -> int:
        """How many packets after the next one are predictable: of its size, and wanted as a whole."""
        most = self._max_packets
        if most > 1 and first == self._size <= _SMALL_BYTES:
            most = most * _PACKET_BYTES // first
        return min(most - 1, (self._left - first) // self._size) if self._size else 0

    def _sums_bytes(self, size: int) -> int:
        return -(-size // self._chunk) * checksums.SUM_BYTES if self._has_sums else 0

    def _checked(self, head: memoryview, *, predicted: int | None = None) -> int:
        """Verify a packet's header; returns the bytes of its data."""
        length, header_bytes = _LENGTHS.unpack_from(head)
        first, at, second, sequence, third, is_last, fourth, size = _HEADER.unpack_from(head, _LENGTHS.size)
        if (first, second, third, fourth) != _TAGS or not _HEADER.size <= header_bytes <= _MAX_HEADER_BYTES:
            if predicted is not None:
                raise UnevenError("its packets differ in size")
            raise MalformedError("a packet without its header")
        if header_bytes > _HEADER.size:
            # Fields of a newer version, which do not concern the data.
            if predicted is not None:
                raise UnevenError("its packets have longer headers")
            self._connection.receive([memoryview(bytearray(header_bytes - _HEADER.size))], self._on_silence)
        if predicted is not None and size != predicted:
            raise UnevenError("its packets differ in size")
        if sequence != self._sequence or at != self._at:
            raise MalformedError(f"packet {sequence} at {at} where {self._sequence} at {self._at} was expected")
        if length != 4 + size + self._sums_bytes(size) or not 0 <= size <= _MAX_PACKET_BYTES:
            raise MalformedError(f"a packet of {length} bytes for {size} of data")
        if self._left:
            wanted = self._left + self._skip
            if is_last or size <= self._skip or (size < wanted and size % self._chunk):
                raise MalformedError(f"the data end where {self._left} bytes are missing")
            if size >= wanted + self._chunk:
                raise MalformedError(f"{size} bytes where {wanted} were asked")
        elif size or not is_last:
            raise MalformedError("more data than were asked")
        return int(size)


@functools.lru_cache(64)
def _parse_answer(data: bytes) -> tuple[int, int, int]:
    """Checksum kind, bytes per checksum, offset of the data. Cached: most small files have the same answer."""
    answer = Message(data)
    status = answer.number(1)
    if status != _SUCCESS:
        message = answer.text(5, "").partition("\n")[0][:200]
        raise RefusedError(message or f"it answers with status {status}", token=status == _TOKEN)
    info = answer.message(4)
    kind, chunk_bytes = map(info.message(1).number, (1, 2))
    if kind not in checksums.KINDS or not 0 < chunk_bytes <= _MAX_CHUNK_BYTES:
        raise MalformedError(f"checksums of kind {kind} for {chunk_bytes} bytes")
    return kind, chunk_bytes, info.number(2)


def raise_silent(silent_s: float) -> None:
    """An `on_silence` that waits no longer."""
    raise SilentError(f"it sent nothing for {silent_s:.1f} s")


def _skip_bytes(views: list[memoryview], length: int) -> list[memoryview]:
    for number, view in enumerate(views):
        if length < len(view):
            return [view[length:], *views[number + 1 :]]
        length -= len(view)
    return []


def _split_views(views: Sequence[memoryview], lengths: Sequence[int]) -> list[list[memoryview]]:
    """Split the memory of `views`, in order, into pieces of these lengths."""
    cut: list[list[memoryview]] = []
    rest = iter(views)
    view = next(rest)
    for length in lengths:
        pieces: list[memoryview] = []
        missing = length
        while missing:
            if not view:
                view = next(rest)
            piece = view[:missing]
            pieces.append(piece)
            missing -= len(piece)
            view = view[len(piece) :]
        cut.append(pieces)
    return cut

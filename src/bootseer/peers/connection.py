"""One TCP connection between two peers: heads in and out, with a deadline for each wait."""

from __future__ import annotations

import os
import select
import socket

from bootseer.errors import CorruptError, TransientError
from bootseer.peers.protocol import MAX_HEAD, Head, parse_head

_END = b"\r\n\r\n"


class Connection:
    """Owns the socket. All methods raise `TransientError` when the other side is gone, or silent for `timeout_s`."""

    def __init__(self, sock: socket.socket, peer: str, timeout_s: float) -> None:
        self.sock = sock
        self.peer = peer
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(timeout_s)
        self._received = b""

    def read_head(self) -> Head | None:
        """The next head; None when the other side has closed the connection between two messages."""
        data = self._received
        while (end := data.find(_END)) < 0:
            if len(data) > MAX_HEAD:
                raise CorruptError(f"{self.peer}: the head of a message is longer than {MAX_HEAD} bytes")
            more = self._receive(MAX_HEAD)
            if not more:
                if data:
                    raise TransientError(f"{self.peer} closed the connection")
                return None
            data += more
        self._received = data[end + len(_END) :]
        return parse_head(data[:end])

    def read_some(self, into: memoryview) -> int:
        """Bytes of a body: how many were written to the beginning of `into`, at least one."""
        if self._received:
            count = min(len(self._received), len(into))
            into[:count] = self._received[:count]
            self._received = self._received[count:]
            return count
        try:
            count = self.sock.recv_into(into)
        except OSError as error:
            raise TransientError(f"{self.peer}: {error}") from error
        if not count:
            raise TransientError(f"{self.peer} closed the connection")
        return count

    def send(self, data: bytes, *, more: bool = False) -> None:
        """Send all of it; `more` follows at once."""
        try:
            self.sock.sendall(data, socket.MSG_MORE if more else 0)
        except OSError as error:
            raise TransientError(f"{self.peer}: {error}") from error

    def send_file(self, fd: int, offset: int, length: int) -> int:
        """Send a part of a file; how much, which is less where the file ends.

        `socket.sendfile` costs a fifth more: it makes a selector for each call.
        """
        end, number = offset + length, self.sock.fileno()
        writable = select.poll()
        writable.register(number, select.POLLOUT)
        while offset < end:
            try:
                count = os.sendfile(number, fd, offset, end - offset)
            except BlockingIOError:
                if not writable.poll(1000 * (self.sock.gettimeout() or 0.0)):
                    raise TransientError(f"{self.peer}: timed out") from None
                continue
            except OSError as error:
                raise TransientError(f"{self.peer}: {error}") from error
            if not count:
                break
            offset += count
        return length - (end - offset)

    def _receive(self, most: int) -> bytes:
        try:
            return self.sock.recv(most)
        except OSError as error:
            raise TransientError(f"{self.peer}: {error}") from error

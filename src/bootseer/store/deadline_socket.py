"""Sockets whose timeout bounds everything until it is set again, not each operation by itself.

Python's own timeout starts anew with each `recv`: a server that drips one byte a second, in the headers too, holds a
reader for ever. Here `settimeout(5)` means that in 5 seconds it is over. `transport` makes its connections of these;
urllib3 sets the timeout once for sending and once for the whole answer, which is what makes this work.
"""

from __future__ import annotations

import socket
import ssl
import time
from typing import Any


class _TotalTimeout(socket.socket):
    _until: float | None = None

    def settimeout(self, value: float | None) -> None:
        """From now on, all operations together may take this many seconds."""
        self._until = None if value is None else time.monotonic() + value
        super().settimeout(value)

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        self._spend()
        return super().recv_into(*args, **kwargs)

    def sendall(self, data: Any, flags: int = 0) -> None:
        self._spend()
        super().sendall(data, flags)

    def send(self, data: Any, flags: int = 0) -> int:
        self._spend()
        return super().send(data, flags)

    def _spend(self) -> None:
        if self._until is not None:
            left_s = self._until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            super().settimeout(left_s)


class PlainSocket(_TotalTimeout):
    """A TCP socket with a total timeout."""

    @classmethod
    def take_over(cls, other: socket.socket, left_s: float | None) -> PlainSocket:
        """The same connection; `other` is closed to its owner. `left_s` is the new timeout."""
        taken = cls(other.family, other.type, other.proto, fileno=other.detach())
        taken.settimeout(left_s)
        return taken


class TlsSocket(_TotalTimeout, ssl.SSLSocket):
    """A TLS socket with a total timeout: what an `ssl.SSLContext` makes when it is its `sslsocket_class`."""

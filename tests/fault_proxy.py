"""A proxy between an HTTP client and a real server that injects faults into requests chosen by the test.

    with FaultProxy(registry.host) as proxy:
        proxy.plan = lambda request: Fault(reset_after=1000) if "/blobs/" in request.path else None
        store = open_store(f"oci://{proxy.host}/some/repository")
        ...
        assert proxy.requests[0].method == "GET"

`plan` is called with every request before it is forwarded and returns its fault, or None. `once(fault, "/blobs/")` is a
plan with a fault for only the first request whose path contains a text. Faults without the server's answer
(`Fault(status=…)`, `Fault(hang=True)`) also work without a server: `FaultProxy("")`.
"""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType


@dataclass(frozen=True)
class Request:
    """A request as the client sent it."""

    number: int
    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


@dataclass(frozen=True)
class Fault:
    """The faults of one request. Fields with their default values change nothing."""

    hang: bool = False
    """Never answer; the connection is closed with the proxy."""
    drop: bool = False
    """Close the connection instead of answering; the request is not forwarded."""
    gate: threading.Event | None = None
    """Wait for this event before answering."""
    status: int = 0
    """Answer with this status, `headers` and `body`, without forwarding the request."""
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of the response that replace the server's; an empty value removes the header."""
    send: Mapping[str, str] = field(default_factory=dict)
    """Headers of the forwarded request that replace the client's; an empty value removes one, e.g. `{"range": ""}`."""
    chunked: bool = False
    """Send the body in chunks, without its length."""
    drip_bytes: int = 0
    """Send the body in pieces of this size, with `drip_pause_s` after each; with `drip_headers`, also the headers."""
    drip_pause_s: float = 0.05
    drip_headers: bool = False
    cut_after: int | None = None
    """Close the connection (FIN) after this number of bytes of the body."""
    reset_after: int | None = None
    """Reset the connection (RST) after this number of bytes of the body."""
    stall_after: int | None = None
    """Send nothing more after this number of bytes of the body; the connection is closed with the proxy."""
    corrupt_at: int | None = None
    """Flip all bits of this byte of the response's body."""
    corrupt_request_at: int | None = None
    """Flip all bits of this byte of the request's body."""


Plan = Callable[[Request], Fault | None]


def once(fault: Fault, path: str = "", method: str = "") -> Plan:
    """A plan with a fault for the first request whose path contains `path` and whose method is `method`, if given."""
    left = [fault]
    lock = threading.Lock()

    def plan(request: Request) -> Fault | None:
        with lock:
            fits = path in request.path and method in ("", request.method)
            return left.pop() if fits and left else None

    return plan


class FaultProxy:
    """The proxy, on a free loopback port during the `with` block. `server` is the `host:port` that it forwards to."""

    def __init__(self, server: str, plan: Plan = lambda _: None) -> None:
        self.plan = plan
        self.requests: list[Request] = []
        self.num_connections = 0
        self._upstream = server
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def __enter__(self) -> FaultProxy:
        self._server = _Server(self)
        self.host = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.end_connections()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # closing waits for them, so that no thread outlives the test
    request_queue_size = 128

    def __init__(self, proxy: FaultProxy) -> None:
        self.proxy = proxy
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    def process_request(self, request: socket.socket, client_address: object) -> None:
        with self._open_lock:
            self._open.add(request)
            self.proxy.num_connections += 1
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:
        with self._open_lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        with self._open_lock:
            for connection in self._open:
                # Wakes its thread, which then closes it.
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    def handle_error(self, request: object, client_address: object) -> None:
        """Log nothing: tests disconnect clients on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 0
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.upstream: http.client.HTTPConnection | None = None

    def finish(self) -> None:
        if self.upstream is not None:
            self.upstream.close()
        super().finish()

    def relay(self) -> None:
        proxy = self.server.proxy
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if len(body) < length:  # the client was killed; the server would wait for the rest
            self.close_connection = True
            return
        with proxy._lock:
            headers = {key.lower(): value for key, value in self.headers.items()}
            request = Request(len(proxy.requests), self.command, self.path, headers, body)
            proxy.requests.append(request)
        fault = proxy.plan(request) or Fault()
        if fault.hang or fault.drop:
            if fault.hang:
                proxy._closing.wait()
            self.close_connection = True
            return
        while fault.gate is not None and not fault.gate.wait(0.02):
            if proxy._closing.is_set():
                self.close_connection = True
                return
        if fault.status:
            self._send(fault, fault.status, {"Content-Length": str(len(fault.body))}, iter([fault.body]))
        else:
            self._pass_on(request, fault)

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = relay  # noqa: N815 - http.server requires these names

    def _pass_on(self, request: Request, fault: Fault) -> None:
        headers = _changed(request.headers, fault.send)
        body = _flipped(request.body, fault.corrupt_request_at)
        if self.upstream is None:
            self.upstream = http.client.HTTPConnection(self.server.proxy._upstream, timeout=300)
        self.upstream.request(request.method, request.path, body or None, headers)
        with self.upstream.getresponse() as answer:
            sent = {key: value for key, value in answer.getheaders() if key.lower() != "transfer-encoding"}
            chunked = answer.length is None and request.method != "HEAD"
            pieces: Iterator[bytes] = iter([answer.read()]) if chunked else iter(lambda: answer.read(65536), b"")
            if chunked:
                data = next(pieces)
                sent["Content-Length"] = str(len(data))
                pieces = iter([data])
            self._send(fault, answer.status, sent, pieces)

    def _send(self, fault: Fault, status: int, headers: Mapping[str, str], pieces: Iterator[bytes]) -> None:
        if fault.chunked:
            headers = _changed(headers, {"Content-Length": "", "Transfer-Encoding": "chunked"})
        lines = [f"HTTP/1.1 {status} {http.client.responses.get(status, 'Unknown')}"]
        lines += [f"{key}: {value}" for key, value in _changed(headers, fault.headers).items()]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        self._write(head, fault if fault.drip_headers else Fault())
        at = 0
        for piece in pieces:
            data = piece
            if fault.corrupt_at is not None and at <= fault.corrupt_at < at + len(piece):
                data = _flipped(piece, fault.corrupt_at - at)
            for limit, reset in ((fault.cut_after, False), (fault.reset_after, True), (fault.stall_after, False)):
                if limit is not None and at + len(data) > limit:
                    self._write(data[: limit - at], fault)
                    if limit == fault.stall_after:
                        self.server.proxy._closing.wait()
                    self._break(reset)
                    return
            if self.command != "HEAD":
                self._write(b"%x\r\n%s\r\n" % (len(data), data) if fault.chunked and data else data, fault)
            at += len(data)
        if fault.chunked:
            self._write(b"0\r\n\r\n", fault)

    def _write(self, data: bytes, fault: Fault) -> None:
        size = fault.drip_bytes or max(len(data), 1)
        for at in range(0, len(data), size):
            self.wfile.write(data[at : at + size])
            if fault.drip_bytes:
                self.server.proxy._closing.wait(fault.drip_pause_s)

    def _break(self, reset: bool) -> None:
        self.close_connection = True
        if reset:
            # With a linger time of 0, close sends a reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.server._open.discard(self.connection)
            self.rfile.close()
            self.wfile.close()
            self.connection.close()

    def log_message(self, *_: object) -> None:
        return


def _changed(headers: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    lower = {key.lower() for key in changes}
    kept = {key: value for key, value in headers.items() if key.lower() not in lower}
    return {**kept, **{key: value for key, value in changes.items() if value}}


def _flipped(data: bytes, at: int | None) -> bytes:
    if at is None or at >= len(data):
        return data
    wrong = bytearray(data)
    wrong[at] ^= 0xFF
    return bytes(wrong)

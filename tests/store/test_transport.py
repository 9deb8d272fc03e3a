"""Addresses from servers, checked before requests to them; connections and bodies of responses."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, closing

import pytest

from bootseer.errors import PermanentError
from bootseer.store.transport import Origin, Transport, join


@pytest.mark.parametrize(
    "url", ["ftp://host/", "ftp://host:21/", "file:///etc/passwd", "//host/", "http://", "http://h:x/"]
)
def test_only_addresses_of_http_are_followed(url: str) -> None:
    with pytest.raises(PermanentError):
        Origin.of(url)


@pytest.mark.parametrize(("url", "port"), [("http://h/", 80), ("https://h/", 443), ("https://h:5000/", 5000)])
def test_an_origin_has_the_port_that_is_meant(url: str, port: int) -> None:
    assert Origin.of(url).port == port


def test_an_origin_is_the_host_that_is_connected_to() -> None:
    # For urllib the host follows the @; urllib3 connects to the one before the backslash.
    assert Origin.of("http://attacker:1\\@registry:2/token") == Origin("http", "attacker", 1)


@pytest.mark.parametrize(
    "url", [f"{address}/a?Signature=secret" for address in ("https://host:port", "ftp://host", "https://[host")]
)
def test_an_error_does_not_show_what_grants_access(url: str) -> None:
    with pytest.raises(PermanentError) as raised:
        Origin.of(join("https://registry/v2/", url))
    assert "secret" not in str(raised.value)


def test_a_body_comes_in_pieces_larger_than_packets() -> None:
    body = bytes(range(256)) * 1200

    def serve(listening: socket.socket) -> None:
        with listening.accept()[0] as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(2):  # on one connection: waiting for more of a body must not apply to the next head
                sock.recv(65536)
                sock.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode())
                for start in range(0, len(body), 4096):
                    sock.sendall(body[start : start + 4096])
                    time.sleep(0.001)

    with socket.create_server(("127.0.0.1", 0)) as listening, closing(Transport()) as transport:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        for _ in range(2):
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
            pieces = list(transport.send("GET", url, until=time.monotonic() + 30).pieces())
            assert b"".join(pieces) == body
            assert len(pieces) < 20  # of 75 packets
        thread.join()


def test_a_first_address_that_does_not_answer_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with IPv6 often: each read of a mount timed out, as the first address used up its deadline."""
    with closing(Transport()) as transport, ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listening.getsockname()[1]
        stack.enter_context(socket.create_server(("127.0.0.2", port), backlog=0))
        for _ in range(2):  # a full queue: the kernel drops further packets
            full = stack.enter_context(socket.socket())
            full.setblocking(False)
            full.connect_ex(("127.0.0.2", port))
        resolve, asked = socket.getaddrinfo, []

        def listed(host: str, *args: int) -> object:
            asked.append(host)
            hosts = ("127.0.0.2", "127.0.0.1") if host == "two" else (host,)
            return [one for host in hosts for one in resolve(host, *args)]

        monkeypatch.setattr(socket, "getaddrinfo", listed)
        monkeypatch.setattr("bootseer.store.transport._HttpConnection._failed", set())

        def serve() -> None:
            for _ in range(2):
                with listening.accept()[0] as sock:
                    sock.recv(65536)
                    sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        for within_s in (2, 60):
            assert transport.send("GET", f"http://two:{port}/", until=time.monotonic() + within_s).body(9) == b"ok"
        assert asked == ["two", "127.0.0.2", "127.0.0.1", "two", "127.0.0.1"]  # the silent one is remembered
        thread.join()

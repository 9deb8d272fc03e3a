"""Sites with TLS: certificates in `certs.d`, proxies, and errors if only one side uses TLS."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bootseer.errors import BootseerError, NotFoundError, PermanentError, TransientError
from bootseer.store import transport
from bootseer.store.open import open_registry
from bootseer.store.registry import Registry as Client
from fault_proxy import Fault, FaultProxy
from registry import Registry, make_certificate, needs_registry

pytestmark = needs_registry


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(transport, "CERTIFICATES", tmp_path / "certs.d")
    return tmp_path / "certs.d"


@pytest.fixture
def tls(tmp_path: Path, certificates: Path) -> Iterator[Registry]:
    """A registry that requires the client certificate `client.crt`."""
    make_certificate(tmp_path / "client.key", tmp_path / "client.crt")
    with Registry(tmp_path, tls=True, clients=tmp_path / "client.crt") as registry:
        yield registry


def asked(host: str, **options: bool) -> BootseerError:
    """The error of a lookup of a missing tag."""
    with closing(open_registry(host, "a/b", **options)) as client, pytest.raises(BootseerError) as caught:
        client.manifest_digest("latest")
    return caught.value


def test_docker_s_certificates_are_trusted_and_shown(tls: Registry, tmp_path: Path, certificates: Path) -> None:
    folder = certificates / tls.host
    folder.mkdir(parents=True)
    # The folder alone marks this loopback address as one with TLS.
    assert f"{folder}/ca.crt" in str(asked(tls.host))
    (folder / "ca.crt").write_bytes(tls.certificate.read_bytes())
    error = asked(tls.host)
    assert isinstance(error, PermanentError)  # it is trusted, but refuses this client
    assert f"put client.cert and client.key into {folder}" in str(error)
    (folder / "client.cert").write_bytes((tmp_path / "client.crt").read_bytes())
    error = asked(tls.host)
    assert isinstance(error, PermanentError)
    assert "client.key" in str(error)
    (folder / "client.key").write_text("no key")
    assert f"{folder}/client.cert cannot be used" in str(asked(tls.host))
    (folder / "client.key").write_bytes((tmp_path / "client.key").read_bytes())
    assert isinstance(asked(tls.host), NotFoundError)


def test_certificates_that_are_replaced_are_read_again(tls: Registry, tmp_path: Path, certificates: Path) -> None:
    """A mount exists for weeks, client certificates are valid for days."""
    folder = certificates / tls.host
    folder.mkdir(parents=True)
    make_certificate(folder / "client.key", folder / "client.cert")  # it is not trusted
    (folder / "ca.crt").write_bytes(tls.certificate.read_bytes())
    with closing(open_registry(tls.host, "a/b")) as client:
        with pytest.raises(PermanentError, match="client certificate"):
            client.manifest_digest("latest")
        for old, new in (("client.key", "client.key"), ("client.cert", "client.crt")):
            (folder / old).write_bytes((tmp_path / new).read_bytes())
        with pytest.raises(NotFoundError):
            client.manifest_digest("latest")


def test_a_certificate_goes_to_its_own_host_alone(tls: Registry, certificates: Path) -> None:
    name, _, port = tls.host.partition(":")
    (certificates / name).mkdir(parents=True)
    (certificates / f"{name}:{int(port) - 1}").mkdir()
    assert transport.certificates(name, int(port)) is None
    assert transport.certificates(name, 443) == certificates / name


def test_plain_http_to_a_registry_with_tls_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with Registry(tmp_path, tls=True) as registry:
        error = asked(registry.host, plain_http=True)
        assert isinstance(error, PermanentError)
        assert "--plain-http" in str(error)
        assert f"/etc/docker/certs.d/{registry.host}/ca.crt" in str(error)


def test_a_server_that_ends_plain_connections_may_want_tls() -> None:
    with FaultProxy("") as proxy:
        proxy.plan = lambda request: Fault(drop=True)
        error = asked(proxy.host)
        assert isinstance(error, TransientError)
        assert "if it requires TLS" in str(error)
        proxy.plan = lambda request: Fault(status=200, body=bytes(1 << 20), cut_after=10)
        with closing(open_registry(proxy.host, "a/b")) as client, pytest.raises(TransientError) as caught:
            list(client.tags())
        assert "TLS" not in str(caught.value), "an answer has begun"


def test_tls_to_a_registry_without_it_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with Registry(tmp_path) as registry, closing(Client(registry.host, "a/b")) as client:
        refused = pytest.raises(PermanentError, match=f"--plain-http, or BOOTSEER_PLAIN_HTTP={registry.host}")
        with refused:
            client.manifest("latest")


@pytest.fixture
def tunnel() -> Iterator[list[str]]:
    """A proxy for `registry.test`: its target (set by the test), its own address, and the requests to it."""
    asked: list[str] = []

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve(client: socket.socket) -> None:
        with client:
            head = client.recv(65536).decode()
            asked.append(head)
            if "proxy-authorization: basic bwu6cybjcmv0" not in head.lower():  # me:s cret
                client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
                return
            host, _, port = asked[0].partition(":")
            with socket.create_connection((host, int(port))) as server:
                client.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
                back = threading.Thread(target=copy, args=(server, client))
                back.start()
                copy(client, server)
                back.join()

    def accept(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],)).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked.append(f"127.0.0.1:{listener.getsockname()[1]}")
        thread = threading.Thread(target=accept, args=(listener,))
        thread.start()
        yield asked
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_registry_behind_a_proxy(
    tmp_path: Path, certificates: Path, tunnel: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Registry(tmp_path, tls=True) as registry:
        (certificates / "registry.test").mkdir(parents=True)
        (certificates / "registry.test" / "ca.crt").write_bytes(registry.certificate.read_bytes())
        monkeypatch.delenv("https_proxy", raising=False)
        monkeypatch.setenv("HTTPS_PROXY", f"http://{tunnel[0]}")
        tunnel[0] = registry.host
        assert "407 Proxy Authentication Required" in str(asked("registry.test"))
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:s%20cret@{os.environ['HTTPS_PROXY'].removeprefix('http://')}")
        assert isinstance(asked("registry.test"), NotFoundError)
        assert tunnel[-1].startswith("CONNECT registry.test:443 ")
        monkeypatch.setenv("HTTPS_PROXY", "127.0.0.1:1")
        error = asked("registry.test")
    assert isinstance(error, TransientError)
    assert str(error) == "the proxy (HTTP_PROXY, HTTPS_PROXY) for registry.test:443: Connection refused"


def test_plain_http_goes_through_a_proxy_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Registry(tmp_path) as registry, FaultProxy(registry.host) as proxy:
        monkeypatch.setenv("http_proxy", f"http://{proxy.host}")
        assert isinstance(asked("registry.test", plain_http=True), NotFoundError)
        assert {request.path for request in proxy.requests} == {"http://registry.test/v2/a/b/manifests/latest"}


@pytest.mark.parametrize(
    ("url", "exempt", "expected"),
    [
        ("https://registry.test/", "", "http://proxy:3128"),
        ("http://registry.test/", "", ""),  # only HTTPS_PROXY is set
        ("https://127.0.0.1:5000/", "", ""),
        ("https://registry.test/", "localhost, .test", ""),
        ("https://registry.test/", "REGISTRY.test:443", ""),
        ("https://registry.test:5000/", "registry.test:443", "http://proxy:3128"),
        ("https://registry.test/", "*.test", ""),
        ("https://myregistry.test/", "registry.test", "http://proxy:3128"),
        ("https://registry.test/", "*", ""),
        ("https://10.1.2.3:5000/", "10.0.0.0/8", ""),
        ("https://10.1.2.3:5000/", "10.2.0.0/16,fd00::/8", "http://proxy:3128"),
        ("https://[fd00::1]:5000/", "fd00::/8", ""),
        ("https://[fd00::1]:5000/", "[fd00::1]:5000", ""),
    ],
)
def test_which_origins_have_a_proxy(url: str, exempt: str, expected: str) -> None:
    env = {"HTTPS_PROXY": "proxy:3128", "NO_PROXY": exempt}
    assert transport.proxy_of(transport.Origin.of(url), env) == expected

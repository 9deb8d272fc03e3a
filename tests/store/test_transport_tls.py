"""Encryption as a site has set it up: certificates below `certs.d`, and words for the wrong way to speak."""

from __future__ import annotations

import socket
import ssl
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
    """A registry that wants a certificate from its clients, which `client.crt` has."""
    make_certificate(tmp_path / "client.key", tmp_path / "client.crt")
    with Registry(tmp_path, tls=True, clients=tmp_path / "client.crt") as registry:
        yield registry


def asked(host: str, **options: bool) -> BootseerError:
    """How the question for a tag that is not there ends."""
    with closing(open_registry(host, "a/b", **options)) as client, pytest.raises(BootseerError) as caught:
        client.manifest_digest("latest")
    return caught.value


def test_docker_s_certificates_are_trusted_and_shown(tls: Registry, tmp_path: Path, certificates: Path) -> None:
    folder = certificates / tls.host
    folder.mkdir(parents=True)
    # The folder alone says that this address of the machine wants TLS.
    assert f"{folder}/ca.crt" in str(asked(tls.host))
    (folder / "ca.crt").write_bytes(tls.certificate.read_bytes())
    error = asked(tls.host)
    assert isinstance(error, PermanentError)  # it is trusted, and refuses us
    assert f"put client.cert and client.key into {folder}" in str(error)
    (folder / "client.cert").write_bytes((tmp_path / "client.crt").read_bytes())
    error = asked(tls.host)
    assert isinstance(error, PermanentError)
    assert "client.key" in str(error)
    (folder / "client.key").write_text("no key")
    assert f"{folder}/client.cert cannot be used" in str(asked(tls.host))
    (folder / "client.key").write_bytes((tmp_path / "client.key").read_bytes())
    assert isinstance(asked(tls.host), NotFoundError)


def test_a_certificate_goes_to_its_own_host_alone(tls: Registry, certificates: Path) -> None:
    name, _, port = tls.host.partition(":")
    (certificates / name).mkdir(parents=True)
    (certificates / f"{name}:{int(port) - 1}").mkdir()
    assert transport.certificates(name, int(port)) is None
    assert transport.certificates(name, 443) == certificates / name


def test_plain_http_to_a_registry_with_tls_says_what_to_write(tmp_path: Path) -> None:
    with Registry(tmp_path, tls=True) as registry:
        error = asked(registry.host, plain_http=True)
        assert isinstance(error, PermanentError)
        assert "--plain-http" in str(error)
        assert f"/etc/docker/certs.d/{registry.host}/ca.crt" in str(error)


def test_a_server_that_ends_plain_connections_is_asked_whether_it_wants_tls(tmp_path: Path) -> None:
    """As those do that look for nothing but TLS; one that is merely down is not called so."""
    make_certificate(tmp_path / "key.pem", tmp_path / "certificate.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")

    def serve(listener: socket.socket) -> None:
        for _ in range(2):
            accepted = listener.accept()[0]
            try:
                context.wrap_socket(accepted, server_side=True).close()
            except OSError:
                accepted.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        error = asked(f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join(60)
    assert isinstance(error, PermanentError)
    assert "requires TLS" in str(error)
    with FaultProxy("") as proxy:
        proxy.plan = lambda request: Fault(drop=True)
        assert isinstance(asked(proxy.host), TransientError)
        proxy.plan = lambda request: Fault(status=400)
        assert "status 400" in str(asked(proxy.host))


def test_tls_to_a_registry_without_says_what_to_write(tmp_path: Path) -> None:
    with Registry(tmp_path) as registry, closing(Client(registry.host, "a/b")) as client:
        refused = pytest.raises(PermanentError, match=f"--plain-http, or BOOTSEER_PLAIN_HTTP={registry.host}")
        with refused:
            client.manifest("latest")

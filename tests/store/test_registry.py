"""The registry client with faults of the registry and of the network."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bootseer.errors import AccessError, CorruptError, NotFoundError, PermanentError, TransientError, UsageError
from bootseer.store.open import open_registry
from bootseer.store.registry import MAX_MANIFEST_BYTES, BlobUpload
from bootseer.store.registry import Registry as Client
from fault_proxy import Fault, FaultProxy, Request, once
from registry import Registry, free_port, make_certificate, needs_registry
from store.contract import DATA, sha256

pytestmark = needs_registry
NAME = sha256(DATA)


def upload(client: Client, data: bytes) -> str:
    blob = BlobUpload(client)
    blob.write(data)
    return blob.commit()


@pytest.fixture
def proxy(registry: Registry) -> Iterator[FaultProxy]:
    with FaultProxy(registry.host) as running:
        yield running


@pytest.fixture
def client(registry: Registry, proxy: FaultProxy, repository: str) -> Iterator[Client]:
    """A client behind the proxy, with DATA in its repository."""
    with closing(open_registry(registry.host, repository)) as direct:
        upload(direct, DATA)
    with closing(open_registry(proxy.host, repository)) as opened:
        yield opened


def read(client: Client, start: int = 0, length: int | None = None, *, timeout_s: float = 30.0) -> bytes:
    return b"".join(client.blob(NAME, start, length, timeout_s=timeout_s))


@pytest.mark.parametrize(
    "fault",
    [
        Fault(drop=True),
        Fault(reset_after=0),
        Fault(reset_after=1000),
        Fault(cut_after=0),
        Fault(cut_after=499_999),
        Fault(headers={"Content-Range": "bytes 101-500100/700001"}),
        Fault(headers={"Content-Range": "bytes 100-500098/700001"}),
        Fault(headers={"Content-Range": "bytes 100-500100/700001"}),
        Fault(headers={"Content-Range": "bytes */700001"}),
        Fault(headers={"Content-Range": "nonsense"}),
        Fault(headers={"Content-Range": ""}),
        Fault(send={"range": ""}),
        Fault(send={"range": "bytes=200-500199"}),
        Fault(send={"range": "bytes=100-1000"}),
        Fault(send={"range": "bytes=100-600000"}),
        Fault(send={"range": "bytes=101-500099"}),
        Fault(send={"range": "bytes=100-1000"}, headers={"Content-Range": "bytes 100-500099/700001"}, chunked=True),
        Fault(send={"range": "bytes=100-600000"}, headers={"Content-Range": "bytes 100-500099/700001"}, chunked=True),
        Fault(send={"range": "bytes=0-99,200-300"}),
        Fault(status=500),
        Fault(status=502, body=b"<html>"),
        Fault(status=206, body=b""),
    ],
    ids=str,
)
def test_an_answer_that_is_not_the_range_is_transient_and_the_next_read_is_right(
    client: Client, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.plan = once(fault)
    got = bytearray()
    with pytest.raises(TransientError) as caught:
        for piece in client.blob(NAME, 100, 500_000):
            got += piece
    assert DATA[100:500_100].startswith(got)
    assert client.host in str(caught.value)
    assert "\n" not in str(caught.value)
    assert read(client, 100, 500_000) == DATA[100:500_100]


@pytest.mark.parametrize("fault", [Fault(cut_after=5000), Fault(reset_after=5000)], ids=str)
def test_a_whole_blob_that_ends_early_is_transient(client: Client, proxy: FaultProxy, fault: Fault) -> None:
    proxy.plan = once(fault)
    with pytest.raises(TransientError):
        read(client)
    assert read(client) == DATA


def test_an_answer_in_chunks_is_as_good(client: Client, proxy: FaultProxy) -> None:
    proxy.plan = lambda _: Fault(chunked=True)
    for _ in range(3):
        assert read(client, 100, 500_000) == DATA[100:500_100]
    assert read(client) == DATA
    assert proxy.num_connections == 1


def test_the_whole_blob_in_answer_to_its_whole_range_is_right(client: Client, proxy: FaultProxy) -> None:
    proxy.plan = lambda _: Fault(send={"range": ""})
    assert read(client, 0, len(DATA)) == DATA


@pytest.mark.parametrize(
    "fault",
    [
        Fault(hang=True),
        Fault(drip_bytes=1, drip_pause_s=0.02),
        Fault(drip_bytes=1, drip_pause_s=0.02, drip_headers=True),
    ],
    ids=str,
)
def test_a_server_that_hangs_or_drips_ends_with_the_deadline(client: Client, proxy: FaultProxy, fault: Fault) -> None:
    proxy.plan = once(fault)
    with pytest.raises(TransientError, match="did not answer completely within"):
        read(client, timeout_s=0.5)
    proxy.plan = lambda _: None
    assert read(client) == DATA


@pytest.mark.slow
def test_the_deadline_of_one_request_is_not_that_of_the_next_on_its_connection(
    client: Client, proxy: FaultProxy
) -> None:
    assert read(client, 0, 10, timeout_s=2.0) == DATA[:10]
    gate = threading.Event()
    proxy.plan = once(Fault(gate=gate))
    # Longer than the first deadline, on the same connection.
    threading.Timer(2.2, gate.set).start()
    assert read(client, 0, 10) == DATA[:10]
    assert proxy.num_connections == 1


def test_a_deadline_that_has_passed_sends_nothing(client: Client, proxy: FaultProxy) -> None:
    with pytest.raises(TransientError, match="no time is left"):
        read(client, timeout_s=0)
    assert proxy.requests == []


def test_connections_are_kept_and_shared_by_threads(client: Client, proxy: FaultProxy) -> None:
    for _ in range(20):
        assert read(client, 5, 1000) == DATA[5:1005]
    assert proxy.num_connections == 1
    gate = threading.Event()
    proxy.plan = lambda _: Fault(gate=gate)
    threads = [threading.Thread(target=read, args=(client, 0, 100_000)) for _ in range(32)]
    for thread in threads:
        thread.start()
    deadline = threading.Event()
    while proxy.num_connections < 32 and not deadline.wait(0.01):
        assert any(thread.is_alive() for thread in threads)
    gate.set()
    for thread in threads:
        thread.join()
    for _ in range(20):
        read(client, 5, 1000)
    assert proxy.num_connections == 32


def test_an_answer_that_was_not_read_gives_up_its_connection_alone(client: Client, proxy: FaultProxy) -> None:
    with closing(client.blob(NAME)) as pieces:
        next(pieces)
    assert read(client) == DATA
    assert proxy.num_connections == 2


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        ("7", 7, 7),
        ("0", 0, 0),
        ("999999", 300, 300),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_of_a_loaded_server_is_used(
    client: Client, proxy: FaultProxy, status: int, value: str, least: float, most: float
) -> None:
    proxy.plan = once(Fault(status=status, headers={"Retry-After": value}))
    with pytest.raises(TransientError, match=str(status)) as caught:
        read(client)
    assert caught.value.retry_after_s is not None
    assert least <= caught.value.retry_after_s <= most


@pytest.mark.parametrize("value", ["", "soon", "-5", "1e9", "9" * 5000, "Fri, 31 Dec 2100 23:59:59 GMT"])
def test_an_invalid_retry_after_is_ignored(client: Client, proxy: FaultProxy, value: str) -> None:
    proxy.plan = once(Fault(status=429, headers={"Retry-After": value}))
    with pytest.raises(TransientError) as caught:
        read(client)
    assert caught.value.retry_after_s is None


def test_refusals_say_where_and_what_to_do(client: Client, proxy: FaultProxy) -> None:
    words = json.dumps({"errors": [{"code": "DENIED", "message": "not\nyours" + "!" * 5000}]}).encode()
    proxy.plan = once(Fault(status=403, body=words))
    with pytest.raises(AccessError) as caught:
        read(client)
    said = str(caught.value)
    assert said.startswith(f"{client.host}/{client.repository}: blob {NAME}: status 403 (DENIED not yours!")
    assert said.endswith(f"log in with: docker login {client.host}")
    assert len(said) < 600
    assert "\n" not in said


def test_a_missing_blob_and_a_missing_repository_are_not_found(registry: Registry, client: Client) -> None:
    with pytest.raises(NotFoundError, match="BLOB_UNKNOWN"):
        list(client.blob("sha256:" + "0" * 64))
    with closing(open_registry(registry.host, "never/pushed")) as other:
        with pytest.raises(NotFoundError):
            other.manifest("latest")
        assert list(other.tags()) == []


def test_docker_hubs_server_has_another_name_than_its_images() -> None:
    with closing(Client("docker.io", "library/a")) as client:
        assert str(client) == "docker.io/library/a"
        assert client._base == "https://registry-1.docker.io/v2/library/a/"


def test_a_host_that_does_not_exist_is_named() -> None:
    port = free_port()
    refused = pytest.raises(TransientError, match=f"cannot connect to 127.0.0.1:{port}: Connection refused")
    with closing(open_registry(f"127.0.0.1:{port}", "a/b")) as client, refused:
        client.manifest("latest")
    unknown = pytest.raises(TransientError, match=r"cannot find the host no-such-host\.invalid")
    with closing(open_registry("no-such-host.invalid", "a/b")) as client, unknown:
        client.manifest("latest", timeout_s=60)


def test_a_listener_that_accepts_nothing_ends_with_the_deadline() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        with closing(open_registry(host, "a/b")) as client, pytest.raises(TransientError, match="within"):
            client.manifest("latest", timeout_s=0.3)


class TestRedirects:
    def test_ranges_of_a_redirected_blob_ask_the_registry_once(self, client: Client, registry: Registry) -> None:
        with FaultProxy(registry.host) as storage, FaultProxy("") as front:
            front.plan = lambda request: _elsewhere(storage, request)
            with closing(open_registry(front.host, client.repository)) as redirected:
                for start in range(0, 50_000, 10_000):
                    assert read(redirected, start, 10_000) == DATA[start : start + 10_000]
            assert len(front.requests) == 1
            assert [request.headers["range"] for request in storage.requests][:2] == [
                "bytes=0-9999",
                "bytes=10000-19999",
            ]

    def test_an_address_that_has_ended_is_asked_for_again(self, client: Client, registry: Registry) -> None:
        with FaultProxy(registry.host) as storage, FaultProxy("") as front:
            front.plan = lambda request: _elsewhere(storage, request)
            with closing(open_registry(front.host, client.repository)) as redirected:
                assert read(redirected, 0, 10) == DATA[:10]
                storage.plan = once(Fault(status=403, body=b"signature has expired"))
                assert read(redirected, 10, 10) == DATA[10:20]
                assert len(front.requests) == 2
                storage.plan = lambda _: Fault(status=403)
                with pytest.raises(AccessError, match=r"to which the registry redirects$"):  # no advice to log in
                    read(redirected, 10, 10)

    def test_the_registry_is_asked_again_when_a_storage_host_is_gone(self, client: Client, registry: Registry) -> None:
        with FaultProxy(registry.host) as storage, FaultProxy("") as front:
            with FaultProxy(registry.host) as gone:
                front.plan = lambda request: _elsewhere(gone, request)
                redirected = open_registry(front.host, client.repository)
                assert read(redirected, 0, 10) == DATA[:10]
            front.plan = lambda request: _elsewhere(storage, request)
            with closing(redirected):
                with pytest.raises(TransientError, match="connect"):
                    read(redirected, 10, 10)
                assert read(redirected, 10, 10) == DATA[10:20]

    def test_a_login_is_not_shown_to_the_storage(
        self, client: Client, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with FaultProxy(registry.host) as storage, FaultProxy("") as front:
            login = {"auths": {front.host: {"username": "me", "password": "secret"}}}
            (tmp_path / "config.json").write_text(json.dumps(login))
            monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))

            def plan(request: Request) -> Fault:
                if "authorization" not in request.headers:
                    return Fault(status=401, headers={"WWW-Authenticate": 'Basic realm="x"'})
                return _elsewhere(storage, request)

            front.plan = plan
            with closing(open_registry(front.host, client.repository)) as redirected:
                assert read(redirected, 0, 10) == DATA[:10]
                assert read(redirected, 10, 10) == DATA[10:20]
            assert [("authorization" in request.headers) for request in front.requests] == [False, True]
            assert storage.requests
            assert not any("authorization" in request.headers for request in storage.requests)

    def test_redirects_without_end_are_an_error(self, client: Client, proxy: FaultProxy) -> None:
        proxy.plan = lambda request: Fault(status=307, headers={"Location": request.path})
        with pytest.raises(PermanentError, match="redirects more than 5 times"):
            read(client)
        assert len(proxy.requests) == 6

    @pytest.mark.parametrize("location", ["ftp://host/x", "file:///etc/passwd", "http://[::", "http://x:99999/"])
    def test_redirects_to_nowhere_are_an_error(self, client: Client, proxy: FaultProxy, location: str) -> None:
        proxy.plan = once(Fault(status=307, headers={"Location": location}))
        with pytest.raises(PermanentError, match="not an address"):
            read(client)

    def test_a_write_is_not_redirected(self, client: Client, proxy: FaultProxy) -> None:
        proxy.plan = lambda _: Fault(status=307, headers={"Location": "http://127.0.0.1:1/"})
        with pytest.raises(PermanentError, match="status 307"):
            upload(client, b"x")


def _elsewhere(storage: FaultProxy, request: Request) -> Fault:
    return Fault(status=307, headers={"Location": f"http://{storage.host}{request.path}?signature=1"})


class TestManifests:
    def test_a_damaged_manifest_is_corrupt(self, client: Client, proxy: FaultProxy) -> None:
        data = b'{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[]}'
        client.put_manifest("tag", data, "application/vnd.oci.image.index.v1+json")
        digest = sha256(data)
        assert client.manifest("tag").data == client.manifest(digest).data == data
        assert client.manifest("tag").digest == client.manifest_digest("tag") == digest
        assert client.manifest("tag").media_type == "application/vnd.oci.image.index.v1+json"
        for reference in ("tag", digest):
            proxy.plan = once(Fault(corrupt_at=5))
            with pytest.raises(CorruptError, match="are not those of"):
                client.manifest(reference)

    @pytest.mark.parametrize("fault", [Fault(status=405), Fault(headers={"Docker-Content-Digest": ""})], ids=str)
    def test_a_digest_is_found_where_head_is_of_no_use(self, client: Client, proxy: FaultProxy, fault: Fault) -> None:
        data = b'{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[]}'
        client.put_manifest("tag", data, "application/vnd.oci.image.index.v1+json")
        proxy.plan = lambda request: fault if request.method == "HEAD" else None
        assert client.manifest_digest("tag") == sha256(data)

    def test_a_manifest_without_bounds_is_not_read_to_its_end(self, client: Client, proxy: FaultProxy) -> None:
        proxy.plan = lambda _: Fault(status=200, body=bytes(MAX_MANIFEST_BYTES + 1))
        with pytest.raises(PermanentError, match=f"more than {MAX_MANIFEST_BYTES} bytes"):
            client.manifest("latest")

    def test_a_manifest_that_no_registry_must_accept_is_not_sent(self, client: Client, proxy: FaultProxy) -> None:
        with pytest.raises(PermanentError, match="too large"):
            client.put_manifest("latest", bytes(MAX_MANIFEST_BYTES + 1), "x")
        assert proxy.requests == []

    @pytest.mark.parametrize("reference", ["", "../x", "a/b", "a b", "x" * 129, "sha256:1", ".x", "a?b"])
    def test_invalid_references_are_refused(self, client: Client, reference: str) -> None:
        with pytest.raises(UsageError):
            client.manifest(reference)


class TestUploads:
    def test_bytes_that_were_damaged_on_their_way_are_refused(self, client: Client, proxy: FaultProxy) -> None:
        data = DATA[:5000]
        proxy.plan = once(Fault(corrupt_request_at=7), method="PUT")
        with pytest.raises(TransientError, match=r"DIGEST_INVALID.*damaged in transit"):
            upload(client, data)
        with pytest.raises(NotFoundError):
            client.blob_size(sha256(data))
        assert upload(client, data) == sha256(data)

    def test_addresses_of_a_session_may_be_relative(self, client: Client, proxy: FaultProxy) -> None:
        data = bytes(range(256)) * 70_000
        blob = BlobUpload(client)
        answer = client.request("push", "POST", "blobs/uploads/", timeout_s=120, body=b"")
        answer.finish()
        relative = answer.headers["Location"].removeprefix(f"http://{proxy.host}")
        assert relative.startswith("/v2/")
        proxy.plan = once(Fault(status=202, headers={"Location": relative}), method="POST")
        blob.write(data)
        assert blob.commit() == sha256(data)
        assert b"".join(client.blob(sha256(data))) == data

    def test_chunks_follow_each_other_and_are_bounded(self, client: Client, proxy: FaultProxy) -> None:
        upload(client, bytes(20_000_000))
        sent = [request for request in proxy.requests if request.method == "PATCH"]
        assert [request.headers["content-range"] for request in sent] == [
            "0-8388607",
            "8388608-16777215",
            "16777216-19999999",
        ]

    def test_a_registry_may_want_larger_chunks(self, client: Client, proxy: FaultProxy) -> None:
        proxy.plan = once(Fault(headers={"OCI-Chunk-Min-Length": "12000000"}), method="POST")
        assert upload(client, bytes(20_000_000)) == sha256(bytes(20_000_000))
        sent = [len(request.body) for request in proxy.requests if request.method == "PATCH"]
        assert sent == [12_000_000, 8_000_000]

    def test_chunks_that_do_not_fit_into_memory_are_refused(self, client: Client, proxy: FaultProxy) -> None:
        proxy.plan = once(Fault(headers={"OCI-Chunk-Min-Length": "999999999"}), method="POST")
        with pytest.raises(PermanentError, match="chunks of at least"):
            upload(client, b"x")

    @pytest.mark.parametrize("method", ["POST", "PATCH", "PUT"])
    @pytest.mark.parametrize("fault", [Fault(status=503), Fault(drop=True), Fault(status=202, headers={})], ids=str)
    def test_an_upload_that_fails_leaves_nothing_visible(
        self, client: Client, proxy: FaultProxy, method: str, fault: Fault
    ) -> None:
        proxy.plan = once(fault, method=method)
        data = bytes(9_000_000) + method.encode()
        with pytest.raises((TransientError, PermanentError)):
            upload(client, data)
        with pytest.raises(NotFoundError):
            client.blob_size(sha256(data))


class TestTls:
    def test_a_registry_with_a_trusted_certificate_is_spoken_to(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Registry(tmp_path, tls=True) as registry:
            monkeypatch.setenv("SSL_CERT_FILE", str(registry.certificate))
            with closing(Client(registry.host, "a/b")) as client:
                assert upload(client, DATA) == NAME
                assert read(client, 100, 300_000) == DATA[100:300_100]
                with pytest.raises(TransientError, match="no time is left"):
                    read(client, timeout_s=0)

    def test_a_drip_ends_with_the_deadline_under_encryption_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_certificate(tmp_path / "key.pem", tmp_path / "certificate.pem")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")

        def drip(listener: socket.socket) -> None:
            # Ends soon after the client has closed the connection.
            with contextlib.suppress(OSError), context.wrap_socket(listener.accept()[0], server_side=True) as accepted:
                accepted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                for _ in range(500):
                    accepted.sendall(b"x")
                    pause.wait(0.02)

        pause = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=drip, args=(listener,))
            thread.start()
            late = pytest.raises(TransientError, match="did not answer completely within")
            with closing(Client(f"127.0.0.1:{listener.getsockname()[1]}", "a/b")) as client, late:
                read(client, timeout_s=0.5)
            thread.join(120)
            assert not thread.is_alive()

    def test_any_other_certificate_is_refused(self, tmp_path: Path) -> None:
        refused = pytest.raises(PermanentError, match=r"certificate of .* is not trusted: .*SSL_CERT_FILE")
        with Registry(tmp_path, tls=True) as registry, closing(Client(registry.host, "a/b")) as client, refused:
            client.manifest("latest")

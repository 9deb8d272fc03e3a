"""The store in a bucket, with an S3 server over HTTP."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import quote

import pytest

from bootseer.errors import AccessError, NotFoundError, PermanentError, TransientError, UsageError
from bootseer.store.store import Store
from fault_proxy import Fault, FaultProxy, Request, once
from registry import free_port
from s3_server import S3Server, environment_for
from store.contract import CHILD, DATA, SharedStoreContract, get, put, sha256

object_store = pytest.importorskip("bootseer.store.object_store", reason="extra s3")
pytest.importorskip("moto.server", reason="moto, the S3 server of the tests, is not installed")

_numbers = itertools.count()

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(s3_server: S3Server) -> S3Server:
    return s3_server


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    for key, value in server.environment.items():
        monkeypatch.setenv(key, value)
    name = f"bucket-{next(_numbers)}"
    server.make_bucket(name)
    return name


class Outside:
    def __init__(self, server: S3Server, bucket: str) -> None:
        self.server, self.bucket = server, bucket

    def get(self, name: str) -> bytes | None:
        key = f"sha256/{name[7:9]}/{name[7:]}" if name.startswith("sha256:") else name
        status, data = self.server.ask("GET", f"/{self.bucket}/some/prefix/{quote(key)}")
        return data if status == 200 else None

    def unfinished(self) -> list[str]:
        rest = [key for key in self.server.keys(self.bucket) if ".uploads" in key]
        return rest + self.server.uploads(self.bucket)


class TestS3Store(SharedStoreContract):
    @pytest.fixture
    def store(self, bucket: str) -> Store:
        return object_store.ObjectStore(f"s3://{bucket}/some/prefix")

    @pytest.fixture
    def outside(self, server: S3Server, bucket: str) -> Outside:
        return Outside(server, bucket)

    def test_the_child_of_a_fork_reads_too(self, store: Store, child_environment: dict[str, str]) -> None:
        """It cannot: it gets an error instead of hanging."""
        command = [sys.executable, str(CHILD), "fork", store.uri]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        assert ended.stdout == "False\n"
        assert "object stores do not work in the child of a fork; start a new process" in ended.stderr


@pytest.fixture
def proxy(server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with FaultProxy(server.host) as running:
        for key, value in environment_for(running.host).items():
            monkeypatch.setenv(key, value)
        yield running


@pytest.fixture
def store(proxy: FaultProxy, bucket: str) -> Iterator[Store]:
    """A store behind the proxy."""
    with closing(object_store.ObjectStore(f"s3://{bucket}/some/prefix")) as opened:
        yield opened


@pytest.mark.parametrize(
    "fault",
    [
        Fault(drop=True),
        Fault(reset_after=1000),
        Fault(cut_after=499_999),
        Fault(send={"range": "bytes=200-500199"}),
        Fault(send={"range": "bytes=100-1000"}),
        Fault(status=429, headers={"Retry-After": "1"}),
        Fault(status=500),
        Fault(status=503),
    ],
    ids=str,
)
def test_an_answer_that_is_not_the_range_is_transient_and_the_next_read_is_right(
    store: Store, proxy: FaultProxy, fault: Fault
) -> None:
    name = put(store, DATA).name
    before = len(proxy.requests)
    proxy.plan = once(fault)
    with pytest.raises(TransientError, match=store.uri):
        get(store, name, 100, 500_000)
    assert len(proxy.requests) == before + 1  # one attempt
    assert get(store, name, 100, 500_000) == DATA[100:500_100]


@pytest.mark.parametrize("fault", [Fault(hang=True), Fault(drip_bytes=1, drip_pause_s=0.02)], ids=str)
def test_a_server_that_hangs_or_drips_ends_with_the_deadline(store: Store, proxy: FaultProxy, fault: Fault) -> None:
    name = put(store, DATA).name
    proxy.plan = once(fault)
    with pytest.raises(TransientError, match=r"no complete answer within 0\.5 s"):
        list(store.read(name, timeout_s=0.5))
    assert get(store, name) == DATA


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_says_what_to_check(store: Store, proxy: FaultProxy, status: int) -> None:
    proxy.plan = lambda _: Fault(status=status)
    with pytest.raises(AccessError, match="check the credentials"):
        get(store, "name")


def test_a_part_that_fails_is_sent_again(store: Store, proxy: FaultProxy) -> None:
    failed = []

    def plan(request: Request) -> Fault | None:
        if "partNumber=2" in request.path and not failed:
            failed.append(request)
            return Fault(status=503)
        return None

    proxy.plan = plan
    data = bytes(20_000_000)
    assert put(store, data).name == sha256(data)
    assert failed


def test_an_upload_that_fails_leaves_nothing(store: Store, proxy: FaultProxy, server: S3Server, bucket: str) -> None:
    proxy.plan = lambda request: Fault(status=403) if "x-amz-copy-source" in request.headers else None
    with pytest.raises(AccessError):
        put(store, bytes(20_000_000), "name")
    assert server.keys(bucket) == []
    assert server.uploads(bucket) == []


def test_an_upload_that_this_user_may_not_remove_is_stored(store: Store, proxy: FaultProxy) -> None:
    refused: list[Request] = []

    def plan(request: Request) -> Fault | None:
        if request.method != "DELETE" and not request.path.endswith("?delete"):
            return None
        refused.append(request)
        return Fault(status=403)

    proxy.plan = plan
    assert put(store, bytes(20_000_000), "name").size_bytes == 20_000_000
    assert len(get(store, "name")) == 20_000_000
    assert refused


def test_an_object_that_could_not_be_copied_is_refused_while_it_is_written(
    store: Store, server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(object_store.MAX_COPY_BYTES, "s3", 10_000_000)
    upload = store.upload()
    upload.write(bytes(9_000_000))
    with pytest.raises(PermanentError, match="at most 10000000 bytes here; spread it over more stripes"):
        upload.write(bytes(9_000_000))
    assert server.keys(bucket) == []


def test_create_is_one_request_that_only_takes_a_free_name(store: Store, proxy: FaultProxy) -> None:
    assert store.create("a/name", b"first")
    assert [request.headers.get("if-none-match") for request in proxy.requests] == ["*"]
    assert not store.create("a/name", b"second")
    assert get(store, "a/name") == b"first"


def test_where_the_condition_is_not_known_nothing_is_created(store: Store, proxy: FaultProxy) -> None:
    unknown = Fault(status=501, body=b"<Error><Code>NotImplemented</Code></Error>")
    proxy.plan = lambda request: unknown if "if-none-match" in request.headers else None
    with pytest.raises(PermanentError, match="does not support conditional writes"):
        store.create("a/name", b"first")
    assert list(store.list()) == []


def test_a_create_without_an_answer_is_transient_and_not_tried_again(store: Store, proxy: FaultProxy) -> None:
    for fault in (Fault(drop=True), Fault(status=503), Fault(status=429)):
        before = len(proxy.requests)
        proxy.plan = once(fault)
        with pytest.raises(TransientError, match="a/name"):
            store.create("a/name", b"first")
        assert len(proxy.requests) == before + 1
    proxy.plan = lambda request: Fault(hang=True)
    with pytest.raises(TransientError, match=r"no complete answer within 0\.5 s"):
        store.create("a/name", b"first", timeout_s=0.5)
    proxy.plan = lambda request: Fault(status=403)
    with pytest.raises(AccessError):
        store.create("a/name", b"first")


def test_a_bucket_that_does_not_exist_is_not_found(bucket: str) -> None:
    with pytest.raises(NotFoundError):
        get(object_store.ObjectStore("s3://no-such-bucket/x"), "name")


def test_an_endpoint_that_does_not_exist_is_transient(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(TransientError, match=f"s3://{bucket}/x: name: "):
        get(object_store.ObjectStore(f"s3://{bucket}/x"), "name")


def test_an_endpoint_without_encryption_must_be_wanted(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(PermanentError, match="AWS_ALLOW_HTTP=true"):
        get(object_store.ObjectStore(f"s3://{bucket}/x"), "name")
    with pytest.raises(NotFoundError):
        get(object_store.ObjectStore(f"s3://{bucket}/x", allow_http=True), "name")


@pytest.mark.parametrize("uri", ["s3://", "s3://b/a/../c", "az://container/x"])
def test_invalid_addresses_are_refused(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(UsageError):
        object_store.ObjectStore(uri)


def test_other_clouds_are_opened_by_the_same_code() -> None:
    assert object_store.ObjectStore("gs://bucket/x/").uri == "gs://bucket/x"

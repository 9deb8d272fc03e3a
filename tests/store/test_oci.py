"""The store in a real registry."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from bootseer.errors import CorruptError, NotFoundError, PermanentError, TransientError, UsageError
from bootseer.store.oci import ARTIFACT_TYPE, OciStore, tag_of
from bootseer.store.open import open_registry
from bootseer.store.store import Store, Stored
from fault_proxy import Fault, FaultProxy, once
from registry import Registry, needs_registry
from store.contract import DATA, SharedStoreContract, get, put, sha256

pytestmark = needs_registry


class Outside:
    """Access by plain HTTP requests."""

    def __init__(self, registry: Registry, repository: str) -> None:
        self.registry, self.repository = registry, repository

    def ask(self, path: str) -> tuple[int, bytes]:
        with closing(http.client.HTTPConnection(self.registry.host, timeout=300)) as connection:
            accept = "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json"
            connection.request("GET", f"/v2/{self.repository}/{path}", headers={"Accept": accept})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def manifest(self, name: str) -> dict[str, object]:
        status, data = self.ask(f"manifests/{tag_of(name)}")
        assert status == 200
        return json.loads(data)

    def get(self, name: str) -> bytes | None:
        if not name.startswith("sha256:"):
            status, data = self.ask(f"manifests/{tag_of(name)}")
            if status == 404:
                return None
            name = json.loads(data)["layers"][0]["digest"]
        status, data = self.ask(f"blobs/{name}")
        return data if status == 200 else None

    def unfinished(self) -> list[str]:
        uploads = self.registry.folder / "data/docker/registry/v2/repositories" / self.repository / "_uploads"
        # The registry does not remove the hash state, a few bytes next to the data of an ended session.
        return [str(path) for path in uploads.glob("*/data")]


@pytest.fixture
def store(registry: Registry, repository: str) -> Iterator[OciStore]:
    with closing(OciStore(open_registry(registry.host, repository))) as opened:
        yield opened


@pytest.fixture
def outside(registry: Registry, repository: str) -> Outside:
    return Outside(registry, repository)


@pytest.mark.slow
class TestOciStore(SharedStoreContract):
    creates_in_one_step = False

    @pytest.fixture
    def store(self, store: OciStore) -> Store:
        return store

    @pytest.fixture
    def outside(self, outside: Outside) -> Outside:
        return outside


def test_a_small_document_costs_one_request(registry: Registry, repository: str) -> None:
    with FaultProxy(registry.host) as proxy, closing(OciStore(open_registry(proxy.host, repository))) as store:
        put(store, DATA[: 16 * 1024], "document")
        before = len(proxy.requests)
        assert get(store, "document") == DATA[: 16 * 1024]
        assert [request.method for request in proxy.requests[before:]] == ["GET"]


def test_the_manifest_is_laid_out_as_specified(store: OciStore, outside: Outside) -> None:
    block = put(store, DATA)
    upload = store.upload()
    upload.write(b"index")
    upload.commit("images/one", refs=[block])
    manifest = outside.manifest("images/one")
    assert manifest["artifactType"] == ARTIFACT_TYPE
    assert manifest["annotations"] == {"dev.bootseer.name": "images/one"}
    own, ref = manifest["layers"]
    assert own["digest"] == sha256(b"index")
    assert own["data"] == base64.b64encode(b"index").decode()
    assert ref["digest"] == block.name
    assert ref["size"] == len(DATA)
    assert tag_of("images/one") == "bootseer-" + hashlib.sha256(b"images/one").hexdigest()[:40]


def test_a_created_object_keeps_what_it_needs(store: OciStore, outside: Outside) -> None:
    block = put(store, DATA)
    assert store.create("images/one", b"index", refs=[block])
    own, ref = outside.manifest("images/one")["layers"]
    assert (own["digest"], ref["digest"]) == (sha256(b"index"), block.name)


@pytest.mark.slow
def test_create_ends_with_its_deadline(registry: Registry, repository: str) -> None:
    with FaultProxy(registry.host) as proxy, closing(OciStore(open_registry(proxy.host, repository))) as store:
        for method in ("GET", "POST", "PUT"):
            proxy.plan = lambda request, method=method: Fault(hang=True) if request.method == method else None
            with pytest.raises(TransientError):
                store.create("a/name", b"x", timeout_s=0.5)
        proxy.plan = lambda request: None
        assert store.create("a/name", b"x")


def test_a_missing_ref_is_refused_by_the_registry(store: OciStore) -> None:
    upload = store.upload()
    upload.write(b"index")
    with pytest.raises(PermanentError, match="MANIFEST_BLOB_UNKNOWN"):
        upload.commit("images/one", refs=[Stored("sha256:" + "1" * 64, 5)])
    with pytest.raises(NotFoundError):
        store.stat("images/one")


def test_a_blob_cannot_keep_others(store: OciStore) -> None:
    block = put(store, DATA)
    upload = store.upload()
    upload.write(b"index")
    with pytest.raises(UsageError, match="cannot keep"):
        upload.commit(refs=[block])


def test_only_content_can_be_kept(store: OciStore) -> None:
    named = put(store, DATA, "a/name")
    upload = store.upload()
    upload.write(b"index")
    with pytest.raises(UsageError, match="only keep objects with content names"):
        upload.commit("another", refs=[named])


def test_an_object_names_the_manifest_that_it_is_about(store: OciStore, outside: Outside) -> None:
    put(store, b"image", "image")
    subject = store.registry.manifest_digest(tag_of("image"))
    upload = store.upload()
    upload.write(b"1")
    upload.commit("hot/a", subject=subject)
    assert outside.manifest("hot/a")["subject"]["digest"] == subject
    assert set(store.registry.tags()) == {tag_of("image"), tag_of("hot/a")}


def test_an_object_whose_subject_does_not_exist_can_be_stored_without_it(store: OciStore) -> None:
    upload = store.upload()
    upload.write(b"x")
    with pytest.raises(NotFoundError):
        upload.commit("lazy/a", subject="sha256:" + "1" * 64)
    with pytest.raises(NotFoundError):
        store.stat("lazy/a")
    upload.commit("lazy/a")
    assert b"".join(store.read("lazy/a")) == b"x"


def test_hostile_manifests_hold_no_object(store: OciStore) -> None:
    put(store, b"x", "blob")
    config = json.loads(store.registry.manifest(tag_of("blob")).data)["config"]
    layer = {"mediaType": "x", "digest": sha256(b"x"), "size": 1}
    good = {"layers": [layer], "annotations": {"dev.bootseer.name": "evil"}}
    cases = [
        {"layers": []},
        {"annotations": {}},
        {"annotations": {"dev.bootseer.name": "../up"}},
        {"annotations": {"dev.bootseer.name": "another"}},
        {"layers": [{**layer, "data": base64.b64encode(b"y").decode()}]},
        {"layers": [{**layer, "data": "!"}]},
        {"layers": [{**layer, "data": 5}]},
    ]
    for case in cases:
        manifest = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config}
        data = json.dumps({**manifest, **good, **case}).encode()
        store.registry.put_manifest(tag_of("evil"), data, "application/vnd.oci.image.manifest.v1+json")
        with pytest.raises(CorruptError, match=r"evil|holds no object"):
            get(store, "evil")
        assert all(found.name in ("blob", "another") for found in store.list())


def test_a_registry_that_forbids_deletion_is_an_error(registry: Registry, repository: str) -> None:
    refused = Fault(status=405, body=b'{"errors":[{"code":"UNSUPPORTED"}]}')
    with FaultProxy(registry.host, lambda request: refused if request.method == "DELETE" else None) as proxy:
        store = OciStore(open_registry(proxy.host, repository))
        name = put(store, DATA).name
        with pytest.raises(PermanentError, match="does not allow deletion"):
            store.delete(name)
        store.close()


@pytest.mark.parametrize("following", ["/v2/{}/tags/list?last=x", "?last=x"])
def test_listing_reads_every_page(registry: Registry, repository: str, following: str) -> None:
    store = OciStore(open_registry(registry.host, repository))
    put(store, b"1", "a")
    put(store, b"2", "b")

    def plan(request: object) -> Fault | None:
        if "tags/list" not in request.path:
            return None
        tag, more = (
            (tag_of("b"), {})
            if "last=" in request.path
            else (tag_of("a"), {"Link": f"<{following.format(repository)}>; rel=next"})
        )
        return Fault(status=200, headers=more, body=json.dumps({"name": repository, "tags": [tag]}).encode())

    with FaultProxy(registry.host, plan) as proxy:
        paged = OciStore(open_registry(proxy.host, repository))
        assert sorted(found.name for found in paged.list()) == ["a", "b"]
        proxy.plan = lambda request: Fault(status=404) if "last=" in request.path else plan(request)
        with pytest.raises(NotFoundError, match="list of tags"):  # `prune` would delete what the rest needs
            list(paged.list())
        paged.close()
    store.close()


def test_an_aborted_upload_ends_its_session_also_after_an_error(registry: Registry, repository: str) -> None:
    with FaultProxy(registry.host, once(Fault(status=500), method="PATCH")) as proxy:
        store = OciStore(open_registry(proxy.host, repository))
        upload = store.upload()
        with pytest.raises(TransientError, match="status 500"):
            upload.write(bytes(9_000_000))
        upload.abort()
        store.close()
    assert Outside(registry, repository).unfinished() == []

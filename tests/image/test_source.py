"""Sources of images: registries, layouts, archives and folders."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bootseer.artifact.objects import read_all
from bootseer.artifact.unpacked import unpack
from bootseer.errors import AccessError, BootseerError, CorruptError, NotFoundError, PermanentError, UsageError
from bootseer.image.conversion.convert import convert
from bootseer.image.document import ImageDocument, document_name
from bootseer.image.reference import parse_reference
from bootseer.image.sources.manifest import Descriptor, Platform, choose
from bootseer.image.sources.registry import _read_blob as read_blob
from bootseer.image.sources.source import ImageSource, open_source, read_resumed
from bootseer.store.oci import tag_of
from bootseer.store.open import open_registry, open_store
from erofs_images import facts_of_folder, needs_root
from fault_proxy import Fault, FaultProxy, Request
from oci_images import (
    OCI_LAYER,
    add_blob,
    add_to_index,
    config_of,
    directory,
    file,
    layer,
    opaque,
    whiteout,
    write_docker_archive,
    write_layout,
)
from registry import Registry, needs_registry
from store_doubles import MemoryStore
from stored import open_merged

BASE = layer(directory("./"), directory("d"), file("d/a", b"a" * 3000), file("b", b"b" * 200_000))
TOP = layer(file("d/c", b"c"), whiteout("b"))


def _open(text: str, **options: Any) -> ImageSource:
    return open_source(parse_reference(text), **options)


@pytest.mark.parametrize("compression", ["gzip", "zstd", "xz", ""])
@pytest.mark.parametrize("docker", [False, True])
def test_a_layout_is_read_whatever_its_dialect_and_compression(compression: str, docker: bool, tmp_path: Path) -> None:
    digest = write_layout(tmp_path, [BASE, TOP], compression=compression, docker=docker, Cmd=["/a"])
    source = _open(f"oci:{tmp_path}")
    assert (source.digest, source.config["config"]) == (digest, {"Cmd": ["/a"]})
    document = convert(source, MemoryStore(str(tmp_path)))
    assert document.digest == digest
    assert [part.diff_id for part in document.layers[:2]] == source.config["rootfs"]["diff_ids"]  # type: ignore[index]


@pytest.mark.parametrize("name", ["docker-archive:{}/fifo", "docker-archive:/dev/zero", "docker-archive:{}", "oci:{}"])
def test_what_is_no_regular_file_is_refused_at_once(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    digest = write_layout(tmp_path, [BASE])
    blob = tmp_path / "blobs" / "sha256" / digest.removeprefix("sha256:")
    blob.unlink()
    os.mkfifo(blob)
    with pytest.raises(UsageError, match="not a regular file"):
        _open(name.format(tmp_path))


def test_a_tag_chooses_from_a_layout_with_several_images(tmp_path: Path) -> None:
    first = write_layout(tmp_path, [BASE], tag="one")
    second = write_layout(tmp_path, [TOP], tag="two")
    assert _open(f"oci:{tmp_path}:one").digest == first
    assert _open(f"oci:{tmp_path}:two").digest == second
    with pytest.raises(UsageError, match="several images"):
        _open(f"oci:{tmp_path}")
    with pytest.raises(UsageError, match="no such tag"):
        _open(f"oci:{tmp_path}:three")


def _write_index(folder: Path, *architectures: str) -> list[str]:
    rows = []
    for architecture in architectures:
        config = add_blob(
            folder,
            json.dumps(config_of([BASE], architecture)).encode(),
            "application/vnd.oci.image.config.v1+json",
        )
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config,
            "layers": [add_blob(folder, BASE, OCI_LAYER)],
        }
        entry = add_blob(folder, json.dumps(manifest).encode(), manifest["mediaType"])
        rows.append({**entry, "platform": {"os": "linux", "architecture": architecture}})
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": rows}
    add_to_index(folder, index, "multi")
    return [row["digest"] for row in rows]


def test_an_index_gives_the_image_of_the_platform(tmp_path: Path) -> None:
    digests = _write_index(tmp_path, "amd64", "arm64")
    for architecture, digest in zip(("amd64", "arm64"), digests, strict=True):
        assert _open(f"oci:{tmp_path}:multi", platform=Platform("linux", architecture)).digest == digest
    with pytest.raises(PermanentError, match=r"no image for linux/riscv64.*linux/amd64, linux/arm64"):
        _open(f"oci:{tmp_path}:multi", platform=Platform("linux", "riscv64"))


@pytest.mark.parametrize(
    ("wanted", "chosen"), [("amd64", "a"), ("amd64/v3", "c"), ("amd64/v2", "a"), ("arm64", "d"), ("arm64/v9", "e")]
)
def test_without_a_variant_the_image_that_runs_on_most_machines_is_chosen(wanted: str, chosen: str) -> None:
    offered = {"c": ("amd64", "v3"), "a": ("amd64", ""), "e": ("arm64", "v9"), "d": ("arm64", "v8")}
    rows = [
        {
            "digest": f"sha256:{digest * 64}",
            "size": 1,
            "platform": {"os": "linux", "architecture": arch, "variant": variant},
        }
        for digest, (arch, variant) in offered.items()
    ]
    assert choose({"manifests": rows}, Platform.parse(f"linux/{wanted}"), "index").digest == f"sha256:{chosen * 64}"


def test_a_manifest_below_an_index_need_not_state_its_type(tmp_path: Path) -> None:
    write_layout(tmp_path / "plain", [BASE])
    plain = _open(f"oci:{tmp_path / 'plain'}")
    manifest = {name: value for name, value in json.loads(plain.manifest).items() if name != "mediaType"}
    entry = add_blob(tmp_path / "plain", json.dumps(manifest).encode(), "application/vnd.oci.image.manifest.v1+json")
    rows = [{**entry, "platform": {"os": "linux", "architecture": "amd64"}}]
    index = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": rows}
    add_to_index(tmp_path / "plain", index, "indexed")
    found = _open(f"oci:{tmp_path / 'plain'}:indexed", platform=Platform("linux", "amd64"))
    assert (found.digest, found.layers[0].digest) == (entry["digest"], plain.layers[0].digest)


@pytest.mark.parametrize("text", ["linux", "linux/", "a/b/c/d", "Linux/amd64"])
def test_what_is_no_platform_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Platform.parse(text)


def _rewrite_manifest(folder: Path, **changes: Any) -> None:
    entry = json.loads((folder / "index.json").read_text())["manifests"][-1]
    blob = folder / "blobs" / "sha256" / entry["digest"].removeprefix("sha256:")
    manifest = {**json.loads(blob.read_text()), **changes}
    (folder / "index.json").unlink()
    add_to_index(folder, {key: value for key, value in manifest.items() if value is not None}, "latest")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schemaVersion": 1}, "schema 1"),
        ({"config": None}, "not an image"),
        ({"layers": []}, "0 layers"),
        ({"layers": [{"digest": "sha256:" + "0" * 64, "size": 1}] * 500}, "500 layers"),
        ({"layers": [{"digest": "md5:1", "size": 1}]}, r"layer 1: .*sha256.*digest"),
        ({"layers": [{"digest": "sha256:" + "0" * 64, "size": -1}]}, r"layer 1: Expected `int` >= 0.*size"),
    ],
)
def test_manifests_that_cannot_be_converted_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_layout(tmp_path, [BASE])
    _rewrite_manifest(tmp_path, **changes)
    with pytest.raises(PermanentError, match=words):
        _open(f"oci:{tmp_path}")


@pytest.mark.parametrize(
    ("media_type", "words"),
    [
        ("application/vnd.oci.image.layer.nondistributable.v1.tar+gzip", "outside the registry"),
        ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", "outside the registry"),
        ("application/vnd.oci.image.layer.v1.tar+gzip+encrypted", "encrypted"),
        ("application/vnd.cncf.helm.chart.content.v1.tar+gzip", "not a file system layer"),
    ],
)
def test_layers_that_cannot_be_converted_are_refused(media_type: str, words: str, tmp_path: Path) -> None:
    write_layout(tmp_path, [BASE])
    _rewrite_manifest(tmp_path, layers=[{"digest": "sha256:" + "0" * 64, "size": 1, "mediaType": media_type}])
    with pytest.raises(PermanentError, match=words):
        _open(f"oci:{tmp_path}")


def test_a_configuration_that_was_changed_is_corrupt(tmp_path: Path) -> None:
    write_layout(tmp_path, [BASE])
    for blob in (tmp_path / "blobs" / "sha256").iterdir():
        if b'"rootfs"' in blob.read_bytes():
            blob.write_bytes(blob.read_bytes().replace(b"amd64", b"arm64"))
    with pytest.raises(CorruptError, match="configuration"):
        _open(f"oci:{tmp_path}")


def test_a_docker_archive_is_the_same_image_as_the_layout(tmp_path: Path) -> None:
    write_layout(tmp_path / "layout", [BASE, BASE, TOP])
    write_docker_archive(tmp_path / "archive", [BASE, BASE, TOP], names=["me/a:v1"])
    store = MemoryStore(str(tmp_path))
    expected = convert(_open(f"oci:{tmp_path}/layout"), store)
    source = _open(f"docker-archive:{tmp_path}/archive:me/a:v1")
    found = convert(source, store)
    assert [part.file for part in found.layers] == [part.file for part in expected.layers]
    assert found.digest == source.digest == _open(f"docker-archive:{tmp_path}/archive").digest
    with pytest.raises(UsageError, match="no such image") as caught:
        _open(f"docker-archive:{tmp_path}/archive:me/a")
    assert "me/a:v1" in caught.value.hint


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b" + b"x" * 600, layer(file("other"))])
def test_what_is_no_docker_archive_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(content)
    with pytest.raises(BootseerError):
        _open(f"docker-archive:{tmp_path}/archive")
    with pytest.raises(UsageError, match="no such file"):
        _open(f"docker-archive:{tmp_path}/nothing")


@needs_root
@pytest.mark.root
def test_a_folder_is_converted_as_it_is(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "d").mkdir(parents=True)
    (root / "d" / ".wh.kept").write_bytes(b"no whiteout")
    os.link(root / "d" / ".wh.kept", root / "hard")
    os.mknod(root / "null", 0o20666, os.makedev(1, 3))
    with (root / "sparse").open("wb") as sparse:
        sparse.seek(10 << 20)
        sparse.write(b"end")
        sparse.truncate(30 << 20)
    os.setxattr(root / "d", "trusted.overlay.opaque", b"y")
    os.utime(root / "hard", ns=(5, 1_234_567_890_123_456_789))
    with socket.socket(socket.AF_UNIX) as left_out:
        before = facts_of_folder(root)
        left_out.bind(str(root / "socket"))
    os.utime(root, ns=(5, before[b""].mtime_ns))
    store = MemoryStore(str(tmp_path))
    documents = [convert(_open(f"dir:{root}"), store) for _ in range(2)]
    assert documents[0] == documents[1]
    unpack(open_merged(documents[0], store), tmp_path / "out")
    assert facts_of_folder(tmp_path / "out") == before


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a folder"):
        _open(f"dir:{tmp_path}/nothing")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry(tmp_path) as registry:
        yield registry


needs_skopeo = pytest.mark.skipif(shutil.which("skopeo") is None, reason="needs skopeo")


def _push(layout: Path, registry: Registry, name: str) -> None:
    command = ["skopeo", "copy", "--quiet", "--dest-tls-verify=false", "--insecure-policy", "--preserve-digests"]
    subprocess.run([*command, f"oci:{layout}:latest", f"docker://{registry.host}/{name}"], check=True)


@needs_registry
@needs_skopeo
def test_a_registry_gives_the_image_and_takes_the_converted_one(registry: Registry, tmp_path: Path) -> None:
    digest = write_layout(tmp_path / "layout", [BASE, TOP])
    _push(tmp_path / "layout", registry, "team/a:v1")
    source = _open(f"{registry.host}/team/a:v1")
    store = open_store(f"oci://{registry.host}/team/a")
    assert (source.digest, source.location) == (digest, store.uri)
    document = convert(source, store)
    assert ImageDocument.parse(read_all(store, document_name(digest), 1 << 20)) == document
    unpack(open_merged(document, store), tmp_path / "out")
    assert (tmp_path / "out" / "d" / "c").read_bytes() == b"c"
    assert not (tmp_path / "out" / "b").exists()
    client = open_registry(registry.host, "team/a")
    attached = json.loads(client.manifest(tag_of(document_name(digest))).data)
    client.close()
    assert attached["subject"]["digest"] == digest  # so registries list it with the image
    before = len(registry.requests())
    assert convert(_open(f"{registry.host}/team/a@{digest}"), store) == document
    again = registry.requests()[before:]
    assert not any(part.source_digest in item.path for item in again for part in document.layers if part.source_digest)
    source.close()
    store.close()


@needs_registry
@needs_skopeo
def test_a_download_that_breaks_goes_on_where_it_stopped(registry: Registry, tmp_path: Path) -> None:
    noise = layer(directory("./"), file("noise", os.urandom(3_000_000)))
    write_layout(tmp_path / "layout", [noise], compression="")
    _push(tmp_path / "layout", registry, "a:latest")
    broken: list[Request] = []

    def break_twice(request: Request) -> Fault | None:
        if "/blobs/" not in request.path or "range" not in request.headers or len(broken) >= 2:
            return None
        broken.append(request)
        return Fault(reset_after=1_000_000)

    with FaultProxy(registry.host) as proxy:
        source = _open(f"{proxy.host}/a")
        proxy.plan = break_twice
        document = convert(source, MemoryStore(str(tmp_path)))
        ranges = [request.headers["range"] for request in proxy.requests if "range" in request.headers]
        source.close()
    assert len(broken) == 2
    assert document.layers[0].file.size_bytes > 3_000_000
    starts = [int(text.removeprefix("bytes=").split("-")[0]) for text in ranges[-3:]]
    assert starts[0] == 0 < starts[1] < starts[2]


@needs_registry
@needs_skopeo
def test_a_registry_that_sends_whole_blobs_only_is_read(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like Harbor's proxy for a blob that it does not have yet."""
    write_layout(tmp_path / "layout", [layer(file("noise", os.urandom(1_000_000)))], compression="")
    _push(tmp_path / "layout", registry, "a:latest")
    monkeypatch.setattr("bootseer.image.sources.registry._RANGE_BYTES", 300_000)
    with FaultProxy(registry.host) as proxy:
        source = _open(f"{proxy.host}/a")
        (found,) = source.layers
        whole = b"".join(found.read(0))
        for fault in (Fault(send={"range": ""}), Fault(send={"range": ""}, chunked=True)):
            proxy.plan = lambda request, fault=fault: fault
            for start in (0, 1, 700_000, found.size_bytes - 1):
                assert b"".join(found.read(start)) == whole[start:]
            assert b"".join(read_resumed(found)) == whole
        source.close()
        with closing(open_registry(proxy.host, "a")) as client:  # it may send without an end
            endless = read_blob(client, Descriptor(found.digest, 1000), 0)
            with pytest.raises(CorruptError, match="more than the 1000 bytes"):
                b"".join(endless)


@needs_registry
@needs_skopeo
def test_a_registry_that_is_away_for_many_attempts_is_waited_for(registry: Registry, tmp_path: Path) -> None:
    write_layout(tmp_path / "layout", [BASE])
    _push(tmp_path / "layout", registry, "a:latest")
    refused: list[Request] = []

    def refuse(request: Request) -> Fault | None:
        if "/blobs/" not in request.path or len(refused) >= 7:
            return None
        refused.append(request)
        return Fault(status=503)

    with FaultProxy(registry.host) as proxy:
        source = _open(f"{proxy.host}/a")
        proxy.plan = refuse
        assert b"".join(read_resumed(source.layers[0])) == b"".join(source.layers[0].read(0))
        source.close()
    assert len(refused) == 7


@needs_registry
def test_an_image_that_does_not_exist_is_not_found(registry: Registry) -> None:
    with pytest.raises(NotFoundError):
        _open(f"{registry.host}/no/such:image")


def test_a_registry_that_refuses_says_so() -> None:
    with FaultProxy("") as proxy:
        proxy.plan = lambda request: Fault(status=403)
        with pytest.raises(AccessError):
            _open(f"{proxy.host}/a/b")


def test_opaque_markers_of_a_root_leave_one_layer(tmp_path: Path) -> None:
    write_layout(tmp_path, [BASE, layer(opaque(""), directory("./"), file("x"))])
    assert len(convert(_open(f"oci:{tmp_path}"), MemoryStore(str(tmp_path))).layers) == 1

"""What somebody who may write into a store can make a node run: documents are forged there, with a real registry and
real mounts."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import CorruptError
from bootseer.image.conversion.convert import convert
from bootseer.image.document import MAX_DOCUMENT_BYTES, document_name
from bootseer.image.mounting.mount import mount_image
from bootseer.image.mounting.request import Request
from bootseer.image.reference import parse_reference
from bootseer.image.sources.source import open_source, this_platform
from bootseer.store.open import open_store
from bootseer.store.retry import read_all
from image_node import Node, push
from oci_images import file, layer, write_docker_archive, write_layout

pytestmark = [pytest.mark.root, pytest.mark.fuse]
EVIL = layer(file("evil", b"runs as root"))


def store_of(node: Node) -> str:
    return f"oci://{node.reference.rpartition(':')[0]}"


def request(node: Node, reference: str, **changes: Any) -> Request:
    given = Request(parse_reference(reference), store_of(node), node.cache, node.runtime, loading="lazy")
    return replace(given, **changes)


def converted(reference: str, uri: str) -> str:
    """Convert an image; its digest."""
    with closing(open_source(parse_reference(reference))) as source, closing(open_store(uri)) as store:
        return convert(source, store).digest


@pytest.fixture
def evil(node: Node) -> str:
    """The digest of another image, converted into the same repository."""
    layout = node.folder / "evil"
    write_layout(layout, [EVIL], architecture=this_platform().architecture, Cmd=["/evil"])
    push(layout, node.registry.host, "team/box", "evil")
    return converted(f"{node.registry.host}/team/box:evil", store_of(node))


def document(uri: str, digest: str) -> dict[str, Any]:
    with closing(open_store(uri)) as store:
        return dict(json.loads(read_all(store, document_name(digest), MAX_DOCUMENT_BYTES)))


def put(uri: str, name: str, data: bytes) -> None:
    """What only somebody with the right to write into the store can do."""
    with closing(open_store(uri)) as store:
        upload = store.upload()
        upload.write(data)
        upload.commit(name)


def forge(uri: str, digest: str, value: dict[str, Any]) -> None:
    put(uri, document_name(digest), json.dumps({**value, "digest": digest}).encode())


Forge = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
FORGERIES: dict[str, Forge] = {
    "all of another image": lambda own, other: other,
    "the layers of another image": lambda own, other: {**own, "layers": other["layers"]},
    "a layer more": lambda own, other: {**own, "layers": [*own["layers"], *other["layers"]]},
    "the configuration of another image": lambda own, other: {**own, "config": other["config"]},
    "layers of no image": lambda own, other: {
        **own,
        "layers": [{**part, "source_digest": "", "diff_id": ""} for part in other["layers"]],
    },
    "a folder": lambda own, other: {
        **own,
        "manifest": "",
        "layers": [{**other["layers"][0], "source_digest": "", "diff_id": ""}],
    },
    "an archive": lambda own, other: {**other, "manifest": ""},
}


@pytest.mark.parametrize("kind", FORGERIES)
def test_a_pinned_image_is_not_exchanged_for_another_one(node: Node, evil: str, kind: str) -> None:
    """`images/sha256-B` says what `images/sha256-A` says: who asks for B must not run A."""
    uri = store_of(node)
    assert converted(node.reference, uri) == node.digest
    forge(uri, node.digest, FORGERIES[kind](document(uri, node.digest), document(uri, evil)))
    for reference in (node.digest, f"{node.reference}@{node.digest}"):
        with pytest.raises(CorruptError, match=node.digest):
            mount_image(request(node, reference), node.folder / "mnt")
        assert not (node.folder / "mnt" / "evil").exists()


def test_what_this_node_kept_of_an_image_is_compared_too(node: Node, evil: str) -> None:
    uri = store_of(node)
    converted(node.reference, uri)
    good = document(uri, node.digest)
    mount_image(request(node, node.digest), node.folder / "mnt").close()
    forge(f"{node.cache}/images", node.digest, document(uri, evil))
    mounted = mount_image(request(node, node.digest), node.folder / "mnt")  # the store knows better
    assert not (mounted.root / "evil").exists()
    mounted.close()
    assert document(f"{node.cache}/images", node.digest) == good


@pytest.mark.parametrize("kind", ["docker-archive", "dir"])
def test_images_without_a_manifest_are_compared_with_their_digest(node: Node, evil: str, kind: str) -> None:
    if kind == "dir":
        source = f"dir:{node.folder}/tree/etc"
    else:
        source = f"docker-archive:{node.folder}/saved.tar"
        write_docker_archive(Path(node.folder, "saved.tar"), [layer(file("good", b"1")), layer(file("better", b"2"))])
    uri = str(node.folder / "store")
    digest = converted(source, uri)
    mount_image(request(node, digest, store=uri), node.folder / "mnt").close()
    own, other = document(uri, digest), document(store_of(node), evil)
    for value in (other, {**own, "layers": other["layers"]}, {**own, "config": other["config"]}):
        forge(uri, digest, value)
        with pytest.raises(CorruptError, match=digest):
            mount_image(request(node, digest, store=uri, cache=node.folder / "new"), node.folder / "mnt")

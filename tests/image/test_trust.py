"""What a user with write access to the store can make a node run: forged documents, with a real registry and mounts."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bootseer.artifact.objects import read_all
from bootseer.artifact.signatures import UNSIGNED, Signatures
from bootseer.errors import CorruptError, PermanentError, SignatureError, UsageError
from bootseer.image.conversion.convert import convert
from bootseer.image.conversion.layer import ConvertOptions
from bootseer.image.document import MAX_DOCUMENT_BYTES, document_name
from bootseer.image.mounting.mount import mount_image
from bootseer.image.mounting.request import Request
from bootseer.image.reference import parse_reference
from bootseer.image.sources.source import open_source, this_platform
from bootseer.mounts.layers import MountMethod
from bootseer.store.open import open_store
from image_node import Node, convert_box, have_converted, have_in_registry, push
from oci_images import file, layer, write_docker_archive, write_layout
from once import once
from registry import Registry
from signing_keys import make_key, trust

pytestmark = [pytest.mark.root, pytest.mark.fuse]
EVIL = layer(file("evil", b"runs as root"))


def store_of(node: Node) -> str:
    return f"oci://{node.reference.rpartition(':')[0]}"


def request(node: Node, reference: str, **changes: Any) -> Request:
    given = Request(parse_reference(reference), store_of(node), cache=node.cache, runtime=node.runtime, loading="lazy")
    return replace(given, **changes)


def converted(reference: str, uri: str, *keys: Path) -> str:
    """Convert an image, and sign it if there are keys. Returns its digest."""
    options = ConvertOptions(signatures=Signatures(tuple(map(str, keys))))
    with closing(open_source(parse_reference(reference))) as source, closing(open_store(uri)) as store:
        return convert(source, store, options=options).digest


@pytest.fixture
def evil(node: Node) -> str:
    """The digest of another image, converted into the same repository."""
    layout = node.folder / "evil"
    digest = write_layout(layout, [EVIL], architecture=this_platform().architecture, Cmd=["/evil"])

    def push_and_convert(registry: Registry) -> None:
        push(layout, registry.host, "team/box", "evil")
        assert convert_box(f"{registry.host}/team/box:evil") == digest

    have_in_registry(node, "evil-box", push_and_convert)
    return digest


def document(uri: str, digest: str) -> dict[str, Any]:
    with closing(open_store(uri)) as store:
        name = document_name(digest)
        return dict(json.loads(UNSIGNED.open(name, read_all(store, name, MAX_DOCUMENT_BYTES), uri)))


def put(uri: str, name: str, data: bytes) -> None:
    """Overwrite an object, like any user with write access to the store."""
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
    """`images/sha256-B` has the content of `images/sha256-A`: a node that requests B must not run A."""
    uri = store_of(node)
    have_converted(node)
    forge(uri, node.digest, FORGERIES[kind](document(uri, node.digest), document(uri, evil)))
    for reference in (node.digest, f"{node.reference}@{node.digest}"):
        with pytest.raises(CorruptError, match=node.digest):
            mount_image(request(node, reference), node.folder / "mnt")
        assert not (node.folder / "mnt" / "evil").exists()


def test_what_this_node_kept_of_an_image_is_compared_too(node: Node, evil: str) -> None:
    uri = store_of(node)
    have_converted(node)
    good = document(uri, node.digest)
    mount_image(request(node, node.digest), node.folder / "mnt").close()
    forge(f"{node.cache}/images", node.digest, document(uri, evil))
    mounted = mount_image(request(node, node.digest), node.folder / "mnt")  # the store has the right one
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


def _make_key(folder: Path) -> None:
    folder.mkdir()
    make_key(folder / "key")


class TestSigned:
    """`--require-signature`: images from a store are mounted only if a trusted key has signed them."""

    @pytest.fixture
    def key(self) -> Path:
        return once("signing-key", _make_key) / "key"

    @pytest.fixture
    def strict(self, node: Node, key: Path) -> Signatures:
        return Signatures(trusted=trust(node.folder / "trusted", key))

    @pytest.fixture
    def look(self, node: Node, strict: Signatures) -> Callable[..., bool]:
        """`look(reference)`: mount it with required signatures. Returns whether it is the signed image."""
        numbers = iter(range(100))

        def mount(reference: str = node.reference, **changes: Any) -> bool:
            wanted = request(node, reference, **{"signatures": strict, **changes})
            mounted = mount_image(wanted, node.folder / f"mnt{next(numbers)}", say=said.append)
            try:
                assert not (mounted.root / "evil").exists()
                return (mounted.root / "hot").read_bytes() == (node.folder / "tree" / "hot").read_bytes()
            finally:
                mounted.close()

        said: list[str] = []
        return mount

    def test_a_signed_image_is_mounted_by_all(self, node: Node, key: Path, look: Callable[..., bool]) -> None:
        have_signed(node, key)
        assert look()
        assert look(cache=node.folder / "other")
        assert look(cache=node.folder / "third", signatures=UNSIGNED)
        assert look(node.digest, cache=node.folder / "other")

    def test_it_starts_again_without_its_store(self, node: Node, key: Path, look: Callable[..., bool]) -> None:
        have_signed(node, key)
        assert look()
        put(store_of(node), document_name(node.digest), b"gone")
        assert look()

    def test_what_this_node_kept_is_verified_for_the_keys_of_today(
        self, node: Node, key: Path, look: Callable[..., bool]
    ) -> None:
        have_signed(node, key)
        assert look()
        other = make_key(node.folder / "new-key")
        changed = Signatures(trusted=trust(node.folder / "changed", other))
        with pytest.raises(SignatureError, match="signed by a key that is not trusted"):
            look(signatures=changed)
        signed(node, key, other)  # with both keys, while nodes trust one or the other
        assert look(signatures=changed)
        assert look(cache=node.folder / "other")

    def test_an_image_without_a_signature_is_refused(self, node: Node, look: Callable[..., bool]) -> None:
        have_converted(node)
        for reference in (node.reference, f"oci:{node.folder}/layout:1"):
            with pytest.raises(SignatureError, match=rf"{document_name(node.digest)} is not signed; .*--sign KEY"):
                look(reference)
        with pytest.raises(SignatureError, match="is not signed"):
            look(node.digest)

    def test_an_image_that_is_not_converted_is_refused(self, node: Node, look: Callable[..., bool]) -> None:
        for reference in (node.reference, f"dir:{node.folder}/tree"):
            with pytest.raises(SignatureError, match="is not converted, so it has no signature"):
                look(reference)

    def test_an_image_that_was_converted_here_before_is_refused(self, node: Node, look: Callable[..., bool]) -> None:
        """A tag may have been moved to it: it may not be the image that the user means."""
        assert look(signatures=UNSIGNED)
        assert (node.cache / "converted").is_dir()
        with pytest.raises(SignatureError, match="is not converted, so it has no signature"):
            look()

    def test_an_image_that_is_pinned_in_its_registry_is_pulled(self, node: Node, look: Callable[..., bool]) -> None:
        """All of it is verified with the digest in the user's reference."""
        have_converted(node)
        pinned = f"{node.reference}@{node.digest}"
        assert look(pinned)
        before = len(node.requests("/blobs/"))
        assert look(pinned)  # it is cached
        assert len(node.requests("/blobs/")) == before
        with pytest.raises(UsageError, match="is not signed"):
            look(pinned, cache=node.folder / "other", fallback="none")

    def test_other_block_files_under_a_good_digest_are_refused(
        self, node: Node, key: Path, evil: str, look: Callable[..., bool]
    ) -> None:
        """The digest does not cover them: manifest, configuration and diff ids are those of the image."""
        uri = store_of(node)
        have_signed(node, key)
        good = document(uri, node.digest)
        files = [part["file"] for part in document(uri, evil)["layers"]]
        forged = {**good, "layers": [{**part, "file": files[0]} for part in good["layers"]]}
        forge(uri, node.digest, forged)
        mounted = mount_image(request(node, node.digest, cache=node.folder / "naive"), node.folder / "naive-mnt")
        assert (mounted.root / "evil").exists()  # without signatures, the digest does not prevent this
        mounted.close()
        with pytest.raises(SignatureError, match="is not signed"):
            look(node.digest)
        attacker = make_key(node.folder / "attacker")
        data = Signatures((str(attacker),)).seal(document_name(node.digest), json.dumps(forged).encode())
        put(uri, document_name(node.digest), data)
        with pytest.raises(SignatureError, match="a key that is not trusted"):
            look(node.digest)
        own = json.loads(data)
        own["signatures"] = json.loads(Signatures((str(key),)).seal("x", b"y"))["signatures"]
        put(uri, document_name(node.digest), json.dumps(own, sort_keys=True, separators=(",", ":")).encode())
        with pytest.raises(SignatureError, match="does not match"):
            look(node.digest)
        assert look(f"{node.reference}@{node.digest}", cache=node.folder / "other")  # pulled

    def test_the_signed_document_of_another_image_is_refused(
        self, node: Node, key: Path, evil: str, look: Callable[..., bool]
    ) -> None:
        """Both are signed; only their names are swapped."""
        uri = store_of(node)
        have_signed(node, key)
        converted(f"{node.registry.host}/team/box:evil", uri, key)
        with closing(open_store(uri)) as store:
            data = read_all(store, document_name(evil), 1 << 20)
        put(uri, document_name(node.digest), data)
        with pytest.raises(SignatureError, match=f"holds another signed object: '{document_name(evil)}'"):
            look(node.digest)

    @pytest.mark.parametrize("data", [b"", b'{"payload":"', b'{"payload":"' + b"A" * (24 << 20)])
    def test_a_cut_or_huge_envelope_is_refused(
        self, node: Node, key: Path, look: Callable[..., bool], data: bytes
    ) -> None:
        have_signed(node, key)
        put(store_of(node), document_name(node.digest), data)
        with pytest.raises(PermanentError, match="sha256-"):
            look(node.digest)

    def test_a_signed_conversion_uses_no_unsigned_layer_documents(
        self, node: Node, key: Path, evil: str, look: Callable[..., bool]
    ) -> None:
        """Layers are converted once for all images: a forged document of a layer would get into a signed image."""
        uri = store_of(node)
        have_converted(node)
        with closing(open_store(uri)) as store:
            names = [stored.name for stored in store.list("layers/")]
            bad = json.dumps({"schema": "bootseer.layer/1", "file": document(uri, evil)["layers"][0]["file"]}).encode()
        for name in names:
            put(uri, name, bad)
        signed(node, key)
        assert look()

    def test_files_that_were_written_out_for_a_forged_document_are_not_used(
        self, node: Node, key: Path, evil: str, look: Callable[..., bool]
    ) -> None:
        """Where nothing can be mounted, unpacked trees are kept, under the name of their content, not of the image."""
        uri = store_of(node)
        have_signed(node, key)
        with closing(open_store(uri)) as store:
            good = read_all(store, document_name(node.digest), 1 << 20)
        value = document(uri, node.digest)
        file = document(uri, evil)["layers"][0]["file"]
        forge(uri, node.digest, {**value, "layers": [{**part, "file": file} for part in value["layers"]]})
        nothing = dict.fromkeys(list(MountMethod)[:3], "said to be missing")
        mounted = mount_image(request(node, node.digest), node.folder / "naive", refused=nothing)
        assert (mounted.root / "evil").exists()
        mounted.close()
        put(uri, document_name(node.digest), good)
        (node.cache / "images" / document_name(node.digest)).unlink()
        mounted = mount_image(request(node, node.digest), node.folder / "good", refused=nothing)
        assert not (mounted.root / "evil").exists()
        mounted.close()


def signed(node: Node, *keys: Path) -> None:
    assert converted(node.reference, store_of(node), *keys) == node.digest


def have_signed(node: Node, key: Path) -> None:
    """Like `signed`, with the key of all tests."""

    def work(registry: Registry) -> None:
        reference = f"{registry.host}/team/box:1"
        assert converted(reference, f"oci://{reference.rpartition(':')[0]}", key) == node.digest

    have_in_registry(node, "signed-box", work)

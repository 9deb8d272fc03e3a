"""Parse and check the manifests, indexes and configurations of images.

OCI and Docker schema 2 documents have the same fields and are read alike. What BootSeer cannot convert is refused with
the reason: schema 1, layers outside the registry, encrypted layers, artifacts that are not images. No I/O.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from bootseer.artifact.document import convert, readable
from bootseer.errors import CorruptError, PermanentError, UsageError
from bootseer.image.document import MAX_CONFIG_BYTES, MAX_LAYERS, ImageDocument
from bootseer.store.store import is_content_name, parse_object

MAX_MANIFEST_BYTES = 4 << 20
MAX_LAYER_BYTES = 1 << 42
_SCHEMA_1 = "application/vnd.docker.distribution.manifest.v1"
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_CONFIGS = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
_LAYERS = ("application/vnd.oci.image.layer.v1.tar", "application/vnd.docker.image.rootfs.diff.tar")


class Platform(Struct, frozen=True):
    """Operating system and architecture of an image. As a request, an empty variant matches any."""

    os: str
    architecture: str
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)

    @classmethod
    def parse(cls, text: str) -> Platform:
        """`os/architecture[/variant]`. Raises `UsageError`."""
        parts = text.split("/")
        if not 2 <= len(parts) <= 3 or not all(re.fullmatch(r"[a-z0-9_.-]+", part) for part in parts):
            raise UsageError(f"{text!r} is not a platform", hint="use os/architecture, like linux/arm64")
        return cls(*parts)


@readable
class Descriptor(Struct, frozen=True, rename={"size_bytes": "size", "media_type": "mediaType"}):
    """A reference to a blob in a document."""

    digest: Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]
    size_bytes: Annotated[int, Meta(ge=0, le=MAX_LAYER_BYTES)]
    media_type: str = ""
    urls: Sequence[str] | None = None


class Manifest(Struct, frozen=True):
    """One image for one platform."""

    data: bytes
    config: Descriptor
    layers: tuple[Descriptor, ...]


def read_manifest(data: bytes, media_type: str, where: str) -> Manifest | Mapping[str, object]:
    """Parse a manifest, or an index, which is returned as it is for `choose`. `media_type` is the response's content
    type, or empty. Raises `CorruptError`, and `PermanentError` for what cannot be converted."""
    value = parse_object(data, f"{where}: the manifest", MAX_MANIFEST_BYTES)
    type_name = str(value.get("mediaType") or media_type)
    if value.get("schemaVersion") == 1 or type_name.startswith(_SCHEMA_1):
        raise PermanentError(f"{where}: manifest schema 1 is not supported; push the image again with a current tool")
    if type_name in _INDEXES or ("manifests" in value and "layers" not in value):
        return value
    config, rows = value.get("config"), value.get("layers")
    if not isinstance(config, dict) or not isinstance(rows, list):
        raise PermanentError(f"{where}: not an image: its manifest has no configuration or no layers")
    if not 1 <= len(rows) < MAX_LAYERS:
        raise PermanentError(f"{where}: {len(rows)} layers; 1 to {MAX_LAYERS - 1} can be mounted")
    found = convert(config, Descriptor, f"{where}: the configuration")
    if found.size_bytes > MAX_CONFIG_BYTES or (found.media_type and found.media_type not in _CONFIGS):
        kind = f"the type {found.media_type} and {found.size_bytes} bytes"
        raise PermanentError(f"{where}: not an image: its configuration has {kind}")
    return Manifest(data, found, tuple(_layer(row, f"{where}: layer {number}") for number, row in enumerate(rows, 1)))


def choose(index: Mapping[str, object], platform: Platform, where: str) -> Descriptor:
    """The index's manifest for a platform. Raises `PermanentError` with the available platforms, and `CorruptError`."""
    rows = index.get("manifests")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise CorruptError(f"{where}: the index has no list of manifests")
    offered = []
    fitting = []
    for row in rows:
        listed = row.get("platform")
        if not isinstance(listed, dict):
            if len(rows) == 1:
                return convert(row, Descriptor, where)
            continue
        found = Platform(str(listed.get("os")), str(listed.get("architecture")), str(listed.get("variant") or ""))
        offered.append(found)
        if (found.os, found.architecture) == (platform.os, platform.architecture) and (
            not platform.variant or found.variant in {"", platform.variant}
        ):
            fitting.append(((found.variant != platform.variant, found.variant), row))
    if fitting:  # the same variant, or the lowest: what is built for amd64/v3 does not run on every amd64
        return convert(min(fitting, key=operator.itemgetter(0))[1], Descriptor, where)
    # BuildKit lists attestations as manifests for the platform unknown/unknown.
    known = ", ".join(sorted({str(one) for one in offered if one.os != "unknown"})) or "none"
    raise PermanentError(f"{where}: no image for {platform}; available: {known}")


def resolve_manifest(
    read: Callable[[str], tuple[bytes, str, str]], first: str, platform: Platform, where: str
) -> tuple[Manifest, str]:
    """The manifest for a platform and its digest. `first`, a tag or digest, may name the manifest itself or an index.

    `read` returns a document's bytes, media type and digest. Raises `CorruptError` and `PermanentError`.
    """
    data, media_type, digest = read(first)
    found = read_manifest(data, media_type, where)
    if not isinstance(found, Manifest):
        chosen = choose(found, platform, where)
        data, media_type, digest = read(chosen.digest)
        found = read_manifest(data, media_type, where)
    if not isinstance(found, Manifest):
        raise PermanentError(f"{where}: nested indexes are not supported")
    return found, digest


def checked(data: bytes, descriptor: Descriptor, where: str) -> bytes:
    """Return `data`. Raises `CorruptError` if it does not match the descriptor's size and digest."""
    if len(data) != descriptor.size_bytes or "sha256:" + hashlib.sha256(data).hexdigest() != descriptor.digest:
        raise CorruptError(f"{where}: the bytes do not have the digest {descriptor.digest}")
    return data


def read_diff_ids(config: Mapping[str, object], layers: int | None, where: str) -> tuple[str, ...]:
    """The configuration's digests of the uncompressed layers, bottom first. Raises `CorruptError` if it does not have
    exactly `layers` (None: any number) valid ones."""
    rootfs = config.get("rootfs")
    found = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(found, list) or len(found) != (len(found) if layers is None else layers):
        raise CorruptError(f"{where}: the configuration does not name the {layers or ''} layers of the manifest")
    for diff_id in found:
        if not isinstance(diff_id, str) or not is_content_name(diff_id):
            raise CorruptError(f"{where}: the configuration has a diff_id that is not a sha256 digest")
    return tuple(found)


def read_config(data: bytes, where: str) -> dict[str, object]:
    """Parse an image's configuration. Raises `CorruptError`."""
    return parse_object(data, f"{where}: the configuration", MAX_CONFIG_BYTES)


def archive_digest(config: bytes, diff_ids: Sequence[str]) -> str:
    """The digest of an image without a manifest: equal for the same image in all archives."""
    return _digest_of({"config": f"sha256:{hashlib.sha256(config).hexdigest()}", "diff_ids": list(diff_ids)})


def folder_digest(config: Mapping[str, object], identity: str) -> str:
    """The digest of an image that was converted from a folder. `identity` is the resulting block file's."""
    return _digest_of({"config": config, "identity": identity})


def check_document(document: ImageDocument) -> None:
    """Raise `CorruptError` unless a document's configuration and list of layers match its image digest.

    This does not verify that a block file holds the content of its layer: only a signature does. A folder's digest
    covers its block file.
    """
    where = f"image document of {document.digest}"
    config = document.config
    listed = [(layer.source_digest, layer.diff_id) for layer in document.layers]
    if document.manifest:
        found = read_manifest(document.manifest, "", where)
        digest = f"sha256:{hashlib.sha256(document.manifest).hexdigest()}"
        if not isinstance(found, Manifest):
            raise CorruptError(f"{where}: its manifest is an index")
        checked(document.config_data, found.config, f"{where}: the configuration")
        diff_ids = read_diff_ids(config, len(found.layers), where)
        expected = [(layer.digest, diff_id) for layer, diff_id in zip(found.layers, diff_ids, strict=True)]
    elif listed == [("", "")]:
        digest = folder_digest(config, document.layers[0].file.identity)
        expected = listed
    else:
        diff_ids = read_diff_ids(config, None, where)
        digest = archive_digest(document.config_data, diff_ids)
        expected = [("", diff_id) for diff_id in diff_ids]
    if digest != document.digest:
        raise CorruptError(f"{where}: it describes another image, {digest}")
    # The list may differ from the image's in two ways (see `convert._assemble`): a layer for the root directory alone
    # may be added on top, and the layers below an opaque one are left out.
    if len(listed) > 1 and listed[-1] == ("", ""):
        listed.pop()
    if listed != expected[-len(listed) :]:
        raise CorruptError(f"{where}: its layers are those of another image")


def _digest_of(value: object) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _layer(row: object, where: str) -> Descriptor:
    layer = convert(row, Descriptor, where)
    kind = layer.media_type
    if "foreign" in kind or "nondistributable" in kind or layer.urls:
        raise PermanentError(f"{where}: layers outside the registry cannot be converted ({kind})")
    if "encrypted" in kind:
        raise PermanentError(f"{where}: encrypted ({kind}); decrypt the image first")
    if kind and not kind.startswith(_LAYERS):
        raise PermanentError(f"{where}: {kind} is not a file system layer")
    return layer

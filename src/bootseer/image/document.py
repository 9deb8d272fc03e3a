"""The document of a converted image: its manifest, its configuration and the block files of its layers.

A store keeps it under `images/sha256-<hex>`, the digest of the image's manifest, so that users keep their image names:
what resolves a name to a manifest finds the converted image. The bytes depend on the source alone. Manifest and
configuration are kept to the byte, so that both can be compared with the digest wherever the document is read
(`sources.manifest.check_document`). The format is written down in docs/formats/image.md. Decides and touches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from bootseer.artifact.document import convert, encode, parse_object
from bootseer.blocks.block_file import BlockFile
from bootseer.errors import CorruptError, PermanentError
from bootseer.store.store import Stored

SCHEMA = "bootseer.image/2"
MAX_DOCUMENT_BYTES = 16 << 20
MAX_CONFIG_BYTES = 4 << 20
MAX_LAYERS = 500  # what overlayfs mounts at once


@dataclass(frozen=True, slots=True)
class LayerFile:
    """A layer as an EROFS image in blocks.

    Digests are of the layer as the image's manifest and configuration name it; empty for a layer that was made from
    something else: a folder, or the attributes of the root directory.
    """

    source_digest: Annotated[str, Meta(pattern=r"\A(sha256:[0-9a-f]{64})?\Z")]
    diff_id: Annotated[str, Meta(pattern=r"\A(sha256:[0-9a-f]{64})?\Z")]
    file: BlockFile


@dataclass(frozen=True, slots=True)
class ImageDocument:
    """A converted image."""

    digest: Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]
    manifest: bytes
    """As the source has it; empty for an image that has none: of an archive or a folder."""
    config_data: bytes
    """The OCI image configuration, as the source has it."""
    layers: Annotated[tuple[LayerFile, ...], Meta(min_length=1, max_length=MAX_LAYERS)]
    """Bottom first."""

    @property
    def config(self) -> Mapping[str, object]:
        """The OCI image configuration. Raises `CorruptError`."""
        return parse_object(self.config_data, f"the configuration of {self.digest}", MAX_CONFIG_BYTES)

    @property
    def name(self) -> str:
        """What the document is called in a store."""
        return document_name(self.digest)

    @property
    def objects(self) -> tuple[Stored, ...]:
        """All objects of the store that the image needs, each once."""
        return tuple(dict.fromkeys(stored for layer in self.layers for stored in layer.file.objects))

    @property
    def size_bytes(self) -> int:
        """Bytes of all layers, uncompressed."""
        return sum(layer.file.size_bytes for layer in self.layers)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all layers as the store keeps them."""
        return sum(layer.file.stored_bytes for layer in self.layers)

    def encode(self) -> bytes:
        """JSON; the same image gives the same bytes."""
        texts = {"manifest": self.manifest, "config": self.config_data}
        value = {
            **{name: data.decode("utf-8", "surrogateescape") for name, data in texts.items()},
            "digest": self.digest,
            "layers": self.layers,
        }
        data = encode(value, SCHEMA)
        if len(data) > MAX_DOCUMENT_BYTES:
            raise PermanentError(f"image {self.digest}: its document would have {len(data)} bytes, too many to read")
        return data

    @classmethod
    def parse(cls, data: bytes) -> ImageDocument:
        """Read a document. Raises `CorruptError`, or `PermanentError` for one of another version."""
        value = parse_object(data, "image document", MAX_DOCUMENT_BYTES)
        if value.get("schema") != SCHEMA:
            raise PermanentError(
                f"image document: schema {value.get('schema')!r}, this BootSeer reads {SCHEMA}; convert the image again"
            )
        try:
            texts = {name: value[name].encode("utf-8", "surrogateescape") for name in ("manifest", "config")}
        except (KeyError, AttributeError, UnicodeEncodeError) as error:
            raise CorruptError("image document: manifest or configuration is not text") from error
        return convert({**value, "manifest": texts["manifest"], "config_data": texts["config"]}, cls, "image document")


def document_name(digest: str) -> str:
    """Where a store keeps the document of the image with this manifest digest (`sha256:…`)."""
    return "images/" + digest.replace(":", "-")

"""The document of a converted image: its manifest, its configuration and the block files of its layers.

A store keeps it under `images/sha256-<hex>`, the digest of the image's manifest, so that image names need not change:
a registry resolves a name to that digest. The document's bytes depend on the source alone. Manifest and configuration
are kept as exact bytes, so that every reader can verify them against the digest (`sources.manifest.check_document`).
The format is described in docs/formats/image.md. No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from bootseer.artifact.document import OtherVersionError, convert, encode, readable
from bootseer.blocks.block_file import BlockFile
from bootseer.errors import CorruptError, PermanentError
from bootseer.store.store import Stored, parse_object

SCHEMA = "bootseer.image/2"
MAX_DOCUMENT_BYTES = 16 << 20
MAX_CONFIG_BYTES = 4 << 20
MAX_LAYERS = 500  # overlayfs's limit


class LayerFile(Struct, frozen=True):
    """A layer as an EROFS image in a block file.

    `source_digest` and `diff_id` are the layer's digests in the image's manifest and configuration. Both are empty for
    a layer that was made from a folder or from the attributes of the root directory.
    """

    source_digest: Annotated[str, Meta(pattern=r"\A(sha256:[0-9a-f]{64})?\Z")]
    diff_id: Annotated[str, Meta(pattern=r"\A(sha256:[0-9a-f]{64})?\Z")]
    file: BlockFile


@readable
class ImageDocument(Struct, frozen=True):
    """A converted image."""

    digest: Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]
    manifest: bytes
    """The source's exact bytes; empty for an image from an archive or a folder, which has no manifest."""
    config_data: bytes
    """The OCI image configuration, the source's exact bytes."""
    layers: Annotated[tuple[LayerFile, ...], Meta(min_length=1, max_length=MAX_LAYERS)]
    """Bottom first."""

    @property
    def config(self) -> Mapping[str, object]:
        """The OCI image configuration. Raises `CorruptError`."""
        return parse_object(self.config_data, f"the configuration of {self.digest}", MAX_CONFIG_BYTES)

    @property
    def name(self) -> str:
        return document_name(self.digest)

    @property
    def objects(self) -> tuple[Stored, ...]:
        """All objects of the store that the image needs, each once."""
        return tuple(dict.fromkeys(stored for layer in self.layers for stored in layer.file.objects))

    @property
    def size_bytes(self) -> int:
        """Size of all layers' EROFS images, uncompressed."""
        return sum(layer.file.size_bytes for layer in self.layers)

    @property
    def stored_bytes(self) -> int:
        """Size of all layers in the store."""
        return sum(layer.file.stored_bytes for layer in self.layers)

    def encode(self) -> bytes:
        """Encode as JSON; equal images give equal bytes. Raises `PermanentError` if the result is too large."""
        texts = {"manifest": self.manifest, "config": self.config_data}
        value = {
            **{name: data.decode("utf-8", "surrogateescape") for name, data in texts.items()},
            "digest": self.digest,
            "layers": self.layers,
        }
        data = encode(value, SCHEMA)
        if len(data) > MAX_DOCUMENT_BYTES:
            raise PermanentError(f"image {self.digest}: its document has {len(data)} bytes, over {MAX_DOCUMENT_BYTES}")
        return data

    @classmethod
    def parse(cls, data: bytes) -> ImageDocument:
        """Parse a document. Raises `CorruptError`, or `OtherVersionError`."""
        value = parse_object(data, "image document", MAX_DOCUMENT_BYTES)
        if value.get("schema") != SCHEMA:
            raise OtherVersionError(
                f"image document: schema {value.get('schema')!r}, this BootSeer reads {SCHEMA}; convert the image again"
            )
        try:
            texts = {name: value[name].encode("utf-8", "surrogateescape") for name in ("manifest", "config")}
        except (KeyError, AttributeError, UnicodeEncodeError) as error:
            raise CorruptError("image document: manifest or configuration is not text") from error
        return convert({**value, "manifest": texts["manifest"], "config_data": texts["config"]}, cls, "image document")


def document_name(digest: str) -> str:
    """The name in a store of the document for this manifest digest (`sha256:…`)."""
    return "images/" + digest.replace(":", "-")

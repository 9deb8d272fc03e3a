"""Documents of converted layers in a store, so that each layer is converted once.

A document's name is a hash of the layer's digest and the conversion's options, so that images with the same layer find
the same document. A layer whose result depends on the layers below has a document for each stack of them. No I/O; the
format is described in docs/formats/image.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from msgspec import Struct

from bootseer.artifact import document
from bootseer.blocks.block_file import BlockFile
from bootseer.erofs.format import Attributes
from bootseer.errors import CorruptError
from bootseer.store.store import parse_object

SCHEMA = "bootseer.layer/1"
RULES = 2
"""Version of the conversion: incremented whenever `erofs`, `layer_tree` etc. would convert a layer to other bytes."""
MAX_BYTES = 4 << 20
_WHAT = "layer document"
_NUMBERS = ("mode", "uid", "gid", "mtime_ns")


@document.readable
class ConvertedLayer(Struct, frozen=True):
    """A converted layer: its block file, and what assembling the image needs."""

    file: BlockFile
    root: Attributes | None
    opaque: bool


def layer_name(diff_id: str, *, block_size: int, level: int, below: str = "") -> str:
    """The name of a layer's document. `below` is the digest of the layers below (`stack_digest`), empty for a layer
    whose result does not depend on them."""
    value = json.dumps([RULES, diff_id, block_size, level, below])
    return "layers/" + hashlib.sha256(value.encode()).hexdigest()


def stack_digest(diff_ids: Sequence[str]) -> str:
    """The digest of a stack of layers, bottom first. Never empty, also for no layers."""
    return hashlib.sha256(" ".join(diff_ids).encode()).hexdigest()


def encode(layer: ConvertedLayer) -> bytes:
    root = None
    if layer.root is not None:
        root = {name: getattr(layer.root, name) for name in _NUMBERS}
        root["xattrs"] = {name.hex(): value.hex() for name, value in layer.root.xattrs.items()}
    return document.encode({"file": layer.file, "root": root, "opaque": layer.opaque}, SCHEMA)


def parse(data: bytes) -> ConvertedLayer:
    """Raises `CorruptError`, also for the lists of questions to lower layers that earlier versions stored."""
    value = parse_object(data, _WHAT, MAX_BYTES)
    if value.get("schema") != SCHEMA:
        raise CorruptError(f"{_WHAT}: schema {value.get('schema')!r}, {SCHEMA} expected")
    try:
        root = value.get("root")
        if isinstance(root, dict):
            xattrs = {bytes.fromhex(name): bytes.fromhex(content) for name, content in root["xattrs"].items()}
            root = {**{name: root[name] for name in _NUMBERS}, "xattrs": xattrs}
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CorruptError(f"{_WHAT}: {error}") from error
    found = {"file": value.get("file"), "root": root, "opaque": value.get("opaque") is True}
    return document.convert(found, ConvertedLayer, _WHAT)

"""What a store remembers of a converted layer, so that it is converted once.

The name of the document says what the layer was and how it was converted; two images with the same layer find the same
document. A layer that asks the layers below it has two: one under its plain name with the questions, and one for each
set of answers with the result. Decides and touches nothing; docs/formats/image.md describes the format.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from bootseer.artifact import document
from bootseer.blocks.block_file import BlockFile
from bootseer.erofs.format import Attributes
from bootseer.errors import CorruptError

SCHEMA = "bootseer.layer/1"
RULES = 1
"""Raised whenever the same layer would become other bytes: `erofs`, `layer_tree` and the like."""
MAX_BYTES = 4 << 20
_WHAT = "layer document"
_NUMBERS = ("mode", "uid", "gid", "mtime_ns")
MAX_QUESTIONS = 10_000
"""A layer with more is converted again each time; its document would be too large to read first."""


@dataclass(frozen=True, slots=True)
class ConvertedLayer:
    """The image of a layer, and what the image as a whole needs to know of it."""

    file: BlockFile
    root: Attributes | None
    opaque: bool


Questions = tuple[tuple[bytes, ...], ...]
"""Paths in the layers below, each as its names."""


def layer_name(diff_id: str, *, block_size: int, level: int, answers: str = "") -> str:
    """The name of a layer's document. `answers` is their digest, empty for the plain name."""
    value = json.dumps([RULES, diff_id, block_size, level, answers])
    return "layers/" + hashlib.sha256(value.encode()).hexdigest()


def encode(layer: ConvertedLayer | Questions) -> bytes:
    """The document."""
    if not isinstance(layer, ConvertedLayer):
        return document.encode({"questions": [[name.hex() for name in path] for path in layer]}, SCHEMA)
    root = None
    if layer.root is not None:
        root = {name: getattr(layer.root, name) for name in _NUMBERS}
        root["xattrs"] = {name.hex(): value.hex() for name, value in layer.root.xattrs.items()}
    return document.encode({"file": layer.file, "root": root, "opaque": layer.opaque}, SCHEMA)


def parse(data: bytes) -> ConvertedLayer | Questions:
    """Read a document. Raises `CorruptError`."""
    value = document.parse_object(data, _WHAT, MAX_BYTES)
    if value.get("schema") != SCHEMA:
        raise CorruptError(f"{_WHAT}: schema {value.get('schema')!r}, {SCHEMA} expected")
    try:
        questions, root = value.get("questions"), value.get("root")
        if isinstance(questions, list):
            return tuple(tuple(bytes.fromhex(name) for name in path) for path in questions[:MAX_QUESTIONS])
        if isinstance(root, dict):
            xattrs = {bytes.fromhex(name): bytes.fromhex(content) for name, content in root["xattrs"].items()}
            root = {**{name: root[name] for name in _NUMBERS}, "xattrs": xattrs}
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CorruptError(f"{_WHAT}: {error}") from error
    found = {"file": value.get("file"), "root": root, "opaque": value.get("opaque") is True}
    return document.convert(found, ConvertedLayer, _WHAT)

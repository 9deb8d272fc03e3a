"""What a store remembers of a converted layer, so that it is converted once.

The name of the document says what the layer was and how it was converted; two images with the same layer find the same
document. A layer that asks the layers below it has two: one under its plain name with the questions, and one for each
set of answers with the result. Decides and touches nothing; docs/formats/image.md describes the format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from bootseer.artifact.document import parse_object
from bootseer.blocks.block_file import BlockFile
from bootseer.erofs.format import Attributes
from bootseer.errors import CorruptError

SCHEMA = "bootseer.layer/1"
RULES = 1
"""Raised whenever the same layer would become other bytes: `erofs`, `layer_tree` and the like."""
MAX_BYTES = 4 << 20
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
    value: dict[str, object] = {"schema": SCHEMA}
    if isinstance(layer, ConvertedLayer):
        root = _root_as_json(layer.root) if layer.root is not None else None
        value |= {"file": layer.file.as_json(), "root": root, "opaque": layer.opaque}
    else:
        value["questions"] = [[name.hex() for name in path] for path in layer]
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def parse(data: bytes) -> ConvertedLayer | Questions:
    """Read a document. Raises `CorruptError`."""
    value = parse_object(data, "layer document", MAX_BYTES)
    try:
        if value.get("schema") != SCHEMA:
            raise CorruptError(f"layer document: schema {value.get('schema')!r}, {SCHEMA} expected")
        questions = value.get("questions")
        if isinstance(questions, list):
            return tuple(tuple(bytes.fromhex(name) for name in path) for path in questions[:MAX_QUESTIONS])
        root = value.get("root")
        return ConvertedLayer(
            BlockFile.from_json(value.get("file")),
            _root_from_json(root) if isinstance(root, dict) else None,
            value.get("opaque") is True,
        )
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CorruptError(f"layer document: {error}") from error


def _root_as_json(root: Attributes) -> dict[str, object]:
    return {
        "mode": root.mode,
        "uid": root.uid,
        "gid": root.gid,
        "mtime_ns": root.mtime_ns,
        "xattrs": {name.hex(): value.hex() for name, value in root.xattrs.items()},
    }


def _root_from_json(value: Mapping[str, object]) -> Attributes:
    numbers = [value[key] for key in ("mode", "uid", "gid", "mtime_ns")]
    xattrs = value["xattrs"]
    if not all(type(number) is int for number in numbers) or not isinstance(xattrs, dict):
        raise CorruptError("layer document: the root directory's attributes are not numbers")
    mode, uid, gid, mtime_ns = (int(str(number)) for number in numbers)
    found = {bytes.fromhex(name): bytes.fromhex(content) for name, content in xattrs.items()}
    return Attributes(mode, uid, gid, mtime_ns, xattrs=found)

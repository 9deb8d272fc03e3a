"""Documents of images and of layers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.artifact.document import OtherVersionError
from bootseer.blocks.block_file import BlockFile
from bootseer.erofs.format import Attributes
from bootseer.errors import CorruptError
from bootseer.image.conversion import layer_document
from bootseer.image.conversion.layer_document import ConvertedLayer, layer_name
from bootseer.image.document import ImageDocument, LayerFile, document_name
from bootseer.store.store import Stored

NAME = "sha256:" + "ab" * 32
FILE = BlockFile(NAME, 149, "cd" * 32, 8192, 100, (Stored(NAME, 100),))
FILE_JSON = msgspec.json.decode(msgspec.json.encode(FILE))
CONFIG = b'{"os": "linux", "rootfs": {"diff_ids": ["%s"]}, "\xff": 1}' % NAME.encode()
DOCUMENT = ImageDocument(NAME, b'{"a": "\xc3\xa4"}\n', CONFIG, (LayerFile(NAME, NAME, FILE), LayerFile("", "", FILE)))


def test_a_document_is_read_as_it_was_written() -> None:
    assert ImageDocument.parse(DOCUMENT.encode()) == DOCUMENT
    assert DOCUMENT.name == document_name(NAME) == "images/sha256-" + "ab" * 32


def test_objects_are_named_once() -> None:
    assert [stored.size_bytes for stored in DOCUMENT.objects] == [149, 100]
    assert (DOCUMENT.size_bytes, DOCUMENT.stored_bytes) == (16384, 200)


def _changed(**changes: Any) -> bytes:
    return json.dumps({**json.loads(DOCUMENT.encode()), **changes}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{" * 100_000,
        b"\xff",
        _changed(digest="sha256:x"),
        _changed(digest=None),
        _changed(config=[]),
        _changed(config="\ud800"),
        _changed(manifest=None),
        _changed(layers=[]),
        _changed(layers=[1]),
        _changed(layers=[{}]),
        _changed(layers=[{"source_digest": "x", "diff_id": "", "file": FILE_JSON}]),
        _changed(layers=[{"source_digest": "", "diff_id": "", "file": {}}]),
        _changed(layers=[{"source_digest": "", "diff_id": "", "file": FILE_JSON}] * 501),
        _changed(config="x" * (17 << 20)),
    ],
)
def test_a_damaged_document_is_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        ImageDocument.parse(data)


def test_a_document_of_another_version_says_so() -> None:
    with pytest.raises(OtherVersionError, match=r"image/1.*convert the image again"):
        ImageDocument.parse(_changed(schema="bootseer.image/1"))


ROOT = Attributes(0o40711, 1, 2, -3, xattrs={b"user.\xff": b"\0"})


@pytest.mark.parametrize("root", [None, ROOT])
def test_a_layer_document_is_read_as_it_was_written(root: Attributes | None) -> None:
    layer = ConvertedLayer(FILE, root, opaque=root is None)
    assert layer_document.parse(layer_document.encode(layer)) == layer


@given(st.recursive(st.none() | st.integers() | st.text(max_size=4), lambda inner: st.lists(inner, max_size=3)))
def test_any_layer_document_is_read_or_corrupt(value: object) -> None:
    for key in ("root", "file"):
        document = {"schema": layer_document.SCHEMA, "file": FILE_JSON, key: value}
        try:
            layer_document.parse(json.dumps(document).encode())
        except CorruptError:
            continue


def test_the_name_of_a_layer_tells_everything_apart_that_makes_other_bytes() -> None:
    names = {
        layer_name(diff_id, block_size=size, level=level, below=below)
        for diff_id in (NAME, "sha256:" + "00" * 32)
        for size in (4096, 8192)
        for level in (1, 3)
        for below in ("", "x")
    }
    assert len(names) == 16

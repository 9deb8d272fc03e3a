"""Images written to a folder, as root and as an ordinary user."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.artifact.unpacked import unpack
from bootseer.erofs.format import BLOCK, Attributes
from bootseer.erofs.merged import Layer, MergedLayers
from bootseer.erofs.reader import ErofsReader
from bootseer.erofs.writer import ROOT, ErofsWriter
from bootseer.errors import CorruptError
from bootseer.image.conversion.convert import convert
from bootseer.image.reference import parse_reference
from bootseer.image.sources.source import open_source
from bootseer.store.open import open_store
from erofs_images import needs_root
from oci_images import device, directory, file, hard_link, layer, symlink, write_layout

LAYERS = [
    layer(
        directory("./"),
        directory("d", mode=0o500),
        file("d/f", b"content", uid=77, mode=0o4755, xattrs={"user.a": b"1", "trusted.b": b"2"}),
        hard_link("hard", "d/f"),
        device("null", 1, 3),
        hard_link("null2", "null"),
        symlink("link", "/outside/the/root"),
        file("sparse", bytes(8 << 20)),
    )
]

_AS_NOBODY = """
import os, sys
from pathlib import Path
import bootseer.store.file
from bootseer.image.document import ImageDocument
from bootseer.image.conversion.convert import open_layer
from bootseer.erofs.merged import Layer, MergedLayers
from bootseer.artifact.unpacked import unpack
from bootseer.store.open import open_store
os.setgroups([]); os.setgid(65534); os.setuid(65534)  # after the imports: `nobody` may not be able to read them
store = open_store(sys.argv[1])
document = ImageDocument.parse(b"".join(store.read(sys.argv[2])))
layers = [Layer(open_layer(store, layer.file), layer.file.identity) for layer in document.layers]
unpack(MergedLayers(layers), Path(sys.argv[3]))
"""


@needs_root
@pytest.mark.root
def test_an_ordinary_user_gets_the_files_without_their_owners(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    write_layout(tmp_path / "layout", LAYERS)
    store = open_store(str(tmp_path / "store"))
    document = convert(open_source(parse_reference(f"oci:{tmp_path}/layout")), store)
    subprocess.run(["chmod", "-R", "a+rX", tmp_path / "store"], check=True)
    (tmp_path / "out").mkdir()
    os.chown(tmp_path / "out", 65534, 65534)
    command = [sys.executable, "-c", _AS_NOBODY, store.uri, document.name, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    status = (tmp_path / "out" / "d" / "f").stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode), status.st_nlink) == (65534, 0o4755, 2)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["d", "hard", "link", "sparse"]
    assert os.listxattr(tmp_path / "out" / "hard") == ["user.a"]
    assert (tmp_path / "out" / "sparse").stat().st_blocks == 0


def test_a_directory_with_two_names_is_corrupt(tmp_path: Path) -> None:
    parts: list[bytes] = []

    class Sink:
        def write(self, data: bytes | memoryview) -> None:
            parts.append(bytes(data))

    writer = ErofsWriter(Sink())
    twice = writer.tree.add(Attributes(stat.S_IFDIR | 0o755))
    writer.tree.link(ROOT, b"a", twice)
    writer.tree.link(ROOT, b"b", twice)
    head = writer.finish()
    image = head + b"".join(parts)
    assert len(head) == BLOCK
    reader = ErofsReader(lambda offset, length: image[offset : offset + length])
    with pytest.raises(CorruptError, match="two names"):
        unpack(MergedLayers([Layer(reader, "x")]), tmp_path / "out")

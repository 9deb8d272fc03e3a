"""Read the content of stores: the tree of an image, and all bytes of environments, to check them for secrets."""

from __future__ import annotations

from pathlib import Path

import zstandard

from bootseer.artifact.objects import read_all, read_index
from bootseer.env.document import EnvironmentDocument
from bootseer.erofs.merged import Layer, MergedLayers
from bootseer.image.conversion.convert import block_reader, open_layer
from bootseer.image.document import ImageDocument
from bootseer.store.file import FileStore
from bootseer.store.store import Store


def stored(folder: Path) -> bytes:
    """All files of the store, and the decompressed blocks and manifests of all snapshots."""
    found = [path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()]
    store = FileStore(folder)
    for path in folder.glob("environments/*/document"):
        document = EnvironmentDocument.parse(path.read_bytes())
        read = block_reader(store, read_index(store, document.file))
        found.append(read(0, document.file.size_bytes))
        for manifest in filter(None, (document.manifest, document.loose)):
            packed = read_all(store, manifest.name, manifest.size_bytes)
            found.append(zstandard.ZstdDecompressor().decompressobj().decompress(packed))
    return b"\n".join(found)


def open_merged(document: ImageDocument, store: Store) -> MergedLayers:
    """The tree of an image, read from a store on demand."""
    return MergedLayers([Layer(open_layer(store, layer.file), layer.file.identity) for layer in document.layers])

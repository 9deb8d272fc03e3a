"""All that a store of environments holds, as one may read it: for tests that look for what must not be there."""

from __future__ import annotations

from pathlib import Path

import zstandard

from bootseer.blocks.block_file import read_index
from bootseer.env.document import EnvironmentDocument
from bootseer.image.block_reader import BlockReader
from bootseer.store.file import FileStore
from bootseer.store.retry import read_all


def stored(folder: Path) -> bytes:
    """Each file of the store as it is, and what each snapshot's blocks and manifests are when they are decompressed."""
    found = [path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()]
    store = FileStore(folder)
    for path in folder.glob("environments/*/document"):
        document = EnvironmentDocument.parse(path.read_bytes())
        blocks = BlockReader(store, read_index(store, document.file))
        found.append(blocks.read(0, document.file.size_bytes))
        for manifest in filter(None, (document.manifest, document.loose)):
            packed = read_all(store, manifest.name, manifest.size_bytes)
            found.append(zstandard.ZstdDecompressor().decompressobj().decompress(packed))
    return b"\n".join(found)

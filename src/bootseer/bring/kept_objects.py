"""Small objects of a store that are kept on this node, so that it starts again what it has when the store is away.

Called by `image.mounting.metadata` and `env.restoring.layer`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bootseer.blocks.block_file import BlockFile, read_index
from bootseer.blocks.index import Index
from bootseer.errors import BootseerError
from bootseer.store.file import FileStore
from bootseer.store.retry import retrying
from bootseer.store.store import Store


class KeptObjects:
    """What is kept in `folder`, which is made when something is; a full disk costs the copy alone, and a line."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.store = FileStore(folder)
        self._say = say

    def index(self, file: BlockFile, origin: Store) -> Index:
        """The index of a block file, which is fetched from `origin` where it is not here. Raises as `read_index`."""
        try:
            return read_index(self.store, file)
        except BootseerError:
            index = retrying(lambda left_s: read_index(origin, file, timeout_s=left_s))
        self.keep(file.index_name, index.encode())
        return index

    def keep(self, name: str, data: bytes) -> None:
        """Keep an object that never changes, or the newest form of one."""
        try:
            upload = self.store.upload()
            try:
                upload.write(data)
                upload.commit(name)
            finally:
                upload.abort()
        except BootseerError as error:
            self._say(f"not kept on this node: {error}")

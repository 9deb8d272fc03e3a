"""Small objects of stores: written with retries, looked for, and kept on this node.

What is kept lets a node start again what it has while the store is away; a full disk costs the copy alone, and a line.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bootseer.artifact.progress import Say
from bootseer.blocks.block_file import BlockFile, read_index
from bootseer.blocks.index import Index
from bootseer.errors import BootseerError, NotFoundError
from bootseer.io.tasks import Tasks
from bootseer.store.file import FileStore
from bootseer.store.retry import retrying
from bootseer.store.store import Store, Stored

WRITE_S = 60.0
_THREADS = 8


def put(store: Store, name: str, data: bytes, refs: Iterable[Stored] = (), *, timeout_s: float = WRITE_S) -> None:
    """Write a small object, in place of one that may be there, with retries."""
    refs = tuple(refs)
    retrying(lambda left_s: put_once(store, name, data, refs), deadline_s=timeout_s)


def put_once(
    store: Store, name: str, data: bytes, refs: tuple[Stored, ...] = (), *, subject: str | None = None
) -> None:
    """The same in one attempt. `subject`: see `Upload.commit`."""
    upload = store.upload()
    try:
        upload.write(data)
        upload.commit(name, refs=refs, subject=subject)
    finally:
        upload.abort()  # after a commit it does nothing


def missing(store: Store, objects: Iterable[Stored]) -> list[Stored]:
    """Those that the store does not have, or not in this size."""
    wanted = list(dict.fromkeys(objects))

    def is_missing(stored: Stored) -> bool:
        try:
            return retrying(lambda left_s: store.stat(stored.name)).size_bytes != stored.size_bytes
        except NotFoundError:
            return True

    with Tasks("bootseer-objects", min(_THREADS, len(wanted) or 1)) as pool:
        return [stored for stored, gone in zip(wanted, pool.map(is_missing, wanted), strict=True) if gone]


class LocalObjects:
    """What is kept in `folder`, which is made when something is."""

    def __init__(self, folder: Path, say: Say) -> None:
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
            put_once(self.store, name, data)
        except BootseerError as error:
            self._say(f"not kept on this node: {error}")

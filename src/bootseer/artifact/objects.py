"""Small objects of stores: read and written with retries, and copied to this node.

Local copies let a node start again while the store is unavailable; if the disk is full, copying is skipped with a line.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bootseer.artifact.places import own_folder
from bootseer.artifact.progress import Say
from bootseer.blocks.block_file import MAX_READ_BYTES, BlockFile, parse_index
from bootseer.blocks.index import Index
from bootseer.errors import BootseerError, CorruptError, NotFoundError, PermanentError, os_errors_as
from bootseer.io.files import replace_file
from bootseer.io.retry import retrying
from bootseer.io.tasks import Tasks
from bootseer.store.file import FileStore
from bootseer.store.store import Store, Stored, check_name, content_path, is_content_name

if TYPE_CHECKING:
    from bootseer.peers.shared_objects import OfferedObject

WRITE_S = 60.0
_THREADS = 8


def read_all(store: Store, name: str, max_bytes: int, timeout_s: float = 60.0) -> bytes:
    """A whole small object, with retries until `timeout_s`; objects named by content are verified.

    Raises `CorruptError` when it is larger than `max_bytes`, or its bytes do not match its name.
    """

    def read(left_s: float) -> bytes:
        data = bytearray()
        with contextlib.closing(store.read(name, timeout_s=left_s)) as pieces:
            for piece in pieces:
                data += piece
                if len(data) > max_bytes:
                    raise CorruptError(f"{store.uri}: {name} is larger than {max_bytes} bytes")
        return bytes(data)

    data = retrying(read, deadline_s=timeout_s)
    if is_content_name(name) and hashlib.sha256(data).hexdigest() != name.removeprefix("sha256:"):
        raise CorruptError(f"{store.uri}: the bytes of {name} are not those of its name")
    return data


def read_index(store: Store, file: BlockFile) -> Index:
    """The index of a block file. Raises as `read_all`, and `CorruptError` when it is not the referenced one."""
    return parse_index(read_all(store, *_of_index(file)), file, store.uri)


def _of_index(file: BlockFile) -> Stored:
    return Stored(file.index_name, min(file.index_bytes, MAX_READ_BYTES))


def put(
    store: Store,
    name: str,
    data: bytes,
    refs: Sequence[Stored] = (),
    *,
    subject: str | None = None,
    timeout_s: float = WRITE_S,
) -> None:
    """Write or replace a small object, with retries. `subject`: see `Upload.commit`."""
    retrying(lambda left_s: put_once(store, name, data, refs, subject=subject), deadline_s=timeout_s)


def put_once(
    store: Store, name: str | None, data: bytes, refs: Sequence[Stored] = (), *, subject: str | None = None
) -> Stored:
    """`put` with a single attempt. `name` None: it is named by its content."""
    upload = store.upload()
    try:
        upload.write(data)
        return upload.commit(name, refs=refs, subject=subject)
    finally:
        upload.abort()  # no effect after a commit


def missing(store: Store, objects: Iterable[Stored]) -> list[Stored]:
    """Those that the store lacks, or has with another size."""
    wanted = list(dict.fromkeys(objects))

    def is_missing(stored: Stored) -> bool:
        try:
            return retrying(lambda left_s: store.stat(stored.name)).size_bytes != stored.size_bytes
        except NotFoundError:
            return True

    with Tasks("bootseer-objects", min(_THREADS, len(wanted) or 1)) as pool:
        return [stored for stored, gone in zip(wanted, pool.map(is_missing, wanted), strict=True) if gone]


class LocalObjects:
    """Copies of objects in `folder`, which is created on demand."""

    def __init__(self, folder: Path, say: Say) -> None:
        self.store = FileStore(folder)
        self._folder = folder
        self._say = say
        self._refused = False

    def index(self, file: BlockFile, origin: Store) -> Index:
        """The index of a block file, read like `content`. Raises as `read_index`."""
        return parse_index(self.content(_of_index(file), origin), file, origin.uri)

    def content(self, stored: Stored, origin: Store, *, timeout_s: float = 60.0) -> bytes:
        """An object named by its content: from this node, else from another node of the job, else from `origin`.

        Raises the errors of `read_all`.
        """
        path = self._folder / content_path(stored.name)
        offered = offer(stored, path)
        with contextlib.suppress(BootseerError):
            copy = read_all(self.store, stored.name, stored.size_bytes)
            with contextlib.suppress(OSError):
                os.utime(path)  # copies are deleted when unused for long
            return copy
        try:
            data = offered.get(self._say) if offered is not None else None
            if data is None:
                data = read_all(origin, stored.name, stored.size_bytes, timeout_s)
            self.keep(stored.name, data)
        finally:
            if offered is not None and not offered.path.exists():
                offered.withdraw()
        return data

    def keep(self, name: str, data: bytes) -> None:
        """`write`, with the first error as a line: without the copies a start works."""
        try:
            self.write(name, data)
        except BootseerError as error:
            if not self._refused:  # an image of many layers would give the same line for each
                self._refused = True
                self._say(f"no copy was stored on this node: {error}")

    def write(self, name: str, data: bytes) -> None:
        """Store a copy of an immutable object, or replace a mutable one. Raises `BootseerError`.

        Not synced: a start would wait for the disk several times. What a crash of the machine damages is not used,
        because readers verify it, and is read from its store again.
        """
        path = self._folder / content_path(check_name(name))
        with os_errors_as(PermanentError, path):
            replace_file(own_folder(path.parent) / path.name, data)


def offer(stored: Stored, path: Path, growing: Path | None = None) -> OfferedObject | None:
    """Offer an object to the job's other nodes; None without peers. `growing` as of `OfferedObject`."""
    if not os.environ.get("BOOTSEER_PEERS_DIR"):
        return None
    # Imported here: most starts have no peers, and the import takes milliseconds.
    from bootseer.peers.shared_objects import OfferedObject

    return OfferedObject.of_environment(*stored, path, growing)

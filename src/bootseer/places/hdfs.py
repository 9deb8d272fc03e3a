"""A folder of HDFS as a `Place`.

Names, folders and writing go through `hdfs.client`; reads go straight to the DataNodes. Every call has a deadline. A
file that must appear whole is written under a hidden name in the same folder and renamed.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    IsFolderError,
    NotFolderError,
    NotFoundError,
    PermanentError,
)
from bootseer.hdfs.block_locations import FileStatus
from bootseer.hdfs.client import HdfsClient
from bootseer.io.retry import retrying
from bootseer.places.place import (
    SMALL_FILE_REPLICAS,
    TEMPORARY_PREFIX,
    Entry,
    OpenFile,
    PartWriter,
    Place,
    is_utf8,
    names_of,
)

_MIB = 1 << 20
_ATTEMPTS = 3
_CHECKSUM_BYTES = 512
"""Block sizes must be multiples of the bytes that one HDFS checksum covers."""


class HdfsPlace(Place):
    """A `Place` in the folder `root`, "/a/b" or "", of a file system."""

    def __init__(self, client: HdfsClient, root: str) -> None:
        self._client = client
        self._root = "/".join(["", *names_of(root.strip("/"))])
        self.uri = f"{client.uri}{self._root}"
        self._may_copy = True

    def name_problem(self, name: str) -> str:
        if ":" in name:
            return "HDFS does not allow a colon in names"
        return "" if is_utf8(name) else "names in HDFS are UTF-8"

    def stat(self, path: str) -> Entry:
        return self._entry(self._client.stat(self._full(path)))

    def list(self, path: str) -> Iterator[Entry]:
        full = self._full(path)
        found = list(self._client.list(full))
        if len(found) == 1 and found[0].path == full:
            raise NotFolderError(f"{self.uri_of(path)} is not a folder")
        return map(self._entry, found)

    def open(self, path: str, *, deadline_s: float = 60.0) -> OpenFile:
        return self._client.reads().open(self._full(path), deadline_s=deadline_s)

    def delay_s(self, nodes: Sequence[str], length: int) -> float:
        return self._client.reads().delay_s(nodes, length)

    def write_bytes(self, path: str, data: bytes, *, mode: int = 0o644) -> Entry:
        with self._temporary(path, data, mode) as (temporary, status):
            self._client.rename(temporary, self._full(path), overwrite=True)
        return replace(self._entry(status), path=path)

    def create_bytes(self, path: str, data: bytes, *, mode: int = 0o644) -> bool:
        try:
            with self._temporary(path, data, mode) as (temporary, _):
                self._client.rename(temporary, self._full(path))
        except AlreadyExistsError:
            return False
        return True

    def begin_parts(
        self, paths: Sequence[str], *, part_bytes: int, mode: int = 0o644, replication: int | None = None,
        avoid: frozenset[str] = frozenset(), last_resort: Sequence[str] = (),
    ) -> Sequence[PartWriter]:  # fmt: skip
        """See `Place.begin_parts`. A part's node is chosen at its first `write`."""
        return self._client.create_placed(
            [self._full(path) for path in paths], block_size=part_bytes, mode=mode, replication=replication,
            avoid=avoid, last_resort=last_resort,
        )  # fmt: skip

    def exclude(self, nodes: Iterable[str]) -> None:
        self._client.excluded.exclude(nodes)

    def rename(self, source: str, target: str, *, replace: bool = True) -> None:
        try:
            self._client.rename(self._full(source), self._full(target), overwrite=replace)
        except IsFolderError as error:  # "source and destination must both be directories"
            if not replace:
                raise AlreadyExistsError(f"{self.uri_of(target)} already exists") from error
            if self.stat(source).is_folder:
                raise NotFolderError(f"{self.uri_of(target)} is not a folder") from error
            raise IsFolderError(f"{self.uri_of(target)} is a folder") from error

    def delete(self, path: str, *, recursive: bool = False, is_file: bool = False) -> None:
        if not path:
            raise PermanentError(f"{self.uri} is the root and cannot be removed")
        self._client.delete(self._full(path), recursive=recursive)

    def make_folder(self, path: str, *, mode: int = 0o755, parents: bool = False) -> None:
        self._client.make_folder(self._full(path), mode=mode, parents=parents)

    def set_mode(self, path: str, mode: int) -> None:
        self._client.set_permission(self._full(path), mode)

    def set_owner(self, path: str, owner: str | None, group: str | None) -> None:
        self._client.set_owner(self._full(path), owner, group)

    def set_mtime(self, path: str, mtime_ns: int) -> None:
        """See `Place.set_mtime`. HDFS keeps milliseconds."""
        self._client.set_mtime(self._full(path), mtime_ns // 1_000_000)

    def space(self) -> tuple[int, int]:
        return self._client.space()

    def facts(self) -> Mapping[str, object]:
        facts = self._client.reads().facts()
        return {**facts, "fallback": facts["fallback"] or self._client.fallback}

    def close(self) -> None:
        self._client.close()

    @contextlib.contextmanager
    def _temporary(self, path: str, data: bytes, mode: int) -> Iterator[tuple[str, FileStatus]]:
        """A hidden file in the folder of `path`, and its status; removed unless it was renamed."""
        full = self._full(path)
        folder = full.rpartition("/")[0]
        temporary = ""

        def put(_: float) -> FileStatus:
            nonlocal temporary
            # Another name for each attempt: what the last one has left may still be there.
            temporary = f"{folder}/{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
            return self._put(temporary, data, mode)

        try:
            status = retrying(put, attempts=_ATTEMPTS)
            yield temporary, status
        except BaseException as error:
            with contextlib.suppress(BootseerError):
                self._client.delete(temporary)
            if isinstance(error, PermanentError) and folder and not self._client.stat(folder).is_folder:
                raise NotFolderError(f"{self.uri_of(path)}: its folder is a file") from None
            raise

    def _put(self, full: str, data: bytes, mode: int) -> FileStatus:
        """Write a file into an existing folder: one that was just removed must not be created again."""
        # Quotas count whole blocks until a file is closed, so the block is no larger than needed. The random rest makes
        # versions differ that have the same length and mtime, as copies of heads by `tar`: see `Entry.version`.
        block_size = max(-(-len(data) // _MIB), 1) * _MIB + secrets.randbelow(2048) * _CHECKSUM_BYTES
        if self._may_copy:
            copies = max(self._client.replication or 0, SMALL_FILE_REPLICAS)
            try:
                return self._client.put(full, data, mode=mode, block_size=block_size, replication=copies, parents=False)
            except BootseerError as error:
                if "exceeds maximum" not in str(error):
                    raise
                self._may_copy = False
        return self._client.put(full, data, mode=mode, block_size=block_size, parents=False)

    def _entry(self, status: FileStatus) -> Entry:
        return Entry(
            path=status.path[len(self._root) + 1 :],
            is_folder=status.is_folder,
            size_bytes=status.size_bytes,
            mtime_ns=status.mtime_ms * 1_000_000,
            mode=status.mode,
            owner=status.owner,
            group=status.group,
            version=f"{status.mtime_ms:x}-{status.size_bytes:x}-{status.block_size:x}",
        )

    def _full(self, path: str) -> str:
        full = "/".join([self._root, *names_of(path)]) or "/"
        if not is_utf8(full):
            raise NotFoundError(f"{full!r} is not a valid path: names in HDFS are UTF-8")
        return full

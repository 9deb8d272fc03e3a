"""Names and folders through hdfs-native, for clusters that `names` does not speak to (Kerberos). Made by `client`.

The same questions and answers. Safe to use from many threads, and after `fork`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from hdfs_native import Client
from hdfs_native import FileStatus as Found

from bootseer.hdfs.answers import NotYetError
from bootseer.hdfs.native import Native
from bootseer.hdfs.status import FileStatus

T = TypeVar("T")

_AGAIN_S = 0.5


class NativeNames:
    """See `names.Names`."""

    def __init__(self, native: Native) -> None:
        self._native = native

    def stat(self, path: str) -> FileStatus:
        """See `HdfsClient.stat`."""
        return _status(self._call(path, lambda client: client.get_file_info(path)))

    def list(self, path: str, *, recursive: bool) -> Iterator[FileStatus]:
        """See `HdfsClient.list`."""
        what = f"{self._native.uri}{path}"
        for found in self._native.stream(what, lambda client: client.list_status(path, recursive)):
            yield _status(found)

    def make_folder(self, path: str, mode: int, *, parents: bool) -> None:
        """Make a folder; one that is there stays."""
        self._call(path, lambda client: client.mkdirs(path, mode, parents))

    def rename(self, source: str, target: str, *, overwrite: bool) -> None:
        """See `HdfsClient.rename`."""
        self._call(source, lambda client: client.rename(source, target, overwrite=overwrite))

    def delete(self, path: str, *, recursive: bool) -> bool:
        """Remove: whether there was anything."""
        return self._call(path, lambda client: client.delete(path, recursive))

    def set_permission(self, path: str, mode: int) -> None:
        """See `HdfsClient.set_permission`."""
        self._call(path, lambda client: client.set_permission(path, mode))

    def set_owner(self, path: str, owner: str | None, group: str | None) -> None:
        """See `HdfsClient.set_owner`."""
        self._call(path, lambda client: client.set_owner(path, owner, group))

    def set_times(self, path: str, mtime_ms: int, atime_ms: int | None) -> None:
        """See `HdfsClient.set_times`."""

        def change(client: Client) -> None:
            atime = client.get_file_info(path).access_time if atime_ms is None else atime_ms
            client.set_times(path, mtime_ms, atime)

        self._call(path, change)

    def room(self, path: str) -> tuple[int, int]:
        """Bytes that a folder may have, 0 or less for as many as it likes, and how many it has, all copies counted."""
        summary = self._call(path, lambda client: client.get_content_summary(path))
        return summary.space_quota, summary.space_consumed

    def _call(self, path: str, ask: Callable[[Client], T]) -> T:
        """An answer about a name, within the time for one question, waiting for a NameNode that has just started."""
        until = time.monotonic() + self._native.settings.call_s
        while True:
            try:
                return self._native.call(f"{self._native.uri}{path}", ask, max(until - time.monotonic(), _AGAIN_S))
            except NotYetError:
                if time.monotonic() + _AGAIN_S >= until:
                    raise
            time.sleep(_AGAIN_S)


def _status(found: Found) -> FileStatus:
    return FileStatus(
        path=found.path,
        is_folder=found.isdir,
        size_bytes=found.length,
        mtime_ms=found.modification_time,
        atime_ms=found.access_time,
        mode=found.permission & 0o7777,
        owner=found.owner,
        group=found.group,
        replication=found.replication or 0,
        block_size=found.blocksize or 0,
    )

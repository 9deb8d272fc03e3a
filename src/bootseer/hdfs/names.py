"""Names and folders of HDFS, asked of the NameNodes over our own connections.

A NameNode that hangs is left after its share of the time and another one asked, and the wait can be interrupted:
hdfs-native waits for it for ever. A question that is asked again because its answer was lost is the same question for
the NameNode, so that a rename is not done twice.

Paths are whole paths of the file system, "/a/b". Safe to use from many threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from bootseer.errors import NotFoundError, TransientError
from bootseer.hdfs.located import FileStatus, parse_status
from bootseer.hdfs.namenode import NameNode
from bootseer.hdfs.protobuf import MalformedError, Message, field

_UNCHANGED: Final = -1


class Names:
    """All methods raise `UnsupportedError` for a cluster that needs another client."""

    def __init__(self, namenode: NameNode) -> None:
        self._namenode = namenode

    def stat(self, path: str) -> FileStatus:
        answer = self._ask("getFileInfo", field(1, path), path)
        try:
            if 1 not in answer:
                raise NotFoundError(f"{self._named(path)} is not there")
            return parse_status(path, answer.message(1))
        except MalformedError as error:
            raise self._malformed(path, error) from error

    def list(self, path: str, *, recursive: bool) -> Iterator[FileStatus]:
        folders = deque([path])
        while folders:
            folder = folders.popleft()
            for found in self._list_one(folder):
                yield found
                if recursive and found.is_folder:
                    folders.append(found.path)

    def make_folder(self, path: str, mode: int, *, parents: bool) -> None:
        """Make a folder; one that is there stays."""
        self._ask("mkdirs", field(1, path) + field(2, field(1, mode)) + field(3, parents), path)

    def rename(self, source: str, target: str, *, overwrite: bool) -> None:
        self._ask("rename2", field(1, source) + field(2, target) + field(3, overwrite), source)

    def delete(self, path: str, *, recursive: bool) -> bool:
        """Remove: whether there was anything."""
        answer = self._ask("delete", field(1, path) + field(2, recursive), path)
        try:
            return bool(answer.number(1))
        except MalformedError as error:
            raise self._malformed(path, error) from error

    def set_permission(self, path: str, mode: int) -> None:
        self._ask("setPermission", field(1, path) + field(2, field(1, mode)), path)

    def set_owner(self, path: str, owner: str | None, group: str | None) -> None:
        request = field(1, path)
        if owner is not None:
            request += field(2, owner)
        if group is not None:
            request += field(3, group)
        self._ask("setOwner", request, path)

    def set_times(self, path: str, mtime_ms: int, atime_ms: int | None) -> None:
        atime = _UNCHANGED if atime_ms is None else atime_ms
        self._ask("setTimes", field(1, path) + field(2, mtime_ms) + field(3, atime), path)

    def _list_one(self, path: str) -> Iterator[FileStatus]:
        """What lies in a folder, a page at a time; a file itself."""
        after = b""
        is_more = True
        while is_more:
            answer = self._ask("getListing", field(1, path) + field(2, after) + field(3, False), path)
            try:
                if 1 not in answer:
                    raise NotFoundError(f"{self._named(path)} is not there")
                page = answer.message(1)
                found = [Message(entry) for entry in page.every(1)]
                for entry in found:
                    name = entry.text(2)
                    yield parse_status(f"{path.rstrip('/')}/{name}" if name else path, entry)
                is_more = bool(page.number(2)) and bool(found)
                after = found[-1].data(2) if found else b""
            except MalformedError as error:
                raise self._malformed(path, error) from error

    def _ask(self, method: str, request: bytes, path: str) -> Message:
        try:
            return Message(self._namenode.ask(method, request, path, None))
        except MalformedError as error:
            raise self._malformed(path, error) from error

    def _named(self, path: str) -> str:
        return f"hdfs://{self._namenode.cluster.authority}{path}"

    def _malformed(self, path: str, error: MalformedError) -> TransientError:
        return TransientError(f"{self._named(path)}: the NameNode's answer is malformed: {error}")

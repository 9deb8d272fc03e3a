"""A file tree in memory for the tests, with reads that can be held back, refused or answered wrongly."""

from __future__ import annotations

import errno
import stat
import threading
from collections.abc import Callable, Sequence

from bootseer.fuse.filesystem import Attributes, Cancel, Listed, Reply

OLD = -1_500_000_000  # a time before 1970, with a fraction of a second


class MemoryTree:
    """Folders are dicts, files bytes, symbolic links strings; names may be any bytes.

    `on_read` replaces reads: it gets the path, the correct answer and the reply.
    """

    def __init__(
        self, content: dict[bytes, object], on_read: Callable[[bytes, bytes, Reply], Cancel | None] | None = None
    ) -> None:
        self.nodes: list[tuple[bytes, object]] = [(b"", None), (b"", content)]
        self.children: dict[int, dict[bytes, int]] = {}
        self.on_read = on_read
        self.xattrs_of: dict[bytes, dict[bytes, bytes]] = {}
        self.threads: set[str] = set()
        self._add(1)

    def _add(self, inode: int) -> None:
        content = self.nodes[inode][1]
        if not isinstance(content, dict):
            return
        self.children[inode] = {}
        for name, child in content.items():
            self.nodes.append((name, child))
            self.children[inode][name] = len(self.nodes) - 1
            self._add(len(self.nodes) - 1)

    def _node(self, inode: int) -> object:
        self.threads.add(threading.current_thread().name)
        if not 0 < inode < len(self.nodes):
            raise OSError(errno.ENOENT, "no such inode")
        return self.nodes[inode][1]

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        inode = self.children[parent].get(name)
        return None if inode is None else self.attributes(inode)

    def attributes(self, inode: int) -> Attributes:
        node = self._node(inode)
        if isinstance(node, dict):
            return Attributes(inode, stat.S_IFDIR | 0o755, nlink=2)
        if isinstance(node, str):
            return Attributes(inode, stat.S_IFLNK | 0o777, len(node))
        assert isinstance(node, bytes)
        return Attributes(inode, stat.S_IFREG | 0o640, len(node), uid=7, gid=8, mtime_ns=OLD)

    def entries(self, inode: int) -> Sequence[Listed]:
        self._node(inode)
        return [
            Listed(name, child, self.attributes(child).mode) for name, child in sorted(self.children[inode].items())
        ]

    def readlink(self, inode: int) -> bytes:
        node = self._node(inode)
        assert isinstance(node, str)
        return node.encode()

    def xattrs(self, inode: int) -> dict[bytes, bytes]:
        return self.xattrs_of.get(self.nodes[inode][0], {})

    def total(self) -> tuple[int, int]:
        files = [node for _, node in self.nodes if isinstance(node, bytes)]
        return sum(map(len, files)), len(files)

    def read(self, inode: int, offset: int, length: int, reply: Reply) -> Cancel | None:
        node = self._node(inode)
        assert isinstance(node, bytes)
        data = node[offset : offset + length]
        if self.on_read is not None:
            return self.on_read(self.nodes[inode][0], data, reply)
        reply(data)
        return None

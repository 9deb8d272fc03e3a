"""The nodes of a mount: which path the kernel knows under which number.

The kernel caches pages by node. So when a file is replaced, its name leads to a new node, and handles of the old one
keep the old one: pages of two versions never mix.

Lock order: a content's lock before the table's lock. Safe to use from many threads.
"""

from __future__ import annotations

import errno
import itertools
import secrets
import threading
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from bootseer.checkpoint.files import FileInfo
from bootseer.checkpoint.os_errors import os_error
from bootseer.fuse.protocol import ROOT
from bootseer.places.place import folder_of

if TYPE_CHECKING:
    from bootseer.checkpoint.mount.content import Content

_FIRST = 1 << 40
"""The smallest number of a node, except the root's."""


class Node(Struct, eq=False):
    """One file or folder as the kernel knows it."""

    number: int
    path: str | None
    """None when the name leads to another node, or is gone."""
    info: FileInfo
    """The latest known attributes, with the latest path."""
    content: Content | None = None
    """Set while the file is open."""
    lookup_count: int = 0
    """The kernel's lookup count: references handed out minus references forgotten."""
    cached_version: str | None = None
    """The version that may be in the page cache; None: none is, "": the pages must be invalidated."""

    @property
    def is_folder(self) -> bool:
        return self.info.is_folder

    @property
    def is_live(self) -> bool:
        return self.content is not None and self.content.is_live

    @property
    def is_published(self) -> bool:
        return self.content is not None and self.content.is_published


def is_same(one: FileInfo, other: FileInfo) -> bool:
    """Whether two infos of one path describe the same folder, or the same version of a file as far as known."""
    return one.is_folder == other.is_folder and (one.is_folder or one.entry.version == other.entry.version)


class Nodes:
    """All nodes of a mount."""

    def __init__(self, root: FileInfo) -> None:
        self.root = Node(ROOT, "", root)
        self._lock = threading.Lock()
        # Random, to differ from inode numbers of other file systems: `io.proc` finds the processes that have a
        # file open by its number alone.
        self._numbers = itertools.count(_FIRST + secrets.randbits(40))
        self._by_number = {ROOT: self.root}
        self._by_path = {"": self.root}

    def get(self, number: int) -> Node:
        """A node that the kernel refers to. Raises ESTALE."""
        node = self._by_number.get(number)
        if node is None:
            raise os_error(errno.ESTALE)
        return node

    def at(self, path: str) -> Node | None:
        """The node of a path, if the kernel knows one."""
        return self._by_path.get(path)

    def acquire(self, path: str, info: FileInfo) -> Node:
        """The node of the file at `path` now, with one more reference by the kernel."""
        with self._lock:
            node = self._by_path.get(path)
            if node is not None and not node.is_live:
                if is_same(node.info, info):
                    node.info = info
                else:
                    self._detach(node)
                    node = None
            if node is None:
                node = self._new(path, info)
            node.lookup_count += 1
            return node

    def acquire_new(self, path: str, info: FileInfo) -> Node:
        """A node for a file that was created just now, whatever the path led to before."""
        with self._lock:
            before = self._by_path.get(path)
            if before is not None:
                self._detach(before)
            node = self._new(path, info)
            node.lookup_count += 1
            return node

    def _new(self, path: str, info: FileInfo) -> Node:
        node = Node(next(self._numbers), path, info)
        self._by_number[node.number] = self._by_path[path] = node
        return node

    def forget(self, number: int, count: int) -> None:
        """The kernel drops `count` references."""
        with self._lock:
            node = self._by_number.get(number)
            if node is not None:
                node.lookup_count -= count
                self._drop_unused(node)

    def closed(self, node: Node) -> None:
        with self._lock:
            node.content = None
            self._drop_unused(node)

    def _drop_unused(self, node: Node) -> None:
        if node.lookup_count <= 0 and node.content is None and node is not self.root:
            self._by_number.pop(node.number, None)
            self._detach(node)

    def detach(self, node: Node) -> None:
        """The node's name leads to another node, or is gone."""
        with self._lock:
            self._detach(node)

    def _detach(self, node: Node) -> None:
        if node.path is not None and self._by_path.get(node.path) is node:
            del self._by_path[node.path]
        node.path = None

    def remove(self, path: str) -> None:
        with self._lock:
            node = self._by_path.get(path)
            if node is not None:
                self._detach(node)

    def rename(self, source: str, target: str) -> None:
        """What was at `source`, and below, is at `target` now, in place of what was there."""
        with self._lock:
            replaced = self._by_path.get(target)
            if replaced is not None:
                self._detach(replaced)
            prefix = f"{source}/"
            moved = [path for path in self._by_path if path == source or path.startswith(prefix)]
            for path in moved:
                node = self._by_path.pop(path)
                node.path = target + path[len(source) :]
                node.info = replace(node.info, entry=replace(node.info.entry, path=node.path))
                self._by_path[node.path] = node

    def live_in(self, folder: str) -> list[Node]:
        """The nodes in a folder with unpublished content."""
        return [node for node in self.live_below(folder) if (at := node.path) and folder_of(at) == folder]

    def open_below(self, folder: str) -> list[Node]:
        """The nodes anywhere below a folder whose files are open."""
        prefix = f"{folder}/" if folder else ""
        with self._lock:
            below = [node for path, node in self._by_path.items() if path.startswith(prefix)]
        return [node for node in below if node.content is not None]

    def live_below(self, folder: str) -> list[Node]:
        """Those with unpublished content."""
        return [node for node in self.open_below(folder) if node.is_live]

    def num_known(self) -> int:
        return len(self._by_number)

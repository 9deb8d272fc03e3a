"""Which node belongs to which path: what the kernel remembers of names is remembered here too.

The kernel keeps pages of a node. So when a file was replaced, its name leads to a new node, and a handle of the
old one keeps that; pages of two contents never meet. Safe to use from many threads.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace

from bootseer.checkpoint.files import FileInfo
from bootseer.checkpoint.mount.content import Node
from bootseer.checkpoint.os_errors import stale
from bootseer.fuse.protocol import ROOT

_FIRST = 1 << 40
"""Numbers of nodes are not smaller, the root's excepted."""


def is_same(one: FileInfo, other: FileInfo) -> bool:
    """Whether both are of one folder, or of what looks like one version of a file, given that they have one path."""
    return one.is_folder == other.is_folder and (one.is_folder or one.entry.version == other.entry.version)


class Nodes:
    """All nodes of a mount."""

    def __init__(self, root: FileInfo) -> None:
        self.root = Node(ROOT, "", root)
        self._lock = threading.Lock()
        # Unlike those of other file systems: by its number alone `fuse.callers` finds the processes that have a file
        # open.
        self._numbers = itertools.count(_FIRST + secrets.randbits(40))
        self._by_number = {ROOT: self.root}
        self._by_path = {"": self.root}

    def get(self, number: int) -> Node:
        """A node that the kernel has got."""
        node = self._by_number.get(number)
        if node is None:
            raise stale()
        return node

    def at(self, path: str) -> Node | None:
        """The node that a path leads to, if the kernel has got one."""
        return self._by_path.get(path)

    def acquire(self, path: str, info: FileInfo) -> Node:
        """The node for what lies at `path` now, for an answer to the kernel, which holds it once more."""
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
            node.held += 1
            return node

    def acquire_new(self, path: str, info: FileInfo) -> Node:
        """A node for a file that was made a moment ago, whatever the path led to before."""
        with self._lock:
            before = self._by_path.get(path)
            if before is not None:
                self._detach(before)
            node = self._new(path, info)
            node.held += 1
            return node

    def _new(self, path: str, info: FileInfo) -> Node:
        node = Node(next(self._numbers), path, info)
        self._by_number[node.number] = self._by_path[path] = node
        return node

    def forget(self, number: int, count: int) -> None:
        """The kernel lets go of a node `count` times."""
        with self._lock:
            node = self._by_number.get(number)
            if node is not None:
                node.held -= count
                self._drop_unused(node)

    def closed(self, node: Node) -> None:
        """No handle has the file open any more."""
        with self._lock:
            node.content = None
            self._drop_unused(node)

    def _drop_unused(self, node: Node) -> None:
        if node.held <= 0 and node.content is None and node is not self.root:
            self._by_number.pop(node.number, None)
            self._detach(node)

    def detach(self, node: Node) -> None:
        """The node's name leads elsewhere or nowhere from now on."""
        with self._lock:
            self._detach(node)

    def _detach(self, node: Node) -> None:
        if node.path is not None and self._by_path.get(node.path) is node:
            del self._by_path[node.path]
        node.path = None

    def remove(self, path: str) -> None:
        """What was at `path` is gone."""
        with self._lock:
            node = self._by_path.get(path)
            if node is not None:
                self._detach(node)

    def rename(self, source: str, target: str) -> None:
        """What was at `source`, and below, is at `target` now; what was at `target` is gone."""
        with self._lock:
            replaced = self._by_path.get(target)
            if replaced is not None:
                self._detach(replaced)
            front = f"{source}/"
            moved = [path for path in self._by_path if path == source or path.startswith(front)]
            for path in moved:
                node = self._by_path.pop(path)
                node.path = target + path[len(source) :]
                node.info = replace(node.info, entry=replace(node.info.entry, path=node.path))
                self._by_path[node.path] = node

    def live_in(self, folder: str) -> list[Node]:
        """The nodes in a folder whose content is not published."""
        with self._lock:
            nodes = [(path, node) for path, node in self._by_path.items() if node.is_live]
        return [node for path, node in nodes if path.rpartition("/")[0] == folder]

    def live_below(self, folder: str) -> list[Node]:
        """The nodes anywhere below a folder whose content is not published."""
        front = f"{folder}/" if folder else ""
        with self._lock:
            return [node for path, node in self._by_path.items() if node.is_live and path.startswith(front)]

    def num_known(self) -> int:
        """How many nodes the kernel holds."""
        return len(self._by_number)


REMEMBERED_S = 5.0
_MAX_FOLDERS = 64
_MISSING_S = 0.1
"""The kernel asks for a name that is to be created right before it creates it."""
_MAX_MISSING = 1024


class Listings:
    """Remembers the latest listings."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` in seconds, from anywhere."""
        self._clock = clock
        self._lock = threading.Lock()
        self._folders: OrderedDict[str, tuple[float, dict[str, FileInfo]]] = OrderedDict()
        self._missing: dict[str, float] = {}
        """When these paths were not there."""
        self.num_changes = 0
        """How often something has changed. To be asked before a listing begins."""

    def remember(self, folder: str, infos: Iterable[FileInfo], *, since: int) -> None:
        """What a listing said that has just come to its end; `since`: `num_changes` at its beginning. It may not have
        seen what has changed meanwhile."""
        by_path = {info.path: info for info in infos}
        with self._lock:
            if self.num_changes != since:
                return
            self._folders[folder] = (self._clock(), by_path)
            self._folders.move_to_end(folder)
            if len(self._folders) > _MAX_FOLDERS:
                self._folders.popitem(last=False)

    def recall(self, path: str) -> FileInfo | None:
        """What the latest listing of its folder said of a path; None when there is none that is fresh."""
        folder = path.rpartition("/")[0]
        with self._lock:
            listed_s, by_path = self._folders.get(folder, (0.0, {}))
            if not by_path or not path:
                return None
            if self._clock() - listed_s > REMEMBERED_S:
                del self._folders[folder]
                return None
            return by_path.get(path)

    def forget(self, *folders: str) -> None:
        """Something in these folders has changed."""
        with self._lock:
            self.num_changes += 1
            for folder in folders:
                self._folders.pop(folder, None)

    def forget_all(self) -> None:
        """A folder has another name, and what lies below it."""
        with self._lock:
            self.num_changes += 1
            self._folders.clear()

    def looked_up(self, path: str, *, is_there: bool) -> None:
        """The place was asked for a path."""
        with self._lock:
            self._missing.pop(path, None)
            if not is_there:
                if len(self._missing) >= _MAX_MISSING:
                    self._missing.clear()
                self._missing[path] = self._clock()

    def was_missing(self, path: str) -> bool:
        """Whether a path was not there when it was looked up a moment ago. Forgets that."""
        with self._lock:
            return self._clock() - self._missing.pop(path, -_MISSING_S) < _MISSING_S

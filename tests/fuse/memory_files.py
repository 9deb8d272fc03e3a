"""A writable file system in memory for the tests, with calls that can be held back."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bootseer.fuse.filesystem import Attributes, Caller, Cancel, Changes, FoundNode, Listed, Opened, Reply, Space

OnRead = Callable[[bytes, Reply], Cancel | None]


@dataclass
class Node:
    mode: int
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    data: bytearray = field(default_factory=bytearray)
    children: dict[bytes, int] = field(default_factory=dict)


class MemoryFiles:
    """Nodes are never removed, so that the kernel's references can be counted. `on_read` replaces reads."""

    def __init__(self, on_read: OnRead | None = None) -> None:
        self.nodes = {1: Node(stat.S_IFDIR | 0o755)}
        self.held: dict[int, int] = {}
        self.flushed: list[int] = []
        self.synced: list[int] = []
        self.opened: dict[int, int] = {}
        self.on_read = on_read
        self.before_write: Callable[[], None] = lambda: None
        self.flush_error = 0
        self.keep_pages = True
        self.sizes: list[int] = []
        self._numbers = itertools.count(2)
        self._lock = threading.Lock()

    def _attributes(self, number: int) -> Attributes:
        node = self.nodes[number]
        return Attributes(
            number, node.mode, len(node.data), uid=node.uid, gid=node.gid, mtime_ns=node.mtime_ns, nlink=1
        )

    def _found(self, number: int) -> FoundNode:
        with self._lock:
            self.held[number] = self.held.get(number, 0) + 1
        return FoundNode(number, self._attributes(number))

    def _child(self, parent: int, name: bytes) -> int:
        number = self.nodes[parent].children.get(name)
        if number is None:
            raise FileNotFoundError(errno.ENOENT, "none")
        return number

    def lookup(self, parent: int, name: bytes) -> FoundNode | None:
        number = self.nodes[parent].children.get(name)
        return None if number is None else self._found(number)

    def forget(self, node: int, count: int) -> None:
        with self._lock:
            self.held[node] -= count

    def attributes(self, node: int) -> Attributes:
        return self._attributes(node)

    def change(self, node: int, changes: Changes) -> Attributes:
        item = self.nodes[node]
        if changes.size is not None:
            del item.data[changes.size :]
            item.data.extend(bytes(changes.size - len(item.data)))
        if changes.mode is not None:
            item.mode = stat.S_IFMT(item.mode) | changes.mode
        item.uid = item.uid if changes.uid is None else changes.uid
        item.gid = item.gid if changes.gid is None else changes.gid
        item.mtime_ns = item.mtime_ns if changes.mtime_ns is None else changes.mtime_ns
        return self._attributes(node)

    def _make(self, parent: int, name: bytes, mode: int, caller: Caller) -> int:
        with self._lock:
            number = next(self._numbers)
        self.nodes[number] = Node(mode, caller.uid, caller.gid, time.time_ns())
        self.nodes[parent].children[name] = number
        return number

    def create(self, parent: int, name: bytes, mode: int, flags: int, caller: Caller) -> tuple[FoundNode, Opened]:
        found = self._found(self._make(parent, name, stat.S_IFREG | mode, caller))
        return found, self.open(found.node, flags, caller)

    def open(self, node: int, flags: int, caller: Caller) -> Opened:
        if flags & os.O_TRUNC:
            self.nodes[node].data.clear()
        with self._lock:
            self.opened[node] = self.opened.get(node, 0) + 1
        return Opened(node, self.keep_pages)

    def read(self, node: int, handle: int, offset: int, length: int, reply: Reply, room: memoryview) -> Cancel | None:
        assert handle == node
        data = bytes(self.nodes[node].data[offset : offset + length])
        if self.on_read is not None:
            return self.on_read(data, reply)
        reply(data)
        return None

    def write(self, node: int, handle: int, offset: int, data: memoryview, caller: Caller) -> None:
        assert handle == node
        self.before_write()
        self.sizes.append(len(data))
        held = self.nodes[node].data
        held.extend(bytes(max(0, offset - len(held))))
        held[offset : offset + len(data)] = data

    def flush(self, node: int, handle: int, caller: Caller) -> None:
        self.flushed.append(node)
        if self.flush_error:
            raise OSError(self.flush_error, "refused")

    def sync(self, node: int, handle: int, caller: Caller) -> None:
        self.synced.append(node)

    def release(self, node: int, handle: int) -> None:
        with self._lock:
            self.opened[node] -= 1

    def unlink(self, parent: int, name: bytes) -> None:
        self._child(parent, name)
        del self.nodes[parent].children[name]

    def make_folder(self, parent: int, name: bytes, mode: int, caller: Caller) -> FoundNode:
        return self._found(self._make(parent, name, stat.S_IFDIR | mode, caller))

    def remove_folder(self, parent: int, name: bytes) -> None:
        if self.nodes[self._child(parent, name)].children:
            raise OSError(errno.ENOTEMPTY, "not empty")
        del self.nodes[parent].children[name]

    def rename(self, parent: int, name: bytes, to_parent: int, to_name: bytes, *, replace: bool) -> None:
        number = self._child(parent, name)
        if not replace and to_name in self.nodes[to_parent].children:
            raise FileExistsError(errno.EEXIST, "there is one")
        del self.nodes[parent].children[name]
        self.nodes[to_parent].children[to_name] = number

    def open_folder(self, node: int) -> int:
        return node

    def entries(self, handle: int, start: int, most: int, *, attributes: bool) -> Sequence[Listed]:
        part = sorted(self.nodes[handle].children.items())[start : start + most]
        return [
            Listed(name, number, self.nodes[number].mode, self._found(number) if attributes else None)
            for name, number in part
        ]

    def release_folder(self, handle: int) -> None:
        pass

    def space(self) -> Space:
        return Space(1 << 40, 1 << 39)

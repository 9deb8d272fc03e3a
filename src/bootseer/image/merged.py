"""Several layers as one tree, the way overlayfs shows them: upper over lower, whiteouts, opaque directories.

Nothing is mounted: layers are read through `ErofsReader`. Used where a layer cannot be understood without those below
it (`layer_tree`), and to write an image out (`unpack`).
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bootseer.erofs.format import Attributes
from bootseer.erofs.reader import ErofsReader, Inode

OVERLAY = b"trusted.overlay."
OPAQUE = OVERLAY + b"opaque"
_ESCAPED = OVERLAY + b"overlay."
WHITEOUT_MODE = stat.S_IFCHR
_MAX_SEEN = 1 << 16


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. `identity` tells its content apart from that of any other."""

    reader: ErofsReader
    identity: str


@dataclass(frozen=True, slots=True)
class Node:
    """A file of the merged tree: the inode that shows, and for a directory those below that it merges with."""

    parts: tuple[tuple[Layer, Inode], ...]

    @property
    def inode(self) -> Inode:
        """The uppermost inode: attributes and content are its own."""
        return self.parts[0][1]

    @property
    def identity(self) -> str:
        """The same for two names of one file, and for nothing else."""
        layer, inode = self.parts[0]
        return f"{layer.identity}:{inode.number}"

    @property
    def is_directory(self) -> bool:
        """Whether it has children."""
        return stat.S_ISDIR(self.inode.mode)

    def attributes(self) -> Attributes:
        """Attributes as a user of the mount sees them, without the marks of overlayfs."""
        layer, inode = self.parts[0]
        found = layer.reader.attributes(inode)
        xattrs = {name: value for name, value in found.xattrs.items() if not is_mark(name)}
        return Attributes(found.mode, found.uid, found.gid, found.mtime_ns, found.rdev, xattrs)

    def target(self) -> bytes:
        """Where a symbolic link points."""
        layer, inode = self.parts[0]
        return layer.reader.readlink(inode)

    def content(self) -> Iterator[bytes]:
        """Data of a regular file."""
        layer, inode = self.parts[0]
        return layer.reader.read(inode)

    def child(self, name: bytes) -> Node | None:
        """The file of this name in the directory."""
        return _merge((layer, layer.reader.lookup(directory, name)) for layer, directory in self.parts)

    def children(self) -> Iterator[tuple[bytes, Node]]:
        """Everything in the directory, in the order of the names' bytes."""
        names = {entry.name for layer, directory in self.parts for entry in layer.reader.entries(directory)}
        for name in sorted(names):
            node = self.child(name)
            if node is not None:
                yield name, node


class MergedTree:
    """Layers, bottom first. Not safe for several threads: it remembers where it was."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.root = Node(tuple((layer, layer.reader.root()) for layer in reversed(layers))) if layers else None
        self._seen: dict[tuple[bytes, ...], Node | None] = {}

    def lookup(self, path: tuple[bytes, ...]) -> Node | None:
        """The file at a path of names; symbolic links on the way are not followed."""
        known = len(path)
        while known and path[:known] not in self._seen:
            known -= 1
        node = self._seen[path[:known]] if known else self.root
        for end in range(known + 1, len(path) + 1):
            if node is None or not node.is_directory:
                return None
            node = node.child(path[end - 1])
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            self._seen[path[:end]] = node
        return node


def is_mark(name: bytes) -> bool:
    """Whether an extended attribute of a layer is overlayfs's own and is not shown."""
    return name.startswith(OVERLAY) and not name.startswith(_ESCAPED)


def escape_xattr(name: bytes) -> bytes:
    """The name under which a layer stores an attribute, so that overlayfs shows it and does not obey it."""
    return _ESCAPED + name[len(OVERLAY) :] if name.startswith(OVERLAY) else name


def unescape_xattr(name: bytes) -> bytes:
    """Reverse of `escape_xattr`: the name that a user sees."""
    return OVERLAY + name[len(_ESCAPED) :] if name.startswith(_ESCAPED) else name


def _merge(found: Iterator[tuple[Layer, Inode | None]]) -> Node | None:
    """What overlayfs shows of files of one name, uppermost first."""
    parts: list[tuple[Layer, Inode]] = []
    for layer, inode in found:
        if inode is None:
            continue
        directory = stat.S_ISDIR(inode.mode)
        if (stat.S_ISCHR(inode.mode) and inode.rdev == (0, 0)) or (parts and not directory):
            break
        parts.append((layer, inode))
        if not directory or (inode.xattrs_bytes and layer.reader.xattrs(inode).get(OPAQUE) == b"y"):
            break
    return Node(tuple(parts)) if parts else None

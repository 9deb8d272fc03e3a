"""Merge layers into one tree as overlayfs does, with whiteouts and opaque directories, but without mounting them.

Layers are read with `ErofsReader`.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bootseer.erofs.format import MODE_OF_TYPE, Attributes
from bootseer.erofs.reader import ErofsReader, Inode

OVERLAY, _USER_OVERLAY = MARKS = b"trusted.overlay.", b"user.overlay."
"""Prefixes of the attributes by which overlayfs marks opaque folders: on the host, and in user namespaces."""
OPAQUE = OVERLAY + b"opaque"
_ESCAPED = OVERLAY + b"overlay."
WHITEOUT_MODE = stat.S_IFCHR
_MAX_CACHED = 1 << 16


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. `identity` is unique to its content."""

    reader: ErofsReader
    identity: str


@dataclass(frozen=True, slots=True)
class Node:
    """A file or directory of the merged tree."""

    parts: tuple[tuple[Layer, Inode], ...]
    """The visible inode; for a directory followed by the directories of lower layers that are merged with it."""

    @property
    def inode(self) -> Inode:
        """The uppermost inode, which has the attributes and content."""
        return self.parts[0][1]

    @property
    def identity(self) -> str:
        """Equal exactly for hard links to one file."""
        layer, inode = self.parts[0]
        return f"{layer.identity}:{inode.number}"

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.inode.mode)

    def attributes(self) -> Attributes:
        """The attributes, without overlayfs's own extended attributes."""
        layer, inode = self.parts[0]
        found = layer.reader.attributes(inode)
        xattrs = {name: value for name, value in found.xattrs.items() if not is_mark(name)}
        return Attributes(found.mode, found.uid, found.gid, found.mtime_ns, found.rdev, xattrs)

    def target(self) -> bytes:
        layer, inode = self.parts[0]
        return layer.reader.readlink(inode)

    def content(self) -> Iterator[bytes]:
        layer, inode = self.parts[0]
        return layer.reader.read(inode)

    def child(self, name: bytes) -> Node | None:
        """The entry of this name in the directory."""
        return _merge((layer, layer.reader.lookup(directory, name)) for layer, directory in self.parts)

    def children(self) -> Iterator[tuple[bytes, Node]]:
        """The directory's entries, sorted by name."""
        found: dict[bytes, Node | None] = {}
        for layer, directory in self.parts:
            for entry in layer.reader.entries(directory):
                if entry.name in found:
                    continue
                if MODE_OF_TYPE.get(entry.kind) in (stat.S_IFDIR, stat.S_IFCHR):  # may be merged, or a whiteout
                    found[entry.name] = self.child(entry.name)
                else:
                    found[entry.name] = Node(((layer, layer.reader.checked(entry.number, entry.kind)),))
        for name in sorted(found):
            if (node := found[name]) is not None:
                yield name, node


class MergedLayers:
    """Finds files by path in the merged tree of layers, bottom first. Not thread-safe: it caches lookups."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.root = Node(tuple((layer, layer.reader.root()) for layer in reversed(layers))) if layers else None
        self._cached: dict[tuple[bytes, ...], Node | None] = {}

    def lookup(self, path: tuple[bytes, ...]) -> Node | None:
        """The file at a path, or None; symbolic links are not followed."""
        known = len(path)
        while known and path[:known] not in self._cached:
            known -= 1
        node = self._cached[path[:known]] if known else self.root
        for end in range(known + 1, len(path) + 1):
            if node is None or not node.is_directory:
                return None
            node = node.child(path[end - 1])
            if len(self._cached) >= _MAX_CACHED:
                self._cached.clear()
            self._cached[path[:end]] = node
        return node


def is_mark(name: bytes) -> bool:
    """Whether an extended attribute is one of overlayfs's own, which it hides from users."""
    return name.startswith(OVERLAY) and not name.startswith(_ESCAPED)


def escape_xattr(name: bytes) -> bytes:
    """The name under which a layer stores an attribute: escaped, if overlayfs would otherwise interpret it."""
    return _ESCAPED + name[len(OVERLAY) :] if name.startswith(OVERLAY) else name


def unescape_xattr(name: bytes) -> bytes:
    """Reverse of `escape_xattr`."""
    return OVERLAY + name[len(_ESCAPED) :] if name.startswith(_ESCAPED) else name


def for_user_namespace(xattrs: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The attributes with overlayfs' marks as an overlay in a user namespace reads them. A layer may have attributes of
    that form itself, which hide nothing in mounts of the host, and are left out."""
    return {
        _USER_OVERLAY + name.removeprefix(OVERLAY) if name.startswith(OVERLAY) else name: value
        for name, value in xattrs.items()
        if not name.startswith(_USER_OVERLAY)
    }


def _merge(found: Iterator[tuple[Layer, Inode | None]]) -> Node | None:
    """Merge the layers' entries of one name, uppermost first; None if the name is not visible."""
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

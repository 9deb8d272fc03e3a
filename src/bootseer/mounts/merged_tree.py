"""Several layers as one tree through FUSE: what an overlay of their file trees would show, without an overlay.

One tree costs one request for a name, where an overlay of FUSE trees asks each layer; and it can be shown where nothing
but FUSE can be mounted. Marks of overlayfs are obeyed and not shown. Owners that the reader's user namespace does not
have would make files inaccessible, so that they are replaced.

A file's number is made of its layer's and of its number there. Only folders that several layers have are counted out as
they are found; they live as long as the tree. All methods run on the session's one thread.
Who calls: `fetched` as `make_tree`, through whoever mounts images.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence

from bootseer.errors import UsageError
from bootseer.fuse.filesystem import Attributes, Cancel, Entry, Reply
from bootseer.mounts.files_tree import FilesTree
from bootseer.mounts.lazy import LazyFile, Source
from bootseer.mounts.user_namespace import num_owners

_MARKS = (b"user.overlay.", b"trusted.overlay.")
_OPAQUE = b"user.overlay.opaque"
_FIRST_MERGED = 1 << 48
Part = tuple[int, int]
"""A layer (0 is the uppermost) and the number of an inode there."""


class MergedTree:
    """The tree of an image; the first of `files` is its lowest layer."""

    def __init__(self, source: Source, files: Sequence[LazyFile], on_error: Callable[[str], None]) -> None:
        """Read the metadata of all layers, and wait for it. Raises `CorruptError` for what is no layer."""
        if not files:
            raise UsageError("an image without layers", hint="convert it again")
        self._layers = [FilesTree(source, file, on_error) for file in reversed(files)]
        self._merged: dict[int, tuple[Part, ...]] = {}
        self._numbers: dict[tuple[Part, ...], int] = {}
        self._num_owners = num_owners()
        self._owner, self._group = os.geteuid(), os.getegid()
        self._root = self._folder_parts([(layer, 1) for layer in range(len(self._layers))])

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        parts = self._child(self._parts(parent), name)
        return self._shown(parts) if parts else None

    def attributes(self, inode: int) -> Attributes:
        return self._shown(self._parts(inode))

    def entries(self, inode: int) -> Sequence[Entry]:
        parts, seen, found = self._parts(inode), set(), []
        for layer, number in parts:
            for entry in self._layers[layer].entries(number):
                if entry.name in seen:
                    continue
                seen.add(entry.name)
                here: tuple[Part, ...] = ((layer, entry.inode),)
                if stat.S_ISDIR(entry.mode) or stat.S_ISCHR(entry.mode):  # it may merge, or be a deletion
                    here = self._child(parts, entry.name)
                if here:
                    found.append(Entry(entry.name, self._number(here), entry.mode))
        return found

    def readlink(self, inode: int) -> bytes:
        layer, number = self._parts(inode)[0]
        return self._layers[layer].readlink(number)

    def xattrs(self, inode: int) -> Mapping[bytes, bytes]:
        layer, number = self._parts(inode)[0]
        found = self._layers[layer].xattrs(number)
        return {name: value for name, value in found.items() if not name.startswith(_MARKS)}

    def total(self) -> tuple[int, int]:
        totals = [layer.total() for layer in self._layers]
        return sum(size for size, _ in totals), sum(files for _, files in totals)

    def read(self, inode: int, offset: int, length: int, reply: Reply) -> Cancel | None:
        layer, number = self._parts(inode)[0]
        return self._layers[layer].read(number, offset, length, reply)

    def _child(self, parents: Sequence[Part], name: bytes) -> tuple[Part, ...]:
        """What shows under a name: a file, or a folder with those that it merges with; nothing when it is deleted."""
        found: list[Part] = []
        for layer, number in parents:
            child = self._layers[layer].lookup(number, name)
            if child is None:
                continue
            if stat.S_ISDIR(child.mode):
                found.append((layer, child.inode))
                continue
            deletion = stat.S_ISCHR(child.mode) and child.rdev == 0
            if not found and not deletion:
                return ((layer, child.inode),)
            break
        return self._folder_parts(found) if found else ()

    def _folder_parts(self, folders: Sequence[Part]) -> tuple[Part, ...]:
        """The folders down to the first one that hides what is below it."""
        for place, (layer, number) in enumerate(folders):
            if self._layers[layer].xattrs(number).get(_OPAQUE) == b"y":
                return tuple(folders[: place + 1])
        return tuple(folders)

    def _parts(self, inode: int) -> tuple[Part, ...]:
        if inode == 1:
            return self._root
        if inode >= _FIRST_MERGED:
            return self._merged[inode]
        number, layer = divmod(inode, len(self._layers))
        return ((layer, number),)

    def _number(self, parts: tuple[Part, ...]) -> int:
        if parts == self._root:
            return 1
        if len(parts) == 1:
            layer, number = parts[0]
            return number * len(self._layers) + layer
        inode = self._numbers.setdefault(parts, _FIRST_MERGED + len(self._numbers))
        self._merged[inode] = parts
        return inode

    def _shown(self, parts: tuple[Part, ...]) -> Attributes:
        layer, number = parts[0]
        found = self._layers[layer].attributes(number)
        return Attributes(
            self._number(parts),
            found.mode,
            found.size,
            found.nlink,
            found.uid if found.uid < self._num_owners else self._owner,
            found.gid if found.gid < self._num_owners else self._group,
            found.rdev,
            found.mtime_ns,
        )

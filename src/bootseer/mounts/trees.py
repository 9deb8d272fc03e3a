"""The FUSE trees of lazy mounts: block files themselves, or the file trees in EROFS block files.

`LazyFiles` is one folder with a file per block file. The kernel mounts EROFS from these files, so it handles names and
inodes itself and requests only blocks. Where the kernel cannot mount EROFS, `MergedTree` serves several layers as one
tree, merged as by overlayfs: a lookup costs one request instead of one per layer, and only FUSE needs to be mounted.
`ErofsTree` serves one layer with its whiteouts and opaque folders, for an overlay in a user namespace.

All metadata and folders of EROFS files are read before the mount, because methods of a tree must not block; file
contents are read on demand. Owners that the user namespace does not map would make files inaccessible, so they are
replaced by the current user.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from bootseer.erofs.format import BLOCK, MODE_OF_TYPE
from bootseer.erofs.merged import MARKS, Layer, Node, for_user_namespace
from bootseer.erofs.reader import ErofsReader
from bootseer.errors import CorruptError, PermanentError
from bootseer.fuse.filesystem import Attributes, Cancel, Listed, Reply
from bootseer.mounts.user_namespace import num_owners

if TYPE_CHECKING:
    from bootseer.blocks.index import Index
    from bootseer.fetch.fetcher import Fetcher

_FIRST = 2
_FIRST_MERGED = 1 << 48
_MAX_METADATA = 1 << 30
_PIECE = 1 << 20


class LazyFiles:
    """A tree of one folder. Immutable and thread-safe."""

    def __init__(self, source: Fetcher, files: Sequence[Index]) -> None:
        """`files`: all files of `source`, in the order of their numbers there."""
        self._source = source
        self._files = tuple(files)
        self._root = Attributes(1, stat.S_IFDIR | 0o555, nlink=2)
        self._attributes = [
            Attributes(_FIRST + place, stat.S_IFREG | 0o444, file.size_bytes) for place, file in enumerate(files)
        ]
        self._by_name = {file.identity.encode(): place for place, file in enumerate(files)}
        self._entries = [Listed(name, _FIRST + place, stat.S_IFREG) for name, place in self._by_name.items()]

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        place = self._by_name.get(name) if parent == 1 else None
        return None if place is None else self._attributes[place]

    def attributes(self, inode: int) -> Attributes:
        return self._root if inode == 1 else self._attributes[inode - _FIRST]

    def entries(self, inode: int) -> Sequence[Listed]:
        return self._entries

    def readlink(self, inode: int) -> bytes:
        raise OSError(errno.EINVAL, "not a symbolic link")

    def xattrs(self, inode: int) -> Mapping[bytes, bytes]:
        return {}

    def total(self) -> tuple[int, int]:
        return sum(file.size_bytes for file in self._files), len(self._files)

    def read(self, inode: int, offset: int, length: int, reply: Reply) -> Cancel | None:
        return self._source.read(inode - _FIRST, offset, length, reply)


class _Image:
    """One EROFS image, with its metadata in memory."""

    def __init__(self, source: Fetcher, file: Index, number: int) -> None:
        """Read all metadata of the file with this number, blocking. Raises `CorruptError` for an invalid image."""
        self.number = number
        self.name = file.identity[:16]
        self.size_bytes = file.size_bytes
        self._read_blocking = partial(source.read_blocking, number)
        self._first = bytes(self._read_blocking(0, BLOCK))
        self.reader = ErofsReader(self._read)
        self._meta_at = self.reader.superblock.meta_block * BLOCK
        if file.size_bytes - self._meta_at > _MAX_METADATA:
            raise PermanentError(f"{self.name}: more than {_MAX_METADATA >> 20} MiB of metadata")
        self._metadata = b"".join(
            bytes(self._read_blocking(at, min(_PIECE, file.size_bytes - at)))
            for at in range(self._meta_at, file.size_bytes, _PIECE)
        )
        self._folders: dict[int, bytes] = {}  # blocks of folders outside the metadata area, by offset
        self._load_folders()

    def _load_folders(self) -> None:
        root = self.reader.root().number
        pending, seen = [root], {root}
        while pending:
            folder = self.reader.inode(pending.pop())
            blocks = folder.size // BLOCK if folder.tail_at is not None else -(-folder.size // BLOCK)
            if (len(self._folders) + blocks) * BLOCK > _MAX_METADATA:
                raise PermanentError(f"{self.name}: more than {_MAX_METADATA >> 20} MiB of folders")
            for at in range(folder.first_block * BLOCK, (folder.first_block + blocks) * BLOCK, BLOCK):
                self._folders[at] = bytes(self._read_blocking(at, BLOCK))
            for entry in self.reader.entries(folder):
                if MODE_OF_TYPE.get(entry.kind) == stat.S_IFDIR:
                    if entry.number in seen:
                        raise CorruptError(f"{self.name}: a folder has two names")
                    seen.add(entry.number)
                    pending.append(entry.number)

    def _read(self, offset: int, length: int) -> bytes:
        if offset + length <= BLOCK:
            return self._first[offset : offset + length]
        if offset < self._meta_at:
            # ErofsReader reads folders in whole blocks, except for the end of the last one.
            block = self._folders.get(offset)
            if block is None or length > BLOCK:
                raise CorruptError(f"{self.name}: metadata outside its area")
            return block[:length]
        return self._metadata[offset - self._meta_at : offset - self._meta_at + length]


class MergedTree:
    """The merged tree of an image, with whiteouts and opaque folders applied (`erofs.merged`); the first of `files` is
    the lowest layer.

    An inode number encodes the layer and its inode; for a merged folder those of the uppermost part. So every process
    assigns the same numbers, and a restarted daemon (`recovery`) understands those that the kernel keeps. All methods
    run on the session's one thread.
    """

    def __init__(self, source: Fetcher, files: Sequence[Index]) -> None:
        """Read the metadata of all layers, blocking. Raises `CorruptError` for an invalid layer."""
        self._source = source
        self._images = [_Image(source, file, number) for number, file in enumerate(files)][::-1]
        self._layers = [Layer(image.reader, str(place)) for place, image in enumerate(self._images)]
        self._root = Node(tuple((layer, layer.reader.root()) for layer in self._layers))
        self._merged: dict[int, Node] = {}
        """Merged folders found so far, by their inode numbers."""
        self._num_owners = num_owners()
        self._owner, self._group = os.geteuid(), os.getegid()

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        found = self._node(parent).child(name)
        return None if found is None else self._attributes_of(found)

    def attributes(self, inode: int) -> Attributes:
        return self._attributes_of(self._node(inode))

    def entries(self, inode: int) -> Sequence[Listed]:
        return [Listed(name, self._inode_of(child), child.inode.mode) for name, child in self._node(inode).children()]

    def readlink(self, inode: int) -> bytes:
        return self._node(inode).target()

    def xattrs(self, inode: int) -> Mapping[bytes, bytes]:
        layer, found = self._node(inode).parts[0]
        return {name: value for name, value in layer.reader.xattrs(found).items() if not name.startswith(MARKS)}

    def total(self) -> tuple[int, int]:
        files = sum(layer.reader.superblock.inodes for layer in self._layers)
        return sum(image.size_bytes for image in self._images), files

    def read(self, inode: int, offset: int, length: int, reply: Reply) -> Cancel | None:
        layer, found = self._node(inode).parts[0]
        image = self._images[int(layer.identity)]
        if found.tail_at is not None:
            raise CorruptError(f"{image.name}: inode {found.number} has inline data, which is not supported")
        return self._source.read(image.number, found.first_block * BLOCK + offset, length, reply)

    def _node(self, inode: int) -> Node:
        if inode == 1:
            return self._root
        if inode >= _FIRST_MERGED:
            if inode not in self._merged:
                self._find_merged()
            return self._merged[inode]
        number, place = divmod(inode - _FIRST, len(self._layers))
        layer = self._layers[place]
        return Node(((layer, layer.reader.inode(number)),))

    def _find_merged(self) -> None:
        """Find all merged folders: the kernel looked this one up in a process that died."""
        waiting = [1]
        while waiting:
            waiting += [entry.inode for entry in self.entries(waiting.pop()) if entry.inode >= _FIRST_MERGED]

    def _inode_of(self, node: Node) -> int:
        if node is self._root:
            return 1
        layer, found = node.parts[0]
        inode = _FIRST + found.number * len(self._layers) + int(layer.identity)
        if len(node.parts) > 1:
            inode += _FIRST_MERGED
            self._merged[inode] = node
        return inode

    def _attributes_of(self, node: Node) -> Attributes:
        found = node.inode
        return Attributes(
            self._inode_of(node),
            found.mode,
            found.size,
            found.nlink,
            found.uid if found.uid < self._num_owners else self._owner,
            found.gid if found.gid < self._num_owners else self._group,
            os.makedev(*found.rdev),
            found.mtime_ns,
        )


class ErofsTree(MergedTree):
    """The tree of one layer as it is, with its whiteouts. Overlay xattrs have the form that user namespaces use."""

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        layer, folder = self._node(parent).parts[0]
        found = layer.reader.lookup(folder, name)
        return None if found is None else self._attributes_of(Node(((layer, found),)))

    def entries(self, inode: int) -> Sequence[Listed]:
        layer, folder = self._node(inode).parts[0]
        return [
            Listed(entry.name, _FIRST + entry.number, MODE_OF_TYPE.get(entry.kind, 0))
            for entry in layer.reader.entries(folder)
        ]

    def xattrs(self, inode: int) -> Mapping[bytes, bytes]:
        layer, found = self._node(inode).parts[0]
        return for_user_namespace(layer.reader.xattrs(found))

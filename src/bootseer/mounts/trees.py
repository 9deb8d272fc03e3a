"""The FUSE trees of lazy mounts: block files themselves, or the file trees in EROFS block files.

`LazyFiles` is one folder with a file per block file. The kernel mounts EROFS from these files, so it handles names and
inodes itself and requests only blocks. Where the kernel cannot mount EROFS, `MergedTree` serves several layers as one
tree, merged as by overlayfs: a lookup costs one request instead of one per layer, and only FUSE needs to be mounted.
`layer_tree` serves one layer with its whiteouts and opaque folders, for an overlay in a user namespace.

All metadata and folders of EROFS files are read before the mount, because methods of a tree must not block; file
contents are read on demand. Owners that the user namespace does not map would make files inaccessible, so they are
replaced by the current user.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from bootseer.erofs.format import BLOCK, Superblock
from bootseer.erofs.reader import ErofsReader, Inode
from bootseer.errors import BootseerError, CorruptError, PermanentError, UsageError
from bootseer.fuse.filesystem import Attributes, Cancel, Data, Entry, Reply
from bootseer.mounts.user_namespace import num_owners

if TYPE_CHECKING:
    from bootseer.fetch.fetcher import Fetcher

OnError = Callable[[str], None]
Part = tuple[int, int]
"""A layer (0 is the uppermost) and the number of an inode there."""
_FIRST = 2
_PRIVILEGED, _UNPRIVILEGED = b"trusted.overlay.", b"user.overlay."
_MARKS = (_UNPRIVILEGED, _PRIVILEGED)
_OPAQUE = b"user.overlay.opaque"
_FIRST_MERGED = 1 << 48
_MAX_METADATA = 1 << 30
_PIECE = 1 << 20
_KINDS = {
    1: stat.S_IFREG,
    2: stat.S_IFDIR,
    3: stat.S_IFCHR,
    4: stat.S_IFBLK,
    5: stat.S_IFIFO,
    6: stat.S_IFSOCK,
    7: stat.S_IFLNK,
}


class LazyFile(NamedTuple):
    """A served file; `number` is its number in the fetcher."""

    name: str
    size_bytes: int
    number: int


class LazyFiles:
    """A tree of one folder. Immutable and thread-safe."""

    def __init__(self, source: Fetcher, files: Sequence[LazyFile], on_error: OnError) -> None:
        self._source = source
        self._files = tuple(files)
        self._on_error = on_error
        self._root = Attributes(1, stat.S_IFDIR | 0o555, nlink=2)
        self._attributes = [
            Attributes(_FIRST + place, stat.S_IFREG | 0o444, file.size_bytes) for place, file in enumerate(files)
        ]
        self._by_name = {file.name.encode(): place for place, file in enumerate(files)}
        self._entries = [Entry(name, _FIRST + place, stat.S_IFREG) for name, place in self._by_name.items()]

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        place = self._by_name.get(name) if parent == 1 else None
        return None if place is None else self._attributes[place]

    def attributes(self, inode: int) -> Attributes:
        return self._root if inode == 1 else self._attributes[inode - _FIRST]

    def entries(self, inode: int) -> Sequence[Entry]:
        if inode != 1:
            raise OSError(errno.ENOTDIR, "not a folder")
        return self._entries

    def readlink(self, inode: int) -> bytes:
        raise OSError(errno.EINVAL, "not a symbolic link")

    def xattrs(self, inode: int) -> Mapping[bytes, bytes]:
        return {}

    def total(self) -> tuple[int, int]:
        return sum(file.size_bytes for file in self._files), len(self._files)

    def read(self, inode: int, offset: int, length: int, reply: Reply) -> Cancel | None:
        file = self._files[inode - _FIRST]
        return start_read(self._source, file.number, offset, length, reply, self._on_error)


def start_read(
    source: Fetcher, file: int, offset: int, length: int, reply: Reply, on_error: Callable[[str], None]
) -> Cancel | None:
    """Begin a read. A failure is answered with EIO and logged."""

    def done(result: Data | BootseerError) -> None:
        if isinstance(result, BootseerError):
            on_error(str(result))
            reply(errno.EIO)
        else:
            reply(result)

    ticket = source.read(file, offset, length, done)
    return None if ticket is None else ticket.cancel


class ErofsTree:
    """The tree of one EROFS image. Inode 1 is its root; other inode numbers are the image's nids plus 2."""

    def __init__(self, source: Fetcher, file: LazyFile, on_error: OnError) -> None:
        """Read all metadata, blocking. Raises `CorruptError` for an invalid image."""
        self._source = source
        self._file = file
        self._on_error = on_error
        first = bytes(source.read_blocking(file.number, 0, BLOCK))
        self._meta_at = Superblock.parse(first).meta_block * BLOCK
        if not BLOCK <= self._meta_at < file.size_bytes:
            raise CorruptError(f"{file.name}: the metadata area lies outside the image")
        if file.size_bytes - self._meta_at > _MAX_METADATA:
            raise PermanentError(f"{file.name}: more than {_MAX_METADATA >> 20} MiB of metadata")
        self._metadata = b"".join(
            bytes(source.read_blocking(file.number, at, min(_PIECE, file.size_bytes - at)))
            for at in range(self._meta_at, file.size_bytes, _PIECE)
        )
        self._first = first
        self._num_owners = num_owners()
        self._owner, self._group = os.geteuid(), os.getegid()
        self._folders: dict[int, bytes] = {}  # blocks of folders outside the metadata area, by offset
        self._reader = ErofsReader(self._read_metadata)
        self._root = self._reader.root().number
        self._num_files = Superblock.parse(first).inodes
        self._load_folders()

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        found = self._reader.lookup(self._inode(parent), name)
        return None if found is None else self._attributes_of(found)

    def attributes(self, inode: int) -> Attributes:
        return self._attributes_of(self._inode(inode))

    def entries(self, inode: int) -> Sequence[Entry]:
        return [
            Entry(entry.name, self._tree_inode(entry.number), _KINDS.get(entry.kind, 0))
            for entry in self._reader.entries(self._inode(inode))
        ]

    def readlink(self, inode: int) -> bytes:
        return self._reader.readlink(self._inode(inode))

    def xattrs(self, inode: int) -> Mapping[bytes, bytes]:
        # An image may have attributes of the unprivileged form, which hide nothing in mounts of the host.
        return {
            _UNPRIVILEGED + name.removeprefix(_PRIVILEGED) if name.startswith(_PRIVILEGED) else name: value
            for name, value in self._reader.xattrs(self._inode(inode)).items()
            if not name.startswith(_UNPRIVILEGED)
        }

    def total(self) -> tuple[int, int]:
        return self._file.size_bytes, self._num_files

    def read(self, inode: int, offset: int, length: int, reply: Reply) -> Cancel | None:
        found = self._inode(inode)
        if not stat.S_ISREG(found.mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if found.tail_at is not None:
            raise CorruptError(f"{self._file.name}: inode {found.number} has inline data, which is not supported")
        at = found.first_block * BLOCK + offset
        return start_read(self._source, self._file.number, at, length, reply, self._on_error)

    def _load_folders(self) -> None:
        pending, seen = [self._root], {self._root}
        while pending:
            folder = self._reader.inode(pending.pop())
            blocks = folder.size // BLOCK if folder.tail_at is not None else -(-folder.size // BLOCK)
            for at in range(folder.first_block * BLOCK, (folder.first_block + blocks) * BLOCK, BLOCK):
                self._folders[at] = bytes(self._source.read_blocking(self._file.number, at, BLOCK))
            if len(self._folders) * BLOCK > _MAX_METADATA:
                raise PermanentError(f"{self._file.name}: more than {_MAX_METADATA >> 20} MiB of folders")
            for entry in self._reader.entries(folder):
                if _KINDS.get(entry.kind) == stat.S_IFDIR:
                    if entry.number in seen:
                        raise CorruptError(f"{self._file.name}: a folder has two names")
                    seen.add(entry.number)
                    pending.append(entry.number)

    def _inode(self, tree_inode: int) -> Inode:
        return self._reader.inode(self._root if tree_inode == 1 else tree_inode - 2)

    def _tree_inode(self, number: int) -> int:
        return 1 if number == self._root else number + 2

    def _attributes_of(self, inode: Inode) -> Attributes:
        return Attributes(
            self._tree_inode(inode.number),
            inode.mode,
            inode.size,
            inode.nlink,
            inode.uid if inode.uid < self._num_owners else self._owner,
            inode.gid if inode.gid < self._num_owners else self._group,
            os.makedev(*inode.rdev),
            inode.mtime_ns,
        )

    def _read_metadata(self, offset: int, length: int) -> bytes:
        if offset + length <= BLOCK:
            return self._first[offset : offset + length]
        if offset < self._meta_at:
            # ErofsReader reads folders in whole blocks, except for the end of the last one.
            block = self._folders.get(offset)
            if block is None or length > BLOCK:
                raise CorruptError(f"{self._file.name}: metadata outside its area")
            return block[:length]
        return self._metadata[offset - self._meta_at : offset - self._meta_at + length]


def layer_tree(source: Fetcher, files: Sequence[LazyFile], on_error: OnError) -> ErofsTree:
    """The tree of the only file in `files`, with overlay xattrs in the form that user namespaces use."""
    if len(files) != 1:
        raise UsageError(f"{len(files)} layers instead of one", hint="several are served by MergedTree")
    return ErofsTree(source, files[0], on_error)


class MergedTree:
    """The merged tree of an image, with whiteouts and opaque folders applied; the first of `files` is the lowest layer.

    An inode number encodes the layer and its inode; for a merged folder those of the uppermost part. So every process
    assigns the same numbers, and a restarted daemon (`recovery`) understands those that the kernel keeps. All methods
    run on the session's one thread.
    """

    def __init__(self, source: Fetcher, files: Sequence[LazyFile], on_error: OnError) -> None:
        """Read the metadata of all layers, blocking. Raises `CorruptError` for an invalid layer."""
        if not files:
            raise UsageError("an image without layers", hint="convert it again")
        self._layers = [ErofsTree(source, file, on_error) for file in reversed(files)]
        self._merged: dict[int, tuple[Part, ...]] = {}
        """Merged folders found so far, by their inode numbers."""
        self._root = self._visible_parts([(layer, 1) for layer in range(len(self._layers))])

    def lookup(self, parent: int, name: bytes) -> Attributes | None:
        parts = self._child_parts(self._parts(parent), name)
        return self._attributes_of(parts) if parts else None

    def attributes(self, inode: int) -> Attributes:
        return self._attributes_of(self._parts(inode))

    def entries(self, inode: int) -> Sequence[Entry]:
        parts, seen, found = self._parts(inode), set(), []
        for layer, number in parts:
            for entry in self._layers[layer].entries(number):
                if entry.name in seen:
                    continue
                seen.add(entry.name)
                here: tuple[Part, ...] = ((layer, entry.inode),)
                if stat.S_ISDIR(entry.mode) or stat.S_ISCHR(entry.mode):  # may be merged, or a whiteout
                    here = self._child_parts(parts, entry.name)
                if here:
                    found.append(Entry(entry.name, self._inode_of(here), entry.mode))
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

    def _child_parts(self, parents: Sequence[Part], name: bytes) -> tuple[Part, ...]:
        """The visible inodes of a name: a file, or a folder and those merged with it; empty if it is deleted."""
        found: list[Part] = []
        for layer, number in parents:
            child = self._layers[layer].lookup(number, name)
            if child is None:
                continue
            if stat.S_ISDIR(child.mode):
                found.append((layer, child.inode))
                continue
            is_whiteout = stat.S_ISCHR(child.mode) and child.rdev == 0
            if not found and not is_whiteout:
                return ((layer, child.inode),)
            break
        return self._visible_parts(found) if found else ()

    def _visible_parts(self, folders: Sequence[Part]) -> tuple[Part, ...]:
        """The folders from the uppermost down to the first opaque one, which hides those below it."""
        for place, (layer, number) in enumerate(folders):
            if self._layers[layer].xattrs(number).get(_OPAQUE) == b"y":
                return tuple(folders[: place + 1])
        return tuple(folders)

    def _parts(self, inode: int) -> tuple[Part, ...]:
        if inode == 1:
            return self._root
        if inode >= _FIRST_MERGED:
            if inode not in self._merged:
                self._find_merged()
            return self._merged[inode]
        number, layer = divmod(inode, len(self._layers))
        return ((layer, number),)

    def _find_merged(self) -> None:
        """Find all merged folders: the kernel looked this one up in a process that died."""
        waiting = [1]
        while waiting:
            waiting += [entry.inode for entry in self.entries(waiting.pop()) if entry.inode >= _FIRST_MERGED]

    def _inode_of(self, parts: tuple[Part, ...]) -> int:
        if parts == self._root:
            return 1
        layer, number = parts[0]
        inode = number * len(self._layers) + layer
        if len(parts) > 1:
            inode += _FIRST_MERGED
            self._merged[inode] = parts
        return inode

    def _attributes_of(self, parts: tuple[Part, ...]) -> Attributes:
        layer, number = parts[0]
        return replace(self._layers[layer].attributes(number), inode=self._inode_of(parts))

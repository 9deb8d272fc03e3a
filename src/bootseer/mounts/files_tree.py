"""The file tree inside an EROFS block file, served through FUSE: for machines where the kernel cannot mount EROFS.

All metadata and all folders of the image are read before the mount, because none of a tree's methods may wait; the
contents of files are read when they are asked for. Attributes of overlays are shown under the names that overlays in
user namespaces read.
Who calls: `fetched` as `make_tree`, through whoever mounts images without root.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping, Sequence

from bootseer.erofs.format import BLOCK, Superblock
from bootseer.erofs.reader import ErofsReader, Inode
from bootseer.errors import CorruptError, PermanentError
from bootseer.fuse.filesystem import Attributes, Cancel, Entry, Reply
from bootseer.mounts.lazy import LazyFile, Source, start_read

_PRIVILEGED, _UNPRIVILEGED = b"trusted.overlay.", b"user.overlay."
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


class FilesTree:
    """The tree of one image. Inode 1 is its root; the others are its own numbers, moved out of the way of 1."""

    def __init__(self, source: Source, file: LazyFile, on_error: Callable[[str], None]) -> None:
        """Read the metadata, and wait for it. Raises `CorruptError` for what is no image of ours."""
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
        self._folders: dict[int, bytes] = {}  # blocks of folders that lie outside the metadata area
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
            Entry(entry.name, self._outer(entry.number), _KINDS.get(entry.kind, 0))
            for entry in self._reader.entries(self._inode(inode))
        ]

    def readlink(self, inode: int) -> bytes:
        return self._reader.readlink(self._inode(inode))

    def xattrs(self, inode: int) -> Mapping[bytes, bytes]:
        return {
            _UNPRIVILEGED + name.removeprefix(_PRIVILEGED) if name.startswith(_PRIVILEGED) else name: value
            for name, value in self._reader.xattrs(self._inode(inode)).items()
        }

    def total(self) -> tuple[int, int]:
        return self._file.size_bytes, self._num_files

    def read(self, inode: int, offset: int, length: int, reply: Reply) -> Cancel | None:
        found = self._inode(inode)
        if not stat.S_ISREG(found.mode):
            raise OSError(errno.EINVAL, "not a regular file")
        if found.tail_at is not None:
            raise CorruptError(f"{self._file.name}: the content of inode {found.number} lies among the metadata")
        at = found.place * BLOCK + offset
        return start_read(self._source, self._file.number, at, length, reply, self._on_error)

    def _load_folders(self) -> None:
        waiting, seen = [self._root], {self._root}
        while waiting:
            folder = self._reader.inode(waiting.pop())
            blocks = folder.size // BLOCK if folder.tail_at is not None else -(-folder.size // BLOCK)
            for at in range(folder.place * BLOCK, (folder.place + blocks) * BLOCK, BLOCK):
                self._folders[at] = bytes(self._source.read_blocking(self._file.number, at, BLOCK))
            if len(self._folders) * BLOCK > _MAX_METADATA:
                raise PermanentError(f"{self._file.name}: more than {_MAX_METADATA >> 20} MiB of folders")
            for entry in self._reader.entries(folder):
                if _KINDS.get(entry.kind) == stat.S_IFDIR:
                    if entry.number in seen:
                        raise CorruptError(f"{self._file.name}: a folder has two names")
                    seen.add(entry.number)
                    waiting.append(entry.number)

    def _inode(self, outer: int) -> Inode:
        return self._reader.inode(self._root if outer == 1 else outer - 2)

    def _outer(self, number: int) -> int:
        return 1 if number == self._root else number + 2

    def _attributes_of(self, inode: Inode) -> Attributes:
        return Attributes(
            self._outer(inode.number),
            inode.mode,
            inode.size,
            inode.nlink,
            inode.uid,
            inode.gid,
            os.makedev(*inode.rdev),
            inode.mtime_ns,
        )

    def _read_metadata(self, offset: int, length: int) -> bytes:
        if offset + length <= BLOCK:
            return self._first[offset : offset + length]
        if offset < self._meta_at:
            # The reader asks for folders in whole blocks, but for the end of the last one.
            block = self._folders.get(offset)
            if block is None or length > BLOCK:
                raise CorruptError(f"{self._file.name}: metadata outside its area")
            return block[:length]
        return self._metadata[offset - self._meta_at : offset - self._meta_at + length]

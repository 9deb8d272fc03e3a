"""Write an EROFS image as a stream: file data as it arrives, then the metadata, and the superblock last.

The image is never whole in memory or on disk. Block 0 is the superblock, which is known only at the end: `finish`
returns it. The sink accepts the first block last (`blocks.writer.BlockWriter`), or is a file positioned after block 0.

The files' data is followed by the blocks of directories and symbolic links, and by the metadata area of inodes. Each
inode is followed by its xattrs and, if it fits into the same block, by the inline tail: the last partial block of its
directory, or its link target. Parents precede children, and the children of a directory are adjacent, so that `ls -l`
and a Python import read few blocks.

The image depends only on the input and its order, not on time, machine or hash seed; the order of the metadata depends
on names alone. Owned by one thread.
"""

from __future__ import annotations

import hashlib
import stat
from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from bootseer.erofs.format import (
    BLOCK,
    EXTENDED,
    FLAT_INLINE,
    FLAT_PLAIN,
    INODE,
    MAX_BLOCKS,
    MAX_NAME,
    MAX_TARGET,
    SLOT,
    Attributes,
    Superblock,
    align,
    decode_rdev,
    decode_xattrs,
    encode_directory_block,
    encode_rdev,
    encode_xattrs,
    file_type,
    known_mode,
    split_directory,
    xattr_count,
)
from bootseer.errors import PermanentError

ROOT = 0
_NS = 1_000_000_000
_MAX_SECONDS = 2**63 - 1
_DEFAULT_ROOT = Attributes(stat.S_IFDIR | 0o755)
_PIECE = 1 << 20
_ZEROS = bytes(_PIECE)
_UNPLACED = 2**64 - 1
# Padding at the end of the image: fsck.erofs 1.5 reads an xattr header after every inode, even if it has no xattrs.
_SPARE = 12


class Tree:
    """Inodes and names. A new tree has a root directory, inode `ROOT`, with mode 0755.

    A tree of a million files must fit into memory, so inodes are numbers and their fields are stored in arrays; names
    take most of the memory.
    """

    def __init__(self) -> None:
        self.modes = array("H")
        self.uids = array("I")
        self.gids = array("I")
        self.seconds = array("q")
        self.nanoseconds = array("I")
        self.sizes = array("Q")
        self.first_blocks = array("I")  # first block of a file, or device number
        self.xattrs: dict[int, bytes] = {}  # encoded; only of inodes with attributes
        self.targets: dict[int, bytes] = {}  # of symbolic links
        self._children: dict[int, dict[bytes, int]] = {}
        self.add(_DEFAULT_ROOT)

    def __len__(self) -> int:
        """The number of inodes added, including those without a name."""
        return len(self.modes)

    def add(self, attributes: Attributes, *, size: int = 0, first_block: int = 0, target: bytes = b"") -> int:
        """Add an inode without a name; returns its number. `size` (bytes) and `first_block` are for regular files,
        `target` is for symbolic links.

        Raises `PermanentError` for attributes that an image cannot hold.
        """
        mode = attributes.mode
        if not known_mode(mode):
            raise PermanentError(f"mode {mode:#o} is not a known file type")
        if stat.S_ISLNK(mode) and not 0 < len(target) <= MAX_TARGET:
            raise PermanentError(f"a symbolic link's target of {len(target)} bytes: Linux allows 1 to {MAX_TARGET}")
        area = encode_xattrs(attributes.xattrs)
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            first_block = encode_rdev(*attributes.rdev)
        number = len(self.modes)
        self.modes.append(mode)
        self.sizes.append(len(target) or size)
        self.first_blocks.append(first_block)
        for column in (self.uids, self.gids, self.seconds, self.nanoseconds):
            column.append(0)
        self._set_times_and_owner(number, attributes)
        if area:
            self.xattrs[number] = area
        if target:
            self.targets[number] = target
        if stat.S_ISDIR(mode):
            self._children[number] = {}
        return number

    def update(self, inode: int, attributes: Attributes) -> None:
        """Replace an inode's attributes, except its type. Raises `PermanentError` as `add` does."""
        area = encode_xattrs(attributes.xattrs)
        self.modes[inode] = stat.S_IFMT(self.modes[inode]) | stat.S_IMODE(attributes.mode)
        self._set_times_and_owner(inode, attributes)
        if area:
            self.xattrs[inode] = area
        else:
            self.xattrs.pop(inode, None)

    def attributes(self, inode: int) -> Attributes:
        """The attributes set by `add` or `update`."""
        mode = self.modes[inode]
        device = stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
        return Attributes(
            mode,
            self.uids[inode],
            self.gids[inode],
            self.seconds[inode] * _NS + self.nanoseconds[inode],
            decode_rdev(self.first_blocks[inode]) if device else (0, 0),
            decode_xattrs(self.xattrs.get(inode, b"")),
        )

    def is_directory(self, inode: int) -> bool:
        return inode in self._children

    def child(self, directory: int, name: bytes) -> int | None:
        """The inode of this name in the directory, or None."""
        return self._children[directory].get(name)

    def link(self, directory: int, name: bytes, inode: int) -> None:
        """Add a name for an inode, or replace the one that has this name. Give a directory only one name. Raises
        `PermanentError` for an invalid name."""
        if not 0 < len(name) <= MAX_NAME or b"/" in name or b"\0" in name or name in {b".", b".."}:
            shown = name[:MAX_NAME].decode("utf-8", "replace")
            raise PermanentError(f"{shown!r} ({len(name)} bytes) is not the name of a file")
        self._children[directory][name] = inode

    def unlink(self, directory: int, name: bytes) -> None:
        """Remove a name, if it exists. Inodes without a name are not written."""
        self._children[directory].pop(name, None)

    def walk_directory(self, directory: int) -> Iterator[tuple[bytes, int]]:
        """(name, inode) of each entry, sorted by name as in the image."""
        children = self._children[directory]
        for name in sorted(children):
            yield name, children[name]

    def _set_times_and_owner(self, inode: int, attributes: Attributes) -> None:
        seconds, nanoseconds = divmod(attributes.mtime_ns, _NS)
        try:
            self.uids[inode] = attributes.uid
            self.gids[inode] = attributes.gid
        except OverflowError as error:
            raise PermanentError(f"owner {attributes.uid}:{attributes.gid} is outside Linux's range") from error
        self.seconds[inode] = max(-_MAX_SECONDS, min(_MAX_SECONDS, seconds))
        self.nanoseconds[inode] = nanoseconds


class Sink(Protocol):
    """Receives the image from block 1 on."""

    def write(self, data: bytes | memoryview, /) -> object:
        """Append."""


class Extent(NamedTuple):
    """First block and size in bytes of a file's data. An empty file has block 0."""

    block: int
    size: int


class ErofsWriter:
    """Writes an image to `sink`. First write a file's data, then add its inode with the resulting extent to `tree`.

    Methods raise `PermanentError` if the image exceeds EROFS's limits, and the sink's errors.
    """

    def __init__(self, sink: Sink) -> None:
        self.tree = Tree()
        self._sink = sink
        self._position = BLOCK
        self._begin = BLOCK

    @property
    def position(self) -> int:
        """Bytes written so far, including block 0."""
        return self._position

    def write(self, data: bytes | memoryview) -> None:
        self._position += len(data)
        self._check_size()
        self._sink.write(data)

    def write_zeros(self, count: int) -> None:
        self._position += count
        self._check_size()
        while count > 0:
            piece = min(count, _PIECE)
            self._sink.write(memoryview(_ZEROS)[:piece])
            count -= piece

    def write_file(self, pieces: Iterable[bytes | memoryview | int]) -> Extent:
        """Write a whole file: pieces of data, and the length of each hole as a number."""
        for piece in pieces:
            if isinstance(piece, int):
                self.write_zeros(piece)
            else:
                self.write(piece)
        return self.end_file()

    def end_file(self) -> Extent:
        """End the current file's data and return its extent. The next write starts another file."""
        extent = Extent(self._begin // BLOCK, self._position - self._begin)
        self.write_zeros(align(self._position, BLOCK) - self._position)
        self._begin = self._position
        return extent if extent.size else Extent(0, 0)

    def finish(self) -> bytes:
        """Write the metadata and return block 0. The writer cannot be used afterwards."""
        if self._position != self._begin:
            raise PermanentError("an image was finished without the end of its last file")
        layout = Layout(self.tree, self._position // BLOCK)
        digest = hashlib.sha256()
        pending = bytearray()
        for piece in layout.encode():
            pending += piece
            if len(pending) >= _PIECE:
                self._flush(pending, digest)
                pending.clear()
        self._flush(pending, digest)
        uuid = bytearray(digest.digest()[:16])  # of version 8: custom content
        uuid[6], uuid[8] = uuid[6] & 0x0F | 0x80, uuid[8] & 0x3F | 0x80
        return replace(layout.superblock, uuid=bytes(uuid)).encode()

    def _flush(self, pending: bytearray, digest: hashlib._Hash) -> None:
        data = bytes(pending)
        digest.update(data)
        self._position += len(data)
        self._sink.write(data)

    def _check_size(self) -> None:
        if self._position > MAX_BLOCKS * BLOCK:
            raise PermanentError(f"an image of more than {MAX_BLOCKS} blocks: EROFS has at most {MAX_BLOCKS}")


class Layout:
    """Places and encodes the metadata of a tree, after `first_block` blocks of superblock and data."""

    def __init__(self, tree: Tree, first_block: int) -> None:
        self._tree = tree
        self._next_block = first_block
        self._end = 0  # size of the metadata area so far, in bytes
        self._order = array("I")  # inodes in the order of the metadata area
        self._nids = array("Q", [_UNPLACED]) * len(tree)
        self._parents = array("I", [0]) * len(tree)
        self._links = array("I", [0]) * len(tree)
        self._outside: list[int] = []  # inodes whose content, or its beginning, is not inline
        self._tails: dict[int, int] = {}  # size of each inline tail
        self._first_blocks: dict[int, int] = {}
        self._place_all()
        self._meta_block = self._next_block
        blocks = self._meta_block + align(self._end + _SPARE, BLOCK) // BLOCK
        if blocks > MAX_BLOCKS:
            raise PermanentError(f"an image of {blocks} blocks: EROFS has at most {MAX_BLOCKS}")
        self.superblock = Superblock(self._nids[ROOT], len(self._order), blocks, self._meta_block)

    def encode(self) -> Iterator[bytes]:
        """The bytes from `first_block` to the end of the image."""
        for inode in self._outside:
            content = self._content(inode)
            whole = content[:-1] if inode in self._tails else content
            yield from (piece.ljust(BLOCK, b"\0") for piece in whole)
        at = 0
        for inode in self._order:
            begin = self._nids[inode] * SLOT
            yield bytes(begin - at)
            record = self._encode_inode(inode)
            yield record
            at = begin + len(record)
        yield bytes(align(at + _SPARE, BLOCK) - at)

    def _place_all(self) -> None:
        tree = self._tree
        self._links[ROOT] = 2
        tree.sizes[ROOT] = self._directory_size(ROOT)
        self._place(ROOT)
        pending = [ROOT]
        while pending:
            directory = pending.pop()
            deeper = []
            for _, inode in tree.walk_directory(directory):
                if tree.is_directory(inode):
                    self._links[inode] = 2
                    self._links[directory] += 1
                    self._parents[inode] = directory
                    tree.sizes[inode] = self._directory_size(inode)
                    deeper.append(inode)
                else:
                    self._links[inode] += 1
                if self._nids[inode] == _UNPLACED:
                    self._place(inode)
            pending.extend(reversed(deeper))

    def _directory_size(self, directory: int) -> int:
        names = sorted([*(name for name, _ in self._tree.walk_directory(directory)), b".", b".."])
        *full, last = split_directory(names)
        return len(full) * BLOCK + last[2]

    def _place(self, inode: int) -> None:
        tree = self._tree
        mode = tree.modes[inode]
        header = INODE.size + len(tree.xattrs.get(inode, b""))
        tail = 0
        if stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
            size = tree.sizes[inode]
            tail = size % BLOCK if header + size % BLOCK <= BLOCK else 0
            blocks = size // BLOCK if tail else align(size, BLOCK) // BLOCK
            if blocks:
                self._outside.append(inode)
                self._first_blocks[inode] = self._next_block
                self._next_block += blocks
        # The kernel requires that an inode does not cross a block, and that an inline tail is in the inode's block.
        need = header + tail if tail else INODE.size
        if self._end % BLOCK + need > BLOCK:
            self._end = align(self._end, BLOCK)
        if tail:
            self._tails[inode] = tail
        self._nids[inode] = self._end // SLOT
        self._order.append(inode)
        self._end += align(header + tail, SLOT)

    def _content(self, inode: int) -> list[bytes]:
        """The content of a directory or symbolic link in blocks, the last one without padding."""
        tree = self._tree
        target = tree.targets.get(inode)
        if target is not None:
            return [target]
        entries = [(b".", self._nids[inode], 2), (b"..", self._nids[self._parents[inode]], 2)]
        entries += [
            (name, self._nids[child], file_type(tree.modes[child])) for name, child in tree.walk_directory(inode)
        ]
        entries.sort()
        names = [name for name, _, _ in entries]
        return [encode_directory_block(entries[first:end]) for first, end, _ in split_directory(names)]

    def _encode_inode(self, inode: int) -> bytes:
        tree = self._tree
        mode = tree.modes[inode]
        area = tree.xattrs.get(inode, b"")
        tail = self._content(inode)[-1] if inode in self._tails else b""
        is_metadata = stat.S_ISDIR(mode) or stat.S_ISLNK(mode)
        first_block = self._first_blocks.get(inode, 0) if is_metadata else tree.first_blocks[inode]
        nid = self._nids[inode]
        record = INODE.pack(
            EXTENDED | (FLAT_INLINE if tail else FLAT_PLAIN) << 1,
            xattr_count(len(area)),
            mode,
            0,
            tree.sizes[inode],
            first_block,
            (nid + 1) & 0xFFFFFFFF,  # i_ino, the inode number for 32-bit stat
            tree.uids[inode],
            tree.gids[inode],
            tree.seconds[inode],
            tree.nanoseconds[inode],
            self._links[inode],
        )
        return record + area + tail

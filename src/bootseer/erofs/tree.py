"""The directory tree of an image that is being written: names and inodes.

A tree of a million files must fit into memory, so inodes are numbers and their fields are stored in arrays; names take
most of the memory. Owned by one thread.
"""

from __future__ import annotations

import stat
from array import array
from collections.abc import Iterator, KeysView

from bootseer.erofs.format import (
    MAX_NAME,
    MAX_TARGET,
    Attributes,
    decode_rdev,
    decode_xattrs,
    encode_rdev,
    encode_xattrs,
    known_mode,
)
from bootseer.errors import PermanentError

ROOT = 0
_NS = 1_000_000_000
_MAX_SECONDS = 2**63 - 1
_DEFAULT_ROOT = Attributes(stat.S_IFDIR | 0o755)


class Tree:
    """Inodes and names. A new tree has a root directory, inode `ROOT`, with mode 0755."""

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

    def names(self, directory: int) -> KeysView[bytes]:
        """The names in a directory, without `.` and `..`, unordered."""
        return self._children[directory].keys()

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

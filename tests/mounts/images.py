"""EROFS images for the tests, from nested dicts."""

from __future__ import annotations

import stat
from pathlib import Path

from bootseer.erofs.format import Attributes
from bootseer.erofs.writer import ErofsWriter

Content = dict[bytes, object]
"""Names to bytes (a file), a dict (a folder), a string (a symbolic link) or None (a whiteout)."""


def write_image(path: Path, content: Content, *, opaque: frozenset[bytes] = frozenset()) -> Path:
    """Write an image; folders named in `opaque` hide what is below them."""
    with path.open("wb") as file:
        file.seek(4096)
        writer = ErofsWriter(file)
        _fill(writer, 0, content, opaque)
        head = writer.finish()
        file.seek(0)
        file.write(head)
    return path


def _fill(writer: ErofsWriter, folder: int, content: Content, opaque: frozenset[bytes]) -> None:
    tree = writer.tree
    for name, node in content.items():
        if isinstance(node, dict):
            xattrs = {b"trusted.overlay.opaque": b"y"} if name in opaque else {}
            inode = tree.add(Attributes(stat.S_IFDIR | 0o755, xattrs=xattrs))
            tree.link(folder, name, inode)
            _fill(writer, inode, node, opaque)
        elif isinstance(node, bytes):
            writer.write(node)
            extent = writer.end_file()
            attributes = Attributes(stat.S_IFREG | 0o640, 7, 8, 1_700_000_000_123_456_789, xattrs={b"user.k": b"v"})
            tree.link(folder, name, tree.add(attributes, size=extent.size, first_block=extent.block))
        elif isinstance(node, str):
            tree.link(folder, name, tree.add(Attributes(stat.S_IFLNK | 0o777), target=node.encode()))
        else:
            tree.link(folder, name, tree.add(Attributes(stat.S_IFCHR)))

"""Unpack a converted image into a folder: the last fallback where nothing can be mounted (`artifact.unpacked`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bootseer.artifact.unpacked import TreeFile, write_tree
from bootseer.cache.cached_file import CachedFile
from bootseer.erofs.merged import Layer, MergedLayers, Node, is_mark, unescape_xattr
from bootseer.erofs.reader import ErofsReader
from bootseer.errors import CorruptError


def unpack_layers(stack: Sequence[CachedFile], folder: Path) -> None:
    """Unpack layers whose blocks are all cached on this node. Raises as `write_tree` does."""
    unpack(MergedLayers([Layer(ErofsReader(layer.read), layer.index.identity) for layer in stack]), folder)


def unpack(tree: MergedLayers, folder: Path) -> None:
    """Write the tree to an empty folder, which is created if missing; see `write_tree`."""
    assert tree.root is not None  # noqa: S101 - an image has layers
    write_tree(_files(tree.root), folder, _visible_xattrs)


def _files(root: Node) -> Iterator[TreeFile]:
    """All files, each folder before its entries."""
    pending: list[tuple[bytes, Node]] = [(b"", root)]
    seen: set[str] = set()
    while pending:
        path, node = pending.pop()
        layer, inode = node.parts[0]
        yield path, layer.reader, inode
        if not node.is_directory:
            continue
        if node.identity in seen:
            raise CorruptError(f"{os.fsdecode(path)}: a directory contains itself or has two names")
        seen.add(node.identity)
        pending += [(path + b"/" + name if path else name, child) for name, child in node.children()]


def _visible_xattrs(xattrs: Mapping[bytes, bytes]) -> Mapping[bytes, bytes]:
    """The attributes without overlayfs' own; escaped ones under their real names."""
    return {unescape_xattr(name): value for name, value in xattrs.items() if not is_mark(name)}

"""Unpack a converted image into a folder: the last fallback where nothing can be mounted.

For root the result equals a mount. Other users own all unpacked files, and devices and attributes that only root may
set are left out. Root of a user namespace sets as much as the kernel permits. The folder must be empty, so that no
symbolic link in it can redirect a write.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from bootseer.artifact.loading import CachedLayer
from bootseer.artifact.unpacked import AttributeWriter, write_file
from bootseer.erofs.format import Attributes
from bootseer.erofs.reader import ErofsReader
from bootseer.errors import CorruptError, PermanentError, UsageError
from bootseer.image.merged import Layer, MergedTree, Node, unescape_xattr


def unpack_layers(stack: Sequence[CachedLayer], folder: Path) -> None:
    """Unpack layers whose blocks are all cached on this node. Raises as `unpack` does."""
    unpack(MergedTree([Layer(ErofsReader(layer.file.read), layer.index.identity) for layer in stack]), folder)


def unpack(tree: MergedTree, folder: Path) -> None:
    """Write the tree to an empty folder, which is created if missing.

    Raises `UsageError` if the folder is not empty, `PermanentError` if a file cannot be written, and the errors of
    reading the image. After an error the files written so far remain.
    """
    root = tree.root
    if root is None:
        raise UsageError("an image without layers", hint="convert it again")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if next(folder.iterdir(), None) is not None:
            raise UsageError(f"{folder} is not empty", hint="name a new folder")
        _Unpacking(os.fsencode(folder)).run(root)
    except OSError as error:
        place = os.fsdecode(error.filename) if error.filename else folder
        raise PermanentError(f"{place}: {error.strerror}") from error


class _Unpacking:
    def __init__(self, folder: bytes) -> None:
        self._folder = folder
        self._attributes = AttributeWriter()
        self._first_name: dict[str, bytes] = {}  # of each file with hard links
        self._directories: set[str] = set()

    def run(self, root: Node) -> None:
        # A directory's attributes are set after its content is written: writing changes its mtime, and its mode may
        # forbid it. The flag says whether the content is written.
        pending: list[tuple[bytes, Node, bool]] = [(self._folder, root, False)]
        while pending:
            path, directory, filled = pending.pop()
            if filled:
                self._set_attributes(path, directory.attributes())
                continue
            if directory.identity in self._directories:
                raise CorruptError(f"{os.fsdecode(path)}: a directory contains itself or has two names")
            self._directories.add(directory.identity)
            pending.append((path, directory, True))
            for name, node in directory.children():
                full = path + b"/" + name
                if node.is_directory:
                    os.mkdir(full, 0o700)  # noqa: PTH102 - bytes: names need not be text
                    pending.append((full, node, False))
                else:
                    self._write(full, node)

    def _write(self, path: bytes, node: Node) -> None:
        if node.inode.nlink > 1:
            first = self._first_name.setdefault(node.identity, path)
            if first != path:
                with contextlib.suppress(FileNotFoundError):  # a device, left out without root
                    os.link(first, path, follow_symlinks=False)
                return
        attributes = node.attributes()
        if stat.S_ISREG(attributes.mode):
            write_file(path, node.content(), node.inode.size)
        elif stat.S_ISLNK(attributes.mode):
            os.symlink(node.target(), path)  # noqa: PTH211
        elif stat.S_ISFIFO(attributes.mode):
            os.mkfifo(path, 0o600)
        else:
            try:
                os.mknod(path, stat.S_IFMT(attributes.mode) | 0o600, os.makedev(*attributes.rdev))
            except PermissionError:
                if self._attributes.privileged:
                    raise
                return
        self._set_attributes(path, attributes)

    def _set_attributes(self, path: bytes, attributes: Attributes) -> None:
        xattrs = {unescape_xattr(name): value for name, value in attributes.xattrs.items()}
        self._attributes.write(path, attributes, xattrs)

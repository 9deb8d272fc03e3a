"""Write a converted image into a folder: the last resort where nothing can be mounted.

The layers are merged here, without the kernel. As root everything is as in a mount; other users own all files, and get
neither devices nor attributes that only root may set. Root of a user namespace stands between the two: what it may, it
does. The folder must be empty: then no name in it can lead elsewhere.

"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from bootseer.artifact.loading import CachedLayer
from bootseer.erofs.format import Attributes
from bootseer.erofs.reader import ErofsReader
from bootseer.errors import CorruptError, PermanentError, UsageError
from bootseer.image.block_reader import open_layer
from bootseer.image.document import ImageDocument
from bootseer.image.merged import Layer, MergedTree, Node, unescape_xattr
from bootseer.mounts.user_namespace import is_host, may_mount, num_owners
from bootseer.store.store import Store


def open_merged(document: ImageDocument, store: Store) -> MergedTree:
    """The tree of an image, read from a store as it is asked for."""
    return MergedTree([Layer(open_layer(store, layer.file), layer.file.identity) for layer in document.layers])


def unpack_layers(stack: Sequence[CachedLayer], folder: Path) -> None:
    """Write the tree of layers that are complete on this node into an empty folder, as `unpack` does."""
    unpack(MergedTree([Layer(ErofsReader(layer.file.read), layer.index.identity) for layer in stack]), folder)


def unpack(tree: MergedTree, folder: Path) -> None:
    """Write the tree into an empty folder, which is made when it is not there.

    Raises `UsageError` when the folder is not empty, `PermanentError` for what this machine cannot store, and what
    reading the image raises. What was written stays after an error.
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
        self._privileged = is_host() and may_mount()
        self._num_owners = num_owners()
        self._first: dict[str, bytes] = {}  # of files with several names
        self._seen: set[str] = set()

    def run(self, root: Node) -> None:
        # A directory gets its attributes behind its content: writing into it moves its time, and may be forbidden.
        waiting: list[tuple[bytes, Node, bool]] = [(self._folder, root, False)]
        while waiting:
            path, directory, filled = waiting.pop()
            if filled:
                self._set_attributes(path, directory.attributes())
                continue
            if directory.identity in self._seen:
                raise CorruptError(f"{os.fsdecode(path)}: a directory contains itself or has two names")
            self._seen.add(directory.identity)
            waiting.append((path, directory, True))
            for name, node in directory.children():
                full = path + b"/" + name
                if node.is_directory:
                    os.mkdir(full, 0o700)  # noqa: PTH102 - bytes: names need not be text
                    waiting.append((full, node, False))
                else:
                    self._write(full, node)

    def _write(self, path: bytes, node: Node) -> None:
        if node.inode.nlink > 1:
            first = self._first.setdefault(node.identity, path)
            if first != path:
                with contextlib.suppress(FileNotFoundError):  # a device that was left out
                    os.link(first, path, follow_symlinks=False)
                return
        attributes = node.attributes()
        if stat.S_ISREG(attributes.mode):
            self._write_file(path, node)
        elif stat.S_ISLNK(attributes.mode):
            os.symlink(node.target(), path)  # noqa: PTH211
        elif stat.S_ISFIFO(attributes.mode):
            os.mkfifo(path, 0o600)
        else:
            try:
                os.mknod(path, stat.S_IFMT(attributes.mode) | 0o600, os.makedev(*attributes.rdev))
            except PermissionError:
                if self._privileged:
                    raise
                return
        self._set_attributes(path, attributes)

    def _write_file(self, path: bytes, node: Node) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for piece in node.content():
                if piece.count(0) == len(piece):
                    os.lseek(descriptor, len(piece), os.SEEK_CUR)  # holes stay holes
                    continue
                rest = memoryview(piece)
                while rest:
                    rest = rest[file.write(rest) :]
            os.ftruncate(descriptor, node.inode.size)

    def _set_attributes(self, path: bytes, attributes: Attributes) -> None:
        """In this order: a new owner takes away set-user bits and capabilities, and the time is last."""
        if self._num_owners:
            uid, gid = (number if number < self._num_owners else 0 for number in (attributes.uid, attributes.gid))
            os.lchown(path, uid, gid)
        for name, value in attributes.xattrs.items():
            self._set_xattr(path, unescape_xattr(name), value)
        if not stat.S_ISLNK(attributes.mode):
            os.chmod(path, stat.S_IMODE(attributes.mode))  # noqa: PTH101 - bytes
        os.utime(path, ns=(attributes.mtime_ns, attributes.mtime_ns), follow_symlinks=False)

    def _set_xattr(self, path: bytes, name: bytes, value: bytes) -> None:
        try:
            os.setxattr(path, name, value, follow_symlinks=False)
        except OSError as error:
            missing = error.errno == errno.ENOTSUP
            forbidden = not self._privileged and error.errno in (errno.EPERM, errno.EACCES)
            if not missing and not forbidden:
                raise

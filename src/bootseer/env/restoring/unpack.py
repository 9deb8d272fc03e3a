"""Unpack a snapshot's layer into files, with overlayfs' marks of deletions and opaque folders.

For machines that cannot mount EROFS, but can mount an overlay over the result. As root all attributes are kept; for
other users all files are theirs, with the marks of overlays in user namespaces. The folder must be new, so that it
contains no symbolic links.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from bootseer.artifact.unpacked import AttributeWriter, write_file
from bootseer.erofs.reader import ErofsReader, Inode
from bootseer.errors import PermanentError
from bootseer.io.tasks import Tasks

_PRIVILEGED, _UNPRIVILEGED = b"trusted.overlay.", b"user.overlay."
_BATCH = 64


def unpack_layer(reader: ErofsReader, folder: Path, *, threads: int = 1) -> None:
    """Write the layer's tree into `folder`, which is created. `reader` is used by several threads.

    Raises `PermanentError` for files that cannot be stored here, and what reading raises; written files stay then.
    """
    try:
        folder.mkdir()
        _Unpacker(reader, os.fsencode(folder)).run(threads)
    except OSError as error:
        place = os.fsdecode(error.filename) if error.filename else folder
        raise PermanentError(f"{place}: {error.strerror}") from error


class _Unpacker:
    def __init__(self, reader: ErofsReader, folder: bytes) -> None:
        self._reader = reader
        self._folder = folder
        self._attributes = AttributeWriter(needed=(_PRIVILEGED, _UNPRIVILEGED))

    def run(self, threads: int) -> None:
        folders: list[tuple[bytes, Inode]] = []
        leaves: list[tuple[bytes, Inode]] = []
        more: list[tuple[bytes, bytes]] = []  # further names of files
        first: dict[int, bytes] = {}
        for name, inode in self._reader.walk():
            path = self._folder + b"/" + name if name else self._folder
            if stat.S_ISDIR(inode.mode):
                if name:
                    os.mkdir(path, 0o700)  # noqa: PTH102 - bytes: names need not be text
                folders.append((path, inode))
            elif (known := first.setdefault(inode.number, path)) != path:
                more.append((known, path))
            else:
                leaves.append((path, inode))
        with Tasks("bootseer-unpack", threads) as pool:
            for _ in pool.map(self._write_some, [leaves[at : at + _BATCH] for at in range(0, len(leaves), _BATCH)]):
                pass
        for known, path in more:
            os.link(known, path, follow_symlinks=False)
        # Attributes of folders last: writing into a folder changes its time, and may be forbidden by its mode.
        for path, inode in reversed(folders):
            self._set_attributes(path, inode)

    def _write_some(self, leaves: list[tuple[bytes, Inode]]) -> None:
        for path, inode in leaves:
            if stat.S_ISREG(inode.mode):
                write_file(path, self._reader.read(inode), inode.size)
            elif stat.S_ISLNK(inode.mode):
                os.symlink(self._reader.readlink(inode), path)  # noqa: PTH211
            elif stat.S_ISFIFO(inode.mode):
                os.mkfifo(path, 0o600)
            else:  # whiteouts, which every user may create
                os.mknod(path, inode.mode, os.makedev(*inode.rdev))
            if not stat.S_ISCHR(inode.mode):
                self._set_attributes(path, inode)

    def _set_attributes(self, path: bytes, inode: Inode) -> None:
        xattrs = self._reader.xattrs(inode)
        if not self._attributes.privileged:
            xattrs = {
                _UNPRIVILEGED + name.removeprefix(_PRIVILEGED) if name.startswith(_PRIVILEGED) else name: value
                for name, value in xattrs.items()
            }
        self._attributes.write(path, inode, xattrs)

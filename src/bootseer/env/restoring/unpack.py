"""Write a snapshot's layer out as files, as it is: deletions and opaque folders keep their marks for an overlay.

For machines that cannot mount it, but can mount an overlay over the result. As root everything is as in the snapshot;
other users own all files, and their marks are those of overlays in user namespaces. The folder must be new: then no
name in it leads elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from bootseer.erofs.reader import ErofsReader, Inode
from bootseer.errors import PermanentError
from bootseer.io.tasks import Tasks
from bootseer.mounts.user_namespace import is_host, may_mount, num_owners

_PRIVILEGED, _UNPRIVILEGED = b"trusted.overlay.", b"user.overlay."
_BATCH = 64


def unpack_layer(reader: ErofsReader, folder: Path, *, threads: int = 1) -> None:
    """Write the layer's tree into `folder`, which is made. `reader` is used by several threads.

    Raises `PermanentError` for what this machine cannot store, and what reading raises. What was written stays then.
    """
    try:
        folder.mkdir()
        _Unpacking(reader, os.fsencode(folder)).run(threads)
    except OSError as error:
        place = os.fsdecode(error.filename) if error.filename else folder
        raise PermanentError(f"{place}: {error.strerror}") from error


class _Unpacking:
    def __init__(self, reader: ErofsReader, folder: bytes) -> None:
        self._reader = reader
        self._folder = folder
        self._all_attributes = is_host() and may_mount()
        self._num_owners = num_owners()

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
        # Writing into a folder moves its time, and may be forbidden.
        for path, inode in reversed(folders):
            self._set_attributes(path, inode)

    def _write_some(self, leaves: list[tuple[bytes, Inode]]) -> None:
        for path, inode in leaves:
            if stat.S_ISREG(inode.mode):
                self._write_file(path, inode)
            elif stat.S_ISLNK(inode.mode):
                os.symlink(self._reader.readlink(inode), path)  # noqa: PTH211
            elif stat.S_ISFIFO(inode.mode):
                os.mkfifo(path, 0o600)
            else:  # deletions, which every user may make
                os.mknod(path, inode.mode, os.makedev(*inode.rdev))
            if not stat.S_ISCHR(inode.mode):
                self._set_attributes(path, inode)

    def _write_file(self, path: bytes, inode: Inode) -> None:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(opened, "wb", buffering=0) as file:
            for piece in self._reader.read(inode):
                if piece.count(0) == len(piece):
                    os.lseek(opened, len(piece), os.SEEK_CUR)  # holes stay holes
                    continue
                rest = memoryview(piece)
                while rest:
                    rest = rest[file.write(rest) :]
            os.ftruncate(opened, inode.size)

    def _set_attributes(self, path: bytes, inode: Inode) -> None:
        """In this order: a new owner takes away set-user bits and capabilities, and the time is last."""
        if self._num_owners:
            uid, gid = (number if number < self._num_owners else 0 for number in (inode.uid, inode.gid))
            os.lchown(path, uid, gid)
        for name, value in self._reader.xattrs(inode).items():
            self._set_xattr(path, name, value)
        if not stat.S_ISLNK(inode.mode):
            os.chmod(path, stat.S_IMODE(inode.mode))  # noqa: PTH101 - bytes
        os.utime(path, ns=(inode.mtime_ns, inode.mtime_ns), follow_symlinks=False)

    def _set_xattr(self, path: bytes, name: bytes, value: bytes) -> None:
        if not self._all_attributes and name.startswith(_PRIVILEGED):
            name = _UNPRIVILEGED + name.removeprefix(_PRIVILEGED)
        with contextlib.ExitStack() as stack:
            if not self._all_attributes:
                stack.enter_context(contextlib.suppress(PermissionError))
            try:
                os.setxattr(path, name, value, follow_symlinks=False)
            except OSError as error:
                if error.errno != errno.ENOTSUP or name.startswith((_PRIVILEGED, _UNPRIVILEGED)):
                    raise

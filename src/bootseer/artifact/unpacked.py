"""Trees unpacked to files, for machines that cannot mount them in any other way: each once on this node.

    <cache>/unpacked/<name>             the tree; renamed to this name when it is complete and synced
    <cache>/unpacked/<name>.new         being written, or left by a killed process
    <cache>/unpacked/<name>.lock        flocked while a process writes or deletes; mtime: last use; content: machines

The name is derived from the identities of the unpacked block files, and from the owner where files cannot have their
own owners. The image's digest is not used: documents map it to block files, and two documents may differ.
A complete tree is never modified: changes go into an overlay or a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from bootseer.artifact.owned_folder import is_ours, one_at_a_time
from bootseer.artifact.places import own_folder, unpacked_folder
from bootseer.artifact.progress import Say
from bootseer.erofs.reader import ErofsReader, Inode
from bootseer.errors import BootseerError, CorruptError, PermanentError
from bootseer.io import locks
from bootseer.io.files import delete_tree
from bootseer.io.tasks import Tasks
from bootseer.mounts import kernel
from bootseer.mounts.state import Runtime
from bootseer.mounts.user_namespace import ALL_IDS, is_host, may_mount, num_owners

if TYPE_CHECKING:
    from bootseer.erofs.merged import MergedLayers, Node

UNPACKED = "unpacked"
"""Key in a mount's details: the name of its unpacked tree."""
OTHERS_S = 30 * 86_400.0
"""How long a tree stays that other machines, which share the cache, have used: their mounts are not known here."""
_BATCH = 64
_PIECE = 1 << 20


def tree_name(identities: Sequence[str]) -> str:
    """The name of the tree of these block files, bottom first, with the owners that this process can set."""
    owners = num_owners()
    name = hashlib.sha256(" ".join(identities).encode()).hexdigest()
    return f"sha256-{name}" + ("" if owners == ALL_IDS else f"-{max(owners, 1)}")


def unpack_once(cache: Path, identities: Sequence[str], write: Callable[[Path], None], say: Say) -> Path:
    """The tree of these block files; if it is missing, `write` creates it in the folder that it is given. `say` gets a
    line when another process writes it.

    Raises `PermanentError` when the disk is full, `TransientError` when another process takes too long to write it.
    """
    tree = own_folder(unpacked_folder(cache)) / tree_name(identities)
    with one_at_a_time(tree.with_name(f"{tree.name}.lock"), f"been writing {tree}", say):
        if not tree.exists():
            new = tree.with_name(f"{tree.name}.new")
            delete_tree(new)
            try:
                write(new)
                _sync(new)
                new.rename(tree)
            except BaseException:
                delete_tree(new)
                raise
    return tree


def delete_idle_trees(cache: Path, runtime: Runtime, *, idle_s: float, needed: str = "") -> list[str]:
    """Delete trees that no mount uses and that were not used for `idle_s` seconds; returns their names.

    The tree `needed` stays.
    """
    folder = own_folder(unpacked_folder(cache), make=False)
    if not folder.is_dir():
        return []
    deleted = []
    for lock in sorted(folder.glob("*.lock")):
        tree = lock.with_suffix("")
        with contextlib.suppress(BootseerError, OSError):
            wait_s = idle_s if all(map(is_ours, lock.read_text().split())) else max(idle_s, OTHERS_S)
            if tree.name == needed or time.time() - lock.stat().st_mtime < wait_s or _is_used(tree, runtime):
                continue
            with locks.flocked(lock, deadline_s=0.0):
                if _is_used(tree, runtime):  # by a process that came before we had the lock
                    continue
                delete_tree(tree)
                delete_tree(tree.with_name(f"{tree.name}.new"))
                lock.unlink()
                deleted.append(tree.name)
    return deleted


def _is_used(tree: Path, runtime: Runtime) -> bool:
    """Whether a mount, possibly one in the making, uses the tree."""
    if runtime.is_mounting():  # checked first: the mount may be recorded while we look at the records
        return True
    if any(state.details.get(UNPACKED) == tree.name and runtime.health(state) != "gone" for state in runtime.all()):
        return True
    return kernel.is_mounted_anywhere(tree.name)  # a container may have a copy of a mount that is unmounted here


def _sync(folder: Path) -> None:
    """Sync the file system before the rename: a machine crash must not leave a complete tree with files of zeros."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(opened) < 0:
            raise PermanentError(f"{folder}: cannot be written to the disk: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(opened)


def read_sparse(descriptor: int, size: int) -> Iterator[bytes | int]:
    """The content of a file of `size` bytes in pieces: its data, and the length of each hole, which is not read. Ends
    early if the file has shrunk."""
    at = 0
    while at < size:
        try:
            begin = min(os.lseek(descriptor, at, os.SEEK_DATA), size)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            begin = size  # a hole up to the end of the file
        if begin > at:
            yield begin - at
        at = begin
        end = min(os.lseek(descriptor, at, os.SEEK_HOLE), size) if at < size else at
        while at < end:
            piece = os.pread(descriptor, min(_PIECE, end - at), at)
            if not piece:
                return
            yield piece
            at += len(piece)


TreeFile = tuple[bytes, ErofsReader, Inode]
"""A path below the tree's folder (empty for the folder itself), and the file's inode in its image."""
Xattrs = Mapping[bytes, bytes]


def write_tree(
    files: Iterable[TreeFile],
    folder: Path,
    rename: Callable[[Xattrs], Xattrs],
    *,
    needed: tuple[bytes, ...] = (),
) -> None:
    """Write files of EROFS images into a folder, which is created if missing, and must be empty, so that no symbolic
    link in it can redirect a write. `files` has each folder before its entries.

    `rename` returns extended attributes as they are to be set; attributes with the prefixes `needed` are not skipped on
    file systems that have none. For root the result equals a mount. Other users own all unpacked files, and devices and
    attributes that only root may set are left out. Raises `PermanentError` and the errors of reading; what was written
    stays then.
    """
    try:
        folder.mkdir(exist_ok=True)
        _TreeWriter(os.fsencode(folder), rename, needed).run(files)
    except OSError as error:
        place = os.fsdecode(error.filename) if error.filename else folder
        raise PermanentError(f"{place}: {error.strerror}") from error


def unpack(tree: MergedLayers, folder: Path) -> None:
    """Write the merged tree of an image's layers into a folder; see `write_tree`. Attributes of overlayfs are left out,
    and escaped ones get their real names."""
    from bootseer.erofs.merged import is_mark, unescape_xattr

    def visible(xattrs: Xattrs) -> Xattrs:
        return {unescape_xattr(name): value for name, value in xattrs.items() if not is_mark(name)}

    write_tree(_files(tree), folder, visible)


def _files(tree: MergedLayers) -> Iterator[TreeFile]:
    """All files, each folder before its entries."""
    pending: list[tuple[bytes, Node]] = [(b"", tree.root)] if tree.root is not None else []
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


class _TreeWriter:
    def __init__(self, folder: bytes, rename: Callable[[Xattrs], Xattrs], needed: tuple[bytes, ...]) -> None:
        self._folder = folder
        self._rename = rename
        self._needed = needed
        self._num_owners = num_owners()
        self._has_all_rights = has_all_rights()

    def run(self, files: Iterable[TreeFile]) -> None:
        folders: list[TreeFile] = []
        leaves: list[TreeFile] = []
        links: list[tuple[bytes, bytes]] = []  # further names of files
        first: dict[tuple[ErofsReader, int], bytes] = {}
        for name, reader, inode in files:
            path = self._folder + b"/" + name if name else self._folder
            if stat.S_ISDIR(inode.mode):
                if name:
                    os.mkdir(path, 0o700)  # noqa: PTH102 - bytes: names need not be text
                folders.append((path, reader, inode))
            elif inode.nlink > 1 and (known := first.setdefault((reader, inode.number), path)) != path:
                links.append((known, path))
            else:
                leaves.append((path, reader, inode))
        batches = [leaves[at : at + _BATCH] for at in range(0, len(leaves), _BATCH)]
        with Tasks("bootseer-unpack", len(os.sched_getaffinity(0))) as pool:
            for _ in pool.map(self._write_some, batches):
                pass
        for known, path in links:
            with contextlib.suppress(FileNotFoundError):  # a device, left out without root
                os.link(known, path, follow_symlinks=False)
        # Attributes of folders last: writing into a folder changes its time, and may be forbidden by its mode.
        for path, reader, inode in reversed(folders):
            self._set_attributes(path, reader, inode)

    def _write_some(self, leaves: Sequence[TreeFile]) -> None:
        for path, reader, inode in leaves:
            if stat.S_ISREG(inode.mode):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0) as file:
                    write_sparse(file, reader.read(inode))
            elif stat.S_ISLNK(inode.mode):
                os.symlink(reader.readlink(inode), path)  # noqa: PTH211
            else:
                is_whiteout = stat.S_ISCHR(inode.mode) and inode.rdev == (0, 0)
                try:
                    os.mknod(path, inode.mode, os.makedev(*inode.rdev))
                except PermissionError:
                    if self._has_all_rights or is_whiteout:  # whiteouts may be created by every user
                        raise
                    continue
                if is_whiteout:  # has no attributes
                    continue
            self._set_attributes(path, reader, inode)

    def _set_attributes(self, path: bytes, reader: ErofsReader, inode: Inode) -> None:
        """Order matters: chown clears set-user bits and capabilities, and the time must be set last."""
        if self._num_owners:
            uid, gid = (number if number < self._num_owners else 0 for number in (inode.uid, inode.gid))
            os.lchown(path, uid, gid)
        for name, value in self._rename(reader.xattrs(inode)).items():
            try:
                os.setxattr(path, name, value, follow_symlinks=False)
            except OSError as error:
                is_missing = error.errno == errno.ENOTSUP and not name.startswith(self._needed)
                is_forbidden = not self._has_all_rights and error.errno in (errno.EPERM, errno.EACCES)
                if not is_missing and not is_forbidden:
                    raise
        if not stat.S_ISLNK(inode.mode):
            os.chmod(path, stat.S_IMODE(inode.mode))  # noqa: PTH101 - bytes
        os.utime(path, ns=(inode.mtime_ns, inode.mtime_ns), follow_symlinks=False)


def has_all_rights() -> bool:
    """Whether this process may set all attributes of files: as root of the host, not of a user namespace."""
    return is_host() and may_mount()


def write_sparse(file: FileIO, pieces: Iterable[bytes]) -> None:
    """Write a new file's content: pieces of zeros become holes."""
    size = 0
    for piece in pieces:
        size += len(piece)
        if piece.count(0) == len(piece):
            file.seek(size)
            continue
        rest = memoryview(piece)
        while rest:
            rest = rest[file.write(rest) :]
    file.truncate(size)

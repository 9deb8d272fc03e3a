"""Trees that are written out as files, for machines that can mount them in no other way: each once on this node.

    <cache>/unpacked/<name>             the tree; it appears by a rename, when all of it is on the disk
    <cache>/unpacked/<name>.new         being written, or what a killed process left
    <cache>/unpacked/<name>.lock        locked while a process writes or deletes; its time is that of the last use

The name tells the block files that were written out, and the files' owner where not every file's own could be
kept. It is not the digest of the image or snapshot: which block files belong to that is said by a document, and two
documents may say different things.
A finished tree is never written to: changes are put on top, or into a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from bootseer.artifact.places import own_folder, unpacked_folder
from bootseer.erofs.format import Attributes
from bootseer.erofs.reader import Inode
from bootseer.errors import BootseerError, PermanentError
from bootseer.io import locks
from bootseer.mounts.state import Runtime
from bootseer.mounts.user_namespace import ALL_IDS, is_host, may_mount, num_owners

UNPACKED = "unpacked"
"""Key of a mount's details: the name of the tree that it uses."""
_LOCK_S = 1800.0
"""How long to wait for another process that writes the same tree."""


def name_of(identities: Sequence[str]) -> str:
    """The name of a tree of these block files, bottom first, as this process may write it."""
    owners = num_owners()
    name = hashlib.sha256(" ".join(identities).encode()).hexdigest()
    return f"sha256-{name}" + ("" if owners == ALL_IDS else f"-{max(owners, 1)}")


def keep_unpacked(cache: Path, identities: Sequence[str], write: Callable[[Path], None]) -> Path:
    """The tree of these block files; where it is not there, `write` writes it into a folder that it makes.

    Raises `PermanentError` when the disk cannot hold it, `TransientError` when another process writes it for too long.
    """
    tree = own_folder(unpacked_folder(cache)) / name_of(identities)
    with _locked(tree, _LOCK_S):
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


def release_unpacked(cache: Path, runtime: Runtime, *, idle_s: float, needed: str = "") -> list[str]:
    """Delete the trees that no mount uses and that were not asked for for `idle_s` seconds; returns their names.

    The one of the name `needed` stays.
    """
    folder = own_folder(unpacked_folder(cache), make=False)
    if not folder.is_dir():
        return []
    deleted = []
    for lock in sorted(folder.glob("*.lock")):
        tree = lock.with_suffix("")
        # The lock's time is read before the lock is taken, which sets it.
        if tree.name == needed or time.time() - lock.stat().st_mtime < idle_s or _is_used(tree, runtime):
            continue
        with contextlib.suppress(BootseerError, OSError), _locked(tree, 0.0):
            if _is_used(tree, runtime):  # by a process that came before we had the lock
                continue
            delete_tree(tree)
            delete_tree(tree.with_name(f"{tree.name}.new"))
            lock.unlink()
            deleted.append(tree.name)
    return deleted


def _is_used(tree: Path, runtime: Runtime) -> bool:
    """Whether a mount uses the tree, or one may that is just being made."""
    if runtime.is_mounting():  # first: the record comes when this is over
        return True
    return any(state.details.get(UNPACKED) == tree.name and runtime.health(state) != "gone" for state in runtime.all())


@contextlib.contextmanager
def _locked(tree: Path, deadline_s: float) -> Iterator[None]:
    """One process at a time; the lock falls with its holder. Notes the use."""
    with locks.flocked(tree.with_name(f"{tree.name}.lock"), deadline_s=deadline_s) as lock:
        os.utime(lock)
        yield


def _sync(folder: Path) -> None:
    """Have everything on the disk before the name says that it is whole: a crash must not leave files of zeros."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(opened) < 0:
            raise PermanentError(f"{folder}: cannot be written to the disk: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(opened)


def delete_tree(folder: Path) -> None:
    """Delete a tree, also where its own folders forbid it. Nothing happens when it is not there."""
    if not folder.exists():
        return
    folder.chmod(0o700)
    for path, names, _ in os.walk(folder):
        for name in names:
            child = Path(path, name)
            if not child.is_symlink():
                child.chmod(0o700)
    shutil.rmtree(folder)


def data_extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Where a file has data; the rest of its `size` bytes are holes."""
    at = 0
    while at < size:
        try:
            begin = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return  # a hole up to the end
        at = min(os.lseek(descriptor, begin, os.SEEK_HOLE), size)
        if begin < at:
            yield begin, at


def write_file(path: bytes, pieces: Iterable[bytes], size: int) -> None:
    """A new file of this content; zeros become holes."""
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(opened, "wb", buffering=0) as file:
        for piece in pieces:
            if piece.count(0) == len(piece):
                os.lseek(opened, len(piece), os.SEEK_CUR)
                continue
            rest = memoryview(piece)
            while rest:
                rest = rest[file.write(rest) :]
        os.ftruncate(opened, size)


class AttributeWriter:
    """Gives files the attributes that this process may set: all as root, times and modes otherwise."""

    def __init__(self, needed: tuple[bytes, ...] = ()) -> None:
        """`needed`: extended attributes whose names begin so must not be missing where a file system has none."""
        self.privileged = is_host() and may_mount()
        self._num_owners = num_owners()
        self._needed = needed

    def write(self, path: bytes, of: Attributes | Inode, xattrs: Mapping[bytes, bytes]) -> None:
        """In this order: a new owner takes away set-user bits and capabilities, and the time is last."""
        if self._num_owners:
            uid, gid = (number if number < self._num_owners else 0 for number in (of.uid, of.gid))
            os.lchown(path, uid, gid)
        for name, value in xattrs.items():
            try:
                os.setxattr(path, name, value, follow_symlinks=False)
            except OSError as error:
                is_missing = error.errno == errno.ENOTSUP and not name.startswith(self._needed)
                is_forbidden = not self.privileged and error.errno in (errno.EPERM, errno.EACCES)
                if not is_missing and not is_forbidden:
                    raise
        if not stat.S_ISLNK(of.mode):
            os.chmod(path, stat.S_IMODE(of.mode))  # noqa: PTH101 - bytes
        os.utime(path, ns=(of.mtime_ns, of.mtime_ns), follow_symlinks=False)

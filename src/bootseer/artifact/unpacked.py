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
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bootseer.artifact.places import own_folder, unpacked_folder
from bootseer.errors import BootseerError, PermanentError, TransientError
from bootseer.mounts.state import Runtime
from bootseer.mounts.user_namespace import ALL_IDS, num_owners

UNPACKED = "unpacked"
"""Key of a mount's details: the name of the tree that it uses."""
_LOCK_S = 1800.0
"""How long to wait for another process that writes the same tree."""
_POLL_S = 0.05


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


def release_unpacked(cache: Path, runtime: Runtime, *, idle_s: float) -> list[str]:
    """Delete the trees that no mount uses and that were not asked for for `idle_s` seconds; returns their names."""
    folder = own_folder(unpacked_folder(cache), make=False)
    if not folder.is_dir():
        return []
    deleted = []
    for lock in sorted(folder.glob("*.lock")):
        tree = lock.with_suffix("")
        # The lock's time is read before the lock is taken, which sets it.
        if time.time() - lock.stat().st_mtime < idle_s or _is_used(tree, runtime):
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
    path = tree.with_name(f"{tree.name}.lock")
    end = time.monotonic() + deadline_s
    lock = _open_lock(path)
    try:
        while not _take(lock, path):
            if time.monotonic() > end:
                raise TransientError(f"{path}: another process has held it for {deadline_s:g} s")
            time.sleep(_POLL_S)
            os.close(lock)
            lock = _open_lock(path)
        os.utime(lock)
        yield
    finally:
        os.close(lock)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _take(lock: int, path: Path) -> bool:
    """Lock it; a lock whose name is gone protects nothing."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


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

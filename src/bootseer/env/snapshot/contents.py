"""The items of a snapshot (one for each path) and their contents.

All paths are inspected before any file is read. Large files are read in pieces, without their holes. A file that
changes meanwhile is an error: a snapshot must hold what the setup left.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import BinaryIO

from blake3 import blake3

from bootseer.artifact.unpacked import read_sparse
from bootseer.env.changes import Action, Change
from bootseer.env.snapshot.bytecode import NS, source_of
from bootseer.env.snapshot.manifest import KINDS, Entry, Kind, path_bytes
from bootseer.erofs.format import NO_XATTRS, has_prefix
from bootseer.erofs.merged import MARKS
from bootseer.errors import PermanentError, os_errors_as

_NOT_KEPT = {stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
_INDIRECT = frozenset({b"redirect", b"metacopy"})
# Labels and signatures that are valid only on the machine where the setup ran.
_OF_THE_MACHINE = frozenset({b"security.selinux", b"security.ima", b"security.evm"})


@dataclass(slots=True)
class Item:
    """One path of the snapshot."""

    entry: Entry
    """Its attributes; without the digest of its content, and as if it had no other name."""
    raw: bytes
    """The path in bytes."""
    source: str = ""
    """`Change.source`."""
    mode: int = 0
    """`st_mode`, with the file type."""
    mtime_ns: int = 0
    inode: tuple[int, int] = (0, 0)
    """Device and inode number of a file with several names; zeros otherwise."""
    python_source: str = ""
    """For a file in `__pycache__`: the path of its source."""

    @property
    def path(self) -> str:
        return self.entry.path

    @property
    def kind(self) -> Kind:
        return self.entry.kind


def inspect_changes(changes: Iterable[Change], ended_s: float | None) -> tuple[list[Item], list[str]]:
    """An item for each change, sorted by path; and a message for each path that is left out.

    Raises `PermanentError` for files that are unreadable, were changed after `ended_s`, or are listed twice.
    """
    items: list[Item] = []
    left_out: list[str] = []
    for change in changes:
        raw = path_bytes(change.path)
        if change.path == "/":
            continue  # its attributes are always those of the real root directory
        if change.action is Action.DELETED:
            items.append(Item(Entry(change.path, "deleted", before=change.before), raw))
            continue
        with path_errors(change.path):
            status = os.lstat(change.source)
        if stat.S_IFMT(status.st_mode) in _NOT_KEPT:
            left_out.append(f"{change.path}: {_NOT_KEPT[stat.S_IFMT(status.st_mode)]}")
            continue
        if ended_s is not None and status.st_ctime_ns > ended_s * NS:
            raise changed_error(change.path)
        items.append(_item(change, raw, status))
    items.sort(key=lambda item: item.raw)
    for earlier, later in pairwise(items):
        if earlier.raw == later.raw:
            raise PermanentError(f"{later.path}: listed twice among the changes of a setup")
    return items, left_out


def _item(change: Change, raw: bytes, status: os.stat_result) -> Item:
    kind = KINDS[stat.S_IFMT(status.st_mode)]
    python_source = (source_of(change.path) or "") if kind == "file" else ""
    # Not for bytecode: each name refers to the source beside it.
    several = kind != "directory" and status.st_nlink > 1 and not python_source
    with path_errors(change.path):
        xattrs = xattrs_of(change.source)
        target = os.readlink(change.source) if kind == "symlink" else ""  # noqa: PTH115
    entry = Entry(
        path=change.path,
        kind=kind,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        size=status.st_size if kind == "file" else 0,
        target=target,
        xattrs={os.fsdecode(name): value for name, value in sorted(xattrs.items())},
        opaque=change.opaque,
        modified=change.action is Action.MODIFIED,
        before=change.before,
    )
    inode = (status.st_dev, status.st_ino) if several else (0, 0)
    return Item(entry, raw, change.source, status.st_mode, status.st_mtime_ns, inode, python_source)


def xattrs_of(path: str) -> Mapping[bytes, bytes]:
    """The extended attributes that a snapshot keeps of a file. Raises `PermanentError` and `OSError`."""
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:  # the file system has none
        return NO_XATTRS
    found = {}
    for name in map(os.fsencode, names):
        for prefix in MARKS:
            if name.startswith(prefix) and name.removeprefix(prefix) in _INDIRECT:
                raise PermanentError(f"{path}: an incomplete file, whose content lies in the layer below")
        if has_prefix(name) and not name.startswith(MARKS) and name not in _OF_THE_MACHINE:
            found[name] = os.getxattr(path, name, follow_symlinks=False)
    return found


def changed_error(path: str) -> PermanentError:
    """The error for a file that was changed after the setup."""
    return PermanentError(f"{path} was changed after the setup had ended; no snapshot is made")


def path_errors(path: str) -> contextlib.AbstractContextManager[None]:
    """Raise an `OSError` of the block as a `PermanentError` that names the path."""
    return os_errors_as(PermanentError, path, then="; no snapshot is made")


SMALL_BYTES = 1 << 20
"""Files up to this size, and bytecode, are read as a whole."""
_PIECE = 1 << 20
_ZEROS = bytes(_PIECE)


def digest_of(data: bytes) -> str:
    """The digest of a file's content, as manifests have it."""
    return f"blake3:{blake3(data).hexdigest()}"


def digest_of_file(file: BinaryIO) -> str:
    """The same of a file that is open. Raises `OSError`."""
    digest = blake3()
    while piece := file.read(_PIECE):
        digest.update(piece)
    return f"blake3:{digest.hexdigest()}"


def read_whole(item: Item) -> bytes:
    """The content of a small file. Raises `OSError`, and `PermanentError` if it has changed since its inspection."""
    with _opened(item) as descriptor:
        data = os.read(descriptor, item.entry.size + 1)
        while len(data) < item.entry.size and (piece := os.read(descriptor, item.entry.size - len(data))):
            data += piece
        if len(data) != item.entry.size:
            raise changed_error(item.path)
    return data


def read_pieces(item: Item, write: Callable[[bytes], object], write_zeros: Callable[[int], object]) -> str:
    """Pass a large file to `write` in pieces, its holes to `write_zeros`; its digest. Raises as `read_whole` does."""
    found, at = blake3(), 0
    with _opened(item) as descriptor:
        for piece in read_sparse(descriptor, item.entry.size):
            if isinstance(piece, int):
                write_zeros(piece)
                for begin in range(0, piece, _PIECE):
                    found.update(_ZEROS[: piece - begin])
                at += piece
            else:
                found.update(piece)
                write(piece)
                at += len(piece)
        if at != item.entry.size:
            raise changed_error(item.path)
    return f"blake3:{found.hexdigest()}"


@contextlib.contextmanager
def _opened(item: Item) -> Iterator[int]:
    """Its file, which must be the inspected one before and after the reading."""
    # O_NONBLOCK: the file may have been replaced by a pipe.
    descriptor = os.open(item.source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_same(item, descriptor)
        yield descriptor
        _check_same(item, descriptor)
    finally:
        os.close(descriptor)


def _check_same(item: Item, descriptor: int) -> None:
    status = os.fstat(descriptor)
    if (status.st_mode, status.st_size, status.st_mtime_ns) != (item.mode, item.entry.size, item.mtime_ns):
        raise changed_error(item.path)

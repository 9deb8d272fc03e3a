"""Look at what a setup left behind, before any of it is read: one item for each path that a snapshot keeps.

Called by `write`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from bootseer.env.changes import Action, Change
from bootseer.env.snapshot.bytecode import source_of
from bootseer.env.snapshot.entry import Entry, Kind, path_bytes
from bootseer.erofs.format import NO_XATTRS, has_prefix
from bootseer.errors import PermanentError

T = TypeVar("T")

_KINDS: Mapping[int, Kind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
}
_NOT_KEPT = {stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
_OVERLAY = (b"trusted.overlay.", b"user.overlay.")
_INDIRECT = frozenset({b"redirect", b"metacopy"})
# Labels and signatures of the machine where the setup ran: they mean nothing on another, or lock it out.
_OF_THE_MACHINE = frozenset({b"security.selinux", b"security.ima", b"security.evm"})
_NS = 1_000_000_000


@dataclass(slots=True)
class Item:
    """One path of the snapshot, as it was found."""

    change: Change
    raw: bytes
    """The path as the kernel has it."""
    kind: Kind
    mode: int = 0
    """With the type, as `lstat` says it."""
    uid: int = 0
    gid: int = 0
    size: int = 0
    mtime_ns: int = 0
    inode: tuple[int, int] = (0, 0)
    """Device and inode number of what may have several names; zeros for what has one."""
    xattrs: Mapping[bytes, bytes] = field(default_factory=lambda: NO_XATTRS)
    target: bytes = b""
    python_source: str = ""
    """For a file that Python keeps in `__pycache__`: the path of what it was made from."""


def look(changes: Iterable[Change], ended_s: float | None) -> tuple[list[Item], list[str]]:
    """An item for each change, sorted by path; and a line for each path that is left out.

    Raises `PermanentError` for what cannot be read, was changed after `ended_s`, or is listed twice.
    """
    items: list[Item] = []
    left_out: list[str] = []
    for change in changes:
        raw = path_bytes(change.path)
        if change.path == "/":
            continue  # the root directory of a snapshot always has its real attributes
        if change.action is Action.DELETED:
            items.append(Item(change, raw, "deleted"))
            continue
        status = _status(change)
        if stat.S_IFMT(status.st_mode) in _NOT_KEPT:
            left_out.append(f"{change.path}: {_NOT_KEPT[stat.S_IFMT(status.st_mode)]}")
            continue
        if ended_s is not None and status.st_ctime_ns > ended_s * _NS:
            raise changed(change.path)
        items.append(_item(change, raw, status))
    items.sort(key=lambda item: item.raw)
    for earlier, later in pairwise(items):
        if earlier.raw == later.raw:
            raise PermanentError(f"{later.change.path}: listed twice among the changes of a setup")
    return items, left_out


def entry_of(item: Item, *, size: int, digest: str = "", link: str = "", loose: bool = False) -> Entry:
    """The manifest's entry for an item. `size` and `digest` are those of its content, which is not looked at here."""
    change = item.change
    if item.kind == "deleted":
        return Entry(change.path, "deleted", action=Action.DELETED, before=change.before, loose=loose)
    return Entry(
        path=change.path,
        kind=item.kind,
        mode=stat.S_IMODE(item.mode),
        uid=item.uid,
        gid=item.gid,
        size=size,
        digest=digest,
        target=os.fsdecode(item.target),
        xattrs={os.fsdecode(name): value for name, value in item.xattrs.items()},
        link=link,
        opaque=change.opaque,
        action=change.action,
        before=change.before,
        loose=loose,
    )


def _status(change: Change) -> os.stat_result:
    return mapped(change.path, lambda: os.lstat(change.source))


def _item(change: Change, raw: bytes, status: os.stat_result) -> Item:
    kind = _KINDS[stat.S_IFMT(status.st_mode)]
    python_source = (source_of(change.path) or "") if kind == "file" else ""
    # Bytecode speaks of the one source beside it, whatever other names it has.
    several = kind != "directory" and status.st_nlink > 1 and not python_source
    return Item(
        change,
        raw,
        kind,
        status.st_mode,
        status.st_uid,
        status.st_gid,
        status.st_size if kind == "file" else 0,
        status.st_mtime_ns,
        (status.st_dev, status.st_ino) if several else (0, 0),
        mapped(change.path, lambda: xattrs_of(change.source)),
        mapped(change.path, lambda: os.readlink(os.fsencode(change.source))) if kind == "symlink" else b"",  # noqa: PTH115
        python_source,
    )


def xattrs_of(path: str) -> Mapping[bytes, bytes]:
    """The extended attributes that a snapshot keeps of a file. Raises `PermanentError` and `OSError`."""
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError:  # the file system has none
        return NO_XATTRS
    found = {}
    for name in map(os.fsencode, names):
        for prefix in _OVERLAY:
            if name.startswith(prefix) and name.removeprefix(prefix) in _INDIRECT:
                raise PermanentError(f"{path}: only a part of a file, its content lies in the layer below")
        if has_prefix(name) and not name.startswith(_OVERLAY) and name not in _OF_THE_MACHINE:
            found[name] = os.getxattr(path, name, follow_symlinks=False)
    return found


def changed(path: str) -> PermanentError:
    """What is raised for a file that did not stay as the setup left it."""
    return PermanentError(f"{path} was changed after the setup had ended; this run gives no snapshot")


def mapped(path: str, ask: Callable[[], T]) -> T:
    """The answer of the file system. Raises `PermanentError` that names the path for its errors."""
    try:
        return ask()
    except OSError as error:
        raise PermanentError(f"{path}: {error.strerror}; this run gives no snapshot") from error

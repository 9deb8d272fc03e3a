"""The kernel's mount interface: fsopen(2) and related calls, bind mounts, mount namespaces, and the mount table.

Unlike mount(2), these calls report why a mount failed as text, take options one at a time instead of in one page, and
return a descriptor of a detached mount. Linux 5.2 or newer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from bootseer.errors import BootseerError
from bootseer.fuse import syscalls
from bootseer.fuse.syscalls import CLONE_NEWNS, MNT_DETACH, check, failure, libc, number_of
from bootseer.io import proc
from bootseer.logs import logger

_LOG = logger(__name__)

# The numbers of system calls since 424 are the same on all architectures. Older C libraries have no wrappers.
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT = 428, 429, 430, 431, 432
_FSOPEN_CLOEXEC = _FSMOUNT_CLOEXEC = 1
_SET_FLAG, _SET_STRING, _CMD_CREATE = 0, 1, 6
_MOVE_FROM_EMPTY_PATH = 4
_MOUNT_SETATTR = 442
_OPEN_TREE_CLONE = 1
_AT_FDCWD = -100
_AT_RECURSIVE, _AT_NO_AUTOMOUNT = 0x8000, 0x800
_MS_REC, _MS_SLAVE = 1 << 14, 1 << 19
MAX_STRING = 255
"""The longest value of one option."""

libc.syscall.restype = ctypes.c_long


def create_mount(kind: str, options: Iterable[tuple[str, str | None]], *, attributes: int = 0) -> int:
    """Create a detached mount of file system type `kind`; returns its descriptor.

    An option without a value is a flag. `attributes`: MS_RDONLY, MS_NOSUID, MS_NODEV.
    """
    context = _call(f"mount {kind}", _FSOPEN, ctypes.c_char_p(kind.encode()), _FSOPEN_CLOEXEC)
    try:
        for key, value in options:
            command, data = (_SET_FLAG, None) if value is None else (_SET_STRING, os.fsencode(value))
            _configure(context, command, key.encode(), data, f"mount {kind}: option {key}")
        _configure(context, _CMD_CREATE, None, None, f"mount {kind}")
        return _call(f"mount {kind}", _FSMOUNT, context, _FSMOUNT_CLOEXEC, attributes)
    finally:
        os.close(context)


def clone_mount(path: Path, *, recursive: bool = False) -> int:
    """A detached copy of the mount at `path` (for a bind mount); `recursive` includes all mounts below it."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | (_AT_RECURSIVE | _AT_NO_AUTOMOUNT if recursive else 0)
    return _call(f"bind {path}", _OPEN_TREE, _AT_FDCWD, ctypes.c_char_p(os.fsencode(path)), flags)


def attach(mount: int, target: Path) -> None:
    """Attach a detached mount to the folder `target`. Closes its descriptor in any case."""
    try:
        path = ctypes.c_char_p(os.fsencode(target))
        _call(f"mount on {target}", _MOVE_MOUNT, mount, ctypes.c_char_p(b""), _AT_FDCWD, path, _MOVE_FROM_EMPTY_PATH)
    finally:
        os.close(mount)


def unmount(target: Path, *, lazy: bool = False) -> None:
    """Unmount the topmost mount on `target`; nothing happens when there is none.

    Raises `TransientError` while it is in use. With `lazy` it is detached at once and ends with its last user.
    """
    _LOG.debug("unmount %s%s", target, " lazily" if lazy else "")
    try:
        syscalls.unmount(target, flags=MNT_DETACH if lazy else 0)
    except BootseerError as error:
        if number_of(error) not in (errno.EINVAL, errno.ENOENT):
            raise


def is_mount(target: Path) -> bool:
    """Whether something is mounted on `target` in this mount namespace. Does not access it: the mount may hang."""
    return bool(mounts_at(target))


def mounts_at(target: Path) -> list[Mount]:
    """The mounts on `target`, one over the other, the topmost last. A file system may be there twice: in a shared
    folder that is bound to itself, each mount is also below what that hides."""
    point = str(Path(os.path.realpath(target.parent), target.name))
    return [mount for mount in mount_table() if mount.path == point]


def mount_points() -> list[str]:
    return [_unescape(line.split(b" ", 5)[4]) for line in Path("/proc/self/mountinfo").read_bytes().splitlines()]


def mounts_below(folder: Path | str) -> list[str]:
    """The mount points below a folder, given as the mount table has it: without links. The last mounted is last."""
    return [point for point in mount_points() if point.startswith(f"{folder}/")]


def unshare_mounts() -> None:
    """Give this process its own mount namespace: mounts made in it end with its last process, even after kill -9.

    Later mounts of the host still propagate into it. Call it before any thread starts: it affects the calling one only.
    """
    check(libc.unshare(CLONE_NEWNS), "make a mount namespace")
    check(libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None), "keep mounts to ourselves")


def restrict(target: Path, attributes: int, *, allow: int = 0) -> None:
    """Set attributes on the mount at `target`: `MS_RDONLY`, `MS_NOSUID`, `MS_NODEV`, `MS_NOEXEC`.

    The attributes in `allow` are cleared.
    """
    changes = (ctypes.c_uint64 * 4)(attributes, allow, 0, 0)
    path = ctypes.c_char_p(os.fsencode(target))
    size = ctypes.c_size_t(ctypes.sizeof(changes))
    _call(f"restrict the mount {target}", _MOUNT_SETATTR, _AT_FDCWD, path, ctypes.c_uint(0), changes, size)


def change_root(folder: Path) -> None:
    """Make the mount `folder` the root of this mount namespace; the old root is unmounted."""
    os.chdir(folder)
    dot = ctypes.c_char_p(b".")
    check(libc.pivot_root(dot, dot), f"change the root to {folder}")
    # pivot_root(".", "."): the old root is now stacked on the new one.
    check(libc.umount2(dot, MNT_DETACH), "leave the old root")
    os.chdir("/")


def _call(step: str, number: int, *arguments: object) -> int:
    return check(int(libc.syscall(ctypes.c_long(number), *arguments)), step)


def _configure(context: int, command: int, key: bytes | None, value: bytes | None, step: str) -> None:
    if value is not None and len(value) > MAX_STRING:
        raise failure(step, errno.ENAMETOOLONG)
    result = libc.syscall(ctypes.c_long(_FSCONFIG), context, command, ctypes.c_char_p(key), ctypes.c_char_p(value), 0)
    if result < 0:
        number, words = ctypes.get_errno(), []
        with contextlib.suppress(OSError):  # ENODATA when all was read
            while message := os.read(context, 1024):
                words.append(message.decode("utf-8", "replace").partition(" ")[2].strip())
        raise failure(step, number, "; ".join(words))


class Mount(Struct, frozen=True):
    """One line of /proc/self/mountinfo."""

    id: int
    parent: int
    device: str
    """`major:minor`."""
    root: str
    """The part of its file system that is mounted: `/` unless it is a bind mount."""
    path: str
    """The mount point, relative to the process's root."""
    options: frozenset[str]
    """Options of the mount (`ro`, `nosuid`), and `ro` of its file system."""
    kind: str
    """Type of the file system: `ext4`, `fuse.sshfs`."""


def mount_table() -> list[Mount]:
    return [parse(line) for line in Path("/proc/self/mountinfo").read_bytes().splitlines()]


def parse(line: bytes) -> Mount:
    """Parse one line of mountinfo. The optional fields end with a dash."""
    left, _, right = line.partition(b" - ")
    number, parent, device, root, path, options = left.split(b" ")[:6]
    kind, _, inside = right.split(b" ", 2)
    words = {*options.split(b","), *(word for word in inside.split(b",") if word == b"ro")}
    return Mount(
        int(number),
        int(parent),
        device.decode(),
        _unescape(root),
        _unescape(path),
        frozenset(map(os.fsdecode, words)),
        os.fsdecode(kind),
    )


def _unescape(word: bytes) -> str:
    """Decode blanks and other characters that mountinfo escapes as \\ooo."""
    return os.fsdecode(word.decode("unicode_escape").encode("latin-1") if b"\\" in word else word)


def visible(rows: Sequence[Mount]) -> list[Mount]:
    """The mounts that paths can reach, parents before children: only the topmost of stacked mounts, and no mount whose
    path was mounted over later. Empty if the process's root is not a mount (a chroot)."""
    children: dict[int, list[Mount]] = {}
    for row in rows:
        children.setdefault(row.parent, []).append(row)
    ids = {row.id for row in rows}
    # From the root down. A child with the path of its parent lies on top of it, and hides it with its other children.
    # A child below the path of another child of the same parent was there first, and is hidden by that one: a later
    # mount at such a path would have the other child as its parent.
    found: list[Mount] = []
    waiting = [row for row in rows if row.path == "/" and row.parent not in ids][:1]
    while waiting:
        top = waiting.pop()
        while covering := [row for row in children.get(top.id, ()) if row.path == top.path and row.id != top.id]:
            top = covering[-1]
        found.append(top)
        below = children.get(top.id, [])
        places = {row.path for row in below}
        waiting += [row for row in below if row.id != top.id and not any(is_below(row.path, place) for place in places)]
    return sorted(found, key=lambda row: (depth(row.path), row.path))


def depth(path: str) -> int:
    """The number of components of a normalized absolute path."""
    return 0 if path == "/" else path.count("/")


def is_below(path: str, folder: str) -> bool:
    """Whether `path` lies inside `folder`; both are absolute and normalized."""
    return path != folder and path.startswith(folder if folder == "/" else f"{folder}/")


def is_mounted_anywhere(part: str) -> bool:
    """Whether any visible process, in any mount namespace, has a mount whose description contains `part`."""
    wanted = os.fsencode(part)
    seen = set()
    for pid in proc.pids():
        with contextlib.suppress(OSError):
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")  # noqa: PTH115 - it names a namespace and no file
            if namespace not in seen:
                description = Path(f"/proc/{pid}/mountinfo").read_bytes()
                seen.add(namespace)
                if wanted in description:
                    return True
    return False

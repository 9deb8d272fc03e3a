"""Look up users, groups and programs in an image's tree, without leaving that tree.

An image is untrusted: its `/etc/passwd` may be a link to the host's, a device, or a terabyte long. The kernel resolves
each path inside the tree (openat2), and only regular files are read, up to a limit. Users (`user` or `user:group`, as
names or numbers) are looked up in the image's own `/etc/passwd` and `/etc/group`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from bootseer.errors import PermanentError, UsageError

_OPENAT2 = 437  # the same number on all architectures
_RESOLVE_IN_ROOT = 0x10
_RESOLVE_NO_MAGICLINKS = 0x02
_TRIES = 1000
"""A path with `..` must be opened again if anything on the machine was renamed or mounted at the same time."""


def read_in_root(root: Path, path: str, max_bytes: int) -> bytes | None:
    """At most `max_bytes` of a regular file below `root`; None if there is no such file.

    Raises `PermanentError` if it cannot be read.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # opening a FIFO or a device must not block
    try:
        with _opened(root, path, flags) as fd, open(fd, "rb", closefd=False) as file:
            return file.read(max_bytes) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR):
            return None
        raise PermanentError(f"/{path.lstrip('/')} of the image cannot be read: {error.strerror}") from error


def program_at(root: Path, path: str) -> str:
    """Name of the file to which `path` below `root` leads; empty unless it is a regular file with an execute bit."""
    with contextlib.suppress(OSError), _opened(root, path) as fd:
        mode = os.fstat(fd).st_mode
        if mode & 0o111 and stat.S_ISREG(mode):
            return Path(f"/proc/self/fd/{fd}").readlink().name
    return ""


@contextlib.contextmanager
def _opened(root: Path, path: str, flags: int = os.O_PATH | os.O_CLOEXEC) -> Iterator[int]:
    how = struct.pack("=QQQ", flags, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    name = ctypes.c_char_p(os.fsencode(path.lstrip("/")))
    with contextlib.ExitStack() as opened:
        top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, top)
        for _ in range(_TRIES):
            fd = syscall(ctypes.c_long(_OPENAT2), ctypes.c_int(top), name, how, ctypes.c_size_t(len(how)))
            if fd >= 0 or ctypes.get_errno() != errno.EAGAIN:
                break
        if fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
        opened.callback(os.close, fd)
        yield int(fd)


_MAX_BYTES = 1 << 20
_MAX_ID = (1 << 32) - 2


class User(Struct, frozen=True):
    """Numeric ids, and the home folder from the image's passwd (default `/`)."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    home: str = "/"


def resolve_user(root: Path, words: str, more_groups: Iterable[str] = ()) -> User:
    """The user that `words` names in the tree at `root` (empty: root), with `more_groups` as supplementary groups.
    Raises `UsageError` for unknown names."""
    user_word, colon, group_word = words.partition(":")
    row = _find(root, "/etc/passwd", user_word or "0", columns=7)
    uid = _number(user_word or "0")
    if uid is None:
        if row is None:
            raise UsageError(
                f"user {user_word!r} is not in the image's /etc/passwd", hint="give a number, as in --user 1000:1000"
            )
        uid = _number(row[2])
    if uid is None or uid > _MAX_ID:
        raise UsageError(f"user {user_word!r} has no valid number", hint="give one, as in --user 1000:1000")
    gid = (_number(row[3]) if row else None) or 0
    groups = {_group(root, word) for word in more_groups}
    if colon and group_word:
        gid = _group(root, group_word)
    elif row is not None:
        groups |= _groups_of(root, row[0])
    return User(uid, gid, tuple(sorted(groups - {gid})), (row[5] if row else "") or "/")


def _group(root: Path, word: str) -> int:
    number = _number(word)
    if number is None:
        row = _find(root, "/etc/group", word, columns=3)
        number = _number(row[2]) if row else None
    if number is None or number > _MAX_ID:
        raise UsageError(f"group {word!r} is not in the image's /etc/group", hint="give its number, such as 44")
    return number


def _groups_of(root: Path, name: str) -> set[int]:
    """The supplementary groups of this user in the image's `/etc/group`."""
    found = set()
    for row in _rows(root, "/etc/group"):
        number = _number(row[2]) if len(row) > 3 and name in row[3].split(",") else None
        if number is not None and number <= _MAX_ID:
            found.add(number)
    return found


def _find(root: Path, path: str, word: str, *, columns: int) -> list[str] | None:
    """The row with this name, or with this number if `word` is a number."""
    number = _number(word)
    for row in _rows(root, path):
        if len(row) >= columns and (row[0] == word if number is None else _number(row[2]) == number):
            return row
    return None


def _rows(root: Path, path: str) -> Iterator[list[str]]:
    data = read_in_root(root, path, _MAX_BYTES) or b""
    for line in data.decode("utf-8", "replace").splitlines():
        if line and not line.startswith("#"):
            yield line.split(":")


def _number(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdecimal() and len(word) < 11 else None

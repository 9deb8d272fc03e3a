"""A folder that only this user and root can redirect or change.

Each component of the path is checked on the way down, as by sshd's StrictModes: it belongs to root or to the user, and
neither its group nor others may write to it. Exceptions: parents with the sticky bit (`/tmp`), where others cannot
rename or delete our entries, and a group with the user's name and no other member.

The walk goes from descriptor to descriptor. The owner of a symbolic link is checked before its target is walked in the
same way, so that nothing depends on fs.protected_symlinks. Since no other user can change any component, paths into the
folder are safe to use afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bootseer.errors import AccessError, PermanentError, UsageError

if TYPE_CHECKING:
    from pathlib import Path  # importing it costs each job 3 ms

FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Opens a folder, but no symbolic link, for further steps."""
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""Creates a new file."""
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITERS = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MAX_LINKS = 40
"""As in the kernel, against loops."""


def trusted_folder(path: str | Path, *, otherwise: str, make: bool = True, private: bool = False) -> Path:
    """The path, without links, of a folder that only this user and root can change.

    It is created with mode 0700 if missing; without `make`, the check ends at the first missing component. `private`
    removes the access of others. `otherwise` is a remedy, added to error messages. Raises `AccessError` for a folder
    that others can change, and `OSError` if it cannot be reached or created.
    """
    from pathlib import Path

    with contextlib.closing(_Walk(path, otherwise, make=make, private=private)) as walk:
        return Path(walk.path)


def own_folder(path: str | Path, *, otherwise: str, make: bool = True, private: bool = False) -> Path:
    """`trusted_folder`, but all errors are `PermanentError`s."""
    try:
        return trusted_folder(path, otherwise=otherwise, make=make, private=private)
    except OSError as error:
        raise PermanentError(f"{error.filename}: {error.strerror}; {otherwise}") from error


def open_trusted(path: str | Path, *, otherwise: str) -> int:
    """A descriptor, for use with `dir_fd`, of a folder that users may share: it may belong to root or have the sticky
    bit, like a parent. Use `open_own` for its entries. The caller closes it.
    """
    with contextlib.closing(_Walk(path, otherwise, shared=True)) as walk:
        return os.open(".", _FOLDER, dir_fd=walk.folder)


def open_own(parent: int, name: str, where: str, *, mode: int = 0o700, otherwise: str) -> int:
    """A subfolder of `parent`, created if missing; `where` is its path for errors. The caller closes it.

    Even if others can write to `parent`, the result is a folder and no link, belongs to this user, and only this user
    can change its content. Raises `AccessError` otherwise, and `OSError`.
    """
    try:
        folder = _open_folder(parent, name, mode)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise AccessError(f"{where} is not a folder, or a link to one: {otherwise}") from error
    try:
        _check(os.fstat(folder), where, otherwise, last=True)
    except BaseException:
        os.close(folder)
        raise
    return folder


def is_secret(status: os.stat_result) -> bool:
    """Whether only its user can read a file. A file of root may also be readable by a group of this user: Kubernetes
    does so for secrets of a pod with an `fsGroup`."""
    others = 0o037 if status.st_uid == 0 != os.geteuid() else 0o077
    return not stat.S_IMODE(status.st_mode) & others


def enter(name: str, folder: int) -> int:
    """A descriptor of a subfolder. Raises `FileNotFoundError` for a symbolic link, and `OSError`."""
    try:
        return os.open(name, FOLDER, dir_fd=folder)
    except NotADirectoryError:
        # The kernel's error for a symbolic link is the same.
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise FileNotFoundError(errno.ENOENT, name) from None
        raise


def home_of(env: Mapping[str, str], uid: int, *, otherwise: str) -> str:
    """The user's home: `$HOME`, else from the user database. Raises `UsageError` if neither names a folder."""
    home = env.get("HOME", "")
    if not home:
        import pwd

        try:
            home = pwd.getpwuid(uid).pw_dir
        except KeyError:
            home = ""
    if not home.startswith("/"):
        raise UsageError(f"user {uid} has no home folder", hint=f"set HOME, or {otherwise}")
    return home


def state_folder(env: Mapping[str, str], name: str, *, otherwise: str) -> str:
    """The folder of this name below `/var/lib/bootseer` for root, and in the user's state folder for others."""
    return f"/var/lib/bootseer/{name}" if os.geteuid() == 0 else user_state_folder(env, name, otherwise=otherwise)


def user_state_folder(env: Mapping[str, str], name: str, *, otherwise: str) -> str:
    """The folder of this name in the user's state folder. Raises `UsageError` for a user without a home."""
    state = env.get("XDG_STATE_HOME") or f"{home_of(env, os.getuid(), otherwise=otherwise)}/.local/state"
    return f"{state}/bootseer/{name}"


def _open_folder(parent: int, name: str, mode: int) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another process created it first
            os.mkdir(name, mode, dir_fd=parent)
        return os.open(name, _FOLDER, dir_fd=parent)


class _Walk:
    """A walk from the root to one folder; `folder` is a descriptor of the last component reached."""

    def __init__(
        self, path: str | Path, otherwise: str, *, make: bool = True, private: bool = False, shared: bool = False
    ) -> None:
        self._otherwise = otherwise
        self._make = make
        # The working folder may have been deleted.
        self._left = [*reversed(_components(str(path) if os.path.isabs(path) else f"{os.getcwd()}/{path}"))]
        self._num_links = 0
        self._names: list[str] = []
        self.folder = os.open("/", FOLDER)
        try:
            status: os.stat_result | None = os.fstat(self.folder)
            while self._left and status is not None:
                # A parent; the last component is checked below, if it is no link.
                _check(status, self.path, otherwise, last=False)
                status = self._step(self._left.pop())
            if status is not None:
                _check(status, self.path, otherwise, last=not shared)
                if private and status.st_mode & _OTHERS:
                    os.chmod(f"/proc/self/fd/{self.folder}", stat.S_IMODE(status.st_mode) & ~_OTHERS)
        except OSError as error:
            self.close()
            raise OSError(error.errno, error.strerror, self.path) from error
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        return "/" + "/".join(self._names)

    def close(self) -> None:
        os.close(self.folder)

    def _step(self, name: str) -> os.stat_result | None:
        """Go to the next component; None if it is missing and not to be created."""
        if name == "..":
            self._names = self._names[:-1]
            self._go(os.open("..", FOLDER, dir_fd=self.folder))
            return os.fstat(self.folder)
        self._names.append(name)
        try:
            found = os.open(name, _STEP, dir_fd=self.folder)
        except FileNotFoundError:
            if not self._make:
                self._names += reversed(self._left)
                return None
            # Parents stay readable: other users may have folders in them.
            os.close(_open_folder(self.folder, name, 0o755 if self._left else 0o700))
            found = os.open(name, _STEP, dir_fd=self.folder)
        status = os.fstat(found)
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink("", dir_fd=found)
            os.close(found)
            self._follow(status, target)
            return os.fstat(self.folder)
        self._go(found)
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return status

    def _follow(self, link: os.stat_result, target: str) -> None:
        if link.st_uid not in trusted_uids():
            raise _wrong_owner(link, self.path, self._otherwise)
        self._num_links += 1
        if self._num_links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        self._names.pop()
        self._left += reversed(_components(target))
        if target.startswith("/"):
            self._names = []
            self._go(os.open("/", FOLDER))

    def _go(self, folder: int) -> None:
        os.close(self.folder)
        self.folder = folder


def _components(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def _check(status: os.stat_result, path: str, otherwise: str, *, last: bool) -> None:
    """Raise `AccessError` if other users can change a folder's content, or for a parent, replace the next component."""
    if status.st_uid != os.geteuid() if last else status.st_uid not in trusted_uids():
        raise _wrong_owner(status, path, otherwise)
    writers = status.st_mode & _WRITERS
    if writers & stat.S_IWGRP and _is_own_group(status.st_gid):
        writers &= ~stat.S_IWGRP
    if not writers or (not last and status.st_mode & stat.S_ISVTX):
        return
    access = f"mode {stat.S_IMODE(status.st_mode):04o}, group {status.st_gid}"
    raise AccessError(f"{path} can be changed by other users ({access}): chmod go-w {path}, or {otherwise}")


def _wrong_owner(status: os.stat_result, path: str, otherwise: str) -> AccessError:
    return AccessError(f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()}: {otherwise}")


def trusted_uids() -> tuple[int, int, int]:
    """Users that can change everything on this machine.

    In a user namespace the host's root, owner of `/`, has an id that stands for all users of the host, so the owners of
    parents mean little there.
    """
    return 0, os.geteuid(), os.stat("/").st_uid


def _is_own_group(gid: int) -> bool:
    """Whether a group is the user's own, as created by distributions with umask 002."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    # Users whose primary group it is are not listed as members.
    members = {*group.gr_mem, *(other.pw_name for other in pwd.getpwall() if other.pw_gid == gid)}
    return user.pw_gid == gid and group.gr_name == user.pw_name and members == {user.pw_name}

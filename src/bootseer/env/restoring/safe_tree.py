"""Access files below a folder without following symbolic links, which may be placed there by users."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator

from bootseer.env.restoring.roots import Environment

OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")
"""Marks of overlayfs for root's mounts, and for those in a user namespace: nothing of the folder below is shown."""
_PYTHON = re.compile(r"python3\.\d+t?")
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def is_opaque(folder: str | bytes) -> bool:
    """Whether a folder in a layer replaces the one below. Raises `OSError` if that cannot be known."""
    for name in OPAQUE:
        try:
            if os.getxattr(folder, name, follow_symlinks=False) == b"y":
                return True
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.ENOTSUP):
                raise
    return False


@contextlib.contextmanager
def new_folder(above: int, name: str, mode: int) -> Iterator[int]:
    """Create a folder in the one that is open as `above`; yields its descriptor, for setting owner and mode.

    Raises `FileExistsError`, also if it was replaced between its creation and its opening.
    """
    os.mkdir(name, mode, dir_fd=above)
    opened = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        is_foreign = os.geteuid() == 0 and os.fstat(opened).st_uid != 0
        if is_foreign or os.listdir(opened):  # noqa: PTH208 - a descriptor
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        yield opened
    finally:
        os.close(opened)


class SafeTree:
    """The tree below `root`. Paths are absolute within it."""

    def __init__(self, root: str = "/") -> None:
        self._root = root

    @contextlib.contextmanager
    def folder(self, path: str) -> Iterator[int]:
        """A descriptor of a folder (`""` for the root), for use as `dir_fd`.

        Raises `NotADirectoryError`, or `OSError` with ELOOP, if a component of the path is not a folder.
        """
        opened = os.open(self._root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in path.split("/")[1:]:
                inner = os.open(name, _FOLDER, dir_fd=opened)
                os.close(opened)
                opened = inner
            yield opened
        finally:
            os.close(opened)

    def status(self, path: str) -> os.stat_result | None:
        """The status of a file, links not followed; None if it does not exist."""
        above, _, name = path.rpartition("/")
        try:
            with self.folder(above) as folder:
                return os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def read(self, path: str) -> int:
        """A descriptor to read a regular file through. Raises `OSError` for anything else."""
        above, _, name = path.rpartition("/")
        with self.folder(above) as folder:
            opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            os.close(opened)
            raise IsADirectoryError(f"{path} is not a regular file")
        return opened

    def has_xattr(self, path: str, name: str, value: bytes) -> bool:
        """Whether a file has this extended attribute; True on a file system without any."""
        above, _, file = path.rpartition("/")
        with self.folder(above) as folder:
            try:
                return os.getxattr(f"/proc/self/fd/{folder}/{file}", name, follow_symlinks=False) == value
            except OSError as error:
                return error.errno == errno.ENOTSUP

    def target(self, path: str) -> str:
        above, _, name = path.rpartition("/")
        with self.folder(above) as folder:
            return os.readlink(name, dir_fd=folder)

    def names(self, path: str) -> list[str]:
        with self.folder(path) as folder:
            opened = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
            try:
                return os.listdir(opened)  # noqa: PTH208 - names
            finally:
                os.close(opened)


class TreeFolders:
    """Facts about folders of the tree that a setup has left at `root`; symbolic links are not followed."""

    def __init__(self, root: str = "") -> None:
        """`root`: where the setup's `/` can be read. The job will run in this process's working folder."""
        self._root = root.rstrip("/")
        self.working_folder = os.path.realpath(".")
        """The real path of the job's working folder; empty if it does not matter."""

    def environment(self, folder: str) -> Environment:
        """What kind of environment the folder is; empty for none."""
        if self.is_folder(f"{folder}/conda-meta"):
            return "conda"
        if self._mode(f"{folder}/pyvenv.cfg"):
            return "venv"
        lib = f"{folder}/lib"
        if not self.is_folder(lib):
            return ""
        try:
            names = os.listdir(self._root + lib)  # noqa: PTH208 - names
        except OSError:
            return ""
        return "python" if any(_PYTHON.fullmatch(name) and self.is_folder(f"{lib}/{name}") for name in names) else ""

    def is_folder(self, path: str) -> bool:
        """Whether it is a folder itself, and no symbolic link to one."""
        return stat.S_ISDIR(self._mode(path))

    def _mode(self, path: str) -> int:
        try:
            return os.lstat(self._root + path).st_mode
        except OSError:
            return 0

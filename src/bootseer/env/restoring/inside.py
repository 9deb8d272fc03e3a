"""Look and write below a folder without ever following a symbolic link: one in somebody's project must not lead us
anywhere. Called by `loose` and `place`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Inside:
    """The tree below `root`. Paths are absolute, as seen from inside of it."""

    def __init__(self, root: str = "/") -> None:
        self._root = root

    @contextlib.contextmanager
    def folder(self, path: str) -> Iterator[int]:
        """A descriptor of a folder (`""` for the root), for the `dir_fd` of others.

        Raises `NotADirectoryError` or an `OSError` of ELOOP for what is reached through something else.
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
        """What lies there, itself; None when nothing does."""
        above, _, name = path.rpartition("/")
        try:
            with self.folder(above) as folder:
                return os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def read(self, path: str) -> int:
        """A descriptor to read a regular file through. Raises `OSError` for what is none."""
        above, _, name = path.rpartition("/")
        with self.folder(above) as folder:
            opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            os.close(opened)
            raise IsADirectoryError(f"{path} is no regular file")
        return opened

    def target(self, path: str) -> str:
        """What a symbolic link says."""
        above, _, name = path.rpartition("/")
        with self.folder(above) as folder:
            return os.readlink(name, dir_fd=folder)

    def names(self, path: str) -> list[str]:
        """What a folder holds."""
        with self.folder(path) as folder:
            opened = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
            try:
                return os.listdir(opened)  # noqa: PTH208 - names
            finally:
                os.close(opened)

"""What `roots` wants to know of folders, looked up in the tree that a setup left behind."""

from __future__ import annotations

import os
import re
import stat

from bootseer.env.restoring.roots import Environment

_PYTHON = re.compile(r"python3\.\d+t?")


class FoldersBelow:
    """Looks into the tree at `root`; symbolic links are not followed."""

    def __init__(self, root: str = "", *, working_folder: str | None = None) -> None:
        """`root`: where `/` as the setup saw it can be read from here. The job works where this process does, if
        nothing else is said."""
        self._root = root.rstrip("/")
        self.working_folder = os.path.realpath(working_folder or ".")

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

"""Trees deeper than Python's recursion limit, the usual limit of open files, or PATH_MAX, as programs can make them."""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def make_deep(folder: Path, depth: int, name: str = "d") -> None:
    """Make this many folders in each other. Each has a file with two names, a link and an empty folder."""
    at = os.open(folder, _FOLDER)
    for _ in range(depth):
        os.mkdir(name, dir_fd=at)
        below = os.open(name, _FOLDER, dir_fd=at)
        os.close(at)
        at = below
        os.close(os.open("file", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=at))
        os.link("file", "again", src_dir_fd=at, dst_dir_fd=at)
        os.symlink("/etc", "link", dir_fd=at)
        os.mkdir("empty", dir_fd=at)
    os.close(at)

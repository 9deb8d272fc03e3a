"""Small file systems, for tests of full disks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bootseer.errors import BootseerError
from bootseer.fuse import syscalls
from bootseer.mounts import kernel


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """An empty tmpfs with these options, such as `size=6m`, on a new folder. Skips the test where it cannot be mounted.

    At the end it is detached at once: a thread of the test may still be about to close a file there, for example the
    cache writer's, which nothing waits for.
    """
    if os.geteuid():
        pytest.skip("needs root to mount a tmpfs")
    folder.mkdir()
    try:
        syscalls.mount("tmpfs", "tmpfs", folder, options=f"{options},mode=700")
    except BootseerError as error:
        pytest.skip(f"cannot mount a tmpfs here: {error}")
    try:
        yield folder
    finally:
        kernel.unmount(folder, lazy=True)

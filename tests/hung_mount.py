"""A file system that does not answer, as after a server's crash: what asks it cannot even be killed."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import BootseerError
from bootseer.fuse.session import mount
from fuse.memory_tree import MemoryTree

_asked = threading.Event()
"""The file system has read a request: one that still waits to be read is taken back when the process that made it is
killed."""


@contextlib.contextmanager
def hung_mount(folder: Path) -> Iterator[Path]:
    """A path that nothing is heard of until the end of the block."""
    gate = threading.Event()
    _asked.clear()

    class Hung(MemoryTree):
        def lookup(self, parent, name):
            _asked.set()
            gate.wait(300)  # in the thread that reads requests, so that it does not see the kernel's interrupts either

    folder.mkdir()
    session = mount(Hung({}), folder)
    try:
        yield folder / "file"
    finally:
        gate.set()
        with contextlib.suppress(BootseerError):
            session.close(force=True)


needs_fuse = pytest.mark.skipif(
    not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="/dev/fuse cannot be opened by this user"
)


def child_that_asks(path: Path) -> int:
    """A child that hangs in the kernel by now, since it asked for this path."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            path.stat()
        os._exit(0)
    assert _asked.wait(120)
    return pid

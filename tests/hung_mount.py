"""A file system that does not answer, like after a server's crash: processes that use it cannot even be killed."""

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
"""The file system has read a request. Before that, the kernel would cancel the request when its process is killed."""


@contextlib.contextmanager
def hung_mount(folder: Path) -> Iterator[Path]:
    """A path whose lookup hangs until the end of the `with` block."""
    gate = threading.Event()
    _asked.clear()

    class Hung(MemoryTree):
        def lookup(self, parent, name):
            _asked.set()
            gate.wait(300)  # blocks the thread that reads requests, so that interrupts are not read either

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
    """Fork a child that accesses this path; returns its process id when it hangs in the kernel."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            path.stat()
        os._exit(0)
    assert _asked.wait(120)
    return pid

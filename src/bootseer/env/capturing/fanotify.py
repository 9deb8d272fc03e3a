"""A binding of fanotify(7), which Python does not have: events about files that are opened through a mount.

The older form of events is used, in which the kernel passes a descriptor of each file: it works on every file system
(overlayfs has no file handles by default), and needs CAP_SYS_ADMIN in the initial namespace. Linux 5.1.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

from bootseer.fuse.syscalls import check, libc

OPENED, WRITTEN = 0x20, 0x08
"""FAN_OPEN: a file was opened. FAN_CLOSE_WRITE: a file that was open for writing was closed."""
_OVERFLOW = 0x4000
_CLOEXEC, _NONBLOCK, _UNLIMITED_QUEUE, _UNLIMITED_MARKS = 0x1, 0x2, 0x10, 0x20
_ADD, _MOUNT, _IGNORED, _IGNORED_FOR_GOOD, _EVICTABLE = 0x1, 0x10, 0x20, 0x40, 0x200
_AT_FDCWD = -100
_EVENT = struct.Struct("=IBBHQii")
# Each event holds a descriptor until it is processed: well below the usual limit of 1024.
_BATCH = 512

libc.fanotify_init.argtypes = [ctypes.c_uint, ctypes.c_uint]
libc.fanotify_mark.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p]


class Event(NamedTuple):
    """A file, and what happened to it since its last event: the kernel merges queued events."""

    mask: int
    fd: int
    """Its descriptor, open until the next batch is asked for."""


class Overflow(Exception):  # noqa: N818 - the kernel's name
    """The kernel has dropped events."""


class Group:
    """A queue of events. Its file descriptor can be polled."""

    def __init__(self) -> None:
        """Raises `AccessError` without the privilege, `PermanentError` on a kernel without fanotify."""
        # O_NONBLOCK: do not wait for the other end of a named pipe, nor for a file lease to be broken.
        how = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        flags = _CLOEXEC | _NONBLOCK | _UNLIMITED_QUEUE | _UNLIMITED_MARKS
        self._queue = check(libc.fanotify_init(flags, how), "watch files")

    def fileno(self) -> int:
        return self._queue

    def watch_mount(self, path: str, mask: int) -> None:
        """Report accesses through the mount at `path`, not those through other mounts of the same file system."""
        number = libc.fanotify_mark(self._queue, _ADD | _MOUNT, mask, _AT_FDCWD, os.fsencode(path))
        check(number, f"watch the mount {path}")

    def ignore_opens(self, file: int) -> None:
        """Stop reporting opens of this file. An optimisation: failures are ignored."""
        ignore = _ADD | _IGNORED | _IGNORED_FOR_GOOD
        for how in (_EVICTABLE, 0):  # since Linux 5.19 without pinning the inode in memory
            if libc.fanotify_mark(self._queue, ignore | how, OPENED, file, None) == 0:
                return

    def read_events(self) -> Iterator[Event]:
        """The queued events, at most some hundred. Does not wait.

        Raises `Overflow`, or `OSError` for a file that the kernel could not open; later calls return the other events.
        """
        try:
            data = os.read(self._queue, _EVENT.size * _BATCH)
        except BlockingIOError:
            return
        events = [Event(mask, file) for _, _, _, _, mask, file, _ in _EVENT.iter_unpack(data)]
        try:
            yield from (event for event in events if event.fd >= 0)
        finally:
            for number in (event.fd for event in events if event.fd >= 0):
                with contextlib.suppress(OSError):  # a FUSE daemon may answer with an error, or have ended
                    os.close(number)
        if any(event.mask & _OVERFLOW for event in events):
            raise Overflow

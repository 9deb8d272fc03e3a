"""fanotify(7), which Python does not have: which process opens which file on which mount.

The older form of events is used, in which the kernel hands over a descriptor of each file: it works on every file
system (overlayfs has no file handles by default) and needs the right to administer the whole system. Linux 5.1.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bootseer.errors import AccessError
from bootseer.fuse.syscalls import check, libc

OPENED, WRITTEN = 0x20, 0x08
"""A file was opened in any way; one that was open for writing was closed."""
_OVERFLOW = 0x4000
_CLOEXEC, _NONBLOCK, _UNLIMITED_QUEUE, _UNLIMITED_MARKS = 0x1, 0x2, 0x10, 0x20
_ADD, _MOUNT, _IGNORED, _IGNORED_FOR_GOOD, _EVICTABLE = 0x1, 0x10, 0x20, 0x40, 0x200
_AT_FDCWD = -100
_EVENT = struct.Struct("=IBBHQii")
# Each event takes a descriptor until it is dealt with: well below the usual limit of 1024.
_BATCH = 512

libc.fanotify_init.argtypes = [ctypes.c_uint, ctypes.c_uint]
libc.fanotify_mark.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p]


class Event(NamedTuple):
    """One file, and what happened to it since it was reported last: the kernel merges events that wait."""

    mask: int
    file: int
    """Its descriptor, open until the next batch is asked for."""
    pid: int


class Overflow(Exception):  # noqa: N818 - what happened, not whose fault it is
    """The kernel has dropped events."""


class Group:
    """A queue of events. Its file descriptor can be polled."""

    def __init__(self) -> None:
        """Raises `AccessError` without the right to watch, `PermanentError` on a kernel that cannot."""
        # Not waiting for the other end of a named pipe, nor for the holder of a lease on a file.
        how = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        flags = _CLOEXEC | _NONBLOCK | _UNLIMITED_QUEUE | _UNLIMITED_MARKS
        if not hasattr(libc, "fanotify_init"):
            raise AccessError("watch files: the C library has no fanotify")
        self._queue = check(libc.fanotify_init(flags, how), "watch files")

    def fileno(self) -> int:
        """The queue's descriptor."""
        return self._queue

    def watch_mount(self, path: str, mask: int) -> None:
        """Report what happens through the mount at `path`, and through no other mount of the same file system."""
        number = libc.fanotify_mark(self._queue, _ADD | _MOUNT, mask, _AT_FDCWD, os.fsencode(path))
        check(number, f"watch the mount {path}")

    def forget_opens(self, file: int) -> None:
        """Let no more opens of this file be reported: they are known. It only saves work: failing is not an error."""
        ignore = _ADD | _IGNORED | _IGNORED_FOR_GOOD
        for how in (_EVICTABLE, 0):  # Linux 5.19 can do it without keeping the file in memory
            if libc.fanotify_mark(self._queue, ignore | how, OPENED, file, None) == 0:
                return

    def batch(self) -> Iterator[Event]:
        """What waits, at most some hundred events; nothing when nothing does.

        Raises `Overflow`, or `OSError` for a file that the kernel could not hand over: others still come.
        """
        try:
            data = os.read(self._queue, _EVENT.size * _BATCH)
        except BlockingIOError:
            return
        events = [Event(mask, file, pid) for _, _, _, _, mask, file, pid in _EVENT.iter_unpack(data)]
        try:
            yield from (event for event in events if event.file >= 0)
        finally:
            _close([event.file for event in events if event.file >= 0])
        if any(event.mask & _OVERFLOW for event in events):
            raise Overflow


def _close(files: Iterable[int]) -> None:
    """Close descriptors, in one call where they stand in a row, as they do."""
    numbers = sorted(files)
    if numbers and numbers[-1] - numbers[0] + 1 == len(numbers):
        os.closerange(numbers[0], numbers[-1] + 1)
        return
    for number in numbers:
        with contextlib.suppress(OSError):
            os.close(number)

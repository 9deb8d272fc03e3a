"""Read what was written to a spool folder since the last poll: lines to send (`trace.ship`), or events (`SpoolTail`).

Files may appear and grow between polls, and their last line may be incomplete. `bootseer run` polls in a thread and
passes the events to `trace.otlp`. No file stays open between polls.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress

from bootseer.trace.event import Event, Malformed, decode
from bootseer.trace.sinks import SUFFIX, safe_name

_NAME = re.compile(rf"(.+)\.\d+\.\d+{re.escape(SUFFIX)}")
"""The name of a `SpoolSink`'s file; its group is the node. Other programs may write files of other names."""
MAX_BYTES_PER_LOOK = 1 << 20
"""Limit in bytes per file and poll; the rest is read by the next poll. A longer line cannot be an event, and is passed
over piece by piece."""
_LAST_S = 10.0
"""The end of a run reads no longer: a container's user may leave a file of any size there, which takes no space."""


def spool_files(folder: str, node: str = "") -> dict[str, tuple[int, int]]:
    """Inode and size of the spool files, by name in order. Links, pipes and folders are ignored, and with `node` the
    files of other nodes. Raises `OSError`."""
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            writer = _NAME.fullmatch(entry.name) if node else None
            if writer is not None and writer[1] != safe_name(node):
                continue
            if entry.name.endswith(SUFFIX) and not entry.name.startswith(".") and entry.is_file(follow_symlinks=False):
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    found[entry.name] = (status.st_ino, status.st_size)
    return dict(sorted(found.items()))


def new_lines(
    folder: str, name: str, status: tuple[int, int], known: tuple[int, int] | None, room: int
) -> tuple[tuple[int, int], bytes] | None:
    """The next complete lines of a file, in at most `room` bytes, after the inode and the offset where they end.

    status: the file's inode and size. known: inode and offset of what was read; the inode detects a new file of the
    same name. None if there are no new lines, or if the file was deleted or may not be read. Raises `OSError` if it
    cannot be read now.
    """
    (inode, size), (before, offset) = status, known or (0, 0)
    if before != inode or size < offset:
        offset = 0
    if size <= offset or room <= 0:
        return None
    try:
        fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EACCES):
            return None
        raise
    try:
        data = os.pread(fd, min(size - offset, room), offset) if os.fstat(fd).st_ino == inode else b""
    finally:
        os.close(fd)
    length = data.rfind(b"\n") + 1 or (len(data) if len(data) == MAX_BYTES_PER_LOOK else 0)
    return ((inode, offset + length), data[:length]) if length else None


class SpoolTail:
    """New events of a folder. Lines that are no events are skipped."""

    def __init__(self, folder: str, node: str = "", keeps: Callable[[Event], bool] = lambda event: True) -> None:
        """`node`: files of other nodes are not read, which may share the folder. `keeps` selects events."""
        self._folder = folder
        self._node = node
        self._keeps = keeps
        self._files: dict[str, tuple[int, int]] = {}
        """Inode and offset of what was read."""

    def poll(self, *, last: bool = False) -> list[Event]:
        """Events of the lines completed since the last call, file by file.

        A missing folder or file gives none. With `last` all complete lines are read, for some seconds. Never raises.
        """
        until_s = time.monotonic() + _LAST_S
        events: list[Event] = []
        try:
            listing = spool_files(self._folder, self._node)
        except OSError:  # a deleted folder, or one to try again; what was read must not be read again
            return events
        for name in self._files.keys() - listing.keys():
            del self._files[name]
        for name, status in listing.items():
            with suppress(OSError):  # retried at the next poll
                while found := new_lines(self._folder, name, status, self._files.get(name), MAX_BYTES_PER_LOOK):
                    self._files[name], data = found
                    for line in data.split(b"\n"):
                        with suppress(Malformed):
                            event = decode(line)
                            if self._keeps(event):
                                events.append(event)
                    if not last or time.monotonic() > until_s:
                        break
        return events

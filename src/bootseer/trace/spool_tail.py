"""Read the events written to a spool folder since the last poll.

Files may appear and grow between polls, and their last line may be incomplete. `bootseer run` polls in a thread and
passes the events to `trace.otlp`. No file stays open between polls.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from bootseer.trace.event import MAX_READ_BYTES, Event, Malformed, decode
from bootseer.trace.sinks import SUFFIX

_MAX_BYTES_PER_LOOK = 1 << 20
"""Limit in bytes per file and poll; the rest is read by the next poll."""


def spool_files(folder: str) -> dict[str, tuple[int, int]]:
    """Inode and size of the spool files, by name in order. Links, pipes and folders are ignored. Raises `OSError`."""
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX) and not entry.name.startswith(".") and entry.is_file(follow_symlinks=False):
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    found[entry.name] = (status.st_ino, status.st_size)
    return dict(sorted(found.items()))


@dataclass(slots=True)
class _Position:
    """How far a file was read. `inode` detects a new file of the same name."""

    inode: int
    offset: int
    skipping: bool = False
    """In a line too long for an event, until its newline."""


class SpoolTail:
    """New events of a folder. Lines that are no events are skipped."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files: dict[str, _Position] = {}

    def poll(self, *, last: bool = False) -> list[Event]:
        """Events of the lines completed since the last call, file by file.

        A missing folder or file gives none. With `last` everything is read to its end, including incomplete lines:
        their writers have ended. Never raises.
        """
        events: list[Event] = []
        listing: dict[str, tuple[int, int]] = {}
        with suppress(OSError):
            listing = spool_files(self._folder)
        for name in self._files.keys() - listing.keys():
            del self._files[name]
        for name, (inode, size) in listing.items():
            position = self._files.get(name)
            if position is None or position.inode != inode or size < position.offset:
                position = self._files[name] = _Position(inode, 0)
            while position.offset < size:
                before = position.offset
                self._read(name, position, events, last=last)
                if not last or position.offset == before:
                    break
        return events

    def _read(self, name: str, position: _Position, events: list[Event], *, last: bool) -> None:
        try:
            data = self._bytes(name, position.offset)
        except OSError:
            return  # retried at the next poll
        complete = data.rfind(b"\n") + 1
        at_end = len(data) < _MAX_BYTES_PER_LOOK
        if not complete:
            if len(data) > MAX_READ_BYTES:
                position.skipping = True
                position.offset += len(data)
                return
            if not (last and at_end):
                return
        if last and at_end:
            complete = len(data)
        position.offset += complete
        lines = data[:complete].split(b"\n")
        if position.skipping:
            del lines[0]
            position.skipping = False
        for line in lines:
            with suppress(Malformed):
                events.append(decode(line)[0])

    def _bytes(self, name: str, offset: int) -> bytes:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(os.path.join(self._folder, name), flags)
        try:
            return os.pread(fd, _MAX_BYTES_PER_LOOK, offset)
        finally:
            os.close(fd)

"""Destinations of event lines: a spool file, stderr, or several sinks.

`write` takes a line that ends in a newline, and never raises or blocks for long: a full disk or a closed pipe loses
events, which are counted in `lost`, but never stops the job.
"""

from __future__ import annotations

import os
import re
import stat
import time
from _thread import RLock  # as `threading.RLock`, whose import would delay every job by 1.5 ms
from collections.abc import Sequence
from contextlib import suppress

from bootseer.io.fork import in_each_process

SUFFIX = ".events"


def safe_name(text: str) -> str:
    """A file name derived from `text`: no separators, not hidden, at most 80 characters."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", text)[:80].lstrip(".")
    return name or "unnamed"


class SpoolSink:
    """An append-only file of this process, created at the first event.

    One write(2) per line: written lines are in the page cache and survive `kill -9`. After a partial write, the next
    line begins with a newline, so that a full disk loses only the partial event.
    """

    def __init__(self, folder: str, node: str) -> None:
        self.lost = 0
        self._folder = folder
        self._node = safe_name(node)
        self._fd = -1
        self._file = (0, 0)
        """Inode and device of the file."""
        self._pid = 0
        self._torn = False
        in_each_process(self._renew_lock)

    def _renew_lock(self) -> None:
        # Reentrant: a signal handler may write an event while its thread is writing one.
        self._lock = RLock()

    def write(self, line: bytes) -> None:
        with self._lock:
            try:
                if not self._is_open():
                    self._open()
                data = b"\n" + line if self._torn else line
                written = os.write(self._fd, data)
                self._torn = written != len(data)
            except OSError:
                self._torn = self._fd >= 0
                self.lost += 1
            else:
                self.lost += self._torn

    def _is_open(self) -> bool:
        """Whether the descriptor is the file of this process. Not after a fork, nor if the program has closed all
        descriptors: then the number may be one of its own files."""
        if self._pid != os.getpid():
            return False
        try:
            status = os.fstat(self._fd)
        except OSError:
            return False
        return (status.st_ino, status.st_dev) == self._file

    def _open(self) -> None:
        self._pid, self._fd = 0, -1  # the parent's descriptor stays open in the parent
        folder = self._folder
        os.makedirs(folder, mode=0o700, exist_ok=True)
        # Events are private to their user; the set-group-ID bit lets a group read them.
        mode = 0o640 if os.stat(folder).st_mode & stat.S_ISGID else 0o600
        name = f"{self._node}.{os.getpid()}.{time.monotonic_ns()}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(os.path.join(folder, name), flags, mode)
        if mode & stat.S_IRGRP:
            with suppress(OSError):  # a file system without modes
                os.fchmod(self._fd, mode)  # whatever the umask
        status = os.fstat(self._fd)
        self._file, self._pid = (status.st_ino, status.st_dev), os.getpid()


class StderrSink:
    """File descriptor 2: events are in the job's own log, wherever that is collected."""

    def __init__(self) -> None:
        self.lost = 0

    def write(self, line: bytes) -> None:
        try:
            if os.write(2, line) != len(line):
                self.lost += 1
        except OSError:
            self.lost += 1


class FanOut:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = sinks

    @property
    def lost(self) -> int:
        return sum(sink.lost for sink in self.sinks)

    def write(self, line: bytes) -> None:
        for sink in self.sinks:
            sink.write(line)


Sink = SpoolSink | StderrSink | FanOut
